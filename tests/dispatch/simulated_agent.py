"""A device of the simulation: the agent's real pure cores, on a wire that misbehaves.

The memory ledger (`shoal_agent.residency`) and the queue of tasks (`shoal_agent.execution`) are
those of the agent itself, so a load over the budget, or a task for a fragment that is not
resident, is found by the other side. Disk and resident fragments survive a session; a killed agent
keeps its disk only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal_agent import execution, residency
from shoal_operator.api.partition import Digest
from shoal_operator.dispatch import instructions as give
from shoal_operator.dispatch.events import (
    ActivationForwarded,
    DeviceDraining,
    DeviceJoined,
    DeviceLost,
    DeviceTelemetry,
    Event,
    Failure,
    FailureKind,
    FragmentCached,
    FragmentEvicted,
    FragmentResident,
    FragmentUnloaded,
    InputUnreadable,
    InstructionFailed,
    ProbeAnswered,
    TaskFinished,
    Telemetry,
)
from shoal_protocol.units import Bytes, Nanoseconds

if TYPE_CHECKING:
    from dispatch.simulated_world import World

MILLISECOND = 1_000_000
SECOND = 1000 * MILLISECOND
TENSOR = frozenset({"tensor"})


@dataclass(slots=True, kw_only=True)
class Model:
    """What a device is: fixed for a scenario. `larger` are true sizes above the estimates."""

    name: str
    budget: int
    single: bool
    slowness: float
    larger: dict[str, int] = field(default_factory=dict)

    def empty_ledger(self) -> residency.Ledger:
        """The ledger of a device that has just started."""
        return residency.Ledger(budget=Bytes(self.budget), single=self.single)


class Agent:
    """One device, over all its sessions."""

    def __init__(self, world: "World", model: Model) -> None:
        self.world = world
        self.model = model
        self.name = model.name
        self.ledger = model.empty_ledger()
        self.cached: set[str] = set()
        self.queue = execution.TaskQueue()
        self.session = 0
        self.connected = False
        self.alive = True
        self.hung = False
        self._sent_until = self._heard_until = 0
        self._executes: dict[int, give.Execute] = {}
        self._given_up: set[str] = set()

    # ---- sessions ----------------------------------------------------------------------------

    def connect(self) -> None:
        """The agent dials."""
        if self.connected or not self.alive:
            return
        self.session = self.world.next_session()
        self.connected, self.hung = True, False
        self._sent_until = self._heard_until = self.world.now
        self.queue = execution.TaskQueue()
        self._executes.clear()
        self._measure(self.session)
        self.world.tell(
            DeviceJoined(
                at=Nanoseconds(self.world.now),
                device=self.name,
                session=self.session,
                budget=Bytes(self.model.budget),
                single=self.model.single,
                resident={Digest(key): size for key, size in self.ledger.resident.items()},
                cached=frozenset(Digest(key) for key in self.cached),
            )
        )

    def break_session(self, *, tell: bool = True) -> None:
        """The stream breaks; the agent drops its queue, keeps its fragments, dials again."""
        if not self.connected:
            return
        lost = DeviceLost(at=Nanoseconds(0), device=self.name, session=self.session)
        self.connected = False
        self.queue = execution.TaskQueue()
        self._executes.clear()
        for digest in list(self.ledger.in_flight):
            self._keep_ledger(residency.LoadFailed(digest=digest))
        if tell:
            self.world.tell_later(self.world.delay(), lost)
        if self.alive:
            self.world.later(self.world.chance.uniform(0.05, 2) * SECOND, self.connect)

    def kill(self, away: float) -> None:
        """kill -9; a supervisor starts it again after a while. The disk stays."""
        if not self.alive:
            return
        self.world.note(f"-- {self.name} is killed")
        self.alive = False
        self.break_session(tell=not self.hung)
        self.ledger = self.model.empty_ledger()
        self.world.later(away, self._start)

    def _start(self) -> None:
        self.alive = True
        self.connect()

    def hang(self, away: float) -> None:
        """Nothing comes from it any more; the stream does not break, until much later."""
        if not self.connected or self.hung:
            return
        self.world.note(f"-- {self.name} hangs")
        self.hung = True
        session = self.session

        def wake() -> None:
            if self._is_in(session):
                self.break_session()

        self.world.later(away, wake)

    def drain(self) -> None:
        """SIGTERM: it finishes what runs, then goes, and comes back later."""
        if not self.connected or self.hung:
            return
        self.world.note(f"-- {self.name} drains")
        self._send_up(DeviceDraining(at=Nanoseconds(0), device=self.name, session=self.session))
        self.world.later(3 * SECOND, lambda: self.kill(SECOND))

    def give_up_fragment(self) -> None:
        """The agent evicts a fragment by itself."""
        if not self.connected or self.hung or not self.ledger.resident:
            return
        digest = next(iter(self.ledger.resident))
        self.world.note(f"-- {self.name} gives up {digest[7:9]}")
        self._keep_ledger(residency.Unloaded(digest=digest))
        self._given_up.add(digest)
        self._carry_out(self.queue.unload(digest))
        self._send_up(
            FragmentEvicted(
                at=Nanoseconds(0), device=self.name, session=self.session, digest=Digest(digest)
            )
        )

    def _measure(self, session: int) -> None:
        if not self._is_in(session) or self.hung:
            return
        chance = self.world.chance
        telemetry = Telemetry(
            cpu_fraction=chance.random(),
            memory_available=Bytes(chance.randrange(1 << 30)) if chance.random() < 0.7 else None,
            battery_fraction=chance.random() if chance.random() < 0.3 else None,
        )
        self._send_up(
            DeviceTelemetry(
                at=Nanoseconds(0), device=self.name, session=session, telemetry=telemetry
            )
        )
        self.world.later(2 * SECOND, lambda: self._measure(session))

    # ---- the wire ----------------------------------------------------------------------------

    def hear(self, instruction: give.Instruction) -> None:
        """Something is sent to the device, on its session's stream: in order."""
        if not self.connected:
            return
        session, now = self.session, self.world.now
        self._heard_until = max(self._heard_until, now + self.world.delay()) + 1

        def arrive() -> None:
            if self._is_in(session) and not self.hung:
                self._obey(instruction, session)

        self.world.later(self._heard_until - now, arrive)

    def _send_up(self, event: Event) -> None:
        """To the coordinator, on the session's stream: in order. It may outlive the stream."""
        if not self.connected or self.hung:
            return
        session, now = self.session, self.world.now
        self._sent_until = max(self._sent_until, now + self.world.delay()) + 1

        def arrive() -> None:
            if self._is_in(session) or self.world.chance.random() < 0.5:
                self.world.tell(event)

        self.world.later(self._sent_until - now, arrive)

    def _is_in(self, session: int) -> bool:
        return self.connected and self.session == session

    def _answer(self, session: int, event: Event) -> None:
        if self._is_in(session):
            self._send_up(event)

    def _fail(self, session: int, number: int, kind: FailureKind, message: str) -> None:
        failure = Failure(kind=kind, message=message)
        event = InstructionFailed(at=Nanoseconds(0), instruction=number, failure=failure)
        self._answer(session, event)

    def arrive(self, session: int, key: execution.Sent) -> bool:
        """Tensors come in; whether they are acknowledged."""
        if not self._is_in(session) or self.hung:
            return False
        effects = self.queue.arrive(Nanoseconds(self.world.now), key, TENSOR)
        if effects is None:
            return False
        self._carry_out(effects)
        return True

    def _push(self, key: execution.Sent, target: str, then: Callable[[bool], None]) -> None:
        """Send an activation to another device; it may be lost, or come twice."""
        world, session, other = self.world, self.session, self.world.agents[target]
        there = other.session
        lost = world.unlucky(world.trouble.push)

        def arrived() -> None:
            delivered = not lost and other.arrive(there, key)
            if self._is_in(session):
                then(delivered)

        if world.unlucky(world.trouble.repeat):
            world.later(0, lambda: other.arrive(there, key) and None)
        world.later(world.delay(), arrived)

    # ---- instructions ------------------------------------------------------------------------

    def _obey(self, instruction: give.Instruction, session: int) -> None:
        match instruction:
            case give.Load():
                self._load(session, instruction)
            case give.Unload():
                self._unload(session, instruction)
            case give.Prefetch():
                self._prefetch(session, instruction)
            case give.Execute():
                self._execute(session, instruction)
            case give.Forward():
                self._forward(session, instruction)
            case give.Release(job=job, epoch=epoch, item=item, stage=stage):
                self._carry_out(self.queue.release([execution.Made(job, epoch, item, stage)]))
            case give.Cancel(cancelled=number):
                self._carry_out(self.queue.cancel(number))
            case give.Probe():
                self._send_up(ProbeAnswered(at=Nanoseconds(0), device=self.name, session=session))
            case _:
                raise self.world.wrong(f"{instruction} is not for a device")

    def _keep_ledger(self, event: residency.Event) -> tuple[residency.Effect, ...]:
        self.ledger, effects = residency.step(self.ledger, event)
        return effects

    def _load(self, session: int, load: give.Load) -> None:
        world, digest = self.world, load.digest
        effects = self._keep_ledger(residency.LoadRequested(digest=digest, need=load.resident))
        if not isinstance(effects[-1], residency.Admit):
            raise world.wrong(f"{self.name} cannot load {digest[7:9]}: {effects}")
        took = world.chance.uniform(5, 60) * MILLISECOND
        if digest not in self.cached:
            took += world.chance.uniform(20, 300) * MILLISECOND
        kinds = (FailureKind.UNAVAILABLE, FailureKind.CORRUPT, FailureKind.DISK_FULL)
        kind = world.chance.choice(kinds) if world.unlucky(world.trouble.load) else None

        def loaded() -> None:
            if not self._is_in(session):
                return
            if kind is None:
                self.cached.add(digest)
                self._loaded(session, load)
            else:
                self._keep_ledger(residency.LoadFailed(digest=digest))
                self._fail(session, load.instruction, kind, "it went wrong")

        world.later(took, loaded)

    def _loaded(self, session: int, load: give.Load) -> None:
        measured = Bytes(max(load.resident, self.model.larger.get(load.digest, 0)))
        finished = residency.LoadFinished(digest=load.digest, measured=measured)
        for effect in self._keep_ledger(finished):
            if isinstance(effect, residency.Evict):
                failure = Failure(
                    kind=FailureKind.BUDGET,
                    message=effect.reason,
                    need=effect.need,
                    have=effect.have,
                )
                number = load.instruction
                event = InstructionFailed(at=Nanoseconds(0), instruction=number, failure=failure)
                self._answer(session, event)
                return
        self._given_up.discard(load.digest)
        self._answer(
            session,
            FragmentResident(at=Nanoseconds(0), instruction=load.instruction, resident=measured),
        )

    def _unload(self, session: int, unload: give.Unload) -> None:
        running = self.queue.running
        if self.queue.unload(unload.digest) or (
            running is not None and running.digest == unload.digest
        ):
            raise self.world.wrong(f"{self.name}: unloaded under its tasks")

        def unloaded() -> None:
            if self._is_in(session):
                self._keep_ledger(residency.Unloaded(digest=unload.digest))
                event = FragmentUnloaded(at=Nanoseconds(0), instruction=unload.instruction)
                self._answer(session, event)

        self.world.later(self.world.delay(), unloaded)

    def _prefetch(self, session: int, prefetch: give.Prefetch) -> None:
        failed = self.world.unlucky(self.world.trouble.load)

        def fetched() -> None:
            if not self._is_in(session):
                return
            if failed:
                kind = FailureKind.UNAVAILABLE
                self._fail(session, prefetch.instruction, kind, "not to be had")
                return
            self.cached.add(prefetch.digest)
            event = FragmentCached(at=Nanoseconds(0), instruction=prefetch.instruction)
            self._answer(session, event)

        self.world.later(self.world.chance.uniform(20, 300) * MILLISECOND, fetched)

    def _forward(self, session: int, forward: give.Forward) -> None:
        job, epoch, item = forward.job, forward.epoch, forward.item
        if not self.queue.holds(execution.Made(job, epoch, item, forward.producer)):
            kind = FailureKind.MISSING_ACTIVATION
            self._fail(session, forward.instruction, kind, f"of stage {forward.producer}")
            return

        def pushed(delivered: bool) -> None:
            if delivered:
                event = ActivationForwarded(at=Nanoseconds(0), instruction=forward.instruction)
                self._answer(session, event)
            else:
                kind = FailureKind.UNREACHABLE
                self._fail(session, forward.instruction, kind, f"{forward.target} is not there")

        key = execution.Sent(job, epoch, item, forward.producer, forward.consumer)
        self._push(key, forward.target, pushed)

    # ---- tasks -------------------------------------------------------------------------------

    def _execute(self, session: int, execute: give.Execute) -> None:
        number, digest = execute.instruction, execute.digest
        if digest not in self.ledger.resident:
            if digest not in self._given_up:
                raise self.world.wrong(f"{self.name}: {digest[7:9]} is not resident")
            self._fail(session, number, FailureKind.NOT_RESIDENT, "given up")
            return
        stage = self.world.specs[execute.job].stages[execute.stage]
        producers = [*stage.predecessors, *([-1] if stage.takes_model_inputs else [])]
        assignment = execution.Assignment(
            instruction=number,
            task=execution.Made(execute.job, execute.epoch, execute.item, execute.stage),
            digest=digest,
            needs=tuple(execution.Need(producer=other, tensors=TENSOR) for other in producers),
        )
        self._executes[number] = execute
        if stage.takes_model_inputs:
            self._await_inputs(session, execute)
        self._carry_out(self.queue.submit(assignment))

    def _await_inputs(self, session: int, execute: give.Execute) -> None:
        world, job, item = self.world, execute.job, execute.item
        if (job, item) in world.trouble.unreadable:
            failure = Failure(kind=FailureKind.INVALID_INPUT, message="not an array")
            event = InputUnreadable(at=Nanoseconds(0), job=job, item=item, failure=failure)
            world.tell_later(world.delay(), event)
            return
        key = execution.Sent(job, execute.epoch, item, -1, execute.stage)
        world.later(world.delay(), lambda: self.arrive(session, key) and None)

    def _carry_out(self, effects: list[execution.Effect]) -> None:
        for effect in effects:
            match effect:
                case execution.Start(assignment=assignment):
                    self._start_task(self.session, assignment)
                case execution.Refused(instruction=number, reason=reason, message=message):
                    del self._executes[number]
                    self._fail(self.session, number, FailureKind[reason.name], message)
                case execution.Stop() | execution.Drop():
                    pass

    def _start_task(self, session: int, assignment: execution.Assignment) -> None:
        world, queue = self.world, self.queue
        execute = self._executes[assignment.instruction]
        compute = int(world.chance.uniform(5, 50) * MILLISECOND * self.model.slowness)
        if (execute.job, execute.item) in world.trouble.poison and not world.calm:
            world.later(compute, lambda: self.kill(SECOND))

        def ended() -> None:
            if self.queue is queue and queue.running is assignment:
                self._end_task(session, execute, compute)

        world.later(compute, ended)

    def _end_task(self, session: int, execute: give.Execute, compute: int) -> None:
        number = execute.instruction
        failure = self._what_failed(execute)
        stages = self.world.specs[execute.job].stages
        needed = any(execute.stage in other.predecessors for other in stages)
        del self._executes[number]
        effects = self.queue.computed(number, TENSOR if needed and failure is None else ())
        if failure is None:
            self._deliver(session, execute, compute)
        else:
            self._fail(session, number, failure, "it went wrong")
            effects += self.queue.delivered(number)
        self._carry_out(effects)

    def _what_failed(self, execute: give.Execute) -> FailureKind | None:
        world = self.world
        reason = self.queue.stopped_because(execute.instruction)
        if reason is not None and world.chance.random() < 0.7:
            return FailureKind[reason.name]
        if (execute.job, execute.item) in world.trouble.invalid:
            return FailureKind.INVALID_INPUT
        if world.unlucky(world.trouble.task):
            kinds = (FailureKind.RUNTIME, FailureKind.MISSING_ACTIVATION, FailureKind.DEADLINE)
            return world.chance.choice(kinds)
        return None

    def _deliver(self, session: int, execute: give.Execute, compute: int) -> None:
        delivered: list[int] = []
        left = [consumer for consumer, _ in execute.routes]

        def answer() -> None:
            if not self._is_in(session) or self.hung:
                return
            self.world.note_result(execute)
            self._answer(
                session,
                TaskFinished(
                    at=Nanoseconds(0),
                    instruction=execute.instruction,
                    compute=Nanoseconds(compute),
                    delivered=tuple(delivered),
                ),
            )
            self._carry_out(self.queue.delivered(execute.instruction))

        def pushed(consumer: int, came: bool) -> None:
            left.remove(consumer)
            if came:
                delivered.append(consumer)
            if not left:
                answer()

        if not left:
            answer()
        job, epoch, item = execute.job, execute.epoch, execute.item
        for consumer, target in execute.routes:
            key = execution.Sent(job, epoch, item, execute.stage, consumer)
            self._push(key, target, lambda came, consumer=consumer: pushed(consumer, came))
