"""What planning answers: a plan with what it would give and what lost, or why there is none."""

from dataclasses import dataclass
from typing import Final

from shoal_protocol.choices import Objective
from shoal_protocol.units import NANOSECONDS_PER_SECOND, Bytes, Nanoseconds, format_bytes

_NAMED_DEVICES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Consecutive fragments on the devices that share their items, fastest first.

    Times are per item on the slowest of the devices: `transfer_nanoseconds` into the stage and out
    of it; None where a shape is unknown. `swaps`: some device cannot hold all of it at once.
    """

    fragments: tuple[int, ...]
    devices: tuple[str, ...]
    compute_nanoseconds: Nanoseconds | None
    transfer_nanoseconds: Nanoseconds | None
    period_nanoseconds: Nanoseconds | None
    resident_bytes: Bytes
    swaps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A plan that lost, and why."""

    alternative: str
    reason: str
    period_nanoseconds: Nanoseconds | None = None
    latency_nanoseconds: Nanoseconds | None = None

    @property
    def items_per_second(self) -> float | None:
        return _rate(self.period_nanoseconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in order, what they give, and what else there was.

    `complete`: every division was weighed; otherwise a better one may exist. `even_split` is what a
    split into equal numbers of fragments would give. Predictions are None where a shape is unknown.
    """

    epoch: int
    objective: Objective
    stages: tuple[StagePlan, ...]
    period_nanoseconds: Nanoseconds | None
    latency_nanoseconds: Nanoseconds | None
    even_split: Rejected | None
    rejected: tuple[Rejected, ...]
    complete: bool

    @property
    def items_per_second(self) -> float | None:
        return _rate(self.period_nanoseconds)

    def homes(self) -> tuple[tuple[str, ...], ...]:
        """Per fragment, the devices that serve it, best first: what a job is submitted with."""
        homes = {each: stage.devices for stage in self.stages for each in stage.fragments}
        return tuple(homes[index] for index in range(len(homes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """Why there is no plan: a fragment, what it needs, and what each device has (in pool order).

    `fragment` is None where the trouble is not one fragment's; `problem` then says all.
    """

    problem: str
    fragment: int | None = None
    need_bytes: Bytes | None = None
    budgets: tuple[tuple[str, Bytes], ...] = ()

    def message(self, partition: str, advice: str = "") -> str:
        """What, where, and what to do: the `advice` of `advice.advise`, where a fragment fits on
        no device.
        """
        if self.fragment is None or self.need_bytes is None:
            return f"{partition} cannot be placed: {self.problem}"
        have = [f"{name} {format_bytes(budget)}" for name, budget in self.budgets]
        if have:
            have[0] = f"{self.budgets[0][0]} has {format_bytes(self.budgets[0][1])}"
        more = len(have) - _NAMED_DEVICES
        listed = ", ".join(have[:_NAMED_DEVICES]) + (f" and {more} more have less" * (more > 0))
        needs = f"needs {format_bytes(self.need_bytes)} resident"
        subject = f"fragment {self.fragment} of {partition} {needs}"
        return f"{subject}{self.problem}; {listed}; {advice or 'cut finer or raise the budget'}"


def duration(nanoseconds: int) -> str:
    """Nanoseconds for people: `26.2 ms`, `1.3 s`."""
    milliseconds = nanoseconds / 1_000_000
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def _rate(period: Nanoseconds | None) -> float | None:
    return NANOSECONDS_PER_SECOND / period if period else None
