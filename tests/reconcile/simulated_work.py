"""What goes on in the simulated cluster: jobs in the coordinator, and workers."""

from dataclasses import dataclass, field

from shoal_operator.reconcile.decision import Terms
from shoal_operator.reconcile.snapshot import RunState, WorkerPhase


@dataclass(slots=True)
class SimulatedJob:
    """A job in the coordinator; `finished` are the items in its journal."""

    state: RunState
    plan: int
    terms: Terms
    finished: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    seconds: float = 0.0
    message: str = ""
    reason: str = ""


@dataclass(slots=True)
class SimulatedWorker:
    """A `batch/v1` Job."""

    owner: str
    command: tuple[str, ...]
    phase: WorkerPhase = WorkerPhase.PENDING
    message: str = ""
    refused: bool = False
    ended_at: str | None = None
