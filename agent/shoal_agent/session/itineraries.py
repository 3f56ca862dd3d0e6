"""Items with an itinerary: they come, run and leave, and nobody is asked in between.

`execution.legs` has the rules. An item runs where a task could: one at a time with the tasks of the
session, within what the ledger grants for it. Where there is no room, or anything else is wrong,
the item fails here, and the coordinator has it run task by task; that way knows of disks, of
relays and of deadlines.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple, Protocol

from shoal_agent.execution.legs import Arrived, Leg, Legs, Step
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.session.answers import EXPECTED, failure, failure_of
from shoal_agent.telemetry.counters import Counters
from shoal_protocol import eager
from shoal_protocol.bulk.link import BulkLink, Undelivered
from shoal_protocol.bulk.transport import Payload
from shoal_protocol.frame_sizes import frame_bytes, received_frame_bytes
from shoal_protocol.frames import MalformedFrame
from shoal_protocol.items import TICKET_BYTES, item_frame, read_layout
from shoal_protocol.tensors import Array, UnsupportedTensor
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Item

LONG_SECONDS: Final = 5.0
"""A run that takes so long is stopped: only light fragments have itineraries, and a task has a
deadline of its own."""
_STEPS: Final = 64
_PUSHED: Final = 256
"""Items that a link may lose when it breaks: more are not under way."""
_PUSHED_SECONDS: Final = 60.0
"""What left earlier has arrived, or the coordinator has given it up."""


class ItemSink(Protocol):
    """Takes what items send: the session."""

    def way(self, device: str, address: str) -> BulkLink: ...
    def reply(self, reply: pb.Reply) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class _Brought(NamedTuple):
    """What an item has brought, the ledger's bytes for it, and when it came."""

    tensors: dict[str, Array]
    compute: list[int]
    room: int
    since: float


