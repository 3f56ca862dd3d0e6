"""With TLS: a device is who its certificate says, and only clients give work."""

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from coordinator.scripted import ScriptedDevice, connected, put_model
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_protocol.channels import Credentials, open_channel
from shoal_protocol.services import SessionClient
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub

PATIENCE_SECONDS = 60.0


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    ca = ("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial")
    openssl(
        *("req", "-x509", *new, "-subj", "/CN=shelf"),
        *("-keyout", folder / "ca.key", "-out", folder / "ca.pem"),
    )
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    for name in ("coordinator", "pi-4", "jetson", "shoal"):
        openssl(
            *("req", *new, "-subj", f"/CN={name}"),
            *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.csr"),
        )
        openssl(
            *("x509", "-req", "-in", folder / f"{name}.csr", "-days", "1", *ca),
            *("-extfile", folder / "names", "-out", folder / f"{name}.pem"),
        )
    return folder


def credentials(folder: Path, name: str) -> Credentials:
    return Credentials(
        ca=folder / "ca.pem", certificate=folder / f"{name}.pem", key=folder / f"{name}.key"
    )


async def test_a_name_is_proved_and_a_device_gives_no_work(folder: Path, tmp_path: Path) -> None:
    document = put_model(tmp_path / "store")
    settings = CoordinatorSettings(
        listen="localhost:0",
        store=tmp_path / "store",
        state=tmp_path / "state",
        credentials=credentials(folder, "coordinator"),
    )
    request = api.ListDevicesRequest()
    async with serving(settings) as coordinator:
        target = f"localhost:{coordinator.port}"

        def device(name: str, certificate: str) -> ScriptedDevice:
            proof = credentials(folder, certificate)
            return ScriptedDevice(target, name, document, credentials=proof)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await device("pi-4", "jetson").run()
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert caught.value.details() == "device 'pi-4' came with the certificate of 'jetson'"

        async with (
            connected(device("pi-4", "pi-4")),
            open_channel(target, credentials(folder, "shoal")) as client,
            open_channel(target, credentials(folder, "jetson")) as stranger,
        ):
            devices = await CoordinatorStub(client).ListDevices(request, timeout=60)
            assert [status.name for status in devices.devices] == ["pi-4"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await CoordinatorStub(stranger).ListDevices(request, timeout=60)
            assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
            # Nor does one device get at what is meant for another.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await SessionClient(stranger).exchange("pi-4").read()
            assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_a_second_coordinator_on_a_unix_socket_in_use_is_refused(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/s"
    first = CoordinatorSettings(listen=target, store=tmp_path / "one", state=tmp_path / "1")
    async with serving(first), open_channel(target) as client:
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shoal_coordinator", "--listen", target),
            *("--store", str(tmp_path / "two")),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(second.communicate(), PATIENCE_SECONDS)
        assert second.returncode == 2
        assert f"cannot listen on {target}: it is in use by another process" in errors.decode()
        await CoordinatorStub(client).ListDevices(api.ListDevicesRequest(), timeout=60)
