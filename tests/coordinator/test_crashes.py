"""What a stranger's files may do to the coordinator's process: nothing that outlasts their job."""

import asyncio
import contextlib
import io
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from coordinator.scripted import put_model, submission
from coordinator.test_restart import stay_connected
from shoal_coordinator.server.jobs import CRASHES
from shoal_coordinator.storage.job_records import CrashCount
from shoal_protocol.channels import open_channel
from shoal_protocol.partition import PartitionDocument, TensorSpec
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub

if TYPE_CHECKING:
    from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorAsyncStub

PROCESS = """
import resource, signal, sys
from pathlib import Path
from shoal_coordinator.server import CoordinatorSettings, run_coordinator
from shoal_coordinator.storage import array_limits, inputs

folder, memory = Path(sys.argv[1]), Path(sys.argv[2])
read = inputs.InputSet.read

def killing(inputs, item, names=None):
    # As where a library has a fault, or the memory's limit is reached.
    if inputs.folder.name == "deadly":
        signal.raise_signal(signal.SIGSEGV)
    return read(inputs, item, names)

inputs.InputSet.read = killing
array_limits._CGROUP_LIMITS = (memory,)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.exit(run_coordinator(CoordinatorSettings(
    listen=f"unix:{folder}/s", store=folder / "store", state=folder / "state",
    exit_with_parent=True)))
"""
ENDED = (api.JobStatus.COMPLETE, api.JobStatus.FAILED)


class Coordinator:
    """A coordinator process that is started again whenever it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.document = put_model(folder / "store")
        self.ends: list[int] = []
        (folder / "memory").write_text(str(4 << 20))

    @contextlib.asynccontextmanager
    async def supervised(self) -> "AsyncIterator[CoordinatorAsyncStub]":
        supervising = asyncio.create_task(self._supervise())
        serving = asyncio.create_task(stay_connected(self.folder, self.document, []))
        try:
            async with open_channel(f"unix:{self.folder}/s") as channel:
                yield CoordinatorStub(channel)
        finally:
            for task in (supervising, serving):
                task.cancel()
            await asyncio.gather(supervising, serving, return_exceptions=True)

    async def _supervise(self) -> None:
        command = (sys.executable, "-c", PROCESS, self.folder, self.folder / "memory")
        while True:
            process = await asyncio.create_subprocess_exec(*command)
            try:
                self.ends.append(await process.wait())
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def request(self, name: str, document: PartitionDocument | None = None) -> api.SubmitJobRequest:
        return submission(
            document or self.document,
            self.folder / name,
            self.folder / f"{name}-out",
            name=name,
        )

    def inputs(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        np.savez(folder / "0.npz", x=np.ones((40, 1, 50), np.float32))
        return folder


async def ended(stub: "CoordinatorAsyncStub", name: str) -> api.JobStatus:
    """The last status of a job, however often the coordinator dies meanwhile."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            watch = api.WatchJobRequest(name=name, interval_seconds=0.05)
            async for status in stub.WatchJob(watch, timeout=60, wait_for_ready=True):
                if status.state in ENDED:
                    return status
        await asyncio.sleep(0.05)


async def submitted(stub: "CoordinatorAsyncStub", request: api.SubmitJobRequest) -> None:
    """Submit, until the coordinator has answered."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.SubmitJob(request, timeout=60, wait_for_ready=True)
            return


@pytest.mark.real
async def test_a_job_that_kills_coordinators_is_quarantined_and_the_others_complete(
    tmp_path: Path,
) -> None:
    coordinator = Coordinator(tmp_path)
    for name in ("deadly", "good"):
        coordinator.inputs(name)
    async with coordinator.supervised() as stub:
        for name in ("deadly", "good"):
            await submitted(stub, coordinator.request(name))
        bad, good = await ended(stub, "deadly"), await ended(stub, "good")
        ends = list(coordinator.ends)
    assert (bad.state, bad.reason) == (api.JobStatus.FAILED, "CoordinatorFailed")
    assert f"the coordinator died {CRASHES} times in a row while it read" in bad.message
    assert f"Check the files in {tmp_path / 'deadly'}" in bad.message
    assert (good.state, good.succeeded) == (api.JobStatus.COMPLETE, 40)
    assert ends == CRASHES * [-signal.SIGSEGV]
    async with coordinator.supervised() as stub:
        assert await ended(stub, "deadly") == bad, "its end is recorded"
    assert len(coordinator.ends) == CRASHES


@pytest.mark.real
async def test_hostile_inputs_fail_their_items_in_a_process_that_lives_on(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    coordinator.inputs("good")
    (tmp_path / "header").mkdir()
    content = io.BytesIO()
    described = {"descr": "<f4", "fortran_order": False, "shape": (0, 1 << 62)}
    np.lib.format.write_array_header_1_0(content, described)
    (tmp_path / "header" / "a.npy").write_bytes(content.getvalue())
    dynamic = replace(
        coordinator.document, inputs=(TensorSpec(name="x", dtype="float", shape=("m", "n")),)
    )
    (tmp_path / "bomb").mkdir()
    np.savez_compressed(tmp_path / "bomb" / "a.npz", x=np.zeros((1, 16 << 20), np.float32))
    assert (tmp_path / "bomb" / "a.npz").stat().st_size < 100_000
    async with coordinator.supervised() as stub:
        await submitted(stub, coordinator.request("header", dynamic))
        await submitted(stub, coordinator.request("bomb"))
        await submitted(stub, coordinator.request("good"))
        header, bomb, good = [await ended(stub, name) for name in ("header", "bomb", "good")]
        assert not coordinator.ends, "no coordinator has died"
    assert (header.state, header.failed) == (api.JobStatus.FAILED, 1)
    assert "which no array can have" in header.failures[0].reason
    assert (bomb.state, bomb.failed) == (api.JobStatus.FAILED, 1)
    assert "needs 64 MiB for one item, and 1 MiB is the most" in bomb.failures[0].reason
    assert (good.state, good.succeeded) == (api.JobStatus.COMPLETE, 40)


def test_a_crash_counts_once_and_only_while_the_job_was_processed(tmp_path: Path) -> None:
    def died() -> CrashCount:
        """The count after the process has died with what the file says."""
        return CrashCount(tmp_path / "job.crashes")

    count = died()
    with count.processing():
        with count.processing():
            pass
        first = died()
    assert (count.crashes, first.crashes) == (0, 1)
    assert died().crashes == 0, "the work had ended"
    with first.processing():
        second = died()
    assert second.crashes == died().crashes + 1 == 2
    second.progress()
    assert died().crashes == 0
