"""What happens in the simulated cluster: jobs in the coordinator, and workers."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from shoal_api.kinds import Partition
from shoal_operator.reconcile.decision import SubmitJob, Terms
from shoal_operator.reconcile.snapshot import RunState, WorkerPhase

ITEMS = 6


@dataclass(slots=True)
class SimulatedJob:
    """A job in the coordinator; `finished` are the items in its journal. `too_large`: a fragment of
    it, as measured, fits on no device; other fragments may have made results before.
    """

    state: RunState
    plan: int
    terms: Terms
    finished: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    seconds: float = 0.0
    started_seconds: float = 0.0
    message: str = ""
    reason: str = ""
    too_large: bool = False
    retry: int = 0

    @staticmethod
    def submitted(call: SubmitJob, known: "SimulatedJob | None") -> "SimulatedJob":
        """A run, perhaps after another one; of a retry, what failed is tried again."""
        again = SimulatedJob(RunState.PENDING, call.plan, call.terms, retry=call.retry)
        if known is not None:
            later = known.retry < call.retry
            assert later or known.reason in {"Cancelled", "Budget"}, "run twice"
            again.finished, again.failed = known.finished, set() if later else known.failed
        return again

    def advance(self, seconds: float, now: float, bad_items: AbstractSet[int]) -> list[int]:
        """Run for so long until now; the items that have finished meanwhile."""
        if self.state is RunState.PENDING:
            self.state = RunState.RUNNING
            return []
        if self.state is not RunState.RUNNING:
            return []
        self.seconds += seconds
        self.started_seconds = self.started_seconds or now - seconds
        ended = sorted(set(range(ITEMS)) - self.finished - self.failed)[:2]
        good = [item for item in ended if item not in bad_items]
        self.finished.update(good)
        self.failed.update(set(ended) - set(good))
        if self.too_large:
            self.state, self.reason = RunState.FAILED, "Budget"
            self.message = "fragment 0 needs 70 MiB; n1 has 64 MiB"
        elif len(self.finished) + len(self.failed) == ITEMS:
            self.state = RunState.FAILED if self.failed else RunState.COMPLETE
            self.reason = "ItemsFailed" if self.failed else ""
        return good


@dataclass(slots=True)
class SimulatedWorker:
    """A `batch/v1` Job."""

    owner: str
    command: tuple[str, ...]
    phase: WorkerPhase = WorkerPhase.PENDING
    message: str = ""
    refused: bool = False
    ended_at: str | None = None


def edited(before: Partition | None, wanted: Partition) -> Partition:
    """What is there once a Partition was applied."""
    if before is None or before.spec == wanted.spec:
        return before or wanted
    generation = (before.metadata.generation or 0) + 1
    return replace(
        before, spec=wanted.spec, metadata=replace(before.metadata, generation=generation)
    )
