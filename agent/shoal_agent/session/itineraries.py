"""Items with an itinerary: they come, run and leave, and nobody is asked in between.

`execution.legs` has the rules. An item runs where a task could: one at a time with the tasks of the
session, within what the ledger grants for it. Where there is no room, or anything else is wrong,
the item fails here, and the coordinator has it run task by task; that way knows of disks, of
relays and of deadlines.

Where runs take next to no time, most of an item's cost is what is done around them. So light items
that wait here behind one another run together and leave in one frame. An item that is alone waits
for none, and one that takes its time leaves before the next one runs.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple, Protocol

from shoal_agent.execution.legs import Arrived, Leg, Legs, Step
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.results import Passed
from shoal_agent.session.answers import EXPECTED, failure, failure_of
from shoal_agent.telemetry.counters import Counters
from shoal_protocol import eager
from shoal_protocol.bulk.link import BulkLink, Undelivered
from shoal_protocol.bulk.transport import Payload
from shoal_protocol.frame_sizes import frame_bytes, received_frame_bytes
from shoal_protocol.frames import Frame, MalformedFrame
from shoal_protocol.items import (
    ARRAY_BYTES,
    ITEM_BYTES,
    ITEMS_TOGETHER,
    TICKET_BYTES,
    Numbered,
    alike,
    items_frame,
    layout_of,
)
from shoal_protocol.pacing import Allowance
from shoal_protocol.tensors import Array, UnsupportedTensor
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Items

LONG_SECONDS: Final = 5.0
"""A run that takes so long is stopped: only light fragments have itineraries, and a task has a
deadline of its own."""
_STEPS: Final = 64
"""More than a job has stages whose items have an itinerary."""
_KNOWN_FRAGMENTS: Final = 1024
_PUSHED: Final = 256
"""Frames, and items, that a link may lose when it breaks: more are not under way."""
_PUSHED_SECONDS: Final = 60.0
"""What left earlier has arrived, or the coordinator has given it up."""
_FAILED_AT_ONCE: Final = 200.0
"""All items that the coordinator has under way may fail here."""
_FAILED_PER_SECOND: Final = 10.0
"""Of one leg: who sends along it may send numbers that nobody gave, and each is answered in the
name of this device."""


class ItemSink(Protocol):
    """Takes what items send: the session."""

    @property
    def full(self) -> bool: ...
    def way(self, device: str, address: str) -> BulkLink: ...
    def reply(self, reply: pb.Reply) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class _Brought(NamedTuple):
    """What an item has brought, the ledger's bytes for it, and when it came. `compute` is that of
    all that came with it."""

    tensors: dict[str, Array]
    compute: tuple[int, ...]
    room: int
    since: float


_Item = Arrived[_Brought]


class _Runs(NamedTuple):
    """A fragment has run: what it gave for each item, and what one run took. `passed` is there
    where it ran in passing."""

    digest: str
    outputs: Sequence[dict[str, Array]]
    seconds: float
    passed: Passed | None


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
        self._pushed: dict[BulkLink, deque[tuple[int, Sequence[int], float]]] = {}
        self._failing: dict[Leg, Allowance] = {}
        self._unsent = 0
        self._running_since: float | None = None
        self._pump: asyncio.Task[None] | None = None
        self._pumping = self._draining = self._closed = False
        self._ran: set[str] = set()
        self._made: dict[str, int] = {}
        """The most bytes that an item's run of a fragment has made."""

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

    def void(self, job: str, epoch: int) -> None:
        """Legs of a job below an epoch are not needed any more, nor what waits for them."""
        for arrived in self._legs.void(job, epoch):
            self._fragments.end_move(arrived.content.room)
        self._failing = {leg: each for leg, each in self._failing.items() if leg.job != job}

    def cancel(self, instruction: int) -> None:
        """The coordinator has given an item up: it does not run where it waits."""
        if (arrived := self._legs.cancel(instruction)) is not None:
            self._fragments.end_move(arrived.content.room)

    async def take_items(self, items: Items, payload: Payload) -> None:
        """Take items that come; see `ItemHandler`."""
        leg = self._legs.find(items.ticket)
        if leg is None or self._closed or self._stale(leg.job, leg.epoch):
            self._counters.transfers_refused["STALE"] += 1
            return
        numbers, size = items.instructions[:], payload.size
        count = len(numbers)
        layout = layout_of(items, size)
        if len(items.compute) > _STEPS:
            raise MalformedFrame(f"{len(items.compute)} stages before")
        shared = size + received_frame_bytes(size) + len(items.layout)
        room = -(-shared // count) + ARRAY_BYTES * len(layout.places)
        no_room = self._draining or not self._legs.room_for(leg, count)
        if no_room or not self._fragments.request_move(count * room):
            self._counters.transfers_refused["BUSY"] += 1
            no_room_left = failure(pb.CANCELLED, "there is no room for items")
            self._fail(leg, numbers, no_room_left)
            return
        try:
            tensors = layout.items(await payload.read(), count)
        except BaseException:
            self._fragments.end_move(count * room)
            raise
        if self._closed:  # while the payload came
            self._fragments.end_move(count * room)
            return
        self._counters.received_bytes += size
        self._counters.transfers += 1
        compute, since, data = tuple(items.compute[:]), perf_counter(), items.layout
        self._legs.arrive(
            [
                Arrived(leg, number, data, _Brought(each, compute, room, since))
                for number, each in zip(numbers, tensors, strict=True)
            ]
        )

    def all_taken(self) -> None:
        """Run what has come; see `ItemHandler`."""
        if self._legs.waiting and not self._pumping:
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
        times = self._fragments.processor.times
        return [
            pb.MeasuredTask(digest=each, task_seconds=times.read(each), within=times.within(each))
            for each in sorted(ran)
        ]

    def drain(self) -> None:
        """The device leaves: what waits fails here, and so does what still comes."""
        self._draining = True
        for arrived in self._legs.clear():
            self._fragments.end_move(arrived.content.room)
            leaves = failure(pb.CANCELLED, "the device leaves")
            self._fail(arrived.leg, [arrived.instruction], leaves)

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
            while together := self._legs.next(self._most_together()):
                try:
                    async with self._turn:
                        await self._run(together)
                finally:
                    self._fragments.end_move(sum([each.content.room for each in together]))
        except Exception as error:
            self._sink.fail(error)
        finally:
            self._pumping = False

    def _most_together(self) -> int:
        """How many of the items that wait may run before the first of them leaves: what they make
        has the memory of one item."""
        if self._legs.waiting == 1 or (leg := self._legs.next_leg) is None:
            return 1
        if not all(self._fragments.light.is_light(step.digest) for step in leg.steps):
            return 1
        made = sum([self._made.get(step.digest, ITEM_BYTES) for step in leg.steps])
        return max(1, min(ITEMS_TOGETHER, ITEM_BYTES // max(1, made)))

    async def _run(self, together: Sequence[_Item]) -> None:
        """Items through their steps and away. Where something is wrong with one of several, each is
        run by itself."""
        leg = together[0].leg
        runs: list[_Runs] = []  # `list[_Runs]()` takes ten times as long
        try:
            values = [each.content.tensors for each in together]
            compute = [*_mean([each.content.compute for each in together])]
            for step in leg.steps:
                runs.append(await self._run_step(step, values))
                compute.append(int(runs[-1].seconds * 1e9))
            numbers = [each.instruction for each in together]
            self._send(leg, compute, list(zip(numbers, values, strict=True)))
        except (KeyError, UnsupportedTensor, *EXPECTED) as error:
            if len(together) == 1:
                self._fail(leg, [together[0].instruction], _failure_of(error))
                return
            for each in together:
                await self._run((each,))
        else:
            self._counters.tasks["executed"] += len(leg.steps) * len(together)
            now = perf_counter()
            for each in together:
                self._counters.task.observe(now - each.content.since)
        finally:
            self._running_since = None
            for ran in runs:
                await self._note(ran)

    async def _run_step(self, step: Step, values: Sequence[dict[str, Array]]) -> _Runs:
        """Run a fragment on all of these, which get its outputs. Raises `KeyError` for what nothing
        has made, and what runs raise."""
        digest, names = step.digest, step.inputs
        feeds = [{name: each[name] for name in names} for each in values]
        self._running_since = perf_counter()
        passed = self._fragments.light.run(digest, feeds)
        if passed is None:
            results = [await self._fragments.run(digest, feed) for feed in feeds]
            outputs = [each.outputs for each in results]
            seconds = sum([each.compute_seconds for each in results]) / len(results)
        else:
            outputs, seconds = passed.outputs, passed.seconds
        for each, made in zip(values, outputs, strict=True):
            each.update(made)
        return _Runs(digest, outputs, seconds, passed)

    async def _note(self, runs: _Runs) -> None:
        """Take what runs have shown, when what they made has left: nobody waits for that."""
        digest, made = runs.digest, self._made.get(runs.digest, 0)
        if runs.passed is not None:
            await self._fragments.light.note(digest, runs.passed)
        for outputs in runs.outputs:
            made = max(made, sum([array.nbytes for array in outputs.values()]))
        self._ran.add(digest)
        if len(self._made) >= _KNOWN_FRAGMENTS:
            self._made.clear()
        self._made[digest] = made
        self._counters.compute.observe(runs.seconds, len(runs.outputs))

    def _send(self, leg: Leg, compute: Sequence[int], items: Sequence[Numbered]) -> None:
        """Raises `UnsupportedTensor`, `Undelivered`, and `KeyError` for what nothing has made."""
        if self._closed:
            return
        sends = leg.sends
        leaving = [(number, {name: each[name] for name in sends}) for number, each in items]
        # All frames are made before one leaves: what is wrong with one is known then.
        for together, frame in [
            (each, items_frame(leg.next_ticket, compute, each)) for each in alike(leaving)
        ]:
            self._push(leg, frame, [number for number, _ in together])

    def _push(self, leg: Leg, frame: Frame, instructions: Sequence[int]) -> None:
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
            self._note_pushed(way, instructions)

    def _left(self, room: int) -> None:
        self._unsent -= 1
        self._fragments.end_move(room)

    def _note_pushed(self, way: BulkLink, instructions: Sequence[int]) -> None:
        """Nobody acknowledges an item: what a link may have lost is known when it has ended."""
        if (pushed := self._pushed.get(way)) is None:
            pushed = self._pushed[way] = deque(maxlen=_PUSHED)
            way.on_end(partial(self._way_ended, way))
        pushed.append((way.pushed.number, instructions, perf_counter()))

    def _way_ended(self, way: BulkLink, reason: str) -> None:
        oldest = perf_counter() - _PUSHED_SECONDS
        lost = [
            instruction
            for number, instructions, at in self._pushed.pop(way)
            if at > oldest and number > way.pushed.arrived
            for instruction in instructions
        ]
        self._report(lost[-_PUSHED:], failure(pb.UNREACHABLE, reason))

    def _fail(self, leg: Leg, instructions: Iterable[int], what: pb.Failure) -> None:
        """Items of a leg have failed. Peers say how many there are: beyond a bound nothing is said,
        and they are given up."""
        allowed = self._failing.get(leg)
        if allowed is None:
            allowed = self._failing[leg] = Allowance(_FAILED_PER_SECOND, _FAILED_AT_ONCE)
        self._report((each for each in instructions if allowed.take_now()), what)

    def _report(self, instructions: Iterable[int], what: pb.Failure) -> None:
        for instruction in instructions:
            if not (self._closed or self._sink.full):
                self._counters.tasks[pb.FailureCode.Name(what.code).lower()] += 1
                self._sink.reply(pb.Reply(instruction=instruction, failure=what))


def _failure_of(error: Exception) -> pb.Failure:
    """What an item's failure is answered with."""
    match error:
        case KeyError():
            return failure(pb.RUNTIME, f"nothing makes {error}")
        case UnsupportedTensor():
            return failure(pb.RUNTIME, str(error))
        case _:
            return failure_of(error)


def _mean(compute: Sequence[tuple[int, ...]]) -> Iterable[int]:
    """What each stage took on average; mostly all came together."""
    first = compute[0]
    if len(compute) == 1 or all(each is first for each in compute):
        return first
    return [sum(each) // len(compute) for each in zip(*compute, strict=False)]


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
