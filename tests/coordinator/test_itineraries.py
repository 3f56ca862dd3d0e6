"""Items that travel: a scripted device takes them, and sends back results, or what it likes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from coordinator.scripted import STAGES, ScriptedDevice, connected
from coordinator.world import World
from protocol.item_frames import Came, came, one_item
from shoal_coordinator.server.carrying import carried, is_light
from shoal_protocol.frames import join_frames, split_frame
from shoal_protocol.items import ITEMS_TOGETHER, items_frame
from shoal_protocol.partition import MODEL, PartitionDocument
from shoal_protocol.tensors import Array
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb

ROWS = 60


def light(document: PartitionDocument, size: int | None = 400) -> PartitionDocument:
    """The same, with so many bytes on each edge."""
    edges = tuple(replace(edge, bytes_per_item=size) for edge in document.edges)
    return replace(document, edges=edges)


class Traveller(ScriptedDevice):
    """Takes items as well. `answer` makes of an item and its results what is sent back."""

    plans: list[pb.Plan]
    travelled: list[int]
    frames: int
    over: list[tuple[str, int]]
    together: bool
    held: list[Came]
    answer: Callable[[pb.Plan, Came, dict[str, Array]], bytes]

    def begin(self) -> "Traveller":
        self.plans, self.travelled, self.frames, self.answer = [], [], 0, results_of
        self.together, self.held, self.over = False, [], []
        return self

    async def _receive(self, message: pb.CoordinatorMessage) -> None:
        if message.cancel.job:
            self.over.append((message.cancel.job, message.cancel.epoch))
        if message.WhichOneof("message") == "plan":
            self.plans.append(message.plan)
            await self._reply(message.plan.instruction, planned=pb.Planned())
        await super()._receive(message)

    async def _take_frame(self, frame: bytes) -> bool:
        header, payload = split_frame(frame)
        if header.WhichOneof("kind") != "items":
            return False
        plan = next(each for each in self.plans if each.ticket == header.items.ticket)
        self.frames += 1
        items = came(header.items, payload)
        for item in items:
            self.travelled.append(item.instruction)
            for stage in STAGES:
                item.tensors.update(stage(item.tensors))
            sent = b"" if self.together else self.answer(plan, item, item.tensors)
            if sent:
                await self._write(sent)
        if self.together:
            self.held += items
            if len(self.held) == len(items):
                asyncio.create_task(self._answer_all(plan))  # noqa: RUF006 - the test waits for it
        return True

    async def _answer_all(self, plan: pb.Plan) -> None:
        """Answer what comes in a while, in one frame."""
        await asyncio.sleep(0.02)
        held, self.held = self.held, []
        await self._write(all_results_of(plan, held))


def all_results_of(plan: pb.Plan, items: Sequence[Came]) -> bytes:
    """In one frame, from the last to the first, with one that nobody waits for."""
    results = [
        (item.instruction, {name: item.tensors[name] for name in plan.sends})
        for item in reversed(items)
    ]
    unknown = (1 << 40, results[0][1])
    return bytes(items_frame(plan.next_ticket, (1000,) * 3, [*results, unknown]))


def results_of(plan: pb.Plan, item: Came, tensors: dict[str, Array]) -> bytes:
    results = {name: tensors[name] for name in plan.sends}
    return one_item(plan.next_ticket, item.instruction, (1000,) * 3, results)


@pytest.fixture
def light_world(world: World) -> World:
    return replace(world, document=light(world.document))


def traveller(world: World, name: str = "a") -> Traveller:
    device = world.device(name)
    device.__class__ = Traveller
    assert isinstance(device, Traveller)
    return device.begin()


async def test_most_items_of_a_light_job_travel(light_world: World) -> None:
    rows, device = light_world.inputs(1, ROWS - 1), traveller(light_world)
    async with connected(device):
        await light_world.submit()
        status = await light_world.ended()
    light_world.check_results(rows)
    assert status.state == api.JobStatus.COMPLETE
    assert [stage.finished for stage in status.stages] == [ROWS] * 3
    assert len(device.travelled) > ROWS / 2
    assert len(device.travelled) + len(device.executed) / 3 == ROWS
    assert list(device.plans[0].sends) == ["early", "y"]


@pytest.mark.parametrize("batches", [False, True])
async def test_where_a_job_asks_for_batches_items_travel_if_no_fragment_allows_them(
    light_world: World, *, batches: bool
) -> None:
    one, *others = light_world.document.fragments
    fragments = (replace(one, batches=batches), *others)
    world = replace(light_world, document=replace(light_world.document, fragments=fragments))
    rows, device = world.inputs(ROWS), traveller(world)
    async with connected(device):
        await world.submit(batch=8)
        await world.ended()
    world.check_results(rows)
    assert bool(device.travelled) is not batches


async def test_a_device_learns_that_a_job_with_routes_is_over(light_world: World) -> None:
    light_world.inputs(ROWS)
    device = traveller(light_world)
    async with connected(device):
        await light_world.submit()
        epoch = (await light_world.ended()).epoch
        async with asyncio.timeout(60):
            while not device.over:
                await asyncio.sleep(0.01)
    assert device.plans
    assert device.over == [("job", epoch + 1)]


async def test_results_that_come_together_are_taken_together(light_world: World) -> None:
    rows, device = light_world.inputs(ROWS), traveller(light_world)
    device.together = True
    async with connected(device):
        await light_world.submit()
        status = await light_world.ended()
    light_world.check_results(rows)
    assert status.state == api.JobStatus.COMPLETE
    assert [stage.finished for stage in status.stages] == [ROWS] * 3
    assert ROWS / 2 < len(device.travelled) <= ROWS
    assert device.frames < len(device.travelled), "what enters together leaves together"


async def test_items_of_a_job_whose_sizes_are_not_known_do_not_travel(world: World) -> None:
    rows, device = world.inputs(20), traveller(world)
    async with connected(device):
        await world.submit()
        await world.ended()
    world.check_results(rows)
    assert not device.plans


def _nothing_at_first(device: Traveller) -> Callable[[pb.Plan, Came, dict[str, Array]], bytes]:
    def answer(plan: pb.Plan, item: Came, tensors: dict[str, Array]) -> bytes:
        wrong = len(device.travelled) == 1
        results = {"early": tensors["early"]} if wrong else tensors
        sent = {name: results[name] for name in plan.sends if name in results}
        return one_item(plan.next_ticket, item.instruction, (1,) * 3, sent)

    return answer


async def test_an_item_with_wrong_results_runs_task_by_task(light_world: World) -> None:
    rows, device = light_world.inputs(ROWS), traveller(light_world)
    device.answer = _nothing_at_first(device)
    async with connected(device):
        await light_world.submit()
        status = await light_world.ended()
    light_world.check_results(rows)
    assert (status.succeeded, status.failed) == (ROWS, 0)
    assert device.travelled


async def test_of_more_results_in_a_frame_than_there_may_be_none_is_taken(
    light_world: World,
) -> None:
    """Results of no bytes would be as many as a header has numbers."""
    rows, device = light_world.inputs(ROWS), traveller(light_world)

    def answer(plan: pb.Plan, item: Came, tensors: dict[str, Array]) -> bytes:
        if len(device.travelled) > 1:
            return results_of(plan, item, tensors)
        forged = {name: np.zeros_like(tensors[name]) for name in plan.sends}
        again = ITEMS_TOGETHER * [(item.instruction, forged)]
        return bytes(items_frame(plan.next_ticket, (1,) * 3, [(item.instruction, forged), *again]))

    device.answer = answer
    async with connected(device):
        await light_world.submit()
        await light_world.ended()
    light_world.check_results(rows)
    assert device.travelled


async def test_results_without_their_ticket_are_ignored(light_world: World) -> None:
    rows, device = light_world.inputs(ROWS), traveller(light_world)

    def answer(plan: pb.Plan, item: Came, tensors: dict[str, Array]) -> bytes:
        forged = {name: np.zeros_like(tensors[name]) for name in plan.sends}
        first = one_item(bytes(16), item.instruction, (1,) * 3, forged)
        return join_frames([first, results_of(plan, item, tensors)])

    device.answer = answer
    async with connected(device):
        await light_world.submit()
        await light_world.ended()
    light_world.check_results(rows)
    assert device.travelled


async def test_items_on_a_device_that_is_lost_run_again(light_world: World) -> None:
    rows = light_world.inputs(ROWS)
    lost, other = traveller(light_world), traveller(light_world, "b")
    lost.answer = lambda plan, item, tensors: b""
    async with connected(lost):
        await light_world.submit()
        async with asyncio.timeout(60):
            while not lost.travelled:
                await asyncio.sleep(0.01)
    async with connected(other):
        status = await light_world.ended()
    light_world.check_results(rows)
    assert (status.succeeded, status.failed) == (ROWS, 0)


def test_an_item_has_with_it_what_is_needed_later(world: World) -> None:
    assert carried(world.document) == (
        ("x",),
        ("x", "a", "early"),
        ("x", "a", "early", "b"),
        ("early", "y"),
    )


def test_a_job_is_light_whose_items_carry_little(world: World) -> None:
    assert is_light(light(world.document))
    assert not is_light(light(world.document, None))
    assert not is_light(light(world.document, 40 << 10))
    text = tuple(replace(spec, dtype="string") for spec in world.document.inputs)
    assert not is_light(replace(light(world.document), inputs=text))
    same = tuple(
        replace(edge, tensors=("x",)) if edge.producer != MODEL else edge
        for edge in world.document.edges
    )
    assert not is_light(replace(light(world.document), edges=same))
