"""A dispatcher driven by hand, and read like a script: join, submit, answer, look what was
given.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict, TypeVar, Unpack

from coordinator.dispatch.invariants import violations
from shoal_coordinator.dispatch.events import (
    ActivationForwarded,
    BudgetChanged,
    DeviceJoined,
    DeviceLost,
    DeviceTelemetry,
    Event,
    Failure,
    FailureKind,
    FragmentCached,
    FragmentResident,
    FragmentUnloaded,
    InstructionFailed,
    ItemsStored,
    JobSpec,
    JobSubmitted,
    Mode,
    Policy,
    Stage,
    TaskFinished,
    Telemetry,
    Tick,
)
from shoal_coordinator.dispatch.instructions import (
    Execute,
    FinishItem,
    Forward,
    Instruction,
    Load,
    Prefetch,
    Unload,
)
from shoal_coordinator.dispatch.machine import Limits, new_state, step
from shoal_protocol.digests import Digest
from shoal_protocol.seen_sizes import Sizes
from shoal_protocol.units import Bytes, Nanoseconds

MILLISECOND = 1_000_000
MIB = 1 << 20


class Rest(TypedDict, total=False):
    """What a test may say of a job besides."""

    epoch: int
    mode: Mode
    policy: Policy
    priority: int
    backoff_limit: int
    deadline: Nanoseconds | None
    open_ended: bool


Given = TypeVar("Given", bound=Instruction)


def digest(name: str) -> Digest:
    """A digest that can be told from others by its first letters."""
    return Digest(f"sha256:{name}".ljust(71, "0"))


def chain(
    *names: str,
    mib: float = 10,
    least_mib: float | None = None,
    homes: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[Stage, ...]:
    """Stages one after the other, of equal size; without `least_mib`, swapping saves nothing."""
    homes = homes or {}
    least = mib if least_mib is None else least_mib
    return tuple(
        Stage(
            digest=digest(name),
            resident_bytes=Bytes(int(mib * MIB)),
            least_bytes=Bytes(int(least * MIB)),
            predecessors=(index - 1,) if index else (),
            takes_model_inputs=index == 0,
            gives_results=index == len(names) - 1,
            homes=homes.get(name, ()),
        )
        for index, name in enumerate(names)
    )


def job(
    stages: tuple[Stage, ...], items: int = 1, name: str = "job", **rest: Unpack[Rest]
) -> JobSpec:
    """A job that says only what matters to the test."""
    said: Rest = {"epoch": 1, **rest}
    return JobSpec(name=name, stages=stages, items=items, **said)


class Table:
    """The dispatcher, and everything that it has asked for, in order. Invariants hold at each
    step.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.state = new_state(limits)
        self.now = 0
        self.given: list[Instruction] = []
        self.sessions = 0

    # ---- events ------------------------------------------------------------------------------

    def feed(self, event: Event) -> list[Instruction]:
        """One step; what it gave."""
        given = list(step(self.state, event))
        assert violations(self.state) == []
        self.given += given
        return given

    def at(self) -> Nanoseconds:
        """Now."""
        return Nanoseconds(self.now)

    def wait(self, milliseconds: int) -> list[Instruction]:
        """Let time pass, with the clock ticking."""
        given = []
        end = self.now + milliseconds * MILLISECOND
        while self.now < end:
            self.now = min(end, self.now + 250 * MILLISECOND)
            given += self.feed(Tick(at=self.at()))
        return given

    def join(
        self,
        name: str,
        mib: float = 24,
        *,
        single: bool = False,
        incarnation: int | None = None,
        resident: tuple[str, ...] = (),
        cached: tuple[str, ...] = (),
    ) -> list[Instruction]:
        """A device joins, by default in a new process; what it has resident is 10 MiB each."""
        self.sessions += 1
        return self.feed(
            DeviceJoined(
                at=self.at(),
                device=name,
                session=self.sessions,
                incarnation=self.sessions if incarnation is None else incarnation,
                budget=Bytes(int(mib * MIB)),
                single=single,
                resident={digest(one): Bytes(10 * MIB) for one in resident},
                cached=frozenset(digest(one) for one in cached),
            )
        )

    def lose(self, name: str) -> list[Instruction]:
        """A device's session breaks."""
        session = self.state.devices[name].session
        return self.feed(DeviceLost(at=self.at(), device=name, session=session))

    def measure(
        self, name: str, telemetry: Telemetry | None = None, *, fetched_mib: float = 0
    ) -> list[Instruction]:
        """A device sends readings, and how much of fragments it has fetched so far."""
        return self.feed(
            DeviceTelemetry(
                at=self.at(),
                device=name,
                session=self.state.devices[name].session,
                telemetry=telemetry or Telemetry(),
                fetched=Bytes(int(fetched_mib * MIB)),
            )
        )

    def change_budget(self, name: str, mib: float, **resident_mib: float) -> list[Instruction]:
        """A device has another budget, and in it these fragments."""
        return self.feed(
            BudgetChanged(
                at=self.at(),
                device=name,
                session=self.state.devices[name].session,
                budget=Bytes(int(mib * MIB)),
                resident={digest(k): Bytes(int(n * MIB)) for k, n in resident_mib.items()},
            )
        )

    def submit(self, spec: JobSpec, completed: frozenset[int] = frozenset()) -> list[Instruction]:
        """A job is submitted."""
        return self.feed(JobSubmitted(at=self.at(), job=spec, completed=completed))

    def answer(
        self,
        instruction: Instruction,
        *,
        delivered: bool = True,
        milliseconds: float = 10,
        resident_mib: float | None = None,
        dropped: tuple[str, ...] = (),
    ) -> list[Instruction]:
        """A device does what it was asked for."""
        at, gone = self.at(), frozenset(map(digest, dropped))
        match instruction:
            case Load(instruction=number, granted=size):
                if resident_mib is not None:
                    size = Bytes(int(resident_mib * MIB))
                return self.feed(
                    FragmentResident(at=at, instruction=number, resident=size, dropped=gone)
                )
            case Unload(instruction=number):
                return self.feed(FragmentUnloaded(at=at, instruction=number))
            case Prefetch(instruction=number):
                return self.feed(FragmentCached(at=at, instruction=number, dropped=gone))
            case Forward(instruction=number):
                return self.feed(ActivationForwarded(at=at, instruction=number))
            case FinishItem(job=name, item=item):
                return self.feed(ItemsStored(at=at, job=name, items=(item,)))
            case Execute(instruction=number, routes=routes):
                return self.feed(
                    TaskFinished(
                        at=at,
                        instruction=number,
                        compute=Nanoseconds(int(milliseconds * MILLISECOND)),
                        delivered=tuple(stage for stage, _ in routes) if delivered else (),
                        resident=Bytes(int((resident_mib or 0) * MIB)),
                    )
                )
            case _:
                raise AssertionError(f"{instruction} has no answer")

    def fail(
        self,
        instruction: Load | Unload | Prefetch | Execute | Forward,
        kind: FailureKind,
        need_mib: float | None = None,
        have_mib: float = 0,
        seen: Sizes | None = None,
    ) -> list[Instruction]:
        """A device cannot do what it was asked for."""
        need = None if need_mib is None else Bytes(int(need_mib * MIB))
        have = None if need_mib is None else Bytes(int(have_mib * MIB))
        failure = Failure(kind=kind, message="it went wrong", need=need, have=have, seen=seen or {})
        return self.feed(
            InstructionFailed(at=self.at(), instruction=instruction.instruction, failure=failure)
        )

    def play(self, given: Sequence[Instruction], steps: int = 10_000) -> list[Instruction]:
        """Answer everything, oldest first, until nothing is left to answer; all that was given."""
        queue, seen = list(given), list(given)
        while queue:
            steps -= 1
            assert steps, "it does not end"
            first = queue.pop(0)
            if isinstance(first, Load | Unload | Prefetch | Execute | Forward | FinishItem):
                more = self.answer(first)
                queue += more
                seen += more
        return seen

    # ---- what was given ----------------------------------------------------------------------

    def all(self, kind: type[Given]) -> list[Given]:
        """All instructions of a kind so far."""
        return [one for one in self.given if isinstance(one, kind)]


def only(given: list[Instruction], kind: type[Given]) -> Given:
    """The one instruction of a kind."""
    found = some(given, kind)
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {given}"
    return found[0]


def some(given: list[Instruction], kind: type[Given]) -> list[Given]:
    """The instructions of a kind."""
    return [one for one in given if isinstance(one, kind)]


def brief(given: list[Instruction]) -> list[str]:
    """Loads, unloads, tasks and forwards, as one reads them aloud."""
    lines = []
    for one in given:
        match one:
            case Load(device=device, digest=name, tier=tier):
                lines.append(f"{device} loads {name[7]} (tier {tier})")
            case Unload(device=device, digest=name):
                lines.append(f"{device} unloads {name[7]}")
            case Execute(device=device, item=item, stage=stage, routes=routes):
                ahead = "".join(f", to {target}" for _, target in routes)
                lines.append(f"{device} runs {item}.{stage}{ahead}")
            case Forward(device=device, target=target, item=item, producer=stage):
                lines.append(f"{device} sends {item}.{stage} to {target}")
            case FinishItem(item=item):
                lines.append(f"item {item} is done")
            case _:
                lines.append(type(one).__name__)
    return lines
