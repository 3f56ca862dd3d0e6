"""What is known of a job."""

from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from itertools import zip_longest
from typing import Final

from shoal_protocol.partition import Outgrown
from shoal_protocol.seen_sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Per stage, the devices that serve it, best first, what each of them grants its fragment, and
    how long it is predicted to take. `explanation` says to people why it is as it is. A plan of a
    higher number replaces it.
    """

    number: int = 0
    stages: tuple[tuple[str, ...], ...] = ()
    granted_bytes: tuple[tuple[int, ...], ...] = ()
    predicted_seconds: tuple[tuple[float, ...], ...] = ()
    explanation: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a user may change while the job runs. 0: no limit, no deadline. `end`: a job that
    follows its inputs takes no further ones; that is never taken back."""

    priority: int = 0
    parallelism: int = 0
    active_deadline_seconds: float = 0.0
    end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Which run of a job it is: of a higher number, a later one. Of the items that failed before,
    it tries `items`, or all of them if these are none. A job that follows its inputs has several in
    one run.
    """

    number: int = 0
    items: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """`work` is a digest of everything that never changes: model, folders, mode, policy. `results`
    is one of what the results depend on: not how the model is cut; empty where nobody recorded it.
    `follows`: it takes inputs as they come. `final_cut`: the model can be cut no finer."""

    work: str
    results: str = ""
    follows: bool = False
    final_cut: bool = False
    plan: Plan = Plan()
    terms: Terms = Terms()
    retry: Retry = Retry()

    def continues(self, earlier: "Submission") -> bool:
        """Whether it goes on with the results of an earlier one."""
        return self.work == earlier.work or (self.results == earlier.results != "")

    @property
    def takes_more(self) -> bool:
        """Whether further inputs are taken, and failed ones again, while the job runs."""
        return self.follows and not self.terms.end

    def amended_by(self, newer: "Submission") -> "Submission":
        """The terms of `newer`, and its plan and retry if these have higher numbers. A job that
        takes no more inputs is only retried when it has ended."""
        plan = newer.plan if newer.plan.number > self.plan.number else self.plan
        again = self.takes_more and newer.retry.number > self.retry.number
        terms = replace(newer.terms, end=self.terms.end or newer.terms.end)
        return replace(self, plan=plan, terms=terms, retry=newer.retry if again else self.retry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Statistics of one run of a job, or of several added up.

    `stored` items were computed and stored; `finished` counts tasks by stage, `tier_hits` by tier;
    `seconds` lasts from a run's first task to its end; `started_seconds` is when the first task
    of the first run began, since 1970 by the wall clock.
    """

    stored: int = 0
    retries: int = 0
    seconds: float = 0.0
    started_seconds: float | None = None
    tier_hits: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()

    def plus(self, later: "Tally") -> "Tally":
        return Tally(
            stored=self.stored + later.stored,
            retries=self.retries + later.retries,
            seconds=self.seconds + later.seconds,
            started_seconds=(
                later.started_seconds if self.started_seconds is None else self.started_seconds
            ),
            tier_hits=_added(self.tier_hits, later.tier_hits),
            finished=_added(self.finished, later.finished),
        )


NOTHING: Final = Tally()


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(one, other, fillvalue=0)))


class Outcome(StrEnum):
    """How a job ends."""

    COMPLETE = "Complete"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """`reason` is one word for a condition, `message` is for people. `outgrown` are the fragments
    for which it failed that fit on no device, `seen` the largest sizes that items had there, where
    no plan knows them."""

    outcome: Outcome
    reason: str = ""
    message: str = ""
    outgrown: tuple[Outgrown, ...] = ()
    seen: Sizes = field(default_factory=dict)


class Refusal(Enum):
    """Why a request is refused: it makes no sense; the store lacks fragments; another job of the
    name runs; it runs in another way, such as with other fragments, to the same results; the job
    still runs; it has nothing to be tried again; there is no such job; there is no room now; the
    coordinator stops."""

    MALFORMED = auto()
    LACKING = auto()
    KNOWN = auto()
    OTHER_WAY = auto()
    RUNS = auto()
    COMPLETE = auto()
    UNKNOWN = auto()
    FULL = auto()
    STOPPING = auto()
