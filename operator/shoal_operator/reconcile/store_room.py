"""Whether the store of a pool has room for the fragments of a cut, and what is said where it has
not. Pure.

What is needed is reckoned with the weights of the fragments that are not there, and at most the
size of the model: fragments may share weights. That is a little less than they take. A delivery
that finds no room all the same waits like one that did not begin.
"""

from typing import Final

from shoal_api.kinds import Model
from shoal_operator.reconcile.conditions import Cause
from shoal_operator.reconcile.decision import Note
from shoal_operator.reconcile.snapshot import InferenceJobSnapshot, PlacementSnapshot
from shoal_operator.reconcile.volumes import StoreRoom
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import format_downwards, format_upwards

WAITING_FOR_ROOM: Final = "WaitingForRoom"
_GIB: Final = 1 << 30
_MIB: Final = 1 << 20
_KEPT_FREE_BYTES: Final = 16 << 20
"""Of each volume, for records."""
_STEPS: Final = 64
"""What there is is told in so many steps of the size: it changes with each result."""


def waits_for_room(
    snapshot: InferenceJobSnapshot | PlacementSnapshot,
    document: PartitionDocument,
    store: StoreRoom,
    there: frozenset[str],
) -> Cause | None:
    """Why a cut is not delivered yet; None: there is room, as far as that is known."""
    need = _need_bytes(document, there, snapshot.model)
    have = _have_bytes(document, store, there)
    if need <= have:
        return None
    pool, step = snapshot.pool_name, max(1, store.size_bytes // _STEPS)
    have = have // step * step
    text = (
        f"{_name(snapshot)} would need {format_upwards(need)} in the store of {pool}, which has "
        f"{format_downwards(have)} of {format_downwards(store.size_bytes)} for it"
    )
    enough = _size(store.size_bytes, need, have)
    raised = f"raise spec.coordinator.storage.size of DevicePool {pool} to {enough}"
    if need > store.size_bytes:
        return Cause(WAITING_FOR_ROOM, f"{text}: {raised}")
    waits = "it is delivered when jobs that use the rest have ended"
    return Cause(WAITING_FOR_ROOM, f"{text}: {waits}; for both at once, {raised}")


def room_notes(snapshot: InferenceJobSnapshot, waits: Cause | None) -> tuple[Note, ...]:
    """That a job waits for room, once for each cut: without what there is, which changes."""
    if waits is None or waits.reason != WAITING_FOR_ROOM:
        return ()
    status = None if snapshot.placement is None else snapshot.placement.status
    epoch = 0 if status is None else status.epoch or 0
    text = waits.message.partition(", which has ")[0]
    return (Note(waits.reason, text, warning=True, since=f"epoch {epoch}"),)


def can_ever_have(
    document: PartitionDocument, store: StoreRoom, there: frozenset[str], model: Model | None
) -> bool:
    """Whether a cut has room where nothing else is in the store."""
    return _need_bytes(document, there, model) <= store.size_bytes


def _need_bytes(document: PartitionDocument, there: frozenset[str], model: Model | None) -> int:
    lacking = {each.digest: each.weight_bytes for each in document.fragments}
    need = sum(size for digest, size in lacking.items() if digest not in there)
    size = None if model is None or model.status is None else model.status.size_bytes
    return need if not size else min(need, size)


def _have_bytes(document: PartitionDocument, store: StoreRoom, there: frozenset[str]) -> int:
    """What there is for fragments that are to come, beside those of the cut that are there."""
    kept = {each.digest: each.weight_bytes for each in document.fragments}
    own = sum(size for digest, size in kept.items() if digest in there & store.unused)
    return store.free_bytes + max(0, store.removable_bytes - own)


def _name(snapshot: InferenceJobSnapshot | PlacementSnapshot) -> str:
    partition = snapshot.partition
    return "the cut" if partition is None else f"Partition {partition.metadata.name}"


def _size(size: int, need: int, have: int) -> str:
    """A size that suffices, as one writes it: with a twentieth for what is not reckoned, and what
    is kept free."""
    wanted = size + (need - have) + need // 20 + _KEPT_FREE_BYTES
    unit, name = (_GIB, "Gi") if wanted > 2 * _GIB else (_MIB, "Mi")
    return f"{-(-wanted // unit)}{name}"
