"""The dispatcher's driver: passes events in, one at a time, and performs the instructions.

Everything here runs in the event loop's thread and never blocks. An instruction becomes a message
in a session's outbox, a background task, or a call of a job's run; its outcome is another event.

An exception does not end the coordinator. The job whose event or instruction raised it fails; where
there is no job, the session of the device ends; where there is neither (the clock), the driver
counts, and fails after some in a row.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from time import monotonic_ns, perf_counter, time
from typing import Final, assert_never

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.dispatch import views
from shoal_coordinator.dispatch.machine import Limits, new_state, step
from shoal_coordinator.server import wire
from shoal_coordinator.server.arrivals import Arrivals
from shoal_coordinator.server.concerns import device_of, job_of
from shoal_coordinator.server.deliveries import Deliveries
from shoal_coordinator.server.device_session import DeviceSession
from shoal_coordinator.server.excesses import Excesses
from shoal_coordinator.server.messenger import Messenger
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_coordinator.server.progress import Progress
from shoal_coordinator.server.reports import reported
from shoal_coordinator.server.routes import Relay, Routes
from shoal_coordinator.server.task_results import Run
from shoal_coordinator.server.timeline import Timeline
from shoal_coordinator.server.traces import Traces
from shoal_coordinator.server.travels import Travels
from shoal_protocol.digests import Digest
from shoal_protocol.frames import TransferError
from shoal_protocol.units import Nanoseconds, seconds
from shoal_protocol.v1 import session_pb2 as pb

logger = logging.getLogger(__name__)

TICK_FAILURES: Final = 5
"""After so many in a row the driver fails, and the process ends."""


class Driver:
    """The dispatcher's state, and what its instructions need."""

    def __init__(
        self,
        sessions: Mapping[str, DeviceSession],
        *,
        limits: Limits,
        relay: Relay,
        named_peers: bool,
        task_seconds: float,
        metrics: CoordinatorMetrics,
    ) -> None:
        """`sessions` are those that are open, by device. `named_peers`: peers are secured by TLS,
        so that a target needs the device's name."""
        self.state = new_state(limits)
        self._sessions = sessions
        self.runs: dict[str, Run] = {}
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception if the dispatcher itself fails."""
        self.on_job_ended: list[Callable[[str], None]] = []
        """Each is called once for each job given to `submit`: the dispatcher has ended it."""
        self.on_job_broken: list[Callable[[str, str], None]] = []
        """Each is called with the message of an exception that a job's processing has raised."""
        self.on_results_unwritable: Callable[[str, str], None] = lambda _job, _message: None
        """Called with what keeps a job's outputs from taking any more results."""
        self.progress = Progress()
        self.deliveries = Deliveries(self._delivery_failed)
        self.excesses = Excesses()
        self.timeline = Timeline()
        self.on_corrupt: Callable[[Digest], None] = lambda _: None
        """Called with a fragment whose bytes a device found wrong, wherever it got them."""
        self.room_for_results: Callable[[Path], Callable[[int], None] | None] = lambda _: None
        """Gives what asks for room for results in a folder, where anybody is to be asked."""
        self.traces = Traces()
        self._routes = Routes(sessions, relay, named_peers=named_peers)
        self._task_seconds = task_seconds
        self._metrics = metrics
        self._travels = Travels(
            sessions, self.runs, self.deliveries, self.timeline, metrics, self._travelled
        )
        self.arrivals = Arrivals(sessions, self.runs, self._travels, self.feed)
        self._events: deque[tuple[ev.Event, str | None, str | None]] = deque()
        self._stepping = False
        self._dispatched: set[str] = set()
        self._failed_ticks = 0
        self._messenger = Messenger(sessions)

    # ---- jobs ------------------------------------------------------------------------------------

    def submit(self, spec: ev.JobSpec, completed: Set[int], failed: ev.Failures) -> None:
        """Give the dispatcher a job; `on_job_ended` follows, in the end."""
        now = self._now()
        if not self._dispatched:
            self.timeline.begin(now, time())
        self._dispatched.add(spec.name)
        self.feed(ev.JobSubmitted(at=now, job=spec, completed=completed, failed=failed))

    def amend(self, spec: ev.JobSpec) -> None:
        """Change a job that the dispatcher has; nothing, if it has ended the job just now."""
        if spec.name in self.state.jobs:
            self.feed(ev.JobSubmitted(at=self._now(), job=spec))

    def withdraw(self, job: str, reason: str) -> None:
        self.feed(ev.JobCancelled(at=self._now(), job=job, reason=reason))

    # ---- events ----------------------------------------------------------------------------------

    def feed(self, event: ev.Event, job: str | None = None, device: str | None = None) -> None:
        """Let the dispatcher process an event, and perform its instructions. `job` and `device` are
        those that an answer to an instruction concerns."""
        self._events.append((event, job, device))
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                while self._events:
                    self._step(*self._events.popleft())
                self._depart()
            self._messenger.flush_soon()
        finally:
            self._stepping = False

    async def tick(self) -> None:
        """Feed the time to the dispatcher and the runs, for ever."""
        while True:
            await asyncio.sleep(0.8 * seconds(ev.TICK_INTERVAL))
            now = self._now()
            for run in list(self.runs.values()):
                try:
                    run.expire(now, partial(self.feed, job=run.name))
                except Exception as error:
                    self.contain("dispatcher", error, run.name, None)
            failed = self._failed_ticks
            self.feed(ev.Tick(at=now))
            for name in self._dispatched - self.state.jobs.keys():
                self._job_ended(name)  # an error has swallowed its end
            if self._failed_ticks == failed:
                self._failed_ticks = 0
                self.progress.moved()

    def _step(self, event: ev.Event, job: str | None, device: str | None) -> None:
        started = perf_counter()
        if isinstance(event, ev.ItemsStored):
            stored = views.stored_items(self.state, event)
            self._metrics.count_stored([took for _, took in stored])
            self.traces.stored(event.job, [item for item, _ in stored])
        try:
            instructions = step(self.state, event)
        except Exception as error:
            self.contain("dispatcher", error, job or job_of(event), device or device_of(event))
            if isinstance(event, ev.JobCancelled):
                self.fail(error)  # it cannot even be withdrawn: begin with a state that is sound
            return
        self._metrics.step_seconds.observe(perf_counter() - started)
        if isinstance(event, ev.JobSubmitted):
            for name, message in self._routes.introductions(event.job, event.at):
                self._messenger.send(name, message)
        debug = logger.isEnabledFor(logging.DEBUG)
        if debug and not isinstance(event, ev.Tick):
            logger.debug("event %s", event)
        for instruction in instructions:
            if debug:
                logger.debug("instruction %s", instruction)
            try:
                self._perform(instruction)
            except Exception as error:
                self.contain("dispatcher", error, job_of(instruction), device_of(instruction))

    def contain(self, part: str, error: BaseException, job: str | None, device: str | None) -> None:
        """Have an exception fail one job, or end one session, and nothing else."""
        logger.error("%s failed (job %s, device %s)", part, job, device, exc_info=error)
        self._metrics.count_failure(part)
        if device is not None and (session := self._sessions.get(device)) is not None:
            session.end("the coordinator failed while it processed a message of this session")
        if job is not None:
            for on_broken in self.on_job_broken:
                on_broken(job, repr(error))
        elif device is None:
            self._failed_ticks += 1
            if self._failed_ticks >= TICK_FAILURES:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Have the process end; the next coordinator resumes."""
        if not self.broken.done():
            self.broken.set_exception(error)

    def _job_ended(self, name: str) -> None:
        if name in self._dispatched:
            self._dispatched.discard(name)
            for on_ended in self.on_job_ended:
                on_ended(name)
            self.traces.job_ended(name)  # who only observes comes last: the end waits for nobody
            if not self._dispatched:
                self.timeline.end(self._now())

    @staticmethod
    def _now() -> Nanoseconds:
        return Nanoseconds(monotonic_ns())

    # ---- instructions ----------------------------------------------------------------------------

    def _perform(self, order: ins.Instruction) -> None:  # noqa: C901, PLR0912 - one for each kind
        match order:  # what there is most of comes first
            case ins.Travel():
                self.traces.entered(order)
                self._travels.enter(order)
            case ins.FinishItem():
                if (run := self.runs.get(order.job)) is not None:
                    run.finish(order.item, order.attempts)
            case ins.Execute():
                self._execute(order)
            case ins.Release():
                self._messenger.release(order)
            case ins.Load():
                self._metrics.loads.inc()
                self._instruct(order, wire.load_message(order, self._routes.peers(order.peers)))
            case ins.Unload():
                self._metrics.evictions.inc()
                self._instruct(order, wire.unload_message(order))
            case ins.Prefetch():
                self._instruct(order, wire.prefetch_message(order, self._routes.peers(order.peers)))
            case ins.Forward():
                self._forward(order)
            case ins.Plan():
                self._plan(order)
            case ins.Cancel():
                self._cancel(order)
            case ins.ForgetJob():
                self._messenger.send(order.device, self._travels.end(order))
            case ins.PeerLost():
                self._messenger.send(
                    order.device, pb.CoordinatorMessage(peer_lost={"device": order.peer})
                )
            case ins.Probe():
                self._messenger.send(
                    order.device, pb.CoordinatorMessage(probe={"nonce": order.session})
                )
            case ins.Disconnect():
                if (session := self._sessions.get(order.device)) is not None:
                    session.end(order.reason)
            case ins.FailItem():
                self._fail_item(order)
            case ins.FinishJob():
                self._job_ended(order.job)
            case _:
                assert_never(order)

    def _execute(self, order: ins.Execute) -> None:
        run, session = self.runs.get(order.job), self._sessions.get(order.device)
        if run is None or session is None:
            return
        self._metrics.count_task(order)
        self.traces.given(order)
        run.expect(order)
        takes_inputs = bool(run.wires[order.stage].model_inputs)
        frame = self.deliveries.inline(order, run) if takes_inputs else b""
        message = wire.execute_message(
            order,
            run.wires[order.stage],
            self._addresses(order.device),
            deadline_seconds=self._deadline_seconds(run),
            lossy=run.lossy,
            input_frame=frame,
        )
        self._instruct(order, message)
        if takes_inputs and not frame:
            self.deliveries.start(session, order, run)

    def _fail_item(self, order: ins.FailItem) -> None:
        logger.info("%s: item %d failed: %s", order.job, order.item, order.failure.message)
        self._metrics.count_failed(order.failure.kind)
        self.traces.failed(order)
        if (run := self.runs.get(order.job)) is not None:
            run.fail(order.item, order.failure, order.attempts)

    def _cancel(self, order: ins.Cancel) -> None:
        self.deliveries.cancel(order.cancelled)
        if not self._travels.void(order.cancelled):
            message = pb.CoordinatorMessage(cancel={"instruction": order.cancelled})
            self._messenger.send(order.device, message)

    def _plan(self, order: ins.Plan) -> None:
        if (message := self._travels.leg(order, self._routes, self._now())) is not None:
            self._instruct(order, message)
            return
        failure = ev.Failure(kind=ev.FailureKind.UNREACHABLE, message="it is relayed")
        self._instruction_failed(order, failure)

    def _depart(self) -> None:
        """Send off the items that travel by what was decided."""
        for orders in self._travels.entered():
            try:
                self._travels.depart(orders)
            except Exception as error:
                self.contain("dispatcher", error, orders[0].job, None)

    def _travelled(self, orders: Sequence[ins.Travel], event: ev.Event) -> None:
        self.traces.travelled(orders, event)
        self.feed(event, orders[0].job)

    def _forward(self, order: ins.Forward) -> None:
        if (run := self.runs.get(order.job)) is not None:
            wires, addresses = run.wires[order.producer], self._addresses(order.device)
            self._instruct(order, wire.forward_message(order, wires, addresses, lossy=run.lossy))

    def relayed_from(self, device: str) -> list[str]:
        """The devices that it could not reach of late: what it sends them is relayed."""
        return self._routes.relayed_from(device, self._now())

    def _addresses(self, device: str) -> wire.Addresses:
        return lambda target: self._routes.address(device, target, self._now())

    def _instruct(self, order: wire.Answerable, message: pb.CoordinatorMessage) -> None:
        if (session := self._sessions.get(order.device)) is not None:
            self.timeline.instructed(order.device, self._now())
            session.unanswered[order.instruction] = order
            self._messenger.send(order.device, message)

    def _deadline_seconds(self, run: Run) -> float:
        if run.deadline is None:
            return self._task_seconds
        remaining = seconds(Nanoseconds(run.deadline - self._now()))
        return max(0.001, min(self._task_seconds, remaining))

    def _delivery_failed(self, order: ins.Execute, failure: ev.Failure) -> None:
        logger.info("inputs for %s: %s", order.device, failure.message)
        if failure.kind is not ev.FailureKind.INVALID_INPUT:
            self._instruction_failed(order, failure)
            return
        job, item = order.job, order.item
        self.feed(ev.InputUnreadable(at=self._now(), job=job, item=item, failure=failure))

    def _instruction_failed(self, order: ins.Execute | ins.Plan, failure: ev.Failure) -> None:
        event = ev.InstructionFailed(at=self._now(), instruction=order.instruction, failure=failure)
        if isinstance(order, ins.Execute):
            self.traces.answered(order, event)
        self.feed(event, order.job, order.device)

    # ---- messages of sessions --------------------------------------------------------------------

    def joined(self, session: DeviceSession) -> None:
        now, session.since = self._now(), self.state.next_number()
        self.timeline.joined(session.device, now)
        self._routes.joined(session.device)
        self.feed(wire.device_joined(session.hello, session.number, now))

    def left(self, session: DeviceSession, reason: str) -> None:
        """A session has ended, and its unanswered instructions are void."""
        self._messenger.left(session.device)
        now, device = self._now(), session.device
        lost = ev.Failure(kind=ev.FailureKind.UNREACHABLE, message=reason, device=device)
        for instruction, order in session.unanswered.items():
            self.deliveries.cancel(instruction)
            if isinstance(order, ins.Execute):
                void = ev.InstructionFailed(at=now, instruction=instruction, failure=lost)
                self.traces.answered(order, void)
        session.unanswered.clear()
        self.timeline.lost(device, now, reason)
        self.feed(ev.DeviceLost(at=now, device=device, session=session.number, reason=reason))

    def receive(self, session: DeviceSession, message: pb.AgentMessage) -> None:
        """A device has sent a message. Raises `wire.Malformed`."""
        at, device, number = self._now(), session.device, session.number
        match message.WhichOneof("message"):
            case "reply":
                self._reply(session, message.reply, at)
            case "telemetry":
                self.timeline.reported(device, message.telemetry, at)
                for event in reported(session, message.telemetry, self.excesses, at):
                    self.feed(event)
            case "probe_reply":
                self.feed(ev.ProbeAnswered(at=at, device=device, session=number))
            case "evicted":
                digest = wire.digest_of(message.evicted.digest)
                self.feed(ev.FragmentEvicted(at=at, device=device, session=number, digest=digest))
            case "draining":
                session.draining = True
                self.feed(ev.DeviceDraining(at=at, device=device, session=number))
            case other:
                raise wire.Malformed(f"a message of kind {other} does not belong here")

    def _reply(self, session: DeviceSession, reply: pb.Reply, at: Nanoseconds) -> None:
        order = session.unanswered.pop(reply.instruction, None)
        if order is None:
            return
        self.deliveries.cancel(reply.instruction)
        device = session.device
        event = wire.answer(reply, order, device, at)
        self._routes.note(order, event, at)
        self.timeline.answered(device, reply, at, idle=not session.unanswered)
        if isinstance(order, ins.Execute):
            self.traces.answered(order, event)
        if isinstance(order, ins.Travel):
            self._travels.void(order.instruction)
            self.traces.travelled((order,), event)
        match order, event:
            case ins.Execute(), ev.TaskFinished():
                self._metrics.compute_seconds.observe(seconds(event.compute))
                self.excesses.executed(session.hello, reply.executed)
                session.times.executed(order.digest, reply.executed)
                run = self.runs.get(order.job)
                if run is None or run.epoch != order.epoch:
                    self.feed(event, order.job, device)  # nobody waits for its results any more
                    return
                frame = reply.executed.result_frame
                try:
                    if frame:
                        run.take_inline(order, frame)
                    run.join(order, event, partial(self.feed, job=order.job, device=device))
                except TransferError as error:
                    kind = ev.FailureKind.RUNTIME
                    failure = ev.Failure(kind=kind, message=error.reason, device=device)
                    self._instruction_failed(order, failure)
            case ins.Load() | ins.Unload(), ev.FragmentResident() | ev.FragmentUnloaded():
                session.times.moved(order.digest, reply)
                self.feed(event, None, device)
            case ins.Load() | ins.Prefetch(), ev.InstructionFailed() if (
                event.failure.kind is ev.FailureKind.CORRUPT
            ):
                self.on_corrupt(order.digest)
                self.feed(event, None, device)
            case _:
                self.feed(event, job_of(order), device)
