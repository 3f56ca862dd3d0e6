"""A coordinator that dies: the next one resumes, and repeats no finished input."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from coordinator.scripted import (
    PATIENCE_SECONDS,
    ScriptedDevice,
    put_model,
    submission,
    whole_model,
)
from shoal_coordinator.jobs.values import Tally
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_coordinator.storage.job_records import JobRecord, Ledger
from shoal_protocol.channels import open_channel
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub

PROCESS = """
import sys
from pathlib import Path
from shoal_coordinator.server import CoordinatorSettings, run_coordinator

folder = Path(sys.argv[1])
sys.exit(run_coordinator(CoordinatorSettings(
    listen=f"unix:{folder}/s", store=folder / "store", state=folder / "state",
    exit_with_parent=True)))
"""


@contextlib.asynccontextmanager
async def coordinator(folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A coordinator process; killed, if it lives still, when the context ends."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROCESS, folder)
    try:
        async with open_channel(f"unix:{folder}/s") as channel:
            await first_answer(channel)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)


async def first_answer(channel: grpc.aio.Channel) -> None:
    """Channels of a process share connections: one to the coordinator before may break only now."""
    stub = CoordinatorStub(channel)
    async with asyncio.timeout(60):
        while True:
            try:
                await stub.ListDevices(api.ListDevicesRequest(), timeout=60, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                return


async def stay_connected(folder: Path, document: PartitionDocument, done: list[int]) -> None:
    """A device that dials again whenever its session ends; items finished are added to `done`."""

    while True:
        device = ScriptedDevice(f"unix:{folder}/s", "a", document)
        try:
            await device.run()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The second is what a write raises where the call ended before it.
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            # A call that the device itself cancelled, as its bulk stream broke, says the same.
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
        finally:
            done.extend(item for item, stage in device.executed if stage == 2)


@pytest.mark.real
@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGKILL, 3), pytest.param(signal.SIGTERM, 1, marks=pytest.mark.minutes)],
)
async def test_the_next_coordinator_resumes_where_a_killed_one_was(
    tmp_path: Path, number: signal.Signals, times: int
) -> None:
    document = put_model(tmp_path / "store")
    (tmp_path / "in").mkdir()
    rows = np.random.default_rng(0).normal(size=(600, 1, 50)).astype(np.float32)
    for file in range(6):
        np.savez(tmp_path / "in" / f"{file}.npz", x=rows[100 * file : 100 * file + 100])
    request = submission(document, tmp_path / "in", tmp_path / "out")
    done: list[int] = []
    device = asyncio.create_task(stay_connected(tmp_path, document, done))
    succeeded = kills = 0
    epochs = set()
    try:
        while True:
            async with (
                coordinator(tmp_path) as process,
                open_channel(f"unix:{tmp_path}/s") as channel,
            ):
                stub = CoordinatorStub(channel)
                first = status = await stub.SubmitJob(request, timeout=60)
                epochs.add(status.epoch)
                # Nothing that was reported as done is done again.
                assert first.resumed >= succeeded
                watch = api.WatchJobRequest(name="job", interval_seconds=0.05)
                async for status in stub.WatchJob(watch, timeout=60):
                    succeeded = status.succeeded
                    if kills < times and status.succeeded > first.resumed + 50:
                        break
                if status.state == api.JobStatus.COMPLETE:
                    break
                process.send_signal(number)
                returned = await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)
                assert returned == (0 if number == signal.SIGTERM else -number)
                kills += 1
    finally:
        device.cancel()
        ended = await asyncio.gather(device, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError), f"the device gave up: {ended[0]!r}"
    assert kills == times
    assert len(epochs) == times + 1
    made = []
    for file in range(6):
        with np.load(tmp_path / "out" / f"{file}.npz") as loaded:
            made.append(loaded["y"])
    np.testing.assert_allclose(np.concatenate(made), whole_model(rows)["y"], atol=1e-5)
    # Per kill, at most what was under way then is done twice.
    assert set(done) == set(range(600))
    assert len(done) - 600 <= kills * 64


async def test_the_next_coordinator_knows_how_a_job_ended(tmp_path: Path) -> None:
    document = put_model(tmp_path / "store")
    target = f"unix:{tmp_path}/s"
    settings = CoordinatorSettings(
        listen=target, store=tmp_path / "store", state=tmp_path / "state"
    )
    request = submission(document, tmp_path / "none", tmp_path / "out")
    async with serving(settings), open_channel(target) as channel:
        first = await CoordinatorStub(channel).SubmitJob(request, timeout=60)
    assert first.state == api.JobStatus.FAILED
    async with serving(settings), open_channel(target) as channel:
        stub = CoordinatorStub(channel)
        watch = api.WatchJobRequest(name="job")
        assert [status async for status in stub.WatchJob(watch, timeout=60)] == [first]
        again = await stub.SubmitJob(request, timeout=60)
        assert (again.state, again.epoch) == (api.JobStatus.FAILED, first.epoch + 1)


async def test_the_next_coordinator_knows_that_no_finer_cut_was_possible(tmp_path: Path) -> None:
    document = put_model(tmp_path / "store")
    target = f"unix:{tmp_path}/s"
    settings = CoordinatorSettings(
        listen=target, store=tmp_path / "store", state=tmp_path / "state"
    )
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", x=np.ones((2, 1, 8), np.float32))
    ends = submission(document, tmp_path / "none", tmp_path / "out", name="ends")
    runs = submission(document, tmp_path / "in", tmp_path / "out", name="runs", final_cut=True)
    async with serving(settings), open_channel(target) as channel:
        stub = CoordinatorStub(channel)
        assert not (await stub.SubmitJob(ends, timeout=60)).final_cut
        ends.final_cut = True
        before = [await stub.SubmitJob(each, timeout=60) for each in (ends, runs)]
    async with serving(settings), open_channel(target) as channel:
        listed = CoordinatorStub(channel).ListJobs(api.ListJobsRequest(), timeout=60)
        after = sorted([each async for each in listed], key=lambda each: each.name)
    for statuses in (before, after):
        assert [(each.name, each.state, each.final_cut) for each in statuses] == [
            ("ends", api.JobStatus.FAILED, True),
            ("runs", api.JobStatus.PENDING, True),
        ]


async def test_a_deadline_counts_from_the_submission_over_restarts(tmp_path: Path) -> None:
    document = put_model(tmp_path / "store")
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", x=np.ones((2, 1, 8), np.float32))
    target = f"unix:{tmp_path}/s"
    state = tmp_path / "state"
    settings = CoordinatorSettings(listen=target, store=tmp_path / "store", state=state)
    request = submission(
        document, tmp_path / "in", tmp_path / "out", active_deadline_seconds=1000.0
    )
    async with serving(settings), open_channel(target) as channel:
        first = await CoordinatorStub(channel).SubmitJob(request, timeout=60)
        assert first.state == api.JobStatus.PENDING
    ledger = Ledger(state)  # as if that had been 2,000 seconds ago
    noted = ledger.load()["job"]
    assert noted.submitted_seconds is not None
    ledger.put(replace(noted, submitted_seconds=noted.submitted_seconds - 2000))
    ledger.close()
    async with serving(settings), open_channel(target) as channel:
        watch = api.WatchJobRequest(name="job", interval_seconds=0.05)
        call = CoordinatorStub(channel).WatchJob(watch, timeout=60)
        last = [status async for status in call][-1]
    assert (last.state, last.reason) == (api.JobStatus.FAILED, "DeadlineExceeded")


async def test_a_record_that_is_not_understood_fails_its_job_and_no_other(tmp_path: Path) -> None:
    document = put_model(tmp_path / "store")
    target = f"unix:{tmp_path}/s"
    settings = CoordinatorSettings(
        listen=target, store=tmp_path / "store", state=tmp_path / "state"
    )
    ledger = Ledger(tmp_path / "state")
    request = submission(document, tmp_path / "in", tmp_path / "out", name="good")
    ledger.put(JobRecord(name="bad", epoch=1, request=api.SubmitJobRequest(name="bad")))
    ledger.put(JobRecord(name="good", epoch=1, request=request))
    ledger.close()
    async with serving(settings), open_channel(target) as channel:
        stub = CoordinatorStub(channel)
        watch = api.WatchJobRequest(name="bad")
        (bad,) = [status async for status in stub.WatchJob(watch, timeout=60)]
        assert (bad.state, bad.reason) == (api.JobStatus.FAILED, "NotResumed")
        watch = api.WatchJobRequest(name="good")
        good = [status async for status in stub.WatchJob(watch, timeout=60)][-1]
        assert (good.reason, good.epoch) == ("FolderRefused", 2)


def test_the_ledger_stores_requests_epochs_and_statistics(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    request = api.SubmitJobRequest(name="a", partition=b"\x00\xff", epoch=1 << 40, lossy=True)
    ledger.put(JobRecord(name="a", epoch=5, request=request, submitted_seconds=1.75e9))
    ledger.put(JobRecord(name="b", epoch=1, request=request))
    ended = api.JobStatus(name="b", state=api.JobStatus.FAILED, message="no", failed=3)
    tally = Tally(stored=3, seconds=1.5, started_seconds=1.75e9, tier_hits=(1, 2, 0, 0))
    ledger.put(JobRecord(name="b", epoch=2, status=ended, work="w", results="r"))
    ledger.put_tally("b", tally)
    (tmp_path / "jobs" / "a.tally").write_text('{"stored": "many"}')
    (tmp_path / "jobs" / "torn.json").write_text('{"version": 1, "na')
    (tmp_path / "jobs" / "alien.json").write_text('{"version": 9}')
    with pytest.raises(OSError, match="is in use by another coordinator"):
        Ledger(tmp_path)
    ledger.close()
    ledger = Ledger(tmp_path)
    assert ledger.load() == {
        "a": JobRecord(name="a", epoch=5, request=request, submitted_seconds=1.75e9),
        "b": JobRecord(name="b", epoch=2, status=ended, work="w", results="r", tally=tally),
    }
    ledger.close()
