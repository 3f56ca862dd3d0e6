"""The real dispatcher and real agent cores in one process, under a seed, on a network that
misbehaves.

A scenario draws devices, jobs and faults from its seed; the world then runs in virtual time:
messages take time, sessions break, devices die, hang, return; activations arrive late, twice and
out of order; loads and tasks fail. The agents are the agent's own pure cores
(`shoal_agent.execution`, `.residency`), so a load over the budget, or a task for a fragment that
is not resident, is found out by the other side.

Checked at every step: the dispatcher's invariants; that every instruction about a job makes sense;
that each item ends once and each job once. At the end: that everything ended in bounded time after
the last fault, and that no agent still holds an activation.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from shoal_agent import execution, residency
from shoal_operator.api.partition import Digest
from shoal_operator.dispatch import instructions as give
from shoal_operator.dispatch.events import (
    TICK_INTERVAL,
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
    ItemStored,
    JobCancelled,
    JobSpec,
    JobSubmitted,
    Mode,
    Policy,
    ProbeAnswered,
    Stage,
    TaskFinished,
    Telemetry,
    Tick,
)
from shoal_operator.dispatch.invariants import violations
from shoal_operator.dispatch.machine import Limits, State, new_state, step
from shoal_protocol.units import Bytes, Nanoseconds

MILLISECOND = 1_000_000
SECOND = 1000 * MILLISECOND
PATIENCE = 400 * SECOND
"""Virtual time after the last fault in which everything must have ended."""


class Wrong(AssertionError):
    """What the simulation found; the message ends with the transcript."""


@dataclass(slots=True, kw_only=True)
class Model:
    """What a device is: fixed for a scenario. `larger` are true sizes above the estimates."""

    name: str
    budget: int
    single: bool
    slowness: float
    larger: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Trouble:
    """How likely what goes wrong is, while faults last."""

    task: float = 0.0
    load: float = 0.0
    push: float = 0.0
    store: float = 0.0
    repeat: float = 0.0
    poison: tuple[tuple[str, int], ...] = ()
    invalid: tuple[tuple[str, int], ...] = ()
    unreadable: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True, eq=False)
class Agent:
    """One device: what survives a session (disk, memory), and the session's queue."""

    model: Model
    ledger: residency.Ledger
    cached: set[str] = field(default_factory=set)
    queue: execution.TaskQueue = field(default_factory=execution.TaskQueue)
    session: int = 0
    connected: bool = False
    alive: bool = True
    hung: bool = False
    draining: bool = False
    sent_until: int = 0
    heard_until: int = 0
    executes: dict[int, give.Execute] = field(default_factory=dict)
    unasked: set[str] = field(default_factory=set)


