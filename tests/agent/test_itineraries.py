"""Items with an itinerary on real agents: they come, run and leave, and only failures are
answered."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from agent.conftest import Joined
from agent.fragment_making import MadeFragment, dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ConnectedDevice, ScriptedCoordinator
from protocol.item_frames import one_item
from shoal_protocol.frames import Frame
from shoal_protocol.tensors import Array
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import FrameHeader, Layout

Join = Callable[..., Awaitable[Joined]]
pytestmark = pytest.mark.forked
ENTRY, MIDDLE, END = (bytes([number]) * 16 for number in (1, 2, 3))
X = np.random.default_rng(0).standard_normal((1, 64), dtype=np.float32)


@pytest.fixture
def fragments(coordinator: ScriptedCoordinator) -> list[MadeFragment]:
    """x -> y, and qx -> qy."""
    store = coordinator.store
    return [
        write_fragment(store, dense_model([64, 64])),
        write_fragment(store, dense_model([64, 64], seed=1, prefix="q")),
    ]


def leg(fragment: MadeFragment, **more: object) -> pb.Plan:
    """One step from the entry to the coordinator, but for what is said besides."""
    values: dict[str, object] = {
        "job": "job",
        "epoch": 1,
        "ticket": ENTRY,
        "steps": [pb.Step(digest=fragment.digest, inputs=["x"])],
        "sends": ["y"],
        "next_ticket": END,
    }
    return pb.Plan(**values | more)  # type: ignore[arg-type]


async def planned(device: ConnectedDevice, plan: pb.Plan) -> None:
    assert (await device.ask("plan", plan)).HasField("planned")


async def prepared(join: Join, fragment: MadeFragment, name: str = "pi-4") -> ConnectedDevice:
    device = (await join(name)).device
    await device.load(fragment.digest, fragment.resident_bytes)
    return device


def relu(fragment: MadeFragment, x: Array) -> Array:
    """What a fragment makes, from its weights."""
    weights = np.fromfile(fragment.folder / "weights.bin", np.float32)[: 64 * 64].reshape(64, 64)
    made: Array = np.maximum(x @ weights, 0)
    return made


async def test_an_item_runs_and_its_results_come_with_what_they_took(
    join: Join, fragments: list[MadeFragment]
) -> None:
    device = await prepared(join, fragments[0])
    await planned(device, leg(fragments[0]))
    for number in range(5):
        await device.send_item(ENTRY, 100 + number, {"x": X + number})
    for number in range(5):
        item, arrays = await device.item()
        assert (item.ticket, item.instruction) == (END, 100 + number)
        assert len(item.compute) == 1
        np.testing.assert_allclose(arrays["y"], relu(fragments[0], X + number), atol=1e-4)


async def test_light_items_that_come_together_leave_together(
    join: Join, fragments: list[MadeFragment]
) -> None:
    device = await prepared(join, fragments[0])
    await planned(device, leg(fragments[0]))
    number = 0
    async with asyncio.timeout(30):
        while max(device.item_frames, default=0) < 2:  # what a run takes is measured first
            items = [(number + each, {"x": X + each}) for each in range(8)]
            await device.send_items(ENTRY, items)
            for expected, _ in items:
                item, arrays = await device.item()
                assert (item.ticket, item.instruction, len(item.compute)) == (END, expected, 1)
                made = relu(fragments[0], X + expected - number)
                np.testing.assert_allclose(arrays["y"], made, atol=1e-4)
            number += 8


async def test_of_items_that_came_together_each_fails_by_itself(
    join: Join, fragments: list[MadeFragment]
) -> None:
    device = await prepared(join, fragments[0])
    await planned(device, leg(fragments[0]))
    failed = await device.send_items(ENTRY, [(number, {"x": X[:, :5]}) for number in range(3)])
    replies = [await asyncio.wait_for(each, 10) for each in failed]
    assert [each.failure.code for each in replies] == [pb.INVALID_INPUT] * 3


async def test_what_a_later_stage_takes_travels_along(
    join: Join, fragments: list[MadeFragment]
) -> None:
    device = await prepared(join, fragments[0])
    await planned(device, leg(fragments[0], sends=["extra", "y"]))
    extra = np.arange(3)
    await device.send_item(ENTRY, 1, {"x": X, "extra": extra})
    _, arrays = await device.item()
    assert list(arrays) == ["extra", "y"]
    np.testing.assert_array_equal(arrays["extra"], extra)


async def test_an_item_goes_from_device_to_device_without_the_coordinator(
    join: Join, fragments: list[MadeFragment]
) -> None:
    one = await prepared(join, fragments[0], "one")
    two = await prepared(join, fragments[0], "two")
    await planned(two, leg(fragments[0], ticket=MIDDLE))
    to_two = {"device": "two", "address": two.hello.address, "next_ticket": MIDDLE}
    await planned(one, leg(fragments[0], sends=["x", "y"], **to_two))
    await one.send_item(ENTRY, 1, {"x": X})
    item, _ = await two.item()
    assert (item.ticket, item.instruction, len(item.compute)) == (END, 1, 2)
    assert one.items.empty()


async def test_an_item_without_a_ticket_is_ignored(
    join: Join, fragments: list[MadeFragment]
) -> None:
    device = await prepared(join, fragments[0])
    await planned(device, leg(fragments[0]))
    ignored = await device.send_item(bytes(16), 1, {"x": X})
    await device.send_item(ENTRY, 2, {"x": X})
    item, _ = await device.item()
    assert item.instruction == 2
    assert not ignored.done()


async def test_a_newer_epoch_voids_the_legs_of_the_older_one(
    join: Join, fragments: list[MadeFragment]
) -> None:
    device = await prepared(join, fragments[0])
    await planned(device, leg(fragments[0]))
    await planned(device, leg(fragments[0], epoch=2, ticket=MIDDLE))
    await device.send_item(ENTRY, 1, {"x": X})
    await device.send_item(MIDDLE, 2, {"x": X})
    item, _ = await device.item()
    assert item.instruction == 2
    late = await device.ask("plan", leg(fragments[0]))
    assert late.failure.code == pb.CANCELLED


async def test_a_leg_needs_its_fragments_in_memory(
    join: Join, fragments: list[MadeFragment]
) -> None:
    device = await prepared(join, fragments[0])
    refused = await device.ask("plan", leg(fragments[1]))
    assert refused.failure.code == pb.NOT_RESIDENT
    await planned(device, leg(fragments[0]))
    await device.unload(fragments[0].digest)
    failed = await device.send_item(ENTRY, 1, {"x": X})
    assert (await asyncio.wait_for(failed, 10)).failure.code == pb.NOT_RESIDENT


@pytest.mark.parametrize(
    ("tensors", "sends", "code"),
    [
        ({"x": X[:, :5]}, "y", pb.INVALID_INPUT),
        ({"y": X}, "y", pb.RUNTIME),
        ({"x": X}, "z", pb.RUNTIME),
    ],
)
async def test_an_item_that_does_not_suit_fails_by_itself(
    join: Join,
    fragments: list[MadeFragment],
    tensors: dict[str, Array],
    sends: str,
    code: pb.FailureCode,
) -> None:
    device = await prepared(join, fragments[0])
    await planned(device, leg(fragments[0], sends=[sends]))
    failed = await device.send_item(ENTRY, 1, tensors)
    assert (await asyncio.wait_for(failed, 10)).failure.code == code


async def test_items_that_a_broken_link_may_have_lost_are_reported(
    join: Join, fragments: list[MadeFragment]
) -> None:
    one = await prepared(join, fragments[0], "one")
    peer = await join("two")
    two = peer.device
    await two.load(fragments[0].digest, fragments[0].resident_bytes)
    await planned(two, leg(fragments[0], ticket=MIDDLE))
    to_two = {"device": "two", "address": two.hello.address, "next_ticket": MIDDLE}
    await planned(one, leg(fragments[0], sends=["x"], **to_two))
    lost = await one.send_item(ENTRY, 1, {"x": X})
    await asyncio.wait_for(two.items.get(), 10)
    await peer.agent.kill()
    assert (await asyncio.wait_for(lost, 10)).failure.code == pb.UNREACHABLE
    never = await one.send_item(ENTRY, 2, {"x": X})
    assert (await asyncio.wait_for(never, 10)).failure.code == pb.UNREACHABLE


def sockets(pid: int) -> int:
    """How many a process has open."""
    files = list(Path(f"/proc/{pid}/fd").iterdir())
    return sum(os.readlink(file).startswith("socket:") for file in files)


async def test_items_that_have_arrived_are_not_reported_when_a_resting_device_hangs_up(
    join: Join, fragments: list[MadeFragment]
) -> None:
    joined = await join("one")
    one, process = joined.device, joined.agent.process
    await one.load(fragments[0].digest, fragments[0].resident_bytes)
    two = await prepared(join, fragments[0], "two")
    before = sockets(process.pid)
    await planned(two, leg(fragments[0], ticket=MIDDLE))
    to_two = {"device": "two", "address": two.hello.address, "next_ticket": MIDDLE}
    await planned(one, leg(fragments[0], sends=["x"], **to_two))
    reported = [await one.send_item(ENTRY, number, {"x": X}) for number in range(3)]
    for _ in reported:
        await two.item()
    assert sockets(process.pid) > before
    async with asyncio.timeout(PATIENCE_SECONDS):
        while sockets(process.pid) > before:
            await asyncio.sleep(0.05)
    await planned(one, leg(fragments[0]))  # what was said before has come
    assert not any(each.done() for each in reported)


async def test_no_more_items_are_reported_than_may_have_been_under_way(
    join: Join, fragments: list[MadeFragment]
) -> None:
    one = await prepared(join, fragments[0], "one")
    peer = await join("two")
    await peer.device.load(fragments[0].digest, fragments[0].resident_bytes)
    await planned(peer.device, leg(fragments[0], ticket=MIDDLE))
    to_two = {"device": "two", "address": peer.device.hello.address, "next_ticket": MIDDLE}
    await planned(one, leg(fragments[0], sends=["x"], **to_two))
    sent: list[asyncio.Future[pb.Reply]] = []
    for first in range(0, 20 * 32, 32):
        sent += await one.send_items(ENTRY, [(first + each, {"x": X}) for each in range(32)])
        for _ in range(32):
            await peer.device.item()
    await peer.agent.kill()
    never = await one.send_item(ENTRY, len(sent), {"x": X})
    assert (await asyncio.wait_for(never, 10)).failure.code == pb.UNREACHABLE
    assert 0 < sum(each.done() for each in sent) <= 256


async def test_an_item_whose_sizes_lie_ends_the_stream_and_nothing_else(
    join: Join, fragments: list[MadeFragment]
) -> None:
    joined = await join()
    device = joined.device
    await device.load(fragments[0].digest, fragments[0].resident_bytes)
    await planned(device, leg(fragments[0]))
    context = await asyncio.wait_for(asyncio.shield(device.exchange), 10)
    header = FrameHeader(last=True)
    header.items.ticket = ENTRY
    header.items.instructions.append(1)
    header.items.layout = Layout().SerializeToString()
    await context.write(bytes(Frame(header.SerializeToString(), (b"more",), 4)))
    await asyncio.wait_for(device.gone.wait(), 10)
    assert joined.agent.process.returncode is None


async def test_an_item_without_room_fails_and_the_next_has_it(
    join: Join, fragments: list[MadeFragment]
) -> None:
    device = (await join("pi-4", budget="64Mi")).device
    await device.load(fragments[0].digest, (64 << 20) - (256 << 10))
    await planned(device, leg(fragments[0]))
    failed = await device.send_item(ENTRY, 1, {"x": np.zeros((512, 64), np.float32)})
    refused = (await asyncio.wait_for(failed, 10)).failure
    assert (refused.code, refused.message) == (pb.CANCELLED, "there is no room for items")
    await device.send_item(ENTRY, 2, {"x": X})
    item, _ = await device.item()
    assert item.instruction == 2


async def test_what_describes_an_item_takes_room_as_well(
    join: Join, fragments: list[MadeFragment]
) -> None:
    device = (await join("pi-4", budget="64Mi")).device
    await device.load(fragments[0].digest, (64 << 20) - (256 << 10))
    await planned(device, leg(fragments[0]))
    nothing = {str(number): np.zeros(0, np.float32) for number in range(500)}
    replies = await device.send_items(ENTRY, [(number, nothing) for number in range(32)])
    failed = [(await asyncio.wait_for(each, 10)).failure for each in replies]
    assert {each.message for each in failed} == {"there is no room for items"}


async def test_an_item_that_has_passed_more_stages_than_a_job_has_ends_the_stream_and_nothing_else(
    join: Join, fragments: list[MadeFragment]
) -> None:
    joined = await join()
    device = joined.device
    await device.load(fragments[0].digest, fragments[0].resident_bytes)
    await planned(device, leg(fragments[0]))
    context = await asyncio.wait_for(asyncio.shield(device.exchange), 10)
    await context.write(one_item(ENTRY, 1, (1 << 40,) * 1000, {"x": X}))
    await asyncio.wait_for(device.gone.wait(), 10)
    assert joined.agent.process.returncode is None
