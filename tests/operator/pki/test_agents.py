"""Real agents that enrol: they join, find one another by name, stay light, and leave when told."""

import asyncio
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from certificates import Pki
from pki.operators import Operator
from shoal_cluster.ports import lasting_port
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_protocol.channels import open_channel
from shoal_protocol.pki.authority import DEVICE_LIFETIME, Authority
from shoal_protocol.services import PeerClient
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

pytestmark = pytest.mark.real

SOON = timedelta(seconds=155)
"""Renewed when two thirds have passed of this, and of the five minutes before: after 3 seconds."""
PATIENCE_SECONDS = 60.0
Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def operator(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Operator]:
    """Its certificates last for the parameter, if there is one."""
    operator = Operator(tmp_path, lifetime=getattr(request, "param", DEVICE_LIFETIME))
    operator.pools["default"] = Authority.make("shelf", datetime.now(UTC))
    async with operator.serving():
        yield operator


@pytest.fixture
async def start(operator: Operator) -> AsyncIterator[Start]:
    """Starts an agent as a pod does: a token, no certificate, an address of its own."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(name: str, coordinator: str, *arguments: str) -> asyncio.subprocess.Process:
        told = operator.device(name, f"token-of-{name}")
        command = [sys.executable, "-m", "shoal_agent", "--name", name, "--budget", "16Mi"]
        command += ["--coordinator", coordinator, "--cache", str(operator.folder / f"cache-{name}")]
        command += ["--enrol", told.target, "--enrol-ca", str(told.ca)]
        command += ["--enrol-token", str(told.token), "--identity-folder", str(told.folder)]
        command += ["--listen", "127.0.0.1:0", "--advertise", "127.0.0.1", *arguments]
        command += ["--log-level", "info", "--speed", os.devnull]  # to measure takes a second
        with (operator.folder / f"{name}.err").open("ab") as errors:
            process = await asyncio.create_subprocess_exec(*command, stderr=errors)
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


def pool_client(operator: Operator, name: str) -> Pki:
    """Certificates of the pool's own authority."""
    pki = Pki(operator.folder / name)
    pki.authority = operator.pools["default"]
    pki.ca.write_bytes(pki.authority.certificate)
    return pki


def settings(operator: Operator) -> CoordinatorSettings:
    return CoordinatorSettings(
        listen="localhost:0",
        store=operator.folder / "store",
        state=operator.folder / "state",
        credentials=pool_client(operator, "server").issue("shelf-coordinator"),
    )


async def until_ready(stub: object, *names: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            devices = await stub.ListDevices(api.ListDevicesRequest(), timeout=60)  # type: ignore[attr-defined]
            ready = [each.name for each in devices.devices if each.state == api.DeviceStatus.READY]
            if sorted(ready) == sorted(names):
                return
            await asyncio.sleep(0.1)


async def test_agents_enrol_and_join_and_are_known_to_one_another(
    operator: Operator, start: Start
) -> None:
    operator.grant("token-of-pi-4.example.com", "pi-4.example.com")
    async with serving(settings(operator)) as coordinator:
        target = f"localhost:{coordinator.port}"
        mine = pool_client(operator, "operator").issue("shoal-operator")
        async with open_channel(target, mine) as channel:
            process = await start("pi-4.example.com", target)
            stub = CoordinatorStub(channel)
            await until_ready(stub, "pi-4.example.com")
            address = coordinator.sessions.last["pi-4.example.com"].hello.address
            assert address.startswith("127.0.0.1:")
            assert not address.endswith(":0")
            # A peer dials by address and checks the name.
            peer = pool_client(operator, "peer").issue("jetson")
            request = FetchFragmentRequest(digest="sha256:" + "0" * 64, file="model.onnx")
            for name, answer in (("pi-4.example.com", "NOT_FOUND"), ("pi-zero", "UNAVAILABLE")):
                async with open_channel(address, peer, server_name=name) as dialled:
                    call = PeerClient(dialled).fetch_fragment(request, 10)
                    assert (await call.code()).name == answer
            # What made the key and the request has left nothing behind in the agent.
            assert "cryptography" not in Path(f"/proc/{process.pid}/maps").read_text()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("operator", [SOON], indirect=True)
async def test_a_renewed_certificate_keeps_the_session(operator: Operator, start: Start) -> None:
    operator.grant("token-of-pi-4", "pi-4")
    async with serving(settings(operator)) as coordinator:
        target = f"localhost:{coordinator.port}"
        await start("pi-4", target)
        mine = pool_client(operator, "operator").issue("shoal-operator")
        async with open_channel(target, mine) as channel:
            await until_ready(CoordinatorStub(channel), "pi-4")
            session = coordinator.sessions.last["pi-4"].number
            told = operator.device("pi-4", "second-token")
            operator.grant("second-token", "pi-4")
            before = told.credentials.certificate.read_bytes()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while told.credentials.certificate.read_bytes() == before:
                    await asyncio.sleep(0.1)
            await until_ready(CoordinatorStub(channel), "pi-4")
            assert coordinator.sessions.last["pi-4"].number == session


@pytest.mark.slow
async def test_an_agent_finds_its_way_to_a_pool_with_another_authority(
    operator: Operator, start: Start
) -> None:
    operator.grant("token-of-pi-4", "pi-4")
    port = lasting_port()
    async with serving(replace(settings(operator), listen=f"localhost:{port}")):
        await start("pi-4", f"localhost:{port}")
        mine = pool_client(operator, "operator").issue("shoal-operator")
        async with open_channel(f"localhost:{port}", mine) as channel:
            await until_ready(CoordinatorStub(channel), "pi-4")
    operator.pools["default"] = Authority.make("shelf", datetime.now(UTC))
    again = replace(settings(operator), listen=f"localhost:{port}")
    async with serving(again) as coordinator:
        mine = pool_client(operator, "operator").issue("shoal-operator")
        async with open_channel(f"localhost:{port}", mine) as channel:
            await until_ready(CoordinatorStub(channel), "pi-4")
        assert list(coordinator.sessions.last) == ["pi-4"]


async def test_an_agent_that_is_not_enrolled_is_not_ready_and_leaves_when_told(
    operator: Operator, start: Start
) -> None:
    process = await start("pi-4", "localhost:1", "--metrics-address", "127.0.0.1:0")
    errors = operator.folder / "pi-4.err"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "not enrolled" not in errors.read_text():
            await asyncio.sleep(0.1)
    url = errors.read_text().split("metrics at ")[1].split("/metrics")[0]
    assert (await asyncio.to_thread(_get, f"{url}/healthz"))[0] == 200
    status, text = await asyncio.to_thread(_get, f"{url}/readyz")
    assert status == 503
    assert "not enrolled: UNAUTHENTICATED: the token is not accepted" in text
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - http on loopback
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, answer.read().decode()
