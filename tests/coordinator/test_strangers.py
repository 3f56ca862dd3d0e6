"""Strangers at the port of a real coordinator: its sessions and jobs do not notice them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from certificates import Pki
from coordinator.scripted import ScriptedDevice, connected, put_model, submission, whole_model
from shoal_cluster.ports import lasting_port
from shoal_protocol.channels import open_channel
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub
from strangers import context_of, crowd, descriptors, handshakes, settled

pytestmark = [pytest.mark.real]

ITEMS = 12
PATIENCE_SECONDS = 60.0


@asynccontextmanager
async def coordinator_process(
    pki: Pki, folder: Path, port: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    own = pki.issue("shelf-coordinator")
    tls = {"ca": own.ca, "certificate": own.certificate, "key": own.key}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shoal_coordinator", "--listen", f"localhost:{port}"),
        *("--store", str(folder / "store"), "--exit-with-parent"),
        *(part for name, path in tls.items() for part in (f"--tls-{name}", str(path))),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def devices_of(stub: "api.CoordinatorAsyncStub") -> list[str]:  # type: ignore[name-defined]
    listed = await stub.ListDevices(api.ListDevicesRequest(), timeout=60, wait_for_ready=True)
    return [device.name for device in listed.devices]


@pytest.mark.parametrize(
    "connections",
    [400, pytest.param(5000, marks=[pytest.mark.minutes, pytest.mark.timeout(600)])],
)
async def test_strangers_disturb_neither_sessions_nor_jobs(
    tmp_path: Path, connections: int
) -> None:
    pki, port = Pki(tmp_path / "pki"), lasting_port()
    document = put_model(tmp_path / "store")
    rows = np.random.default_rng(0).normal(size=(ITEMS, 1, 100)).astype(np.float32)
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "000.npz", x=rows)
    gate = asyncio.Semaphore(5)
    context = context_of(pki.issue("jetson"), pki.ca)
    async with (
        coordinator_process(pki, tmp_path, port) as process,
        open_channel(f"localhost:{port}", pki.issue("shoal")) as channel,
    ):
        stub = CoordinatorStub(channel)
        assert await devices_of(stub) == []
        device = ScriptedDevice(
            f"localhost:{port}", "pi-4", document, credentials=pki.issue("pi-4"), gate=gate
        )
        async with connected(device):
            request = submission(document, tmp_path / "in", tmp_path / "out")
            await stub.SubmitJob(request, timeout=60)
            while len(device.executed) < 5:
                await asyncio.sleep(0.05)
            before = descriptors(process.pid)

            # Once it was enough that a few dozen shake hands at once.
            assert await handshakes(port, context, each=10) == 320
            opened = 0
            while opened < connections:
                opened += await crowd(port, context, min(300, connections - opened))
                assert process.returncode is None
                pki.issue("shelf-coordinator")  # renewed in its files, between the crowds

            assert await settled(process.pid, before + 2) <= before + 2
            assert await devices_of(stub) == ["pi-4"]
            for _ in range(3 * ITEMS):
                gate.release()
            watch = stub.WatchJob(api.WatchJobRequest(name="job"), timeout=PATIENCE_SECONDS)
            statuses = [status async for status in watch]
            assert statuses[-1].state == api.JobStatus.COMPLETE
            assert len(device.executed) == 3 * ITEMS  # nothing was done twice
    with np.load(next((tmp_path / "out").glob("*.npz"))) as made:
        np.testing.assert_allclose(made["y"], whole_model(rows)["y"], atol=1e-5)
