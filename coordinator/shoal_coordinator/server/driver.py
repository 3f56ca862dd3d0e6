"""Drives the dispatcher: events in, one at a time, in the order in which they came; instructions
out.

Everything here runs in the event loop's thread and waits for nothing. An instruction is a message
put in a session's outbox, a task started beside, or a note to a job; what comes of it is another
event.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from time import monotonic_ns, perf_counter
from typing import Final, assert_never

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.dispatch.machine import Limits, new_state, step
from shoal_coordinator.server import wire
from shoal_coordinator.server.deliveries import Deliveries
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_coordinator.server.runs import JobRun
from shoal_coordinator.server.sessions import DeviceSession
from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.digests import Digest
from shoal_protocol.frames import TransferError
from shoal_protocol.units import Bytes, Nanoseconds, nanoseconds, seconds
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, Activation

logger = logging.getLogger(__name__)

RELEASE_SECONDS: Final = 0.02
"""How long a release waits for a message that it can go with."""
DETOUR: Final = nanoseconds(60)
"""How long activations between two devices are relayed after one could not reach the other."""


class Relay(StrEnum):
    """Which activations pass through the coordinator: those that cannot do otherwise, or all."""

    AUTO = "Auto"
    ALWAYS = "Always"


class Driver:
    """The dispatcher's state, and all that its instructions need."""

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
        self.runs: dict[str, JobRun] = {}
        self.deadlines: dict[str, Nanoseconds] = {}
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception if the dispatcher itself fails."""
        self.moved_at = monotonic_ns()
        self.deliveries = Deliveries(self._undeliverable, self._unreadable)
        self.on_corrupt: Callable[[Digest], None] = lambda _: None
        """ConditionUpdate of a fragment whose bytes a device found wrong, wherever it got them."""
        self._relay = relay
        self._named_peers = named_peers
        self._task_seconds = task_seconds
        self._metrics = metrics
        self._events: deque[ev.Event] = deque()
        self._stepping = False
        self._released: dict[str, list[pb.Task]] = {}
        self._flushing: asyncio.TimerHandle | None = None
        self._detours: dict[tuple[str, str], Nanoseconds] = {}

    # ---- events ----------------------------------------------------------------------------------

    def feed(self, event: ev.Event) -> None:
        """Let the dispatcher take an event, and do what it says."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                self._step(self._events.popleft())
            if self._released and self._flushing is None:
                loop = asyncio.get_running_loop()
                self._flushing = loop.call_later(RELEASE_SECONDS, self._flush_released)
        except Exception as error:
            logger.exception("the dispatcher failed")
            if not self.broken.done():
                self.broken.set_exception(error)
        finally:
            self._stepping = False

    async def tick(self) -> None:
        """Tell the time, for ever."""
        while True:
            await asyncio.sleep(0.8 * seconds(ev.TICK_INTERVAL))
            now = self._now()
            for run in list(self.runs.values()):
                run.expire(now, self.feed)
            self.feed(ev.Tick(at=now))
            self.moved_at = now

    def _step(self, event: ev.Event) -> None:
        started = perf_counter()
        instructions = step(self.state, event)
        self._metrics.step_seconds.observe(perf_counter() - started)
        debug = logger.isEnabledFor(logging.DEBUG)
        if debug and not isinstance(event, ev.Tick):
            logger.debug("event %s", event)
        for instruction in instructions:
            if debug:
                logger.debug("instruction %s", instruction)
            self._perform(instruction)

    @staticmethod
    def _now() -> Nanoseconds:
        return Nanoseconds(monotonic_ns())

    # ---- instructions ----------------------------------------------------------------------------

    def _perform(self, order: ins.Instruction) -> None:  # noqa: C901, PLR0912 - one for each kind
        match order:
            case ins.Execute():
                self._execute(order)
            case ins.Release():
                self._released.setdefault(order.device, []).append(wire.released_task(order))
            case ins.Load():
                self._metrics.loads.inc()
                self._give(order, wire.load_message(order, self._peers(order.peers)))
            case ins.Unload():
                self._metrics.evictions.inc()
                self._give(order, wire.unload_message(order))
            case ins.Prefetch():
                self._give(order, wire.prefetch_message(order, self._peers(order.peers)))
            case ins.Forward():
                self._forward(order)
            case ins.Cancel():
                self.deliveries.cancel(order.cancelled)
                cancel = pb.Cancel(instruction=order.cancelled)
                self._tell(order.device, pb.CoordinatorMessage(cancel=cancel))
            case ins.PeerLost():
                lost = pb.PeerLost(device=order.peer)
                self._tell(order.device, pb.CoordinatorMessage(peer_lost=lost))
            case ins.Probe():
                probe = pb.Probe(nonce=order.session)
                self._tell(order.device, pb.CoordinatorMessage(probe=probe))
            case ins.Disconnect():
                if (session := self._session(order.device)) is not None:
                    session.end(order.reason)
            case ins.FinishItem() | ins.FailItem() | ins.FinishJob():
                self._conclude(order)
            case _:
                assert_never(order)

    def _execute(self, order: ins.Execute) -> None:
        run, session = self.runs.get(order.job), self._session(order.device)
        if run is None or session is None:
            return
        self._metrics.count_task(order)
        run.expect(order)
        takes_inputs = bool(run.wires[order.stage].model_inputs)
        frame = self.deliveries.inline(order, run) if takes_inputs else b""
        message = wire.execute_message(
            order,
            run.wires[order.stage],
            lambda target: self._address(order.device, target),
            deadline_seconds=self._deadline_seconds(order.job),
            lossy=run.lossy,
            input_frame=frame,
        )
        self._give(order, message)
        if takes_inputs and not frame:
            self.deliveries.start(session, order, run)

    def _forward(self, order: ins.Forward) -> None:
        if (run := self.runs.get(order.job)) is not None:
            message = wire.forward_message(
                order,
                run.wires[order.producer],
                lambda target: self._address(order.device, target),
                lossy=run.lossy,
            )
            self._give(order, message)

    def _conclude(self, order: ins.FinishItem | ins.FailItem | ins.FinishJob) -> None:
        run = self.runs.get(order.job)
        if run is None:
            return
        match order:
            case ins.FinishItem():
                run.finish(order.item)
            case ins.FailItem():
                logger.info("%s: item %d failed: %s", order.job, order.item, order.failure.message)
                run.fail(order.item, order.failure)
            case ins.FinishJob():
                run.finish_job(complete=order.failure is None)
            case _:
                assert_never(order)

    def _give(self, order: wire.Given, message: pb.CoordinatorMessage) -> None:
        if (session := self._session(order.device)) is not None:
            session.given[order.instruction] = order
            self._tell(order.device, message)

    def _tell(self, device: str, message: pb.CoordinatorMessage) -> None:
        """Send a message, after what was released before: a task that runs again must not lose what
        it makes to a release that was meant for its first run."""
        if (session := self._session(device)) is None:
            return
        if (tasks := self._released.pop(device, None)) is not None:
            session.tell(pb.CoordinatorMessage(release=pb.Release(tasks=tasks)))
        session.tell(message)

    def _flush_released(self) -> None:
        """Send what no message came after."""
        self._flushing = None
        for device, tasks in self._released.items():
            if (session := self._session(device)) is not None:
                session.tell(pb.CoordinatorMessage(release=pb.Release(tasks=tasks)))
        self._released.clear()

    def _session(self, device: str) -> DeviceSession | None:
        return self._sessions.get(device)

    def _address(self, device: str, target: str) -> str:
        """How a device reaches another; empty: through the coordinator."""
        session = self._session(target)
        until = self._detours.get((device, target))
        if self._relay is Relay.ALWAYS or session is None:
            return ""
        if until is not None:
            if self._now() < until:
                return ""
            del self._detours[device, target]
        return session.hello.address

    def _peers(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        sessions = (self._session(device) for device in devices)
        return tuple(
            f"{session.device}@{session.hello.address}"
            if self._named_peers and not session.hello.address.startswith("unix:")
            else session.hello.address
            for session in sessions
            if session is not None and session.hello.address
        )

    def _deadline_seconds(self, job: str) -> float:
        if (deadline := self.deadlines.get(job)) is None:
            return self._task_seconds
        remaining = seconds(Nanoseconds(deadline - self._now()))
        return max(0.001, min(self._task_seconds, remaining))

    def _undeliverable(
        self, session: DeviceSession, order: ins.Execute, failure: ev.Failure
    ) -> None:
        logger.info("inputs for %s: %s", session.device, failure.message)
        self.feed(
            ev.InstructionFailed(at=self._now(), instruction=order.instruction, failure=failure)
        )

    def _unreadable(self, order: ins.Execute, failure: ev.Failure) -> None:
        self.feed(
            ev.InputUnreadable(at=self._now(), job=order.job, item=order.item, failure=failure)
        )

    # ---- what sessions tell ----------------------------------------------------------------------

    def joined(self, session: DeviceSession) -> None:
        """A device is here."""
        self.feed(wire.device_joined(session.hello, session.number, self._now()))

    def left(self, session: DeviceSession, reason: str) -> None:
        """A session is over, and everything that was asked on it void."""
        self._released.pop(session.device, None)
        for instruction in session.given:
            self.deliveries.cancel(instruction)
        session.given.clear()
        self.feed(
            ev.DeviceLost(
                at=self._now(), device=session.device, session=session.number, reason=reason
            )
        )

    def heard(self, session: DeviceSession, message: pb.AgentMessage) -> None:
        """A device says something. Raises `wire.Malformed`."""
        at, device, number = self._now(), session.device, session.number
        match message.WhichOneof("message"):
            case "reply":
                self._reply(session, message.reply, at)
            case "telemetry":
                session.telemetry = message.telemetry
                telemetry = wire.telemetry_of(message.telemetry)
                fetched = Bytes(message.telemetry.fetched_bytes)
                self.feed(
                    ev.DeviceTelemetry(
                        at=at, device=device, session=number, telemetry=telemetry, fetched=fetched
                    )
                )
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
        order = session.given.pop(reply.instruction, None)
        if order is None:
            return
        self.deliveries.cancel(reply.instruction)
        event = wire.answer(reply, order, at)
        self._note_routes(order, event, at)
        match order, event:
            case ins.Execute(), ev.TaskFinished():
                self._metrics.compute_seconds.observe(seconds(event.compute))
                run = self.runs.get(order.job)
                if run is None or run.epoch != order.epoch:
                    return
                frame = reply.executed.result_frame
                try:
                    if frame:
                        run.take_inline(order, frame)
                    run.join(order, event, self.feed)
                except TransferError as error:
                    failure = ev.Failure(kind=ev.FailureKind.RUNTIME, message=error.reason)
                    number = order.instruction
                    self.feed(ev.InstructionFailed(at=at, instruction=number, failure=failure))
            case ins.Load() | ins.Prefetch(), ev.InstructionFailed() if (
                event.failure.kind is ev.FailureKind.CORRUPT
            ):
                self.on_corrupt(order.digest)
                self.feed(event)
            case _:
                self.feed(event)

    def _note_routes(self, order: wire.Given, event: ev.Event, at: Nanoseconds) -> None:
        """Where a device could not reach another, activations go through here for a while."""
        match order, event:
            case ins.Execute(), ev.TaskFinished():
                missed = [target for stage, target in order.routes if stage not in event.delivered]
            case ins.Forward(), ev.InstructionFailed() if (
                event.failure.kind is ev.FailureKind.UNREACHABLE
            ):
                missed = [order.target]
            case _:
                return
        for target in missed:
            self._detours[order.device, target] = Nanoseconds(at + DETOUR)

    # ---- what links tell -------------------------------------------------------------------------

    def admit(self, device: str, activation: Activation) -> None:
        """Raise `TransferError` for a result that nobody waits for."""
        run = self.runs.get(activation.key.job)
        if run is None or activation.key.consumer != -1:
            raise TransferError(
                f"job {activation.key.job[:80]!r} does not run here",
                outcome=Acknowledgement.STALE,
            )
        run.admit(activation)

    def passes(self, activation: Activation) -> bool:
        """Whether an activation to be relayed is of a job that runs, and of its epoch."""
        run = self.runs.get(activation.key.job)
        return run is not None and run.epoch == activation.key.epoch

    async def take(self, device: str, received: ReceivedActivation) -> None:
        """A result has arrived."""
        if (run := self.runs.get(received.key.job)) is not None:
            await run.take(received, self.feed)
