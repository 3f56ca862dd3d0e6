"""The items of a job are listed with what became of them, and those that failed are retried."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest

from coordinator.scripted import STAGES, Stage, connected, put_model, submission
from coordinator.world import World, refusal
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_coordinator.server.item_lists import pages
from shoal_coordinator.storage import item_list
from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.item_list import (
    FailedItem,
    ItemList,
    ListedFile,
    stored_items,
    write_items,
)
from shoal_protocol.channels import open_channel
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub

Item = api.JobItem


class Picky:
    """A stage that fails with some items, as long as it is told to."""

    def __init__(self, *rows: np.ndarray) -> None:
        self.bad = [float(2 * row[0, 0]) for row in rows]

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (STAGES[0], self._run, STAGES[2])

    def _run(self, tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        if float(tensors["a"][0, 0]) in self.bad:
            raise ValueError("does not suit")
        return STAGES[1](tensors)


async def listed(stub: CoordinatorStub, *states: Item.State, name: str = "job") -> list[Item]:
    request = api.ListItemsRequest(name=name, states=states)
    return [each async for page in stub.ListItems(request, timeout=60) for each in page.items]  # type: ignore[attr-defined]


async def retry(world: World, *items: int) -> api.JobStatus:
    return await world.stub.RetryJob(api.RetryJobRequest(name="job", items=items), timeout=60)


def numbers(items: Sequence[Item]) -> list[int]:
    return [each.item for each in items]


async def test_items_are_listed_with_state_reason_tries_and_device(world: World) -> None:
    rows = world.inputs(3, 1)
    picky = Picky(rows[1])
    async with connected(world.device("a", stages=picky.stages)):
        await world.submit(backoff_limit=1)
        await world.ended()
    found = await listed(world.stub)
    assert [(each.input, each.state) for each in found] == [
        ("000.npz[0]", Item.SUCCEEDED),
        ("000.npz[1]", Item.FAILED),
        ("000.npz[2]", Item.SUCCEEDED),
        ("001.npz[0]", Item.SUCCEEDED),
    ]
    failed = found[1]
    assert (failed.tries, failed.device) == (2, "a")
    assert "does not suit" in failed.reason
    assert {each.tries for each in found if each.state == Item.SUCCEEDED} == {1}
    assert numbers(await listed(world.stub, Item.FAILED)) == [1]


async def test_items_of_a_job_that_runs_are_active_or_wait(world: World) -> None:
    world.inputs(30)
    gate = asyncio.Semaphore(1)
    async with connected(world.device("a", gate=gate)):
        await world.submit(parallelism=2)
        await world.until(lambda status: status.active == 2)
        active = await listed(world.stub, Item.ACTIVE)
        waiting = await listed(world.stub, Item.WAITING)
        assert numbers(active) == [0, 1]
        assert {each.device for each in active} <= {"a", ""}
        assert {each.tries for each in active} == {1}
        assert numbers(waiting) == list(range(2, 30))
        code, reason = await refusal(retry(world))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert reason == "job job runs; what failed can be tried again when it has ended"


async def test_what_is_kept_of_items_that_went_well_does_not_grow_with_their_number(
    world: World,
) -> None:
    rows = world.inputs(200)
    picky = Picky(rows[150])
    async with connected(world.device("a", stages=picky.stages)):
        await world.submit(backoff_limit=1)
        await world.ended()
        kept = json.loads((world.folder / "out/.shoal/job/items.json").read_text())
        assert (kept["stored"], kept["tries"], kept["earlier"]) == ([[0, 150], [151, 200]], [], [])
        assert [each.tries for each in await listed(world.stub)] == [1] * 150 + [2] + [1] * 49
        picky.bad.clear()
        await retry(world)
        await world.ended()
    kept = json.loads((world.folder / "out/.shoal/job/items.json").read_text())
    assert (kept["stored"], kept["tries"]) == ([[0, 200]], [])
    assert kept["earlier"] == [[0, 150], [151, 200]]
    assert [each.tries for each in await listed(world.stub)] == [0] * 150 + [1] + [0] * 49


def test_a_list_of_items_of_an_earlier_version_counts_their_tries(tmp_path: Path) -> None:
    folder = tmp_path / ".shoal" / "job"
    folder.mkdir(parents=True)
    files = [["a.npz", 0, True]]
    kept = {"version": 1, "total": 4, "files": files, "stored": [[0, 3]], "failed": []}
    (folder / "items.json").write_text(json.dumps({**kept, "tries": [[1, 1], [2, 3]]}))
    assert (items := stored_items(tmp_path, "job")) is not None
    assert [each.tries for each in items] == [0, 1, 3, 0]


def test_a_list_of_items_stays_readable_however_many_fail_and_with_what_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_list, "_MOST_BYTES", 8 << 10)
    monkeypatch.setattr(item_list, "_FAILURE_BYTES", 4 << 10)
    failed = {n: FailedItem(n, f"a.npz[{n}]", "é" * 200, 1, "pi-4") for n in range(1000)}
    failed[0] = FailedItem(0, "a.npz[0]", "x" * 5000, 1, "pi-4")
    files = (ListedFile("a.npz", 0, True),)
    written = ItemList(total=1001, files=files, stored={1000}, failed=failed)
    (tmp_path / ".shoal/job").mkdir(parents=True)
    with contextlib.closing(Folder(tmp_path / ".shoal/job")) as folder:
        write_items(folder, written)
    items = stored_items(tmp_path, "job")
    assert items is not None
    assert items.counts() == written.counts()
    assert items.not_failed([999, 1000]) == [1000]
    listed = list(items)
    assert [each.input for each in listed] == [each.input for each in written]
    assert [each.failure is None for each in listed] == [False] * 1000 + [True]
    reasons = [each.failure.reason for each in listed if each.failure is not None]
    assert reasons[:2] == ["x" * 1000, "é" * 200]
    assert "the reason is not stored" in reasons[-1]
    assert dict(items.failed) == {each.item: each.failure for each in listed[:-1]}


async def test_a_page_of_items_is_bounded(world: World) -> None:
    world.inputs(700, size=1)
    await world.submit()
    await world.until(lambda status: status.items == 700)
    call = world.stub.ListItems(api.ListItemsRequest(name="job"), timeout=60)
    assert [len(page.items) async for page in call] == [256, 256, 188]


async def test_a_search_among_many_items_lets_others_have_their_turn() -> None:
    many = ItemList(
        total=100_000, files=(ListedFile("a.npz", 0, True),), stored=frozenset(), failed={}
    )
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    assert [page async for page in pages(many, {}, [Item.FAILED])] == []
    counting.cancel()
    assert turns > 10


async def test_a_retry_tries_what_failed_and_computes_no_result_again(world: World) -> None:
    rows = world.inputs(4)
    picky = Picky(rows[1], rows[3])
    device = world.device("a", stages=picky.stages)
    async with connected(device):
        await world.submit(backoff_limit=0)
        assert (await world.ended()).failed == 2
        picky.bad.clear()
        device.executed.clear()
        again = await retry(world)
        assert again.retry == 1
        last = await world.ended()
    assert (last.state, last.succeeded, last.failed, last.resumed) == (
        api.JobStatus.COMPLETE,
        4,
        0,
        2,
    )
    assert {item for item, _ in device.executed} == {1, 3}
    world.check_results(rows)
    assert not (world.folder / "out" / "failures.json").exists()
    code, reason = await refusal(retry(world))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert reason == "job job is complete: no item of it has failed"


async def test_of_the_failed_items_only_those_that_are_named_are_tried(world: World) -> None:
    rows = world.inputs(2, 3, 1)
    picky = Picky(rows[1], rows[2], rows[5])
    device = world.device("a", stages=picky.stages)
    async with connected(device):
        await world.submit(backoff_limit=0)
        await world.ended()
        picky.bad.clear()
        device.executed.clear()
        await retry(world, 2)
        last = await world.ended()
        assert {item for item, _ in device.executed} == {2}
        assert (last.state, last.reason, last.failed) == (api.JobStatus.FAILED, "ItemsFailed", 2)
        assert [each.item for each in last.failures] == [1, 5]
        assert numbers(await listed(world.stub, Item.FAILED)) == [1, 5]
        code, reason = await refusal(retry(world, 2))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert reason == (
            "item 2 of job job has not failed; 2 of its 6 items have: `shoal items job --failed`"
        )
        await retry(world)
        assert (await world.ended()).state == api.JobStatus.COMPLETE
    world.check_results(rows)


async def test_a_retry_is_resumed_and_possible_after_the_coordinator_was_restarted(
    tmp_path: Path,
) -> None:
    document = put_model(tmp_path / "store")
    target = f"unix:{tmp_path}/s"
    settings = CoordinatorSettings(
        listen=target, store=tmp_path / "store", state=tmp_path / "state", metrics="127.0.0.1:0"
    )
    started: list[World] = []

    async def begin(coordinator: object, channel: grpc.aio.Channel) -> World:
        world = World(coordinator, target, document, CoordinatorStub(channel), channel, tmp_path)  # type: ignore[arg-type]
        started.append(world)
        return world

    async with serving(settings) as coordinator, open_channel(target) as channel:
        world = await begin(coordinator, channel)
        rows = world.inputs(4)
        picky = Picky(rows[0], rows[2])
        async with connected(world.device("a", stages=picky.stages)):
            request = submission(document, tmp_path / "in", tmp_path / "out", backoff_limit=0)
            await world.stub.SubmitJob(request, timeout=60)
            await world.ended()
    async with serving(settings) as coordinator, open_channel(target) as channel:
        world = await begin(coordinator, channel)
        assert numbers(await listed(world.stub, Item.FAILED)) == [0, 2]
        assert (await retry(world, 2)).retry == 1  # no device is there yet
    async with serving(settings) as coordinator, open_channel(target) as channel:
        world = await begin(coordinator, channel)
        picky.bad.clear()
        device = world.device("a", stages=picky.stages)
        async with connected(device):
            last = await world.ended()
    assert {item for item, _ in device.executed} == {2}
    assert (last.reason, last.failed, last.retry) == ("ItemsFailed", 1, 1)


async def test_a_retry_of_a_job_that_is_being_cancelled_runs_it_after_that(world: World) -> None:
    rows = world.inputs(6)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit()
        await world.until(lambda status: status.active > 0)
        world.coordinator.jobs.cancel("job", "no need")
        again = await retry(world)
        assert again.retry == 1
        for _ in range(40):
            gate.release()
        assert (await world.ended()).state == api.JobStatus.COMPLETE
    world.check_results(rows)


async def test_items_of_no_job_are_refused_by_name(world: World) -> None:
    code, reason = await refusal(listed(world.stub, name="none"))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "there is no job 'none' here")
    world.inputs()
    await world.submit(inputs_uri=f"{world.folder}/nowhere")
    code, reason = await refusal(listed(world.stub))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert reason == "job job ended before its items were counted"


async def test_a_retry_of_a_number_that_no_further_one_can_follow_is_refused(world: World) -> None:
    """To count it up would end the coordinator."""
    rows = world.inputs(1)
    async with connected(world.device("a", stages=Picky(rows[0]).stages)):
        for last in (2**32 - 1, 2**31, 2**30):
            asked = world.submit(backoff_limit=0, retry=api.Retry(number=last))
            assert f"the retry has number {last}" in (await refusal(asked))[1]
        await world.submit(backoff_limit=0, retry=api.Retry(number=2**30 - 1))
        await world.ended()
        for number in (2**30, 2**30 + 1):
            assert (await retry(world)).retry == number
            await world.ended()
    assert not world.coordinator.driver.broken.done()