class World:
    """A scenario while it runs."""

    def __init__(self, seed: int, models: list[Model], trouble: Trouble, limits: Limits) -> None:
        self.chance = random.Random(seed)  # noqa: S311
        self.seed = seed
        self.now = 0
        self.state: State = new_state(limits)
        self.trouble = trouble
        self.calm = False
        self.transcript: list[str] = []
        self.agents = {model.name: Agent(model, _empty_ledger(model)) for model in models}
        self.specs: dict[str, JobSpec] = {}
        self.completed: dict[str, frozenset[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.finished: dict[str, Failure | None] = {}
        self.reported: dict[tuple[str, int, int], set[int]] = {}
        self.sessions = 0
        self.steps = 0
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    # ---- time --------------------------------------------------------------------------------

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Do something after a delay, in nanoseconds."""
        self._count += 1
        heappush(self._agenda, (self.now + max(int(delay), 1), self._count, action))

    def run(self, until: int, done: Callable[[], bool]) -> None:
        """Let time pass until something is the case, or the time is up."""
        while self._agenda and self._agenda[0][0] <= until and not done():
            self.now, _, action = heappop(self._agenda)
            action()

    def tick(self) -> None:
        """The shell's clock."""
        self.tell(Tick(at=Nanoseconds(self.now)))
        self.later(TICK_INTERVAL, self.tick)

    def note(self, text: str) -> None:
        """Write a line of the transcript."""
        self.transcript.append(f"{self.now / SECOND:9.4f} {text}")

    def wrong(self, text: str) -> Wrong:
        """Stop: this is not as it should be."""
        lines = "\n".join(self.transcript[-400:])
        return Wrong(f"seed {self.seed}: {text}\n{lines}")

    # ---- the coordinator ---------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """One step of the dispatcher, checked, and what follows from it."""
        self.steps += 1
        given = step(self.state, event)
        if given or not isinstance(event, Tick | DeviceTelemetry):
            self.note(f"{_short(event)}")
        for instruction in given:
            self.note(f"    {_short(instruction)}")
        broken = violations(self.state)
        if broken:
            raise self.wrong("; ".join(broken))
        for instruction in given:
            self.carry_out(instruction)

    def carry_out(self, instruction: give.Instruction) -> None:
        """What the shell does with an instruction."""
        match instruction:
            case give.FinishItem():
                self._finish_item(instruction)
            case give.FailItem():
                self._end_item(instruction.job, instruction.item, "failed")
            case give.FinishJob():
                self._finish_job(instruction)
            case give.Disconnect():
                agent = self.agents[instruction.device]
                if agent.session == instruction.session:
                    self.break_session(agent, tell=False)
            case _:
                self._send_down(instruction)

    def _finish_item(self, instruction: give.FinishItem) -> None:
        job, item = instruction.job, instruction.item
        stages = {stage for stage, spec in enumerate(self.specs[job].stages) if spec.gives_results}
        arrived = self.reported.get((job, instruction.epoch, item), set())
        if not stages <= arrived:
            raise self.wrong(f"{job}/{item} is finished with results of {arrived} only")
        key = (job, item)
        if key in self.ends:
            raise self.wrong(f"{job}/{item} ends twice: {self.ends[key]}, then stored")
        self.ends[key] = "storing"
        failure = None
        if self._unlucky(self.trouble.store):
            failure = Failure(kind=FailureKind.OUTPUT, message="not writable")

        def stored() -> None:
            if job in self.finished:
                return
            if failure is None:
                self.ends[key] = "stored"
            self.tell(ItemStored(at=Nanoseconds(self.now), job=job, item=item, failure=failure))

        self.later(self._delay(), stored)

    def _end_item(self, job: str, item: int, how: str) -> None:
        known = self.ends.get((job, item))
        if known not in {None, "storing"}:
            raise self.wrong(f"{job}/{item} ends twice: {known}, then {how}")
        self.ends[job, item] = how

    def _finish_job(self, instruction: give.FinishJob) -> None:
        job = instruction.job
        if job in self.finished:
            raise self.wrong(f"{job} is finished twice")
        self.finished[job] = instruction.failure
        if instruction.failure is None:
            for item in range(self.specs[job].items):
                how = self.ends.get((job, item))
                if item in self.completed[job]:
                    if how is not None:
                        raise self.wrong(f"{job}/{item} had ended before, and is {how} again")
                elif how not in {"stored", "failed"}:
                    raise self.wrong(f"{job} is finished, but item {item} is {how}")

    # ---- sessions ----------------------------------------------------------------------------

    def connect(self, agent: Agent) -> None:
        """The agent dials."""
        if agent.connected or not agent.alive:
            return
        self.sessions += 1
        agent.session = self.sessions
        agent.connected, agent.hung, agent.draining = True, False, False
        agent.sent_until = agent.heard_until = self.now
        agent.queue = execution.TaskQueue()
        agent.executes.clear()
        self._telemetry(agent, agent.session)
        self.tell(
            DeviceJoined(
                at=Nanoseconds(self.now),
                device=agent.model.name,
                session=agent.session,
                budget=Bytes(agent.model.budget),
                single=agent.model.single,
                resident={Digest(digest): size for digest, size in agent.ledger.resident.items()},
                cached=frozenset(Digest(digest) for digest in agent.cached),
            )
        )

    def break_session(self, agent: Agent, *, tell: bool = True) -> None:
        """The stream breaks; the agent drops its queue, keeps its fragments, dials again."""
        if not agent.connected:
            return
        session, agent.connected = agent.session, False
        agent.queue = execution.TaskQueue()
        agent.executes.clear()
        for digest in list(agent.ledger.in_flight):
            agent.ledger, _ = residency.step(agent.ledger, residency.LoadFailed(digest=digest))
        if tell:
            self.later(
                self._delay(),
                lambda: self.tell(
                    DeviceLost(at=Nanoseconds(self.now), device=agent.model.name, session=session)
                ),
            )
        if agent.alive:
            self.later(self.chance.uniform(0.05, 2) * SECOND, lambda: self.connect(agent))

    def kill(self, agent: Agent, away: float) -> None:
        """kill -9; a supervisor starts it again after a while. The disk stays."""
        if not agent.alive:
            return
        self.note(f"-- {agent.model.name} is killed")
        agent.alive = False
        self.break_session(agent, tell=not agent.hung)
        agent.ledger = _empty_ledger(agent.model)
        self.later(away, lambda: self._start(agent))

    def _start(self, agent: Agent) -> None:
        agent.alive = True
        agent.ledger = _empty_ledger(agent.model)
        self.connect(agent)

    def hang(self, agent: Agent, away: float) -> None:
        """Nothing comes from it any more; the stream does not break."""
        if not agent.connected or agent.hung:
            return
        self.note(f"-- {agent.model.name} hangs")
        agent.hung = True
        session = agent.session

        def wake() -> None:
            if agent.session == session and agent.connected:
                # What it had to say was said to nobody: the transport gives up.
                self.break_session(agent)

        self.later(away, wake)

    def drain(self, agent: Agent) -> None:
        """SIGTERM: it finishes what runs, then goes, and comes back later."""
        if not agent.connected or agent.hung:
            return
        self.note(f"-- {agent.model.name} drains")
        agent.draining = True
        self.send_up(
            agent,
            DeviceDraining(
                at=Nanoseconds(self.now), device=agent.model.name, session=agent.session
            ),
        )
        self.later(3 * SECOND, lambda: self.kill(agent, SECOND))

    def evict(self, agent: Agent) -> None:
        """The agent gives up a fragment by itself."""
        if not agent.connected or agent.hung or not agent.ledger.resident:
            return
        digest = next(iter(agent.ledger.resident))
        self.note(f"-- {agent.model.name} gives up {digest[7:13]}")
        agent.ledger, _ = residency.step(agent.ledger, residency.Unloaded(digest=digest))
        agent.unasked.add(digest)
        self._effects(agent, agent.queue.unload(digest))
        self.send_up(
            agent,
            FragmentEvicted(
                at=Nanoseconds(self.now),
                device=agent.model.name,
                session=agent.session,
                digest=Digest(digest),
            ),
        )

    def _telemetry(self, agent: Agent, session: int) -> None:
        if not agent.connected or agent.session != session or agent.hung:
            return
        chance = self.chance
        telemetry = Telemetry(
            cpu_fraction=chance.random(),
            memory_available=Bytes(chance.randrange(1 << 30)) if chance.random() < 0.7 else None,
            battery_fraction=chance.random() if chance.random() < 0.3 else None,
        )
        self.send_up(
            agent,
            DeviceTelemetry(
                at=Nanoseconds(self.now),
                device=agent.model.name,
                session=session,
                telemetry=telemetry,
            ),
        )
        self.later(2 * SECOND, lambda: self._telemetry(agent, session))

    # ---- the network -------------------------------------------------------------------------

    def _delay(self) -> int:
        return int(self.chance.uniform(0.1, 20) * MILLISECOND)

    def _unlucky(self, probability: float) -> bool:
        return not self.calm and self.chance.random() < probability

    def _send_down(self, instruction: give.Instruction) -> None:
        """To a device, on its session's stream: in order."""
        agent = self.agents[instruction.device]  # type: ignore[union-attr]
        session = agent.session
        if not agent.connected:
            return
        agent.heard_until = max(agent.heard_until, self.now + self._delay()) + 1

        def arrive() -> None:
            if agent.connected and agent.session == session and not agent.hung:
                self.obey(agent, instruction)

        self.later(agent.heard_until - self.now, arrive)

    def send_up(self, agent: Agent, event: Event) -> None:
        """From a device, on its session's stream: in order."""
        if not agent.connected or agent.hung:
            return
        session = agent.session
        agent.sent_until = max(agent.sent_until, self.now + self._delay()) + 1

        def arrive() -> None:
            if agent.session == session and (agent.connected or self.chance.random() < 0.5):
                self.tell(_dated(event, self.now))

        self.later(agent.sent_until - self.now, arrive)

    def answer(self, agent: Agent, session: int, event: Event) -> None:
        """An answer to an instruction of a session; void if the session is over."""
        if agent.session == session:
            self.send_up(agent, event)

    # ---- the agent ---------------------------------------------------------------------------

    def obey(self, agent: Agent, instruction: give.Instruction) -> None:
        """An instruction arrives at a device."""
        session = agent.session
        match instruction:
            case give.Load():
                self._load(agent, session, instruction)
            case give.Unload():
                self._unload(agent, session, instruction)
            case give.Prefetch():
                self._prefetch(agent, session, instruction)
            case give.Execute():
                self._execute(agent, session, instruction)
            case give.Forward():
                self._forward(agent, session, instruction)
            case give.Release():
                made = execution.Made(
                    instruction.job, instruction.epoch, instruction.item, instruction.stage
                )
                self._effects(agent, agent.queue.release([made]))
            case give.Cancel():
                self._effects(agent, agent.queue.cancel(instruction.cancelled))
            case give.Probe():
                self.send_up(
                    agent,
                    ProbeAnswered(
                        at=Nanoseconds(self.now), device=agent.model.name, session=session
                    ),
                )
            case _:
                raise self.wrong(f"{instruction} is not for a device")

    def _fail(self, agent: Agent, session: int, number: int, failure: Failure) -> None:
        event = InstructionFailed(at=Nanoseconds(self.now), instruction=number, failure=failure)
        self.answer(agent, session, event)

    def _load(self, agent: Agent, session: int, load: give.Load) -> None:
        request = residency.LoadRequested(digest=load.digest, need=load.resident)
        agent.ledger, effects = residency.step(agent.ledger, request)
        if not isinstance(effects[-1], residency.Admit):
            raise self.wrong(f"{agent.model.name} cannot load {load.digest[7:13]}: {effects}")
        took = self.chance.uniform(5, 60) * MILLISECOND
        if load.digest not in agent.cached:
            took += self.chance.uniform(20, 300) * MILLISECOND
        kinds = (FailureKind.UNAVAILABLE, FailureKind.CORRUPT, FailureKind.DISK_FULL)
        kind = self.chance.choice(kinds) if self._unlucky(self.trouble.load) else None

        def loaded() -> None:
            if agent.session != session or not agent.connected:
                return
            if kind is not None:
                failed = residency.LoadFailed(digest=load.digest)
                agent.ledger, _ = residency.step(agent.ledger, failed)
                failure = Failure(kind=kind, message=kind.value)
                self._fail(agent, session, load.instruction, failure)
                return
            agent.cached.add(load.digest)
            self._loaded(agent, session, load)

        self.later(took, loaded)

    def _loaded(self, agent: Agent, session: int, load: give.Load) -> None:
        measured = Bytes(max(load.resident, agent.model.larger.get(load.digest, 0)))
        ended = residency.LoadFinished(digest=load.digest, measured=measured)
        agent.ledger, effects = residency.step(agent.ledger, ended)
        evict = next((effect for effect in effects if isinstance(effect, residency.Evict)), None)
        if evict is not None:
            failure = Failure(
                kind=FailureKind.BUDGET, message=evict.reason, need=evict.need, have=evict.have
            )
            self._fail(agent, session, load.instruction, failure)
            return
        agent.unasked.discard(load.digest)
        self.answer(
            agent,
            session,
            FragmentResident(
                at=Nanoseconds(self.now), instruction=load.instruction, resident=measured
            ),
        )

    def _unload(self, agent: Agent, session: int, unload: give.Unload) -> None:
        if effects := agent.queue.unload(unload.digest):
            raise self.wrong(f"{agent.model.name}: unloaded under its tasks: {effects}")
        running = agent.queue.running
        if running is not None and running.digest == unload.digest:
            raise self.wrong(f"{agent.model.name}: unloaded under a running task")

        def unloaded() -> None:
            if agent.session != session or not agent.connected:
                return
            gone = residency.Unloaded(digest=unload.digest)
            agent.ledger, _ = residency.step(agent.ledger, gone)
            event = FragmentUnloaded(at=Nanoseconds(self.now), instruction=unload.instruction)
            self.answer(agent, session, event)

        self.later(self._delay(), unloaded)

    def _prefetch(self, agent: Agent, session: int, prefetch: give.Prefetch) -> None:
        failed = self._unlucky(self.trouble.load)

        def fetched() -> None:
            if agent.session != session or not agent.connected:
                return
            if failed:
                failure = Failure(kind=FailureKind.UNAVAILABLE, message="not to be had")
                self._fail(agent, session, prefetch.instruction, failure)
                return
            agent.cached.add(prefetch.digest)
            event = FragmentCached(at=Nanoseconds(self.now), instruction=prefetch.instruction)
            self.answer(agent, session, event)

        self.later(self.chance.uniform(20, 300) * MILLISECOND, fetched)

    def _execute(self, agent: Agent, session: int, execute: give.Execute) -> None:
        number, digest = execute.instruction, execute.digest
        if digest not in agent.ledger.resident:
            if digest not in agent.unasked:
                raise self.wrong(f"{agent.model.name}: {digest[7:13]} is not resident")
            failure = Failure(kind=FailureKind.NOT_RESIDENT, message="given up")
            self._fail(agent, session, number, failure)
            return
        stage = self.specs[execute.job].stages[execute.stage]
        names = frozenset({"tensor"})
        producers = [*stage.predecessors, *([-1] if stage.takes_model_inputs else [])]
        needs = tuple(execution.Need(producer=producer, tensors=names) for producer in producers)
        task = execution.Made(execute.job, execute.epoch, execute.item, execute.stage)
        agent.executes[number] = execute
        assignment = execution.Assignment(instruction=number, task=task, digest=digest, needs=needs)
        if stage.takes_model_inputs:
            self._send_inputs(agent, session, execute)
        self._effects(agent, agent.queue.submit(assignment))

    def _send_inputs(self, agent: Agent, session: int, execute: give.Execute) -> None:
        job, item = execute.job, execute.item
        if (job, item) in self.trouble.unreadable:
            failure = Failure(kind=FailureKind.INVALID_INPUT, message="not an array")
            event = InputUnreadable(at=Nanoseconds(self.now), job=job, item=item, failure=failure)
            self.later(self._delay(), lambda: self.tell(_dated(event, self.now)))
            return
        key = execution.Sent(job, execute.epoch, item, -1, execute.stage)
        self.later(self._delay(), lambda: self._arrive(agent, session, key))

    def _arrive(self, agent: Agent, session: int, key: execution.Sent) -> bool:
        if not agent.connected or agent.session != session or agent.hung:
            return False
        effects = agent.queue.arrive(Nanoseconds(self.now), key, {"tensor"})
        if effects is None:
            return False
        self._effects(agent, effects)
        return True

    def _push(
        self, agent: Agent, key: execution.Sent, target: str, then: Callable[[bool], None]
    ) -> None:
        """Send an activation to another device; it may be lost, or come twice."""
        session, other = agent.session, self.agents[target]
        there = other.session
        lost = self._unlucky(self.trouble.push)

        def arrive() -> None:
            delivered = not lost and other.connected and self._arrive(other, there, key)
            if agent.session == session and agent.connected:
                then(delivered)

        self.later(self._delay(), arrive)
        if self._unlucky(self.trouble.repeat):
            # A sender that missed the acknowledgement sends again: it is the same transfer, so the
            # receiver sees the second before it acknowledges the first.
            self.later(0, lambda: self._arrive(other, there, key) and None)

    def _forward(self, agent: Agent, session: int, forward: give.Forward) -> None:
        made = execution.Made(forward.job, forward.epoch, forward.item, forward.producer)
        if not agent.queue.holds(made):
            failure = Failure(
                kind=FailureKind.MISSING_ACTIVATION, message=f"stage {forward.producer}"
            )
            self._fail(agent, session, forward.instruction, failure)
            return
        key = execution.Sent(
            forward.job, forward.epoch, forward.item, forward.producer, forward.consumer
        )

        def pushed(delivered: bool) -> None:
            if delivered:
                event: Event = ActivationForwarded(
                    at=Nanoseconds(self.now), instruction=forward.instruction
                )
                self.answer(agent, session, event)
                return
            failure = Failure(
                kind=FailureKind.UNREACHABLE, message=f"{forward.target} is not there"
            )
            self._fail(agent, session, forward.instruction, failure)

        self._push(agent, key, forward.target, pushed)

    def _effects(self, agent: Agent, effects: list[execution.Effect]) -> None:
        for effect in effects:
            match effect:
                case execution.Start(assignment=assignment):
                    self._start_task(agent, agent.session, assignment)
                case execution.Refused(instruction=number, reason=reason):
                    agent.executes.pop(number)
                    kind = FailureKind[reason.name]
                    failure = Failure(kind=kind, message=effect.message)
                    self._fail(agent, agent.session, number, failure)
                case execution.Stop() | execution.Drop():
                    pass

    def _start_task(self, agent: Agent, session: int, assignment: execution.Assignment) -> None:
        execute = agent.executes.get(assignment.instruction)
        if execute is None:
            return
        compute = int(self.chance.uniform(5, 50) * MILLISECOND * agent.model.slowness)
        queue = agent.queue
        about = (execute.job, execute.item)
        if about in self.trouble.poison and not self.calm:
            self.later(compute, lambda: self.kill(agent, SECOND))

        def ended() -> None:
            if agent.queue is not queue or queue.running is not assignment:
                return
            self._end_task(agent, session, execute, compute)

        self.later(compute, ended)

    def _end_task(self, agent: Agent, session: int, execute: give.Execute, compute: int) -> None:
        number = execute.instruction
        stage = self.specs[execute.job].stages
        reason = agent.queue.stopped_because(number)
        failure = None
        if reason is not None and self.chance.random() < 0.7:
            failure = Failure(kind=FailureKind[reason.name], message="stopped")
        elif (execute.job, execute.item) in self.trouble.invalid:
            failure = Failure(kind=FailureKind.INVALID_INPUT, message="wrong shape")
        elif self._unlucky(self.trouble.task):
            kinds = (FailureKind.RUNTIME, FailureKind.MISSING_ACTIVATION, FailureKind.DEADLINE)
            failure = Failure(kind=self.chance.choice(kinds), message="it went wrong")
        needed = any(execute.stage in other.predecessors for other in stage)
        kept = {"tensor"} if needed and failure is None else set()
        agent.executes.pop(number, None)
        # The queue is told first; what it starts next runs while this one's outputs travel.
        effects = agent.queue.computed(number, kept)
        if failure is not None:
            self._fail(agent, session, number, failure)
            effects += agent.queue.delivered(number)
        else:
            self._deliver(agent, session, execute, compute)
        if agent.session == session:
            self._effects(agent, effects)

    def _deliver(self, agent: Agent, session: int, execute: give.Execute, compute: int) -> None:
        delivered: list[int] = []
        left = [len(execute.routes)]

        def answer() -> None:
            if agent.session != session or not agent.connected:
                return
            if agent.hung:
                return
            event = TaskFinished(
                at=Nanoseconds(self.now),
                instruction=execute.instruction,
                compute=Nanoseconds(compute),
                delivered=tuple(delivered),
            )
            if self.specs[execute.job].stages[execute.stage].gives_results:
                key = (execute.job, execute.epoch, execute.item)
                self.reported.setdefault(key, set()).add(execute.stage)
            self.answer(agent, session, event)
            self._effects(agent, agent.queue.delivered(execute.instruction))

        def pushed(consumer: int, came: bool) -> None:
            if came:
                delivered.append(consumer)
            left[0] -= 1
            if not left[0]:
                answer()

        if not execute.routes:
            answer()
        for consumer, target in execute.routes:
            key = execution.Sent(execute.job, execute.epoch, execute.item, execute.stage, consumer)
            self._push(agent, key, target, lambda came, consumer=consumer: pushed(consumer, came))

    # ---- jobs --------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, completed: frozenset[int] = frozenset()) -> None:
        """A user submits a job, or a newer plan of one."""
        if spec.name in self.finished:
            return
        self.specs[spec.name] = spec
        self.completed.setdefault(spec.name, completed)
        self.tell(JobSubmitted(at=Nanoseconds(self.now), job=spec, completed=completed))

    def cancel(self, name: str) -> None:
        """A user changes their mind."""
        self.tell(JobCancelled(at=Nanoseconds(self.now), job=name, reason="no longer wanted"))


def _empty_ledger(model: Model) -> residency.Ledger:
    return residency.Ledger(budget=Bytes(model.budget), single=model.single)


def _dated(event: Event, at: int) -> Event:
    from dataclasses import replace

    return replace(event, at=Nanoseconds(at))


def _short(value: Event | give.Instruction) -> str:
    """One line of the transcript: the kind, then what is not the same everywhere."""
    words = [type(value).__name__]
    for name in value.__slots__:
        field_value = getattr(value, name)
        if name in {"at", "telemetry", "why"} or field_value in ((), {}, frozenset(), ""):
            continue
        words.append(f"{name}={_brief(field_value)}")
    return " ".join(words)


def _brief(value: object) -> str:
    if isinstance(value, JobSpec):
        stages = " ".join(
            f"[{stage.digest[7:9]} {stage.resident_bytes}B after {list(stage.predecessors)}"
            f" on {list(stage.homes)}{' result' if stage.gives_results else ''}]"
            for stage in value.stages
        )
        return (
            f"{value.name} epoch {value.epoch}, {value.items} items, {value.mode} {value.policy}"
            f" priority {value.priority}: {stages}"
        )
    text = str(value) if not isinstance(value, Failure) else f"{value.kind}({value.message})"
    for zeros in ("0" * 60,):
        text = text.replace(zeros, "")
    return text.replace("sha256:", "")


# ---- scenarios -------------------------------------------------------------------------------


def scenario(seed: int) -> World:
    """Draw a world from a seed: devices, jobs, and what will go wrong."""
    chance = random.Random(seed * 7919 + 1)  # noqa: S311
    jobs = [_job(chance, index) for index in range(chance.choice((1, 1, 1, 2, 3)))]
    sizes = {stage.digest: stage.resident_bytes for job in jobs for stage in job.stages}
    models = _devices(chance, sizes)
    rough = chance.random() < 0.7
    items = [(job.name, chance.randrange(job.items)) for job in jobs if job.items]
    trouble = Trouble()
    if rough:
        trouble = Trouble(
            task=chance.choice((0, 0, 0.05, 0.2)),
            load=chance.choice((0, 0, 0.1, 0.3)),
            push=chance.choice((0, 0, 0.1, 0.4)),
            store=chance.choice((0, 0, 0.1)),
            repeat=chance.choice((0, 0.2)),
            poison=tuple(items[:1]) if chance.random() < 0.1 else (),
            invalid=tuple(items[:1]) if chance.random() < 0.2 else (),
            unreadable=tuple(items[1:2]) if chance.random() < 0.2 else (),
        )
    limits = Limits(history=64)
    world = World(seed, models, trouble, limits)
    names = [model.name for model in models]
    if chance.random() < 0.5:
        jobs = [_with_homes(chance, job, names) for job in jobs]
    _schedule(world, chance, jobs, rough=rough)
    return world


def _job(chance: random.Random, index: int) -> JobSpec:
    count = chance.choice((1, 2, 2, 3, 3, 4, 5))
    shared = chance.random() < 0.3
    stages: list[Stage] = []
    for stage in range(count):
        before = list(range(stage))
        if not before or (chance.random() < 0.1 and stage > 1):
            predecessors: tuple[int, ...] = ()
        elif chance.random() < 0.6:
            predecessors = (stage - 1,)
        else:
            predecessors = tuple(sorted(chance.sample(before, chance.randint(1, len(before)))))
        digest = f"sha256:{'s' if shared else chr(97 + index)}{stage}".ljust(71, "0")
        size = 5 + (stage * 7) % 11 if shared else chance.randint(4, 20)
        stages.append(
            Stage(
                digest=Digest(digest),
                resident_bytes=Bytes(size),
                predecessors=predecessors,
                takes_model_inputs=not predecessors or chance.random() < 0.2,
                gives_results=stage == count - 1 or chance.random() < 0.15,
            )
        )
    return JobSpec(
        name=f"job-{index}",
        stages=tuple(stages),
        items=chance.choice((0, 1, 2, 5, 8, 12)),
        epoch=1,
        mode=chance.choice((Mode.STREAMING, Mode.STREAMING, Mode.BARRIER)),
        policy=chance.choice(list(Policy)),
        priority=chance.choice((0, 0, 1)),
        backoff_limit=chance.choice((0, 1, 3)),
    )


def _devices(chance: random.Random, sizes: dict[Digest, Bytes]) -> list[Model]:
    most = max(sizes.values())
    models = []
    for index in range(chance.choice((1, 2, 3, 3, 4, 6))):
        single = chance.random() < 0.4
        budget = chance.choice((most, most + 3, 2 * most, 3 * most))
        if index and chance.random() < 0.2:
            budget = most - 1
        larger = {}
        if chance.random() < 0.1:
            digest, size = chance.choice(list(sizes.items()))
            larger[digest] = size + chance.randint(1, 6)
        models.append(
            Model(
                name=f"device-{index}",
                budget=budget,
                single=single,
                slowness=chance.choice((1, 1, 1, 4)),
                larger=larger,
            )
        )
    return models


def _with_homes(chance: random.Random, job: JobSpec, names: list[str]) -> JobSpec:
    from dataclasses import replace

    stages = tuple(
        replace(stage, homes=tuple(chance.sample(names, chance.randint(1, min(2, len(names))))))
        for stage in job.stages
    )
    return replace(job, stages=stages)


def _schedule(world: World, chance: random.Random, jobs: list[JobSpec], *, rough: bool) -> None:
    from dataclasses import replace

    for agent in world.agents.values():
        world.later(chance.uniform(0, 1.5) * SECOND, lambda agent=agent: world.connect(agent))
    for job in jobs:
        at = chance.uniform(0, 2) * SECOND
        completed = frozenset(item for item in range(job.items) if chance.random() < 0.05)
        if chance.random() < 0.1:
            job = replace(job, deadline=Nanoseconds(int(at + chance.uniform(1, 20) * SECOND)))
        world.later(at, lambda job=job, completed=completed: world.submit(job, completed))
        if chance.random() < 0.1:
            cancelled = at + chance.uniform(0, 3) * SECOND
            world.later(cancelled, lambda job=job: world.cancel(job.name))
        if chance.random() < 0.15:
            again = _with_homes(chance, replace(job, epoch=2), list(world.agents))
            replanned = at + chance.uniform(0, 2) * SECOND
            world.later(replanned, lambda again=again: world.submit(again))
    world.tick()
    if not rough:
        return
    for _ in range(chance.choice((0, 1, 2, 4))):
        agent = chance.choice(list(world.agents.values()))
        away = chance.choice((0.2, 2, 15)) * SECOND
        faults: list[Callable[[], None]] = [
            lambda agent=agent, away=away: world.kill(agent, away),
            lambda agent=agent: world.break_session(agent),
            lambda agent=agent, away=away: world.hang(agent, away),
            lambda agent=agent: world.drain(agent),
            lambda agent=agent: world.evict(agent),
        ]
        world.later(chance.uniform(0.5, 8) * SECOND, chance.choice(faults))


FAULTS_END = 25 * SECOND


def simulate(seed: int) -> World:
    """Run one scenario to its end; `Wrong` says what was wrong."""
    world = scenario(seed)

    def ended() -> bool:
        return len(world.specs) > 0 and all(name in world.finished for name in world.specs)

    def calm() -> None:
        world.calm = True

    world.later(FAULTS_END, calm)
    world.run(FAULTS_END, lambda: False if not world.specs else ended() and world.now > 5 * SECOND)
    world.calm = True
    world.run(FAULTS_END + PATIENCE, ended)
    for name in world.specs:
        if name not in world.finished:
            raise world.wrong(f"{name} has not ended")
    world.run(world.now + 30 * SECOND, lambda: False)
    _check_nothing_left(world)
    return world


def _check_nothing_left(world: World) -> None:
    state = world.state
    if state.jobs or any(device.queued or device.keeps for device in state.devices.values()):
        raise world.wrong("work is left in the dispatcher")
    for agent in world.agents.values():
        held = [key for key in agent.queue._held if not _may_stay(world, key)]
        if agent.connected and held:
            raise world.wrong(f"{agent.model.name} still holds {held}")


def _may_stay(world: World, key: execution.Key) -> bool:
    """What an agent lets expire by itself: model's inputs, and what was sent to it twice."""
    if isinstance(key, execution.Made):
        return False
    return key.producer == -1 or world.trouble.repeat > 0
