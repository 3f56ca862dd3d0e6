"""A Partition whose cuts are planned: who chooses them, from what, and when others follow. Pure.

A worker makes the model's table of cuts. The oldest Placement of the Partition chooses from it, for
its objective, on the devices of its pool, and says so in `status.cut`. A worker cuts there. Other
Placements place the fragments that there are.

The cut that was made, or is being made, stays unless another gains more than a tenth, as weighed by
the same table. While another is being made, the finished one is placed and runs.
"""

import base64
import gzip
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Final

from shoal_api.kinds import Partition, Placement
from shoal_api.kinds.placement import ChosenCut
from shoal_operator.reconcile.bounded_json import MOST_BYTES, is_bounded
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.manifests import labels_of, manifest
from shoal_operator.reconcile.names import table_name
from shoal_operator.reconcile.plans import unmeasured
from shoal_operator.reconcile.snapshot import CutAnswer, StoredDocument, StoredTable
from shoal_planner.devices import PoolDevice
from shoal_planner.explanation import could_be_better
from shoal_planner.goal import Goal
from shoal_planner.outcome import rate_of
from shoal_planner.planned_cuts import PlannedCut, choose_cut, next_cut
from shoal_planner.sharing import Taken, left_over
from shoal_protocol.choices import Cutting, Objective
from shoal_protocol.cut_table import (
    CutTable,
    TableRefused,
    table_from_json,
    table_to_json,
)
from shoal_protocol.units import counted, listed, seconds

KEY: Final = "cuts.json.gz"
RECIPE: Final = "shoal.dev/recipe"
_REMEMBERED: Final = 32
_NAMED: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CutQuestion:
    """Where to cut for these devices. `current`: the cut that was chosen before; None: none was, or
    not for this spec. `taken` is what other models take of the devices. Equal questions have equal
    answers."""

    stored: StoredTable
    devices: tuple[PoolDevice, ...]
    objective: Objective
    current: tuple[str, ...] | None
    taken: tuple[tuple[str, Taken], ...] = ()

    def is_like(self, other: object) -> bool:
        """As of `plans.Question`."""
        return isinstance(other, CutQuestion) and self._unmeasured() == other._unmeasured()

    def _unmeasured(self) -> "CutQuestion":
        return replace(self, devices=unmeasured(self.devices))

    def answer(self) -> CutAnswer:
        """It may take seconds."""
        cut = None
        if self.taken:
            left = left_over(self.devices, dict(self.taken))
            cut = _answered(self.stored.table, left, self.objective, self.current)
        if cut is None or cut.period is None:
            cut = _answered(self.stored.table, self.devices, self.objective, self.current)
        return CutAnswer(cut)


@lru_cache(_REMEMBERED)
def _answered(
    table: CutTable,
    devices: tuple[PoolDevice, ...],
    objective: Objective,
    current: tuple[str, ...] | None,
) -> PlannedCut | None:
    goal = Goal(objective)
    if current is None:
        return choose_cut(table, devices, goal)
    return next_cut(table, devices, goal, current)


def is_planned(partition: Partition | None) -> bool:
    """Whether a Placement chooses the cuts."""
    return partition is not None and partition.spec.cutting is Cutting.PLANNED


def chooser(placements: Iterable[Placement]) -> Placement | None:
    """Of the Placements of one Partition the one that chooses its cuts: the oldest."""
    alive = [each for each in placements if each.metadata.deletion_timestamp is None]
    return min(alive, key=age, default=None)


def age(of: Placement) -> tuple[str, str]:
    """The oldest is the first."""
    return of.metadata.creation_timestamp or "", of.metadata.name


def cut_arguments(cuts: Sequence[str]) -> tuple[str, ...]:
    """How `shoal partition` makes this cut."""
    return cuts_at(cuts) if cuts else ("--fragments", "1")


def cuts_at(tensors: Sequence[str]) -> tuple[str, ...]:
    """How `shoal partition` cuts at tensors, whose names may have commas."""
    return tuple(word for name in tensors for word in ("--cut", name))


def cuts_of(stored: StoredDocument) -> tuple[str, ...] | None:
    """The planned cut that a document is of; None: it was made otherwise."""
    match stored.arguments:
        case ("--cut", *_) as words:
            pairs = zip(words[::2], words[1::2], strict=False)
            return tuple(name for _, name in takewhile(lambda pair: pair[0] == "--cut", pairs))
        case ("--cuts", names, *_):  # as operators wrote before
            return tuple(names.split(","))
        case ("--fragments", "1", *_):
            return ()
    return None


def chosen_cut(cut: PlannedCut, before: ChosenCut | None) -> ChosenCut:
    """What the status says; of a cut that was chosen before, what was said then."""
    if before is not None and before.cuts == cut.tensors:
        return before
    return ChosenCut(
        cuts=cut.tensors,
        items_per_second=rate_of(cut.period),
        latency_seconds=None if cut.latency is None else seconds(cut.latency),
        reason=_reason(cut),
    )


def _reason(cut: PlannedCut) -> str:
    fragments = counted(len(cut.tensors) + 1, "fragment")
    if cut.period is None:
        return f"{fragments}, the fewest that fit: no devices hold the model at once"
    names = [device.name for division in cut.divisions for device in division.devices]
    text = f"{fragments}, the best cut for {listed(names, _NAMED)}"
    if cut.gap:
        text = f"{fragments}, a cut for {listed(names, _NAMED)}; {could_be_better(cut.gap)}"
    if cut.gain is not None:
        text = f"{text}; {100 * cut.gain:.0f} % better than the cut before"
    return text


# ---- the table in its ConfigMap ------------------------------------------------------------------


def table_map(partition: Partition, stored: StoredTable) -> Manifest:
    """The ConfigMap of a table."""
    packed = gzip.compress(table_to_json(stored.table).encode(), mtime=0)
    return manifest(
        partition,
        "ConfigMap",
        table_name(partition.metadata.name),
        labels_of(partition, "cuts"),
        {"annotations": {RECIPE: stored.recipe}},
        binaryData={KEY: base64.b64encode(packed).decode()},
    )


def read_table(config_map: Mapping[str, object]) -> StoredTable | None:
    """What a ConfigMap of ours holds; None where somebody has made it useless: it is made again."""
    match config_map:
        case {
            "metadata": {"annotations": {"shoal.dev/recipe": str(recipe)}},
            "binaryData": {"cuts.json.gz": str(packed)},
        }:
            table = _unpacked(packed)
            return None if table is None else StoredTable(recipe=recipe, table=table)
    return None


@lru_cache(_REMEMBERED)
def _unpacked(packed: str) -> CutTable | None:
    try:
        unpacker = zlib.decompressobj(wbits=31)
        text = unpacker.decompress(base64.b64decode(packed), MOST_BYTES)
        return table_from_json(text) if is_bounded(text) else None
    except (ValueError, zlib.error, TableRefused):
        return None
