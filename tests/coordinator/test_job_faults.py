"""An error inside the coordinator costs at most one job, and its status says so."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.scripted import connected, put_model
from coordinator.world import World
from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch.machine import step
from shoal_coordinator.jobs.state import Phase
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_coordinator.server.lives import Life
from shoal_coordinator.storage.results import ResultStore
from shoal_protocol.channels import open_channel
from shoal_protocol.partition import TensorSpec, document_to_json
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub


@contextlib.contextmanager
def slow_completion(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """The completion of results waits, as on a slow disk, until the context ends."""
    (folder / "slow").mkdir()
    read, write = os.pipe()
    complete = ResultStore.complete

    def slowly(store: ResultStore) -> str | None:
        os.read(read, 1)
        return complete(store)

    monkeypatch.setattr(ResultStore, "complete", slowly)
    try:
        yield
    finally:
        os.write(write, b"xx")


async def test_an_amendment_while_results_are_completed_does_not_start_the_job_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = world.inputs(3)
    device = world.device("a")
    stages = [api.StagePlacement(devices=["a"]) for _ in world.document.fragments]
    async with connected(device):
        with slow_completion(monkeypatch, world.folder):
            await world.submit(epoch=1)
            await world.until(lambda status: status.succeeded == 3)
            amended = await world.submit(epoch=1, priority=7)
            moved = await world.submit(epoch=2, priority=7, stages=stages)
            assert {amended.state, moved.state} == {api.JobStatus.RUNNING}
            assert moved.completing
        last = await world.ended()
    assert (last.state, last.succeeded, last.plan) == (api.JobStatus.COMPLETE, 3, 2)
    assert not last.completing
    assert len(device.executed) == 9, "no task is run twice"
    world.check_results(rows)


async def test_a_job_that_is_cancelled_while_it_is_opened_never_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.inputs(3)
    device, cancelled = world.device("a"), threading.Event()
    open_run = Life._open_run

    def slowly(life: Life) -> Any:
        cancelled.wait(60)
        return open_run(life)

    monkeypatch.setattr(Life, "_open_run", slowly)
    async with connected(device):
        await world.submit()
        cancelling = asyncio.ensure_future(
            world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
        )
        life = world.coordinator.jobs.get("job")
        while life.job.stop is None:
            await asyncio.sleep(0.001)
        assert life.job.phase is Phase.OPENING
        cancelled.set()
        status = await cancelling
    assert status.state == api.JobStatus.CANCELLED
    assert not device.executed


async def test_a_submission_while_the_job_is_cancelled_begins_it_anew(world: World) -> None:
    rows = world.inputs(3)
    gate = asyncio.Semaphore(0)
    jobs = world.coordinator.jobs
    async with connected(world.device("a", gate=gate)):
        first = await world.submit()
        await world.until(lambda status: status.active > 0)
        job = jobs.find("job")
        assert job is not None
        jobs.cancel("job", "suspended")
        again = await world.submit()
        assert job.status().state == api.JobStatus.CANCELLED
        for _ in range(20):
            gate.release()
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE
    assert (first.epoch, again.epoch) == (1, 2)
    world.check_results(rows)


async def test_tasks_that_finish_after_their_job_was_cancelled_leave_the_device_to_others(
    world: World,
) -> None:
    rows = world.inputs(*(1 for _ in range(30)))
    gate = asyncio.Semaphore(0)
    device = world.device("a", gate=gate)
    device.cancels = False
    async with connected(device):
        await world.submit(name="first", outputs_uri=f"{world.folder}/first")
        await world.until(lambda status: sum(each.running for each in status.stages) > 1, "first")
        await world.submit()
        cancel = api.CancelJobRequest(name="first")
        assert (await world.stub.CancelJob(cancel, timeout=60)).state == api.JobStatus.CANCELLED
        for _ in range(200):
            gate.release()
        assert (await world.ended()).state == api.JobStatus.COMPLETE
    world.check_results(rows)


@contextlib.asynccontextmanager
async def running(
    folder: Path, settings: CoordinatorSettings, document: Any
) -> AsyncIterator[World]:
    target = settings.listen
    async with serving(settings) as coordinator, open_channel(target) as channel:
        yield World(coordinator, target, document, CoordinatorStub(channel), channel, folder)


HOSTILE = {
    "float": (np.dtype("<f4"), (0, 1 << 62)),
    "string": (np.dtype("<U0"), (1, 4)),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_header_is_a_refused_item_with_its_reason(world: World, kind: str) -> None:
    dtype, shape = HOSTILE[kind]
    (world.folder / "hostile").mkdir()
    with (world.folder / "hostile/in.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": dtype.str, "fortran_order": False, "shape": shape}
        )
    spec = TensorSpec(name="x", dtype=kind, shape=("m", "n"))
    document = document_to_json(replace(world.document, inputs=(spec,))).encode()
    rows = world.inputs(2)
    async with connected(world.device("a")):
        await world.submit(
            name="bad",
            partition=document,
            inputs_uri=f"{world.folder}/hostile",
            outputs_uri=f"{world.folder}/bad",
        )
        bad = await world.ended("bad")
        await world.submit()
        good = await world.ended()
    assert not world.coordinator.driver.broken.done()
    assert (bad.state, bad.reason, bad.failed) == (api.JobStatus.FAILED, "ItemsFailed", 1)
    assert bad.failures[0].reason.startswith("in.npy: ")
    assert good.state == api.JobStatus.COMPLETE
    world.check_results(rows)


def failing_for(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the dispatcher raise at every stored item of a job."""

    def failing(state: Any, event: ev.Event) -> Any:
        if isinstance(event, ev.ItemsStored) and event.job == job:
            raise ZeroDivisionError("a bug")
        return step(state, event)

    monkeypatch.setattr("shoal_coordinator.server.driver.step", failing)


