"""The room that items take while they come: it is given back, however their session ends."""

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np

from shoal_agent.runtime.fragments import Fragments
from shoal_agent.session.itineraries import Itineraries
from shoal_agent.telemetry.counters import Counters
from shoal_protocol.bulk.link import BulkLink
from shoal_protocol.bulk.transport import Allocate, new_memory
from shoal_protocol.items import items_frame
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import FrameHeader

TICKET, DIGEST = bytes(16), "sha256:" + 64 * "0"
FRAME = items_frame(TICKET, (), [(1, {"x": np.zeros(4, np.float32)})])


class Session:
    """Keeps what items are answered with (an `ItemSink`)."""

    full = False

    def __init__(self) -> None:
        self.replies: list[pb.Reply] = []

    def way(self, device: str, address: str) -> BulkLink:
        raise AssertionError("nothing leaves")

    def reply(self, reply: pb.Reply) -> None:
        self.replies.append(reply)

    def fail(self, error: BaseException) -> None:
        raise error


class Slow:
    """A payload that is on its way until the test has it come (a `Payload`)."""

    size = FRAME.payload_bytes

    def __init__(self) -> None:
        self.asked, self.comes = asyncio.Event(), asyncio.Event()

    async def read(self, allocate: Allocate = new_memory) -> memoryview:
        self.asked.set()
        await self.comes.wait()
        return memoryview(bytearray(b"".join(FRAME.payload)))

    async def read_into(self, targets: object) -> None:
        raise AssertionError("an item is read whole")

    def pieces(self, most_bytes: int) -> AsyncIterator[memoryview]:
        raise AssertionError("an item is read whole")


def planned(fragments: Fragments, session: Session) -> Itineraries:
    """With a leg for the frame."""
    fragments.ledger.resident = {DIGEST: Bytes(1)}
    itineraries = Itineraries(
        fragments, lambda job, epoch: False, session, Counters(), asyncio.Lock()
    )
    step = pb.Step(digest=DIGEST, inputs=["x"])
    itineraries.plan(pb.Plan(job="job", ticket=TICKET, steps=[step], next_ticket=TICKET))
    assert session.replies.pop().HasField("planned")
    return itineraries


async def test_a_flood_of_items_without_room_leaves_a_bounded_number_of_answers(
    make: Callable[..., Fragments],
) -> None:
    session = Session()
    itineraries = planned(make(), session)
    itineraries.drain()
    items = FrameHeader.FromString(FRAME.header).items
    await itineraries.take_items(items, Slow())
    assert session.replies.pop().failure.code == pb.CANCELLED
    session.full = True  # the coordinator gives up what it hears nothing of
    await itineraries.take_items(items, Slow())
    assert not session.replies


async def test_an_item_that_comes_while_its_session_ends_leaves_no_room_taken(
    make: Callable[..., Fragments],
) -> None:
    fragments = make()
    itineraries = planned(fragments, Session())
    payload, items = Slow(), FrameHeader.FromString(FRAME.header).items
    taking = asyncio.create_task(itineraries.take_items(items, payload))
    await payload.asked.wait()
    assert fragments.ledger.moving > 0
    itineraries.close()
    payload.comes.set()
    await taking
    itineraries.all_taken()
    assert fragments.ledger.moving == 0
    assert itineraries.waiting == 0
