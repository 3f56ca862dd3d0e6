"""What planning answers: a plan with what it would give and what lost, or why there is none."""

from dataclasses import dataclass
from typing import Final

from shoal_planner.device_costs import DeviceCost, Holding, shared_period
from shoal_planner.goal import Goal
from shoal_protocol.choices import Objective
from shoal_protocol.units import (
    NANOSECONDS_PER_SECOND,
    Bytes,
    Nanoseconds,
    format_downwards,
    format_need,
    format_number,
)

SHORTEST_PERIOD: Final = Nanoseconds(100_000)
"""To hand an item over takes longer. A plan that promises more knows nothing of the work."""
EVEN_SPLIT: Final = "even split"
_NAMED_DEVICES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How a device holds the fragments of its stage: what it grants each of them while that is
    resident. With less than its `resident_bytes` a fragment runs in blocks. `cost` is what an item
    takes it; None where times cannot be predicted.
    """

    device: str
    budget_bytes: Bytes
    holding: Holding
    granted_bytes: tuple[Bytes, ...]
    cost: DeviceCost | None
    predicted: tuple[Nanoseconds, ...] = ()
    """How long a task of each takes there; empty: that cannot be predicted."""

    @property
    def resident_bytes(self) -> Bytes:
        """What the device holds at once."""
        reloads = self.holding is Holding.RELOADED
        return Bytes(max(self.granted_bytes) if reloads else sum(self.granted_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Consecutive fragments on the devices that share their items, fastest first.

    Times are per item, on the slowest of the devices: `transfer_nanoseconds` into the stage and
    out of it; None where a shape is unknown. `period_nanoseconds` is that of all together. The
    bytes come in and go out with an item; None where nothing does.
    """

    fragments: tuple[int, ...]
    shares: tuple[Share, ...]
    received_bytes: int | None
    sent_bytes: int | None

    @property
    def devices(self) -> tuple[str, ...]:
        """Their names, in the order of `shares`."""
        return tuple(share.device for share in self.shares)

    @property
    def costs(self) -> tuple[DeviceCost, ...]:
        """What an item takes each device; empty where times cannot be predicted."""
        return tuple(share.cost for share in self.shares if share.cost is not None)

    @property
    def compute_nanoseconds(self) -> Nanoseconds | None:
        """Of an item on the slowest device, without reading weights again."""
        return max((cost.compute for cost in self.costs), default=None)

    @property
    def read_nanoseconds(self) -> Nanoseconds | None:
        """Weights that are read again for an item, on the slowest device."""
        return max((cost.read for cost in self.costs), default=None)

    @property
    def transfer_nanoseconds(self) -> Nanoseconds | None:
        """To take an item in and pass it on, with handling and delays, on the slowest device."""
        return max((cost.transfer for cost in self.costs), default=None)

    @property
    def link_nanoseconds(self) -> Nanoseconds | None:
        """Of an item, the longest time that one device's link is busy with it."""
        return max((cost.link for cost in self.costs), default=None)

    @property
    def period_nanoseconds(self) -> Nanoseconds | None:
        """One item every so often, from all devices together."""
        return shared_period([cost.period for cost in self.costs]) if self.costs else None

    @property
    def resident_bytes(self) -> Bytes:
        """The most that one of the devices holds at once."""
        return max(share.resident_bytes for share in self.shares)

    def held(self, holding: Holding) -> bool:
        """Whether some device holds the stage in that way."""
        return any(share.holding is holding for share in self.shares)

    def grants(self, fragment: int) -> tuple[Bytes, ...]:
        """What each of the devices grants a fragment of the stage."""
        place = self.fragments.index(fragment)
        return tuple(share.granted_bytes[place] for share in self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A plan that lost, and why."""

    alternative: str
    reason: str
    period_nanoseconds: Nanoseconds | None = None
    latency_nanoseconds: Nanoseconds | None = None

    @property
    def items_per_second(self) -> float | None:
        """None: not known (see `rate_of`)."""
        return rate_of(self.period_nanoseconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in order, what they give, and what else there was.

    `gap`: by what part of the best possible value this one is larger at most; 0: none is better,
    None: that is not known. `items` are those of the job that a makespan is planned for; None: not
    known. `beside`: what other models leave of the devices, or that they leave too little; "" where
    none runs on the pool. `waiting`: some device has no room for other items while it runs one of
    its fragments. Predictions are None where a shape is unknown.
    """

    epoch: int
    objective: Objective
    stages: tuple[StagePlan, ...]
    period_nanoseconds: Nanoseconds | None
    latency_nanoseconds: Nanoseconds | None
    rejected: tuple[Rejected, ...]
    gap: float | None
    items: int | None = None
    beside: str = ""
    waiting: bool = False

    @property
    def reloading(self) -> bool:
        """Whether some device loads the fragments of a stage in turn."""
        return any(stage.held(Holding.RELOADED) for stage in self.stages)

    @property
    def goal(self) -> Goal:
        """What it was made for."""
        return Goal(self.objective, self.items)

    @property
    def makespan_nanoseconds(self) -> Nanoseconds | None:
        """What all items take with cold loads; None where that is not the objective, or unknown."""
        period, latency = self.period_nanoseconds, self.latency_nanoseconds
        if not self.goal.cold or period is None or latency is None:
            return None
        return Nanoseconds(self.goal.value(period, latency))

    @property
    def items_per_second(self) -> float | None:
        """None: not known (see `rate_of`)."""
        return rate_of(self.period_nanoseconds)

    @property
    def even_split(self) -> Rejected | None:
        """What a split into equal numbers of fragments would give; None where this plan is that."""
        return next((each for each in self.rejected if each.alternative == EVEN_SPLIT), None)

    def homes(self) -> tuple[tuple[str, ...], ...]:
        """Per fragment, the devices that serve it, best first: what a job is submitted with."""
        homes = {each: stage.devices for stage in self.stages for each in stage.fragments}
        return tuple(homes[index] for index in range(len(homes)))

    def grants(self) -> tuple[tuple[Bytes, ...], ...]:
        """Per fragment, what each of its homes grants it."""
        grants = {each: stage.grants(each) for stage in self.stages for each in stage.fragments}
        return tuple(grants[index] for index in range(len(grants)))

    def predictions(self) -> tuple[tuple[Nanoseconds, ...], ...]:
        """Per fragment, how long a task of it takes on each of its homes; empty: not predicted."""
        return tuple(
            tuple(share.predicted[place] for share in stage.shares if share.predicted)
            for stage in self.stages
            for place in range(len(stage.fragments))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """Why there is no plan: a fragment, what it needs, and what each device has (in pool order).

    `need_bytes` is what it needs at least, `resident_bytes` what it needs to be resident.
    `fragment` is None where the trouble is not one fragment's; `problem` then says all.
    """

    problem: str
    fragment: int | None = None
    need_bytes: Bytes | None = None
    resident_bytes: Bytes | None = None
    budgets: tuple[tuple[str, Bytes], ...] = ()

    def message(self, partition: str, advice: str = "") -> str:
        """What, where, and what to do: the `advice` of `advice.advise`, where a fragment fits on
        no device.
        """
        if self.fragment is None or self.need_bytes is None:
            return f"{partition} cannot be placed: {self.problem}"
        have = [f"{name} {format_downwards(budget)}" for name, budget in self.budgets]
        if have:
            have[0] = f"{self.budgets[0][0]} has {format_downwards(self.budgets[0][1])}"
        more = len(have) - _NAMED_DEVICES
        listed = ", ".join(have[:_NAMED_DEVICES]) + (f" and {more} more have less" * (more > 0))
        needs = f"needs {format_need(self.need_bytes, self.resident_bytes or self.need_bytes)}"
        subject = f"fragment {self.fragment} of {partition} {needs}"
        return f"{subject}{self.problem}; {listed}; {advice or 'cut finer or raise the budget'}"


def duration(nanoseconds: int) -> str:
    """Nanoseconds for people: `26.2 ms`, `1.3 s`."""
    milliseconds = nanoseconds / 1_000_000
    if milliseconds < 1000:
        return f"{format_number(milliseconds)} ms"
    return f"{format_number(milliseconds / 1000)} s"


def rate_of(period: Nanoseconds | None) -> float | None:
    """Items per second; None also where so little is known of the work that it seems to take no
    time."""
    if period is None or period < SHORTEST_PERIOD:
        return None
    return NANOSECONDS_PER_SECOND / period