class Itineraries:
    """Those of one session. `turn` is held by whoever runs a fragment."""

    def __init__(
        self,
        fragments: Fragments,
        stale: Callable[[str, int], bool],
        sink: ItemSink,
        counters: Counters,
        turn: asyncio.Lock,
    ) -> None:
        """`stale` says whether a job has a newer epoch."""
        self._fragments = fragments
        self._stale = stale
        self._sink = sink
        self._counters = counters
        self._turn = turn
        self._legs: Legs[_Brought] = Legs()
        self._pushed: dict[BulkLink, deque[tuple[int, float]]] = {}
        self._unsent = 0
        self._running_since: float | None = None
        self._pump: asyncio.Task[None] | None = None
        self._pumping = self._draining = self._closed = False
        self._ran: set[str] = set()

    @property
    def waiting(self) -> int:
        return self._legs.waiting

    @property
    def idle(self) -> bool:
        """Nothing runs, and everything that ran has left."""
        return not (self._pumping or self._unsent)

    def plan(self, message: pb.Plan) -> None:
        """Take items along a leg from now on, and say so."""
        reply = pb.Reply(instruction=message.instruction)
        resident = self._fragments.ledger.resident
        missing = [step.digest for step in message.steps if step.digest not in resident]
        if not 0 < len(message.steps) <= _STEPS or len(message.ticket) != TICKET_BYTES:
            reply.failure.CopyFrom(failure(pb.RUNTIME, "this is no leg of an itinerary"))
        elif self._stale(message.job, message.epoch) or self._draining:
            reply.failure.CopyFrom(failure(pb.CANCELLED, "its epoch is over, or the device leaves"))
        elif missing:
            reply.failure.CopyFrom(failure(pb.NOT_RESIDENT, f"{missing[0]} is not resident"))
        else:
            self._legs.plan(message.ticket, _leg(message))
            reply.planned.SetInParent()
        self._sink.reply(reply)

    async def take_item(self, item: Item, payload: Payload) -> None:
        """Take an item that comes; see `ItemHandler`."""
        leg = self._legs.find(item.ticket)
        if leg is None or self._closed or self._stale(leg.job, leg.epoch):
            self._counters.transfers_refused["STALE"] += 1
            return
        layout = read_layout(item.layout)
        size = payload.size
        if size != layout.size or len(item.compute) > _STEPS * _STEPS:
            raise MalformedFrame(f"an item of {size} bytes, where its layout has {layout.size}")
        room = size + received_frame_bytes(size)
        if self._draining or self._legs.full or not self._fragments.request_move(room):
            self._counters.transfers_refused["BUSY"] += 1
            self._fail(item.instruction, failure(pb.CANCELLED, "there is no room for items"))
            return
        try:
            tensors = layout.arrays(await payload.read())
        except BaseException:
            self._fragments.end_move(room)
            raise
        self._counters.received_bytes += size
        self._counters.transfers += 1
        brought = _Brought(tensors, list(item.compute), room, perf_counter())
        self._legs.arrive(Arrived(leg, item.instruction, brought))
        if not self._pumping:
            self._pumping = True
            self._pump = eager.begin(self._run_all())

    def tick(self) -> None:
        """Time has passed: a run may take too long."""
        since = self._running_since
        if since is not None and perf_counter() - since > LONG_SECONDS:
            self._fragments.stop_run()

    def measured(self) -> list[pb.MeasuredTask]:
        """What tasks take of the fragments that ran since this was last asked."""
        ran, self._ran = self._ran, set()
        read = self._fragments.processor.times.read
        return [pb.MeasuredTask(digest=each, task_seconds=read(each)) for each in sorted(ran)]

    def drain(self) -> None:
        """The device leaves: what waits fails here, and so does what still comes."""
        self._draining = True
        for arrived in self._legs.clear():
            self._fragments.end_move(arrived.content.room)
            self._fail(arrived.instruction, failure(pb.CANCELLED, "the device leaves"))

    def close(self) -> None:
        """The session broke: nothing of it is needed any more."""
        self._closed = True
        if self._running_since is not None:
            self._fragments.stop_run()
        if self._pump is not None:
            self._pump.cancel()
        for arrived in self._legs.clear():
            self._fragments.end_move(arrived.content.room)

    # ---- inside ------------------------------------------------------------------------------

    async def _run_all(self) -> None:
        """Run what has come, until nothing waits."""
        try:
            while (arrived := self._legs.next()) is not None:
                try:
                    async with self._turn:
                        await self._run(arrived)
                finally:
                    self._fragments.end_move(arrived.content.room)
        except Exception as error:
            self._sink.fail(error)
        finally:
            self._pumping = False

    async def _run(self, arrived: Arrived[_Brought]) -> None:
        """One item, through its steps and away."""
        leg, brought = arrived.leg, arrived.content
        values, compute = brought.tensors, brought.compute
        try:
            for step in leg.steps:
                feed = {name: values[name] for name in step.inputs}
                self._running_since = perf_counter()
                result = await self._fragments.run(step.digest, feed)
                values.update(result.outputs)
                compute.append(int(result.compute_seconds * 1e9))
                self._counters.compute.observe(result.compute_seconds)
                self._ran.add(step.digest)
            self._send(leg, arrived.instruction, compute, values)
        except KeyError as error:
            self._fail(arrived.instruction, failure(pb.RUNTIME, f"nothing makes {error}"))
        except UnsupportedTensor as error:
            self._fail(arrived.instruction, failure(pb.RUNTIME, str(error)))
        except EXPECTED as error:
            self._fail(arrived.instruction, failure_of(error))
        else:
            self._counters.tasks["executed"] += len(leg.steps)
            self._counters.task.observe(perf_counter() - brought.since)
        finally:
            self._running_since = None

    def _send(
        self, leg: Leg, instruction: int, compute: list[int], values: dict[str, Array]
    ) -> None:
        """Raises `UnsupportedTensor`, `Undelivered`, and `KeyError` for what nothing has made."""
        if self._closed:
            return
        frame = item_frame(
            leg.next_ticket, instruction, compute, {name: values[name] for name in leg.sends}
        )
        room = frame.payload_bytes + frame_bytes(frame.payload_bytes)
        if not self._fragments.request_move(room):
            raise Undelivered("there is no room for its outputs")
        self._unsent += 1
        left = partial(self._left, room)
        try:
            way = self._sink.way(leg.device, leg.address)
            way.push(frame, left)
        except Undelivered:
            left()
            raise
        self._counters.sent_bytes += frame.size
        self._counters.transfers += 1
        if leg.device:
            self._note_pushed(way, instruction)

    def _left(self, room: int) -> None:
        self._unsent -= 1
        self._fragments.end_move(room)

    def _note_pushed(self, way: BulkLink, instruction: int) -> None:
        """Nobody acknowledges an item: what a link may have lost is known when it has ended."""
        if (pushed := self._pushed.get(way)) is None:
            pushed = self._pushed[way] = deque(maxlen=_PUSHED)
            way.on_end(partial(self._way_ended, way))
        pushed.append((instruction, perf_counter()))

    def _way_ended(self, way: BulkLink, reason: str) -> None:
        oldest = perf_counter() - _PUSHED_SECONDS
        for instruction, at in self._pushed.pop(way):
            if at > oldest:
                self._fail(instruction, failure(pb.UNREACHABLE, reason))

    def _fail(self, instruction: int, what: pb.Failure) -> None:
        if not self._closed:
            self._counters.tasks[pb.FailureCode.Name(what.code).lower()] += 1
            self._sink.reply(pb.Reply(instruction=instruction, failure=what))


def _leg(message: pb.Plan) -> Leg:
    return Leg(
        job=message.job,
        epoch=message.epoch,
        steps=tuple(Step(digest=step.digest, inputs=tuple(step.inputs)) for step in message.steps),
        sends=tuple(message.sends),
        device=message.device,
        address=message.address,
        next_ticket=message.next_ticket,
    )
