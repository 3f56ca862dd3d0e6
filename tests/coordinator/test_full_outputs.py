"""Outputs that can take no more: the job stops at the first result, and resumes when they can."""

import asyncio
import errno
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from coordinator.scripted import connected
from coordinator.test_retries import listed
from coordinator.world import World
from shoal_coordinator.server import followed_runs
from shoal_protocol.v1 import coordinator_pb2 as api
from small_disk import small_disk
from troubled_disk import failing_disk

ITEMS = 400
FILES = 120
"""Of one item each: a file takes at least a page."""


def grow(folder: Path, size: str = "4m") -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


@pytest.mark.parametrize("files", [[1] * FILES, [ITEMS]], ids=["a file each", "stacked"])
async def test_a_job_stops_at_the_first_result_that_finds_no_room(
    world: World, files: list[int]
) -> None:
    rows = world.inputs(*files)
    items = sum(files)
    device, outputs = world.device("a"), world.folder / "out"
    with small_disk(outputs, "128k"):
        async with connected(device):
            await world.submit(parallelism=4)
            full = await world.ended()
            assert (full.state, full.reason) == (api.JobStatus.FAILED, "ResultsUnwritten")
            assert full.message == (
                f"results cannot be written to {outputs}: No space left on device; "
                "make room there, then run the job again: it resumes"
            )
            assert full.failed == 0, "the items are sound"
            assert 0 < full.succeeded < items / 2
            computed = {item for item, _ in device.executed}
            assert len(computed) <= full.succeeded + 2 * 4, "what could not be stored was computed"
            grow(outputs)
            await world.submit()
            last = await world.ended()
        assert (last.state, last.succeeded, last.failed) == (api.JobStatus.COMPLETE, items, 0)
        assert last.resumed >= full.succeeded
        world.check_results(rows)


async def test_a_stopped_job_says_so_after_a_restart_and_other_jobs_run(world: World) -> None:
    rows = world.inputs(*[1] * FILES)
    outputs = world.folder / "small"
    with small_disk(outputs, "64k"):
        async with connected(world.device("a")):
            await world.submit(name="stopped", outputs_uri=str(outputs))
            await world.submit()
            assert (await world.ended("stopped")).reason == "ResultsUnwritten"
            assert (await world.ended()).state == api.JobStatus.COMPLETE
    world.check_results(rows)


@pytest.mark.parametrize("shape", [(1, 3), (2, 2, 3, 7)], ids=["sound", "unsuitable"])
async def test_a_job_that_follows_stops_where_its_list_of_files_finds_no_room(
    world: World, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_runs, "SCAN_SECONDS", 0.05)
    folder, outputs = world.folder / "in", world.folder / "out"
    folder.mkdir()
    with small_disk(outputs, "200k"):
        async with connected(world.device("a")):
            await world.submit(follow=True)
            for number in range(ITEMS):
                np.save(folder / f"{number:04}{'-' * 100}.npy", np.ones(shape, np.float32))
            full = await world.ended()
            assert (full.state, full.reason) == (api.JobStatus.FAILED, "ResultsUnwritten")
            assert full.message == (
                f"results cannot be written to {outputs}: No space left on device; "
                "make room there, then run the job again: it resumes"
            )
            assert len(await listed(world.stub)) >= full.items
            grow(outputs, "16m")  # the list's log alone may have 4 MiB
            await world.submit(follow=True, end=True)
            last = await world.ended()
    assert last.items == last.succeeded + last.failed == ITEMS


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EDQUOT, "Disk quota exceeded; make room there, then run the job again"),
        (errno.EROFS, "Read-only file system; make it writable, then run the job again"),
        (errno.EIO, "Input/output error; make it writable, then run the job again"),
    ],
)
async def test_whatever_keeps_a_disk_from_taking_more_stops_the_job(
    world: World, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    world.inputs(ITEMS)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(parallelism=1)
        with failing_disk(monkeypatch, number):
            for _ in range(3 * ITEMS):
                gate.release()
            last = await world.ended()
    assert (last.state, last.reason) == (api.JobStatus.FAILED, "ResultsUnwritten")
    assert message in last.message
    assert (last.succeeded, last.failed) == (0, 0)


@pytest.mark.parametrize("files", [[1] * FILES, [FILES]], ids=["a file each", "stacked"])
async def test_a_job_stops_whose_outputs_were_deleted_and_begins_anew(
    world: World, files: list[int]
) -> None:
    rows = world.inputs(*files)
    gate, outputs = asyncio.Semaphore(10), world.folder / "out"
    async with connected(world.device("a", gate=gate)):
        await world.submit(parallelism=4)
        await world.until(lambda status: status.succeeded > 0)
        while outputs.exists():  # a result may come between what is deleted
            shutil.rmtree(outputs, ignore_errors=True)
        for _ in range(9 * FILES):
            gate.release()
        gone = await world.ended()
        assert (gone.state, gone.reason) == (api.JobStatus.FAILED, "ResultsUnwritten")
        assert gone.failed == 0, "the items are sound"
        assert f"{outputs} was deleted" in gone.message.replace("/.shoal/job", "")
        await world.submit()
        last = await world.ended()
    assert (last.state, last.failed) == (api.JobStatus.COMPLETE, 0)
    world.check_results(rows)
