"""The processes of a local pool on loopback ports with mutual TLS, as they are between machines."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from shoal_api.kinds.device_pool import LocalDevice
from shoal_cli.local.pool import PoolRun
from shoal_cli.local.supervisor import ProcessSpec
from shoal_cli.local.watch import Watch
from shoal_protocol.channels import Credentials, open_channel
from shoal_protocol.identities import CLIENT, COORDINATOR
from shoal_protocol.pki.authority import Authority, Use

_HOST: Final = "127.0.0.1"


@dataclass(slots=True, kw_only=True)
class SecuredRun(PoolRun):
    """`credentials` are the client's."""

    credentials: Credentials = field(init=False)

    def __post_init__(self) -> None:
        # Not `super()`: a dataclass with slots is another class than the one that is defined here.
        self.target = f"{_HOST}:{_free_port()}"
        _issue(self.workspace.root, (device.name for device in self.devices))
        self.credentials = _files(self.workspace.root, CLIENT)
        self._channel = open_channel(self.target, self.credentials)
        self.watch = Watch(self._channel)

    def _coordinator_spec(self) -> ProcessSpec:
        return self._secured(PoolRun._coordinator_spec(self), COORDINATOR)

    def _agent_spec(self, device: LocalDevice, number: int) -> ProcessSpec:
        spec = PoolRun._agent_spec(self, device, number)
        own = self._socket(str(number))
        command = tuple(f"{_HOST}:0" if each == own else each for each in spec.command)
        return self._secured(replace(spec, command=command), device.name)

    def _secured(self, spec: ProcessSpec, name: str) -> ProcessSpec:
        files = _files(self.workspace.root, name)
        options = [f"--tls-ca={files.ca}", f"--tls-certificate={files.certificate}"]
        return replace(spec, command=(*spec.command, *options, f"--tls-key={files.key}"))


def _issue(folder: Path, devices: Iterable[str]) -> None:
    now = datetime.now(UTC)
    authority = Authority.make("bench", now)
    for name in (CLIENT, COORDINATOR, *devices):
        files = _files(folder, name)
        issued = authority.issue(name, now, hosts=[name, _HOST], use=Use.BOTH)
        files.ca.write_bytes(authority.certificate)
        files.certificate.write_bytes(issued.certificate)
        files.key.write_bytes(issued.key)


def _files(folder: Path, name: str) -> Credentials:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    return Credentials(ca=folder / "ca.pem", certificate=certificate, key=key)


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as server:
        port: int = server.getsockname()[1]
    return port
