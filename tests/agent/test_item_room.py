"""The room that items and activations take while they come: it is given back, however their session
ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np

from shoal_agent.execution.values import Made
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.session.itineraries import Itineraries
from shoal_agent.session.tasks import Tasks
from shoal_agent.telemetry.counters import Counters
from shoal_agent.transport.activations import ActivationStore
from shoal_agent.transport.intake import open_intake
from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.bulk.link import BulkLink, OutboundActivation
from shoal_protocol.bulk.transport import Allocate, Held, new_memory
from shoal_protocol.frames import Frame, split_frame
from shoal_protocol.items import items_frame
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, FrameHeader

TICKET, DIGEST = bytes(16), "sha256:" + 64 * "0"
X = np.zeros(4, np.float32)
FRAME = items_frame(TICKET, (), [(1, {"x": X})])


class Session:
    """Keeps what items are answered with (a `ReplySink`)."""

    full = False

    def __init__(self) -> None:
        self.replies: list[pb.Reply] = []

    def way(self, device: str, address: str) -> BulkLink:
        raise AssertionError("nothing leaves")

    async def deliver(self, outbound: OutboundActivation, address: str) -> int:
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


class Sized(Slow):
    """The payload of a frame, which nobody asks for."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.size = frame.payload_bytes


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


async def test_rubbish_by_one_way_leaves_few_answers_and_what_comes_by_another_is_answered(
    make: Callable[..., Fragments],
) -> None:
    """Numbers that nobody gave are answered in the device's name."""
    session = Session()
    itineraries = planned(make(), session)
    other = bytes(15) + b"1"
    step = pb.Step(digest=DIGEST, inputs=["x"])
    itineraries.plan(pb.Plan(job="other", ticket=other, steps=[step], next_ticket=other))
    session.replies.clear()
    itineraries.drain()
    for first in range(0, 3200, 32):
        rubbish = items_frame(TICKET, (), [(n, {"x": X}) for n in range(first, first + 32)])
        await itineraries.take_items(FrameHeader.FromString(rubbish.header).items, Sized(rubbish))
    assert 200 <= len(session.replies) < 300, "all that may be under way, and a few"
    honest = items_frame(other, (), [(9999, {"x": X})])
    await itineraries.take_items(FrameHeader.FromString(honest.header).items, Sized(honest))
    assert session.replies[-1].instruction == 9999


async def test_items_that_wait_go_with_their_job_or_by_themselves_and_nobody_is_answered(
    make: Callable[..., Fragments],
) -> None:
    fragments, session = make(), Session()
    itineraries = planned(fragments, session)
    frame = items_frame(TICKET, (), [(number, {"x": X}) for number in (1, 2, 3)])
    payload = Held(memoryview(b"".join(frame.payload)))
    await itineraries.take_items(FrameHeader.FromString(frame.header).items, payload)
    took = fragments.ledger.moving
    for cancelled in (2, 2, 4):
        itineraries.cancel(cancelled)
        assert (itineraries.waiting, fragments.ledger.moving) == (2, took * 2 // 3)
    itineraries.void("other", 1)
    assert itineraries.waiting == 2
    itineraries.void("job", 1)
    assert (itineraries.waiting, fragments.ledger.moving) == (0, 0)
    itineraries.all_taken()
    assert itineraries.idle
    assert not session.replies


async def test_a_session_that_has_ended_takes_no_activation(
    make: Callable[..., Fragments], tmp_path: Path
) -> None:
    fragments = make()
    store = ActivationStore(tmp_path / "store", 1 << 20, fragments, fragments.buffers)
    tasks = Tasks("pi-4", fragments, store, Session(), Counters())
    key = ActivationKey(job="job", epoch=1, item=0, producer=-1, consumer=0)
    (frame,) = encode_activation(key, "pi-4", {"x": np.zeros(4, np.float32)}, transfer=1)
    intake = open_intake("pi-4", lambda: tasks, Counters())
    for right in (Acknowledgement.ACCEPTED, Acknowledgement.BUSY):
        header, payload = split_frame(frame)
        answer = await intake.take(header, Held(payload))
        assert answer is not None
        assert FrameHeader.FromString(answer.header).acknowledgement.outcome == right
        tasks.close()
    ledger = fragments.ledger
    assert (ledger.moving, store.held_bytes) == (0, 0)
    assert ledger.reserved == fragments.buffers.holes_bytes, "nothing but what waits for the next"


async def test_what_comes_while_its_session_ends_is_not_taken(
    make: Callable[..., Fragments], tmp_path: Path
) -> None:
    fragments = make()
    store = ActivationStore(tmp_path / "store", 1 << 20, fragments, fragments.buffers)
    tasks = Tasks("pi-4", fragments, store, Session(), Counters())
    buffer = tasks.open_buffer(16, 0, 0)
    tasks.close()
    key = ActivationKey(job="job", epoch=1, item=0, producer=-1, consumer=0)
    received = ReceivedActivation(1, key, "pi-4", {"x": np.zeros(4, np.float32)}, 16, 16)
    assert not tasks.take(received, buffer)
    buffer.abandon()
    assert (fragments.ledger.moving, store.held_bytes) == (0, 0)


async def test_what_a_run_gives_back_while_it_is_sent_on_takes_its_room_once(
    make: Callable[..., Fragments], tmp_path: Path
) -> None:
    fragments = make()
    store = ActivationStore(tmp_path / "store", 1 << 20, fragments, fragments.buffers)
    ledger, made = fragments.ledger, Made("job", 1, 0, 0)
    await store.put(made, {"x": np.zeros(4096, np.uint8)})
    store.cover(made)
    assert fragments.request_move(8192), "something else moves"
    with store.lend(made):
        await store.uncover(made)
        assert ledger.moving == 4096 + 8192
    assert (ledger.moving, ledger.reserved) == (8192, 4096)
    store.drop([made])
    assert ledger.reserved == fragments.buffers.holes_bytes


async def test_what_a_run_gives_back_while_it_is_sent_on_goes_to_the_disk_where_memory_is_full(
    make: Callable[..., Fragments], tmp_path: Path
) -> None:
    fragments = make()
    store = ActivationStore(tmp_path / "store", 1 << 20, fragments, fragments.buffers)
    made, content = Made("job", 1, 0, 0), np.arange(4096) % 251
    await store.put(made, {"x": content})
    store.cover(made)
    assert fragments.request_move(fragments.ledger.free), "nothing is left"
    with store.lend(made) as lent:
        await store.uncover(made)
        assert lent is not None
        np.testing.assert_array_equal(lent["x"], content)
    assert not store.in_memory(made)
    kept = store.get(made)
    assert kept is not None
    np.testing.assert_array_equal(kept["x"], content)


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
