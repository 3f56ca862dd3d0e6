"""What happens in the simulated cluster: jobs in the coordinator, and workers."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from reconcile.values import document
from shoal_api.kinds import Partition
from shoal_operator.reconcile.decision import Manifest, SubmitJob, Terms
from shoal_operator.reconcile.names import TEMPLATE
from shoal_operator.reconcile.snapshot import RunState, WorkerPhase, Workload
from shoal_protocol.cut_table import CutTable, table_to_json
from shoal_protocol.partition import Outgrown, PartitionDocument, document_to_json

ITEMS = 6


@dataclass(slots=True)
class SimulatedJob:
    """A job in the coordinator; `finished` are the items in its journal. `too_large`: fragments of
    it that, as measured, fit on no device; other fragments may have made results before.
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
    too_large: tuple[Outgrown, ...] = ()
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
            self.message = f"fragment {self.too_large[0].fragment} needs 70 MiB; n1 has 64 MiB"
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


def printed(
    command: tuple[str, ...],
    cut: Callable[[tuple[str, ...]], PartitionDocument],
    table: CutTable | None,
) -> bytes | None:
    """What a worker prints at its end."""
    if "--table" in command:
        assert table is not None
        return table_to_json(table).encode()
    if command[1] == "inspect":
        digest = document().model_digest
        return (
            f'{{"digest": "{digest}", "size_bytes": 1, "opset": 17, "parameters": 3,'
            '"inputs": [], "outputs": []}'
        ).encode()
    if "--document" in command:
        return document_to_json(cut(command)).encode()
    return None


def rolled_out(objects: Mapping[tuple[str, str], Manifest], ready: int) -> tuple[Workload, ...]:
    """The DaemonSets among these objects, with so many pods."""
    found = []
    for (kind, name), made in objects.items():
        if kind == "DaemonSet":
            metadata = made["metadata"]
            assert isinstance(metadata, Mapping)
            template = metadata["annotations"][TEMPLATE]
            found.append(
                Workload(name=name, wanted=3, ready=ready, current=True, template=template)
            )
    return tuple(found)
