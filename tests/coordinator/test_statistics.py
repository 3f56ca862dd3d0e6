"""The statistics of a job add up over all its runs, as long as its results stand."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from time import sleep

import pytest

from coordinator.scripted import ScriptedDevice, connected, whole_model
from coordinator.world import World, running_world
from shoal_coordinator.jobs.state import Phase
from shoal_coordinator.storage.results import ResultStore
from shoal_protocol.partition import MODEL, Edge, PartitionDocument, document_to_json
from shoal_protocol.v1 import coordinator_pb2 as api

TIERS = ("resident", "cached", "idle", "evict")


async def test_statistics_add_up_over_suspending_and_resuming(world: World) -> None:
    rows = world.inputs(*(1 for _ in range(6)))
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(parallelism=1)
        for _ in range(7):
            gate.release()
        await world.until(lambda status: status.succeeded == 2)
        before = await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
    async with connected(world.device("b")):
        await world.submit()
        last = await world.ended()
    assert (last.state, last.resumed, last.succeeded) == (api.JobStatus.COMPLETE, 2, 6)
    assert last.started_seconds == before.started_seconds
    assert last.seconds > before.seconds > 0
    assert last.items_per_second == pytest.approx(6 / last.seconds)
    tasks = sum(getattr(last.tier_hits, tier) for tier in TIERS)
    assert tasks >= 18
    assert [stage.finished for stage in last.stages][1:] == [6, 6]
    await world.submit()
    again = await world.ended()
    assert again.state == api.JobStatus.COMPLETE
    assert (again.seconds, again.tier_hits) == (last.seconds, last.tier_hits)
    world.check_results(rows)


async def test_statistics_add_up_over_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(0)
    async with running_world(tmp_path) as world:
        world.inputs(*(1 for _ in range(6)))
        async with connected(world.device("a", gate=gate)):
            await world.submit(parallelism=1)
            for _ in range(7):
                gate.release()
            await world.until(lambda status: status.succeeded == 2)
            (before,) = [each async for each in world.stub.ListJobs(api.ListJobsRequest())]
    async with running_world(tmp_path) as world, connected(world.device("a")):
        last = await world.ended()
    assert (last.state, last.resumed, last.succeeded) == (api.JobStatus.COMPLETE, 2, 6)
    assert last.started_seconds < before.started_seconds + before.seconds
    assert last.seconds > before.seconds
    assert [stage.finished for stage in last.stages][1:] == [6, 6]
    assert last.items_per_second == pytest.approx(6 / last.seconds)


def storing_waits(monkeypatch: pytest.MonkeyPatch, until: Callable[[], bool]) -> Event:
    """Results become durable only then, as on a slow disk; the event is set when some wait."""
    waiting = Event()
    finish = ResultStore.finish

    def slowly(store: ResultStore, items: list[int]) -> dict[int, str]:
        waiting.set()
        while not until():
            sleep(0.01)
        return finish(store, items)

    monkeypatch.setattr(ResultStore, "finish", slowly)
    return waiting


async def test_an_item_that_is_stored_after_its_job_was_suspended_is_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = world.inputs(*(1 for _ in range(6)))
    jobs = world.coordinator.jobs
    async with connected(world.device("a")):
        with monkeypatch.context() as patch:
            waiting = storing_waits(patch, lambda: jobs.get("job").job.phase is not Phase.RUNNING)
            await world.submit(parallelism=1)
            await asyncio.to_thread(waiting.wait, 60)
            before = await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
        await world.submit()
        last = await world.ended()
    assert (before.state, before.succeeded) == (api.JobStatus.CANCELLED, 1)
    assert before.items_per_second == pytest.approx(1 / before.seconds)
    assert (last.state, last.resumed, last.succeeded) == (api.JobStatus.COMPLETE, 1, 6)
    assert last.items_per_second == pytest.approx(6 / last.seconds)
    world.check_results(rows)


async def test_an_item_that_is_stored_while_the_coordinator_stops_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        async with running_world(tmp_path) as world:
            world.inputs(*(1 for _ in range(6)))
            jobs = world.coordinator.jobs
            waiting = storing_waits(patch, lambda: jobs.closed)
            async with connected(world.device("a")):
                await world.submit(parallelism=1)
                await asyncio.to_thread(waiting.wait, 60)
    async with running_world(tmp_path) as world, connected(world.device("a")):
        last = await world.ended()
    assert (last.state, last.resumed, last.succeeded) == (api.JobStatus.COMPLETE, 1, 6)
    assert last.items_per_second == pytest.approx(6 / last.seconds)


def in_one_piece(document: PartitionDocument) -> PartitionDocument:
    """The coarsest cut of the model: one fragment computes all of it."""
    first = replace(document.fragments[0], inputs=document.inputs, outputs=document.outputs)
    edges = (
        Edge(producer=MODEL, consumer=0, tensors=("x",), bytes_per_item=None),
        Edge(producer=0, consumer=MODEL, tensors=("early", "y"), bytes_per_item=None),
    )
    return replace(document, fragments=(first,), edges=edges)


async def test_statistics_add_up_over_a_finer_cut_and_count_tasks_of_its_stages_only(
    world: World,
) -> None:
    rows = world.inputs(*(1 for _ in range(6)))
    coarse = in_one_piece(world.document)
    gate = asyncio.Semaphore(2)
    whole = ScriptedDevice(
        world.target, "a", coarse, stages=(lambda t: whole_model(t["x"]),), gate=gate
    )
    async with connected(whole):
        await world.submit(parallelism=1, partition=document_to_json(coarse).encode())
        await world.until(lambda status: status.succeeded == 2)
        before = await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
    async with connected(world.device("b")):
        await world.submit()
        last = await world.ended()
    assert (last.state, last.resumed, last.succeeded) == (api.JobStatus.COMPLETE, 2, 6)
    assert last.started_seconds == before.started_seconds
    assert last.seconds > before.seconds > 0
    assert last.items_per_second == pytest.approx(6 / last.seconds)
    assert [stage.finished for stage in last.stages] == [4, 4, 4]
    world.check_results(rows)


async def test_statistics_add_up_over_a_newer_plan_in_one_run(world: World) -> None:
    rows = world.inputs(*(1 for _ in range(6)))
    gate = asyncio.Semaphore(7)  # of 18 tasks: two items, and the first stage of a third
    plans = {
        name: [api.StagePlacement(devices=[name]) for _ in world.document.fragments]
        for name in ("a", "b")
    }
    first, second = world.device("a", gate=gate), world.device("b")
    async with connected(first, second):
        await world.submit(parallelism=1, epoch=1, stages=plans["a"])
        await world.until(lambda status: status.stages[0].finished == 3)
        (before,) = [each async for each in world.stub.ListJobs(api.ListJobsRequest())]
        await world.submit(parallelism=1, epoch=2, stages=plans["b"])
        last = await world.ended()
    assert (before.succeeded, len(first.executed), len(second.executed)) == (2, 7, 12)
    assert (last.state, last.resumed, last.succeeded) == (api.JobStatus.COMPLETE, 0, 6)
    assert last.plan == 2
    assert last.seconds > before.seconds > 0
    assert last.started_seconds < before.started_seconds + before.seconds
    assert last.items_per_second == pytest.approx(6 / last.seconds)
    assert [stage.finished for stage in last.stages] == [7, 6, 6]
    hits = [sum(getattr(s.tier_hits, tier) for tier in TIERS) for s in (before, last)]
    assert hits[1] == hits[0] + 12, "tasks of the newer plan are added to those of the older"
    world.check_results(rows)


async def test_statistics_begin_anew_where_results_go_elsewhere(world: World) -> None:
    world.inputs(2)
    async with connected(world.device("a")):
        await world.submit()
        first = await world.ended()
        await world.submit(outputs_uri=f"{world.folder}/elsewhere")
        second = await world.ended()
    assert second.resumed == 0
    assert [stage.finished for stage in second.stages] == [2, 2, 2]
    assert second.started_seconds > first.started_seconds


async def test_statistics_begin_anew_when_results_are_deleted(world: World) -> None:
    world.inputs(2)
    async with connected(world.device("a")):
        await world.submit()
        first = await world.ended()
        (world.folder / "out/000.npz").unlink()
        await world.submit()
        second = await world.ended()
    assert [stage.finished for stage in second.stages] == [2, 2, 2]
    assert second.started_seconds > first.started_seconds
