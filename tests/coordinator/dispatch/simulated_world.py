"""The world of the simulation: virtual time, chance under a seed, the dispatcher and its driver.

Checked at every step: that each item and each job ends once, an item only with all its results.
The dispatcher's invariants recount its whole state, which takes as long as all else: they are
checked at every step, or at one in so many (`look_every`) that chance chooses. What was done is
written into a transcript, which a failure carries.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush

from coordinator.dispatch.invariants import violations
from coordinator.dispatch.simulated_agent import Agent
from coordinator.dispatch.simulated_items import ItemLink, Luggage, ticket
from coordinator.dispatch.simulated_link import MILLISECOND, SECOND, Model
from shoal_coordinator.dispatch import instructions as give
from shoal_coordinator.dispatch.events import (
    TICK_INTERVAL,
    DeviceTelemetry,
    Event,
    Failure,
    FailureKind,
    InstructionFailed,
    ItemsArrived,
    ItemsStored,
    JobCancelled,
    JobSpec,
    JobSubmitted,
    Tick,
)
from shoal_coordinator.dispatch.machine import Limits, new_state, step
from shoal_protocol.units import Nanoseconds, nanoseconds

_SHOWN_LINES = 400


class Wrong(AssertionError):
    """What the simulation found; the message ends with the transcript."""


@dataclass(slots=True, kw_only=True)
class Trouble:
    """How likely what goes wrong is, while faults last; and which items are bad."""

    task: float = 0.0
    load: float = 0.0
    push: float = 0.0
    store: float = 0.0
    repeat: float = 0.0
    poison: tuple[tuple[str, int], ...] = ()
    invalid: tuple[tuple[str, int], ...] = ()
    unreadable: tuple[tuple[str, int], ...] = ()
    crashing: frozenset[str] = frozenset()
    """Fragments that end the agent that loads them, also after the other faults."""


class World:
    """A scenario while it runs."""

    def __init__(self, seed: int, models: list[Model], trouble: Trouble) -> None:
        self.seed = seed
        self.chance = random.Random(seed)  # noqa: S311 (not for secrets)
        self.now = 0
        turnaround = nanoseconds(self.chance.choice((0.003, 0.1)))
        self.state = new_state(Limits(turnaround=turnaround))
        self.life = 1
        """Of the coordinator: what an earlier one was to hear reaches nobody."""
        self.down = False
        self.trouble = trouble
        self.calm = False
        self.together = 0
        self.travels: dict[int, give.Travel] = {}
        self.arrived = 0
        self.faults = 0
        """What went wrong so far."""
        self.runs: Counter[tuple[str, int, int]] = Counter()
        """Of tasks: job, item, stage."""
        self.story: list[tuple[int, str | Event | give.Instruction]] = []
        """What happened when; becomes text in `transcript`, as that takes as long as the rest."""
        self.agents = {model.name: self.agent(model) for model in models}
        self.specs: dict[str, JobSpec] = {}
        self.finished: dict[str, Failure | None] = {}
        self.steps = 0
        self.look_every = 1
        self._completed: dict[str, frozenset[int]] = {}
        self._ends: dict[tuple[str, int], str] = {}
        self._results: dict[tuple[str, int, int], set[int]] = {}
        self._sessions = 0
        self._events: list[tuple[int, int, Callable[[], object], bool]] = []
        self._count = 0
        self._under_way = 0
        self._looks = random.Random(f"{seed} looks")  # noqa: S311 (not for secrets)

    def agent(self, model: Model) -> Agent:
        """A device of the world."""
        return Agent(self, model)

    # ---- time and chance ---------------------------------------------------------------------

    def later(self, delay: float, action: Callable[[], object], *, routine: bool = False) -> None:
        """Do something after a delay, in nanoseconds; with `routine`, what goes on for ever."""
        self._count += 1
        self._under_way += not routine
        at = self.now + max(int(delay), 1)
        heappush(self._events, (at, self._count, action, routine))

    def feed_later(self, delay: float, event: Event) -> None:
        """Have an event reach the dispatcher after a delay."""
        self.later(delay, self.in_life(lambda: self.feed(event)))

    def in_life(self, action: Callable[[], object]) -> Callable[[], None]:
        """Something that only this life of the coordinator does."""
        life = self.life

        def act() -> None:
            if self.life == life:
                action()

        return act

    def run(self, until: int, done: Callable[[], bool]) -> None:
        """Let time pass until something is the case, or the time is up."""
        while self._events and self._events[0][0] <= until and not done():
            self.act()

    def act(self) -> None:
        """Have the next thing happen."""
        self.now, _, action, routine = heappop(self._events)
        self._under_way -= not routine
        action()

    def tick(self) -> None:
        """The clocks of the driver and of the agents."""
        self.feed(Tick(at=Nanoseconds(0)))
        for agent in self.agents.values():
            agent.tick()
        self.later(TICK_INTERVAL, self.tick, routine=True)

    def delay(self) -> int:
        """How long a message takes."""
        return int(self.chance.uniform(0.1, 20) * MILLISECOND)

    def unlucky(self, probability: float) -> bool:
        """Whether it goes wrong this time."""
        happens = not self.calm and self.chance.random() < probability
        self.faults += happens
        return happens

    def next_session(self) -> int:
        """Number of a session, growing."""
        self._sessions += 1
        return self._sessions

    def note(self, what: str | Event | give.Instruction) -> None:
        """Record what happens now; what begins with dashes is a fault."""
        self.faults += isinstance(what, str)
        self.story.append((self.now, what))

    @property
    def held(self) -> list[JobSpec]:
        """What is held now."""
        return [job.spec for job in self.state.jobs.values() if job.spec.holds]

    @property
    def jobs_ended(self) -> bool:
        """Whether all jobs that were submitted have ended; placements end with their leases."""
        return all(name in self.finished for name, spec in self.specs.items() if not spec.holds)

    @property
    def still(self) -> bool:
        """Whether nothing more is to happen, but for ticks and telemetry."""
        return self._under_way == 0

    @property
    def transcript(self) -> list[str]:
        """What happened, a line each."""
        return _lines(self.story)

    def wrong(self, text: str) -> Wrong:
        """Stop: this is not as it should be."""
        lines = "\n".join(_lines(self.story[-_SHOWN_LINES:]))
        return Wrong(f"seed {self.seed}: {text}\n{lines}")

    # ---- the coordinator ---------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """One step of the dispatcher, checked, and what follows from it. The event happens now."""
        if self.down:
            return
        self.steps += 1
        # In place, as nobody has it yet: a copy takes as long as a short step.
        object.__setattr__(event, "at", Nanoseconds(self.now))
        if isinstance(event, InstructionFailed):
            self.travels.pop(event.instruction, None)
        given = step(self.state, event)
        if given or not isinstance(event, Tick | DeviceTelemetry):
            self.note(event)
        for instruction in given:
            self.note(instruction)
        if self.look_every == 1 or self._looks.random() * self.look_every < 1:
            self.check_invariants()
        for instruction in given:
            self.carry_out(instruction)

    def check_invariants(self) -> None:
        """Recount all that the dispatcher knows."""
        if broken := violations(self.state):
            raise self.wrong("; ".join(broken))

    def submit(self, spec: JobSpec, completed: frozenset[int] = frozenset()) -> None:
        """A user submits a job, or a newer plan of one."""
        if spec.name in self.finished:
            return
        if spec.name in self.state.jobs:
            self.note(f"-- {spec.name} is planned anew")
        self.specs[spec.name] = spec
        self._completed.setdefault(spec.name, completed)
        self.feed(JobSubmitted(at=Nanoseconds(0), job=spec, completed=completed))

    def hold(self, spec: JobSpec) -> None:
        """An operator has fragments held, in the place of those that it had held until now."""
        if spec.name in self.state.jobs:
            self.cancel(spec.name)
        self.finished.pop(spec.name, None)
        self.submit(spec)

    def stream(self, spec: JobSpec, pauses: Sequence[float]) -> None:
        """A client sends a job's items one after another, and leaves when all have ended."""
        name = spec.name
        self.submit(replace(spec, items=0, open_ended=True))
        at = 0.0
        for number, pause in enumerate(pauses, 1):
            at += pause
            self.feed_later(at, ItemsArrived(at=Nanoseconds(0), job=name, items=number))

        def leave() -> None:
            ends = {self._ends.get((name, item)) for item in range(len(pauses))}
            if ends <= {"stored", "failed"}:
                self.cancel(name)
            elif name not in self.finished:
                self.later(SECOND, leave)

        self.later(at, leave)

    def cancel(self, name: str) -> None:
        """A user changes their mind."""
        self.feed(JobCancelled(at=Nanoseconds(0), job=name, reason="no longer wanted"))

    def note_run(self, job: str, item: int, stage: int) -> None:
        """A task has run: again only if something went wrong, or had no room."""
        self.runs[job, item, stage] += 1
        known = self.state.jobs.get(job)
        retries = 0 if known is None else known.retries
        if self.runs[job, item, stage] > 1 + self.faults + retries:
            raise self.wrong(f"{job}/{item}/{stage} runs again, and nothing was wrong")

    def note_result(self, execute: give.Execute) -> None:
        """An agent has sent what a stage gives of the model's outputs, if anything."""
        if self.specs[execute.job].stages[execute.stage].gives_results:
            key = (execute.job, execute.epoch, execute.item)
            self._results.setdefault(key, set()).add(execute.stage)

    def carry_out(self, instruction: give.Instruction) -> None:
        """What the dispatcher wants is done, or sent."""
        match instruction:
            case give.FinishItem():
                self._finish_item(instruction)
            case give.Travel():
                self._enter(instruction)
            case give.Cancel(cancelled=number) if self.travels.pop(number, None) is not None:
                pass
            case give.FailItem(job=job, item=item):
                self._end_item(job, item, "failed")
            case give.FinishJob(job=job, failure=failure):
                self.finish_job(job, failure)
            case give.Disconnect(device=device, session=session):
                if self.agents[device].session == session:
                    self.agents[device].break_session(report=False)
            case _:
                if isinstance(instruction, give.Load):
                    self._check_homes(instruction)
                self.agents[instruction.device].receive(instruction)

    def _enter(self, travel: give.Travel) -> None:
        """Send an item to its first device; its input may turn out to be of no use."""
        self.travels[travel.instruction] = travel
        number, where = travel.instruction, self.agents[travel.device]
        if (travel.job, travel.item) in self.trouble.unreadable:
            failure = Failure(kind=FailureKind.CANCELLED, message="not an array")
            event = InstructionFailed(at=Nanoseconds(0), instruction=number, failure=failure)
            self.feed_later(self.delay(), event)
            return
        luggage = Luggage(travel, 0, ())
        by = ticket(self.life, travel.route, 0)
        self.later(self.delay(), lambda: where.arrive_item(by, luggage))

    def take_results(self, sender: ItemLink, results: list[Luggage]) -> None:
        """The results of items that have travelled arrive."""
        if not sender.connected:
            return
        arrived = [
            each for each in results if self.travels.pop(each.travel.instruction, None) is not None
        ]
        for each in arrived:
            travel = each.travel
            stages = self.specs[travel.job].stages
            wanted = {index for index, stage in enumerate(stages) if stage.gives_results}
            self._results[travel.job, travel.epoch, travel.item] = wanted
        self.arrived += len(arrived)
        if arrived:
            sender.finish_items(arrived)

    def _check_homes(self, load: give.Load) -> None:
        """What is only held is loaded on its homes."""
        users = [
            (job.spec.holds, load.device in stage.homes)
            for job in self.state.jobs.values()
            for stage in job.spec.stages
            if stage.digest == load.digest
        ]
        if users and not any(is_home or not holds for holds, is_home in users):
            raise self.wrong(f"{load.digest[7:9]} is held, and loaded on {load.device}")

    def _finish_item(self, instruction: give.FinishItem) -> None:
        job, item = instruction.job, instruction.item
        stages = self.specs[job].stages
        wanted = {index for index, stage in enumerate(stages) if stage.gives_results}
        arrived = self._results.get((job, instruction.epoch, item), set())
        if not wanted <= arrived:
            raise self.wrong(f"{job}/{item} is finished with the results of {arrived} only")
        if (how := self._ends.get((job, item))) is not None:
            raise self.wrong(f"{job}/{item} ends twice: {how}, then finished")
        self._ends[job, item] = "being stored"
        self.store(job, item)

    def store(self, job: str, item: int) -> None:
        """Write an item's results."""
        failure = None
        if self.unlucky(self.trouble.store):
            failure = Failure(kind=FailureKind.OUTPUT, message="not writable")

        def stored() -> None:
            if failure is None:
                self._ends[job, item] = "stored"
            self.feed(ItemsStored(at=Nanoseconds(0), job=job, items=(item,), failure=failure))

        self.later(self.delay(), self.in_life(stored))

    def _end_item(self, job: str, item: int, how: str) -> None:
        known = self._ends.get((job, item))
        if known not in {None, "being stored"}:
            raise self.wrong(f"{job}/{item} ends twice: {known}, then {how}")
        self._ends[job, item] = how

    def finish_job(self, job: str, failure: Failure | None) -> None:
        """The dispatcher says that a job has ended."""
        if job in self.finished:
            raise self.wrong(f"{job} is finished twice")
        self.finished[job] = failure
        for item in range(self.specs[job].items):
            how = self._ends.get((job, item))
            if item in self._completed[job] and how is not None:
                raise self.wrong(f"{job}/{item} had a result already, and is {how}")
            ended = item in self._completed[job] or how in {"stored", "failed"}
            if failure is None and not ended:
                raise self.wrong(f"{job} is finished, but item {item} is {how}")