async def test_an_error_in_the_dispatcher_fails_its_job_and_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_for("bad", monkeypatch)
    rows = world.inputs(3)
    async with connected(world.device("a")):
        for name in ("bad", "good"):
            await world.submit(name=name, outputs_uri=f"{world.folder}/{name}")
        good, bad = await world.ended("good"), await world.ended("bad")
    assert good.state == api.JobStatus.COMPLETE, good.message
    assert (bad.state, bad.reason) == (api.JobStatus.FAILED, "CoordinatorFailed")
    assert "the coordinator failed while it processed this job: ZeroDivisionError" in bad.message
    assert not world.coordinator.driver.broken.done()
    world.check_results(rows, "good")


async def test_a_quarantined_job_does_not_run_again_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = put_model(tmp_path / "store")
    target = f"unix:{tmp_path}/s"
    settings = CoordinatorSettings(
        listen=target, store=tmp_path / "store", state=tmp_path / "state"
    )
    failing_for("job", monkeypatch)
    async with running(tmp_path, settings, document) as world:
        world.inputs(3)
        async with connected(world.device("a")):
            await world.submit()
            first = await world.ended()
    async with running(tmp_path, settings, document) as world:
        device = world.device("a")
        async with connected(device):
            assert await world.ended() == first
        assert not device.executed


async def test_an_error_while_results_are_written_fails_the_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(store: ResultStore, items: Any) -> dict[int, str]:
        raise ZeroDivisionError("a bug")

    world.inputs(3)
    with monkeypatch.context() as patch:
        patch.setattr(ResultStore, "finish", broken)
        async with connected(world.device("a")):
            await world.submit()
            last = await world.ended()
    assert (last.state, last.reason) == (api.JobStatus.FAILED, "CoordinatorFailed")
    assert "ZeroDivisionError" in last.message


async def test_an_error_while_the_end_of_a_job_is_worked_out_fails_the_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise ZeroDivisionError("a bug")

    world.inputs(3)
    async with connected(world.device("a")):
        with monkeypatch.context() as patch:
            patch.setattr("shoal_coordinator.server.lives.run_end", broken)
            await world.submit()
            last = await asyncio.wait_for(world.ended(), 60)
        assert (last.state, last.reason) == (api.JobStatus.FAILED, "CoordinatorFailed")
        assert "ZeroDivisionError" in last.message
        await world.submit()
        again = await world.ended()
    assert (again.state, again.resumed) == (api.JobStatus.COMPLETE, 3)


@pytest.mark.parametrize("observer", ["traces.job_ended", "timeline.end"])
async def test_an_error_in_what_only_observes_a_job_does_not_keep_it_from_ending(
    world: World, monkeypatch: pytest.MonkeyPatch, observer: str
) -> None:
    raised: list[str] = []

    def broken(*_: object) -> None:
        raised.append(observer)
        raise ZeroDivisionError("a bug")

    world.inputs(3)
    part, method = observer.split(".")
    monkeypatch.setattr(getattr(world.coordinator.driver, part), method, broken)
    async with connected(world.device("a")):
        await world.submit()
        last = await asyncio.wait_for(world.ended(), 60)
    assert raised == [observer]
    assert last.succeeded == 3
    await world.stub.RemoveJob(api.RemoveJobRequest(name="job"), timeout=60)


async def test_an_error_about_a_message_ends_that_devices_session(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(state: Any, event: ev.Event) -> Any:
        if isinstance(event, ev.DeviceDraining):
            raise ZeroDivisionError("a bug")
        return step(state, event)

    monkeypatch.setattr("shoal_coordinator.server.driver.step", failing)
    device, other = world.device("a"), world.device("b")
    async with connected(other):
        task = asyncio.create_task(device.run())
        await device.welcome
        await device.drain()
        with pytest.raises(Exception, match="the coordinator failed while it processed"):
            await asyncio.wait_for(task, 10)
        assert list(world.coordinator.sessions.by_device) == ["b"]
    assert not world.coordinator.driver.broken.done()


async def test_ticks_that_keep_failing_end_the_process_rather_than_pass_in_silence(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(state: Any, event: ev.Event) -> Any:
        if isinstance(event, ev.Tick):
            raise ZeroDivisionError("a bug")
        return step(state, event)

    monkeypatch.setattr("shoal_coordinator.server.driver.step", failing)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(asyncio.shield(world.coordinator.driver.broken), 20)
