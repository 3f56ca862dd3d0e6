"""Items that travel: a scripted device takes them, and sends back results, or what it likes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from coordinator.scripted import STAGES, ScriptedDevice, connected
from coordinator.world import World
from shoal_coordinator.server.carrying import carried, is_light
from shoal_protocol.frames import join_frames, split_frame
from shoal_protocol.items import item_frame, read_layout
from shoal_protocol.partition import MODEL, PartitionDocument
from shoal_protocol.tensors import Array
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Item

ROWS = 60


def light(document: PartitionDocument, size: int | None = 400) -> PartitionDocument:
    """The same, with so many bytes on each edge."""
    edges = tuple(replace(edge, bytes_per_item=size) for edge in document.edges)
    return replace(document, edges=edges)


class Traveller(ScriptedDevice):
    """Takes items as well. `answer` makes of an item and its results what is sent back."""

    plans: list[pb.Plan]
    travelled: list[int]
    answer: Callable[[pb.Plan, Item, dict[str, Array]], bytes]

    def begin(self) -> "Traveller":
        self.plans, self.travelled, self.answer = [], [], results_of
        return self

    async def _receive(self, message: pb.CoordinatorMessage) -> None:
        if message.WhichOneof("message") == "plan":
            self.plans.append(message.plan)
            await self._reply(message.plan.instruction, planned=pb.Planned())
        await super()._receive(message)

    async def _take_frame(self, frame: bytes) -> bool:
        header, payload = split_frame(frame)
        if header.WhichOneof("kind") != "item":
            return False
        tensors = read_layout(header.item.layout).arrays(payload)
        plan = next(each for each in self.plans if each.ticket == header.item.ticket)
        self.travelled.append(header.item.instruction)
        for stage in STAGES:
            tensors |= stage(tensors)
        if sent := self.answer(plan, header.item, tensors):
            await self._write(sent)
        return True


def results_of(plan: pb.Plan, item: Item, tensors: dict[str, Array]) -> bytes:
    results = {name: tensors[name] for name in plan.sends}
    return bytes(item_frame(plan.next_ticket, item.instruction, [1000] * 3, results))


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


async def test_items_of_a_job_whose_sizes_are_not_known_do_not_travel(world: World) -> None:
    rows, device = world.inputs(20), traveller(world)
    async with connected(device):
        await world.submit()
        await world.ended()
    world.check_results(rows)
    assert not device.plans


def _nothing_at_first(device: Traveller) -> Callable[[pb.Plan, Item, dict[str, Array]], bytes]:
    def answer(plan: pb.Plan, item: Item, tensors: dict[str, Array]) -> bytes:
        wrong = len(device.travelled) == 1
        results = {"early": tensors["early"]} if wrong else tensors
        sent = {name: results[name] for name in plan.sends if name in results}
        return bytes(item_frame(plan.next_ticket, item.instruction, [1] * 3, sent))

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


async def test_results_without_their_ticket_are_ignored(light_world: World) -> None:
    rows, device = light_world.inputs(ROWS), traveller(light_world)

    def answer(plan: pb.Plan, item: Item, tensors: dict[str, Array]) -> bytes:
        forged = {name: np.zeros_like(tensors[name]) for name in plan.sends}
        first = item_frame(bytes(16), item.instruction, [1] * 3, forged)
        return join_frames([bytes(first), results_of(plan, item, tensors)])

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
        async with asyncio.timeout(20):
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
