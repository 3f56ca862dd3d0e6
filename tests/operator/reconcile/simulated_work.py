"""What happens in the simulated cluster: jobs in the coordinator, and workers."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from reconcile.values import document
from shoal_api.kinds import Partition
from shoal_operator.reconcile.decision import Manifest, SubmitJob, Terms
from shoal_operator.reconcile.names import TEMPLATE
from shoal_operator.reconcile.snapshot import Run, RunState, WorkerPhase, Workload
from shoal_protocol.cut_table import CutTable, table_to_json
from shoal_protocol.partition import (
    Outgrown,
    PartitionDocument,
    document_from_json,
    document_to_json,
)

ITEMS = 6


@dataclass(slots=True)
class SimulatedJob:
    """A job in the coordinator; `finished` are the items in its journal. `too_large`: fragments of
    it that, as measured, fit on no device; other fragments may have made results before.
    `large_items`: those for which they do not; none: all.
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
    large_items: AbstractSet[int] = frozenset()
    retry: int = 0
    final_cut: bool = False
    cut: PartitionDocument | None = None

    @staticmethod
    def submitted(call: SubmitJob, known: "SimulatedJob | None") -> "SimulatedJob":
        """A run, perhaps after another one; of a retry, what failed is tried again."""
        again = SimulatedJob(
            RunState.PENDING,
            call.plan,
            call.terms,
            retry=call.retry,
            final_cut=call.final_cut,
            cut=document_from_json(call.partition),
        )
        if known is not None:
            later = known.retry < call.retry
            assert later or known.reason in {"Cancelled", "Budget"}, "run twice"
            again.finished, again.failed = known.finished, set() if later else known.failed
        return again

    @property
    def is_active(self) -> bool:
        return self.state in (RunState.PENDING, RunState.RUNNING)

    def has(self, fragments: PartitionDocument) -> bool:
        """Whether these are its fragments."""
        assert self.cut is not None
        mine, others = ([each.digest for each in of.fragments] for of in (self.cut, fragments))
        return mine == others

    def waits_for_room(self, there: Iterable[int], known: Iterable[int]) -> bool:
        """Whether a fragment has no place in the budgets of devices that are there. Where it has
        none in any that is known, the job fails."""
        if not self.is_active or not self._without_room(max(there, default=0)):
            return False
        if outgrown := self._without_room(max(known)):
            self.state, self.reason, self.too_large = RunState.FAILED, "Budget", outgrown
            self.message = f"fragment {outgrown[0].fragment} fits on no device"
        return True

    def _without_room(self, budget: int) -> tuple[Outgrown, ...]:
        assert self.cut is not None
        return tuple(
            Outgrown(fragment=each.index, need_bytes=each.least_bytes)
            for each in self.cut.fragments
            if each.least_bytes > budget
        )

    def advance(self, seconds: float, now: float, bad_items: AbstractSet[int]) -> list[int]:
        """Run for so long until now; the items that have finished meanwhile."""
        if self.state is RunState.PENDING:
            self.state = RunState.RUNNING
            return []
        if self.state is not RunState.RUNNING:
            return []
        self.seconds += seconds
        self.started_seconds = self.started_seconds or now - seconds
        left = set(range(ITEMS)) - self.finished - self.failed
        ended = sorted(left if self.final_cut else left - self.large_items)[:2]
        good = [item for item in ended if item not in bad_items | self.large_items]
        self.finished.update(good)
        self.failed.update(set(ended) - set(good))
        if self.too_large and not self.final_cut:
            self.state, self.reason = RunState.FAILED, "Budget"
            self.message = f"fragment {self.too_large[0].fragment} needs 70 MiB; n1 has 64 MiB"
        elif len(self.finished) + len(self.failed) == ITEMS:
            self.state = RunState.FAILED if self.failed else RunState.COMPLETE
            self.reason = "ItemsFailed" if self.failed else ""
        return good

    def seen(self, name: str) -> Run:
        """What the coordinator says of it."""
        return Run(
            job=name,
            state=self.state,
            message=self.message,
            reason=self.reason,
            outgrown=self.too_large if self.reason == "Budget" else (),
            plan=self.plan,
            terms=self.terms,
            items=ITEMS,
            active=int(self.state is RunState.RUNNING),
            succeeded=len(self.finished),
            failed=len(self.failed),
            seconds=self.seconds,
            started_seconds=self.started_seconds,
            retry=self.retry,
            final_cut=self.final_cut,
            items_per_second=len(self.finished) / self.seconds if self.seconds else 0.0,
            latency_p50_seconds=0.5,
            tier_hits=(1, 2, 3, 4),
            failures=tuple((item, f"{item}.npz", "no such shape") for item in sorted(self.failed)),
        )


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
