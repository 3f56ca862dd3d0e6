"""Tasks of one session: the queue decides; this runs them, stores their outputs and sends them."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from shoal_agent.execution import values as execution
from shoal_agent.execution.queue import TaskQueue
from shoal_agent.execution.values import Assignment, Effect, Need
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.results import RunResult
from shoal_agent.session.answers import EXPECTED, failure, failure_of, refusal
from shoal_agent.session.itineraries import ItemSink, Itineraries
from shoal_agent.session.outputs import Outputs, made
from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.logs import log
from shoal_agent.telemetry.machine import steady_nanoseconds
from shoal_agent.transport.activations import ActivationStore, SpillFull, StoreBuffer
from shoal_protocol import eager
from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.bulk.link import OutboundActivation
from shoal_protocol.seen_sizes import write_sizes
from shoal_protocol.tensors import Array, memory_bytes
from shoal_protocol.units import Nanoseconds, nanoseconds, seconds
from shoal_protocol.v1 import session_pb2 as pb

_ENDLESS_SECONDS: Final = 10.0**9
"""A deadline that is no earlier is none."""
_SMALL_BYTES: Final = 16 << 10
"""Outputs that are no larger leave with others, and take next to no memory meanwhile."""


class ReplySink(ItemSink, Protocol):
    """Takes what tasks send: the session."""

    async def deliver(self, outbound: OutboundActivation, address: str) -> int: ...


@dataclass(slots=True)
class _Order:
    """An Execute that has not been answered, and when it came."""

    message: pb.Execute
    since: Nanoseconds


class Tasks:
    """The tasks that one session gave to this device. `ticket_key` is that of the session."""

    def __init__(
        self,
        device: str,
        fragments: Fragments,
        store: ActivationStore,
        sink: ReplySink,
        counters: Counters,
    ) -> None:
        self._device = device
        self._fragments = fragments
        self._store = store
        self._sink = sink
        self._counters = counters
        self._queue = TaskQueue()
        self._orders: dict[int, _Order] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._starts: deque[execution.Start] = deque()
        self._starting = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = Nanoseconds(0)
        self._outputs = Outputs(device, fragments, store, sink.deliver, counters)
        self._turn = asyncio.Lock()
        self.itineraries = Itineraries(fragments, self.stale, sink, counters, self._turn)
        self._closed = False
        self.ticket_key = b""

    @property
    def queued(self) -> int:
        return self._queue.queued + self.itineraries.waiting

    @property
    def unanswered(self) -> int:
        return len(self._orders)

    @property
    def spilled_bytes(self) -> int:
        return self._store.spilled_bytes

    @property
    def idle(self) -> bool:
        """Nothing runs, and everything that ran is answered."""
        return self._queue.idle and not self._background and self.itineraries.idle

    # ---- instructions ---------------------------------------------------------------------------

    def execute(self, message: pb.Execute) -> None:
        now = Nanoseconds(steady_nanoseconds())
        if message.digest not in self._fragments.ledger.resident:
            self.fail(
                message.instruction, failure(pb.NOT_RESIDENT, f"{message.digest} is not resident")
            )
            return
        deadline = None
        if 0 < message.deadline_seconds < _ENDLESS_SECONDS:
            deadline = Nanoseconds(now + nanoseconds(message.deadline_seconds))
            self._wake_at(deadline)
        self._orders[message.instruction] = _Order(message, now)
        self._do(
            self._queue.submit(
                Assignment(
                    instruction=message.instruction,
                    task=made(message.task),
                    digest=message.digest,
                    needs=tuple(
                        Need(producer=source.producer, tensors=frozenset(source.tensors))
                        for source in message.inputs
                    ),
                    deadline=deadline,
                    batch=max(1, message.batch),
                )
            )
        )

    def plan(self, message: pb.Plan) -> None:
        self.void(message.job, message.epoch)
        self.itineraries.plan(message)

    def waits(self, instruction: int) -> bool:
        return instruction in self._orders

    def forward(self, message: pb.Forward) -> None:
        self._begin(self._forward(message))

    def release(self, tasks: Iterable[pb.Task]) -> None:
        self._do(self._queue.release(made(task) for task in tasks))

    def cancel(self, instruction: int) -> None:
        self.itineraries.cancel(instruction)
        self._do(self._queue.cancel(instruction))

    def refuse(self, instruction: int, why: pb.Failure) -> None:
        """Give up one task, whose inputs have no room here."""
        for effect in self._queue.cancel(instruction):
            if isinstance(effect, execution.Refused):
                self.fail(instruction, why)
            else:
                self._do([effect])

    def void(self, job: str, epoch: int) -> None:
        self.itineraries.void(job, epoch)
        self._do(self._queue.void(job, epoch))

    def unload(self, digest: str) -> None:
        self._do(self._queue.unload(digest))

    def drain(self) -> None:
        """Answer what has not begun."""
        self.itineraries.drain()
        for instruction in list(self._orders):
            if instruction not in self._queue.running:
                self._do(self._queue.cancel(instruction))

    # ---- what peers and the coordinator send ----------------------------------------------------

    def stale(self, job: str, epoch: int) -> bool:
        return self._queue.stale(job, epoch)

    def has_room(self, size: int) -> bool:
        return not self._closed and self._store.has_room(size)

    def open_buffer(self, memory_bytes: int, scratch_bytes: int, text_bytes: int) -> StoreBuffer:
        return self._store.open_buffer(memory_bytes, scratch_bytes, text_bytes)

    def take(self, received: ReceivedActivation, buffer: StoreBuffer) -> bool:
        """Take an activation that has come whole. False: it is of an older epoch or session."""
        key = received.key
        if self._closed or self.stale(key.job, key.epoch) or buffer.store is not self._store:
            return False
        self._store.receive(key, received.tensors, buffer)
        now = Nanoseconds(steady_nanoseconds())
        effects = self._queue.arrive(now, key, received.tensors)
        assert effects is not None, "it was not stale"
        self._do(effects)
        return True

    def close(self) -> None:
        """The session broke: nothing of it is needed any more."""
        self._closed = True
        self.itineraries.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._queue.running:
            self._fragments.stop_run()
        for task in self._background:
            task.cancel()
        self._store.clear()

    # ---- inside ---------------------------------------------------------------------------------

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case execution.Start():
                    self._starts.append(effect)
                case execution.Stop():
                    self._fragments.stop_run()
                case execution.Refused(instruction=instruction, reason=reason, message=message):
                    self.fail(instruction, refusal(reason, message))
                case execution.Drop(keys=keys):
                    self._store.drop(keys)
                case _:
                    assert_never(effect)
        if self._starts and not self._starting:
            self._start_all()

    def _start_all(self) -> None:
        """Run what may run, one after the other: one that ends at once lets the next one begin. So
        what light tasks send leaves together."""
        self._starting = True
        try:
            while self._starts:
                start = self._starts.popleft()
                self._begin(self._run_together(start) if start.joined else self._run(start))
        finally:
            self._starting = False

    async def _run(self, start: execution.Start) -> None:
        """One task, from its inputs to its answer."""
        instruction = start.assignment.instruction
        order = self._orders[instruction]
        started = steady_nanoseconds()
        outcome = await self._compute(start)
        if self._closed:
            return
        stopped = self._queue.stopped_because(instruction)
        if isinstance(outcome, RunResult):
            await self._finish(start, order, outcome)
        else:
            if stopped is not None:
                ran = seconds(Nanoseconds(steady_nanoseconds() - started))
                outcome = _stopped(stopped, start.assignment, order.message, ran, outcome.message)
            await self._computed(start)
            self.fail(instruction, outcome)
        self._do(self._queue.delivered(instruction))

    async def _run_together(self, start: execution.Start) -> None:
        """Tasks that may run at once, as far as their inputs let them; the others wait again, and
        so do all where the run fails, each to run by itself: whoever is to blame fails alone."""
        starts, digest = [start, *start.joined], start.assignment.digest
        found = [self._inputs(each) for each in starts]
        items = [each if isinstance(each, dict) else None for each in found]
        chosen = self._fragments.batches.choose(digest, items)
        numbers = [each.assignment.instruction for each in starts]
        others = [number for at, number in enumerate(numbers) if at not in chosen]
        self._do(self._queue.put_back(others))
        if len(chosen) < 2:
            await self._run(start)
            return
        left = len(chosen)
        try:
            inputs = [item for at in chosen if (item := items[at]) is not None]
            async with self._turn:
                results = await self._fragments.run_together(digest, inputs)
            if not self._closed:
                for at, result in zip(chosen, results, strict=True):
                    self._begin(self._hand_over(starts[at], result))
                    left -= 1
        except EXPECTED as error:
            log.info("%d items run by themselves: %s", len(chosen), error)
            if not self._closed:
                self._do(self._queue.put_back([numbers[at] for at in chosen], alone=True))
        finally:
            self._fragments.batches.settled(left)

    async def _hand_over(self, start: execution.Start, result: RunResult) -> None:
        """What one task of a batch made."""
        instruction = start.assignment.instruction
        try:
            await self._finish(start, self._orders[instruction], result)
        finally:
            self._fragments.batches.settled()
        self._do(self._queue.delivered(instruction))

    async def _finish(self, start: execution.Start, order: _Order, result: RunResult) -> None:
        """Store and send what a task made, and answer it."""
        task, message = start.assignment.task, order.message
        try:
            kept = await self._outputs.keep(task, message, result.outputs)
        except (SpillFull, OSError) as error:
            await self._computed(start)
            text = f"cannot keep the outputs: {error}"
            need, have = getattr(error, "need_bytes", 0), getattr(error, "have_bytes", 0)
            why = failure(pb.DISK_FULL, text, need=need, have=have)
            self.fail(message.instruction, why)
            return
        with (
            self._outputs.room(task, message, result.outputs, kept) as room,
            self._store.lend(task),
        ):
            small = sum(map(memory_bytes, result.outputs.values())) <= _SMALL_BYTES
            await self._computed(start, kept, in_the_way=not room, small=small)
            if not self._queue.holds(task):
                self._store.drop([task])  # a newer epoch came meanwhile
            if not room:
                await self._fragments.make_way(result.outputs)
            began = steady_nanoseconds()
            reply = await self._outputs.hand_on(task, message, result)
            reply.instruction = message.instruction
            if reply.WhichOneof("outcome") == "executed":
                ended = steady_nanoseconds()
                total = seconds(Nanoseconds(ended - order.since))
                reply.executed.total_seconds = total
                reply.executed.sending_seconds = seconds(Nanoseconds(ended - began))
                if message.digest in self._fragments.ledger.resident:
                    reply.executed.resident_bytes = self._fragments.planned_bytes(message.digest)
                self._counters.compute.observe(result.compute_seconds)
                self._counters.task.observe(total)
            self._answer(reply)

    async def _computed(
        self,
        start: execution.Start,
        kept: tuple[str, ...] = (),
        *,
        in_the_way: bool = False,
        small: bool = False,
    ) -> None:
        """Continue with the queue, when inputs that other tasks need too have places of their own:
        what runs next has the memory in which they were."""
        instruction = start.assignment.instruction
        self._do(self._queue.computed(instruction, kept, in_the_way=in_the_way, small=small))
        for key, _ in start.inputs:
            try:
                await self._store.uncover(key)
            except (SpillFull, OSError) as error:
                # Whoever needs it finds it missing; the coordinator has it made again.
                log.warning("dropped the activation %s: %s", key, error)
        if not self._closed:
            self._do(self._queue.settled(instruction))

    async def _compute(self, start: execution.Start) -> RunResult | pb.Failure:
        tensors = self._inputs(start)
        if not isinstance(tensors, dict):
            return failure(pb.MISSING_ACTIVATION, f"the activation {tensors} is gone")
        for key, _ in start.inputs:
            self._store.cover(key)
        digest = start.assignment.digest
        try:
            async with self._turn:
                if self._queue.stopped_because(start.assignment.instruction) is not None:
                    return failure(pb.CANCELLED, "stopped before it began")
                result = await self._fragments.run(digest, tensors)
        except EXPECTED as error:
            failed = failure_of(error)
            if failed.code == pb.BUDGET:
                seen = self._fragments.opening.sizes_seen(digest, tensors)
                write_sizes(failed.seen, seen)
            return failed
        if start.assignment.batch > 1:
            self._fragments.batches.note(digest, tensors, result.outputs)
        return result

    def _inputs(self, start: execution.Start) -> dict[str, Array] | execution.Key:
        """What a task takes, or the key of what is gone of it."""
        tensors: dict[str, Array] = {}
        for key, names in start.inputs:
            held = self._store.get(key)
            if held is None or not names <= held.keys():
                return key
            tensors |= {name: held[name] for name in names}
        return tensors

    async def _forward(self, message: pb.Forward) -> None:
        self._sink.reply(await self._outputs.forward(message))

    def fail(self, instruction: int, what: pb.Failure) -> None:
        """Answer a task that is not taken, or failed."""
        self._answer(pb.Reply(instruction=instruction, failure=what))

    def _answer(self, reply: pb.Reply) -> None:
        self._orders.pop(reply.instruction, None)
        failed = reply.WhichOneof("outcome") == "failure"
        outcome = pb.FailureCode.Name(reply.failure.code).lower() if failed else "executed"
        self._counters.tasks[outcome] += 1
        if not self._closed:
            self._sink.reply(reply)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        try:
            task = eager.begin(work)
        except Exception as error:
            self._sink.fail(error)
            return
        if task is not None:
            self._background.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._sink.fail(error)

    def _wake_at(self, due: Nanoseconds) -> None:
        """Have `tick` called then, or earlier. (Most tasks end long before their deadline: a timer
        that follows the first one would be set anew several times a task.)"""
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        delay = max(0.0, seconds(Nanoseconds(due - steady_nanoseconds())))
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick_when_due)

    def _tick_when_due(self) -> None:
        self._timer = None
        self.tick()
        if (due := self._queue.next_deadline()) is not None and not self._closed:
            self._wake_at(due)

    def tick(self) -> None:
        """Time has passed: deadlines, and activations that nobody claimed."""
        self.itineraries.tick()
        self._do(self._queue.tick(Nanoseconds(steady_nanoseconds())))


def _stopped(
    reason: execution.Reason, assignment: Assignment, order: pb.Execute, ran: float, how: str
) -> pb.Failure:
    """The failure of a task that was stopped while it ran, for `ran` seconds. One whose time went
    by while others ran is not to blame: it is only given up here, and runs elsewhere."""
    what = f"stage {assignment.task.stage} (fragment {assignment.digest[:19]})"
    if reason is not execution.Reason.DEADLINE:
        return refusal(reason, how)
    if ran < order.deadline_seconds / 2:
        late = f"{what} began late: it waited for other tasks until its deadline was near"
        return refusal(execution.Reason.CANCELLED, late)
    return refusal(reason, f"{what} ran for {ran:.3g} s, as long as a task may, and was {how}")