# ---- the transcript ------------------------------------------------------------------------------


def _lines(story: Sequence[tuple[int, str | Event | give.Instruction]]) -> list[str]:
    """Instructions are further to the right than what they follow from."""
    return [
        f"{at / SECOND:9.4f} {'    ' * isinstance(what, give.Instruction)}"
        f"{what if isinstance(what, str) else _line(what)}"
        for at, what in story
    ]


def _line(value: Event | give.Instruction) -> str:
    """The kind, then what is not the same everywhere."""
    words = [type(value).__name__]
    for name in [each.name for each in fields(value)]:
        content = getattr(value, name)
        if name in {"at", "telemetry", "why"} or content in ((), {}, frozenset(), "", None):
            continue
        words.append(f"{name}={_brief(content)}")
    return " ".join(words)


def _brief(value: object) -> str:
    match value:
        case Failure(kind=kind, message=message):
            return f"{kind}({message})"
        case JobSpec():
            stages = " ".join(
                f"[{stage.digest[7:9]} {stage.resident_bytes}B after {list(stage.predecessors)}"
                f" on {list(stage.homes)}{' result' if stage.gives_results else ''}]"
                for stage in value.stages
            )
            return (
                f"{value.name} epoch {value.epoch}, {value.items} items, {value.mode},"
                f" {value.policy}, priority {value.priority}: {stages}"
            )
        case _:
            return str(value).replace("0" * 60, "").replace("sha256:", "")
