"""Items on a link: pushed, not acknowledged, and known to be lost only when the link has ended."""

import asyncio

import numpy as np
import pytest

from protocol.test_bulk import Pipe, Taker, outbound, serving
from protocol.test_local_link import on_the_wire, raw_pair
from shoal_protocol.bulk.link import BulkLink, Undelivered
from shoal_protocol.bulk.local import LocalTransport
from shoal_protocol.bulk.receiving import Intake
from shoal_protocol.bulk.transport import Payload
from shoal_protocol.frames import Frame, MalformedFrame, frames_in
from shoal_protocol.items import items_frame
from shoal_protocol.v1 import tensors_pb2 as pb


class Items:
    """Takes all items (an `ItemHandler`)."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, bytes]] = []
        self.pauses: list[int] = []
        """How many had been taken each time that no more were at hand."""

    async def take_items(self, items: pb.Items, payload: Payload) -> None:
        content = bytes(await payload.read())
        self.taken += [(number, content) for number in items.instructions]

    def all_taken(self) -> None:
        self.pauses.append(len(self.taken))


def joined(items: Items | None) -> tuple[Pipe, BulkLink, Taker, BulkLink]:
    near, far, taker = Pipe(), Pipe(), Taker()
    near.other, far.other = far, near
    return near, BulkLink(near), taker, BulkLink(far, Intake(taker), items=items)


def item(number: int, size: int = 4) -> Frame:
    return items_frame(bytes(16), (), [(number, {"x": np.full(size, number % 251, np.uint8)})])


class Left:
    """Counts what has left."""

    count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_items_arrive_in_order_beside_transfers() -> None:
    items, left = Items(), Left()
    _, near, taker, far = joined(items)
    async with serving(near, far):
        for number in range(100):
            near.push(item(number), left)
        await near.send(outbound())
        for number in range(100, 200):
            near.push(item(number), left)
        await near.send(outbound(1))
    assert items.taken == [(number, bytes([number % 251] * 4)) for number in range(200)]
    assert len(taker.taken) == 2
    assert left.count == 200


async def test_one_item_leaves_at_once_and_those_of_the_same_turn_together() -> None:
    items = Items()
    pipe, near, _, far = joined(items)
    async with serving(near, far):
        await asyncio.sleep(0)
        near.push(item(0), Left())
        assert len(pipe.written) == 1, "nobody had to run for that"
        for number in range(1, 20):
            near.push(item(number), Left())
        await near.ping()
        assert [len(list(frames_in(each))) for each in pipe.written[:2]] == [1, 20]


async def test_on_a_local_link_those_of_the_same_turn_leave_at_once_as_well() -> None:
    near, far = raw_pair()
    link = BulkLink(LocalTransport(near))
    async with serving(link):
        for number in range(3):
            link.push(item(number), Left())
            assert far.recv(1 << 16) == on_the_wire(item(number)), "nobody had to run for that"
    far.close()


async def test_a_message_of_items_stays_small() -> None:
    items = Items()
    pipe, near, _, far = joined(items)
    async with serving(near, far):
        for number in range(20):
            near.push(item(number, 100_000), Left())
        await near.ping()
    assert max(map(len, pipe.written)) < 300_000
    assert len(items.taken) == 20


async def test_what_was_pushed_has_arrived_when_what_left_behind_it_is_acknowledged() -> None:
    items = Items()
    pipe, near, _, far = joined(items)
    async with serving(near, far):
        for number in range(3):
            near.push(item(number), Left())
        assert (near.pushed.number, near.pushed.arrived) == (3, 0)
        await near.send(outbound())
        assert near.pushed.arrived == 3
        near.push(item(3), Left())
        await near.confirm()
        assert near.pushed.arrived == 4
        written = len(pipe.written)
        await near.confirm()
        assert len(pipe.written) == written, "there was nothing to ask"
        assert len(items.taken) == 4


async def test_what_waits_is_let_go_when_the_link_ends() -> None:
    left, reasons = Left(), list[str]()
    pipe, near, _, far = joined(Items())
    pipe.flows.clear()
    near.on_end(reasons.append)
    async with serving(near, far):
        for number in range(10):
            near.push(item(number), left)
        await asyncio.sleep(0)
    assert left.count == 10
    assert reasons == ["the test is over"]
    with pytest.raises(Undelivered, match="the test is over"):
        near.push(item(0), left)


async def test_an_item_where_none_belongs_ends_the_stream() -> None:
    _, near, _, far = joined(None)
    async with serving(near, far) as (_, receiving):
        near.push(item(0), Left())
        await asyncio.wait([receiving])
        assert "items where none belong" in str(receiving.exception())


async def test_items_that_came_before_rubbish_do_not_wait_for_others() -> None:
    items = Items()
    _, near, _, far = joined(items)
    async with serving(near, far) as (_, receiving):
        near.push(item(1), Left())
        near.push(item(2), Left())
        near.push(Frame(b"rubbish"), Left())
        await asyncio.wait([receiving])
        assert isinstance(receiving.exception(), MalformedFrame)
    assert len(items.taken) == 2
    assert items.pauses[-1] == 2
