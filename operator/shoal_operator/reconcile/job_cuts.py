"""What a job's own Partition is cut for, whether it is cut so, and whether it has a place. Pure."""

from typing import Final

from shoal_api.fields import Condition
from shoal_api.kinds import InferenceJob, Partition, Placement
from shoal_api.kinds.inference_job import FinerCut
from shoal_operator.reconcile.conditions import FALSE
from shoal_operator.reconcile.names import OWNER_UID, uid_of
from shoal_operator.reconcile.partition import recipe_of
from shoal_operator.reconcile.plans import is_too_much
from shoal_operator.reconcile.pool_budgets import UPDATING, pool_budget
from shoal_operator.reconcile.snapshot import DeviceState, InferenceJobSnapshot, Unreachable
from shoal_operator.reconcile.times import seconds_since

_REFUSALS: Final = frozenset({"Refused", "TooManyFragments", "DocumentTooLarge"})
"""Reasons of Cut for a Partition that is not cut unless somebody edits it."""
_LASTS_SECONDS: Final = 10.0
"""Before a model is cut anew for less: a limit may be lowered for a moment. Twice as long for each
cut that there was, so that no budget that goes up and down has it cut again and again."""
_LASTS_AT_MOST_SECONDS: Final = 600.0
AWAY_SECONDS: Final = 60.0
"""For so long a device that is lost may be back: its agent is started again, or its node."""


def is_ours(job: InferenceJob, there: Partition | Placement | None) -> bool:
    """Whether an object of the job's name is the job's, or may become it."""
    return there is None or there.metadata.labels.get(OWNER_UID) == uid_of(job)


def owns_partition(snapshot: InferenceJobSnapshot) -> bool:
    """Whether the job has a Partition made for itself, which nobody else changes."""
    return snapshot.job.spec.model_ref is not None and is_ours(snapshot.job, snapshot.partition)


def cut_for(snapshot: InferenceJobSnapshot) -> int | None:
    """What the job's own Partition is cut for: fragments that every device of the pool can hold;
    where there is no such cut, those that the largest can. Once it is cut, that stays as it is
    (where it cannot: `finer_cuts`).
    """
    there, finer = snapshot.partition, snapshot.before.finer_cut
    if finer is not None:
        return finer.max_fragment_size_bytes
    if there is None or there.spec.max_fragment_size is None:
        return None if snapshot.pool is None else pool_budget(snapshot.pool)
    return larger_budget(snapshot, there) or there.spec.max_fragment_size


def larger_budget(snapshot: InferenceJobSnapshot, there: Partition) -> int | None:
    """The largest budget in the pool, if the cut for a smaller one was refused; also of a device
    that is away, and may be back."""
    if isinstance(snapshot.view, Unreachable) or refusal_of(there) is None or _is_divided(snapshot):
        return None
    whole = _is_whole(snapshot)
    known = [
        each.budget_bytes
        for each in snapshot.view.devices
        if each.state is not DeviceState.LOST or not whole
    ]
    largest = max(known, default=0)
    return largest if largest > size_of(there) else None


def _is_divided(snapshot: InferenceJobSnapshot) -> bool:
    """Whether fragments of the cut are divided: another size does not help then."""
    finer = snapshot.before.finer_cut
    return finer is not None and bool(finer.outgrown)


def refusal_of(there: Partition) -> str | None:
    """Why a Partition, as its spec is now, cannot be cut."""
    cut = there.condition("Cut")
    if cut is None or cut.status is not FALSE or cut.reason not in _REFUSALS:
        return None
    return cut.message if cut.observed_generation == there.generation else None


def is_cut_as_wanted(snapshot: InferenceJobSnapshot) -> bool:
    """Whether the stored document is of the cut that the job wants its own Partition to have."""
    finer, partition, stored = snapshot.before.finer_cut, snapshot.partition, snapshot.document
    if finer is None:
        return True
    if partition is None or snapshot.model is None or stored is None:
        return False
    return is_asked(partition, finer) and stored.recipe == recipe_of(partition, snapshot.model)


def is_asked(partition: Partition, finer: FinerCut) -> bool:
    """Whether a Partition says what the job's status does."""
    spec = partition.spec
    asked = (spec.max_fragment_size, set(spec.seen), spec.outgrown)  # the server may sort by key
    return asked == (finer.max_fragment_size_bytes, set(finer.seen), finer.outgrown)


def is_final(snapshot: InferenceJobSnapshot) -> bool:
    """Whether the job's own Partition cannot be cut finer: what is too large fails by itself."""
    finer = snapshot.before.finer_cut
    return finer is not None and finer.final


# ---- fragments that have no place ----------------------------------------------------------------


def misplaced(snapshot: InferenceJobSnapshot) -> str | None:
    """Why the fragments that there are have no place, though every device is there, and some have
    what they were cut for."""
    return None if _is_away(snapshot) or _have_less(snapshot) else without_place(snapshot)


def other_size(snapshot: InferenceJobSnapshot) -> tuple[int, str] | None:
    """What the job's own Partition is to be cut for instead, and why; None: it stays as it is.

    Where no device has what it was cut for any more, and its fragments have no place: for the
    least that one has. Where that is refused: for the most that one has. The cut that was wanted
    last has to be there, or refused.
    """
    partition, finer, ready = snapshot.partition, snapshot.before.finer_cut, _ready(snapshot)
    if partition is None or partition.spec.max_fragment_size is None or not ready:
        return None
    if finer is not None and not is_asked(partition, finer):
        return None
    refusal, why = refusal_of(partition), without_place(snapshot)
    if refusal is not None:
        more = finer is not None and not finer.outgrown and max(ready) > size_of(partition)
        return (max(ready), refusal) if more else None
    if why is None or not _have_less(snapshot) or not is_cut_as_wanted(snapshot):
        return None
    return (min(ready), why) if _lasts(snapshot) else None


def size_of(partition: Partition) -> int:
    """What a Partition is cut for; 0: it says something else."""
    return partition.spec.max_fragment_size or 0


def is_outdated(snapshot: InferenceJobSnapshot) -> bool:
    """Whether the plan was made for larger budgets, and another one follows."""
    placement, view = snapshot.placement, snapshot.view
    if placement is None or placement.status is None or isinstance(view, Unreachable):
        return False
    budgets = {each.name: each.budget_bytes for each in view.devices}
    return is_too_much(placement.status, budgets)


def may_have_more(snapshot: InferenceJobSnapshot, there: Partition) -> bool:
    """Whether devices may have, or get, what a Partition that was refused for less takes: one
    that is known, one that is being told of a larger budget, or for a while one that a coordinator
    that began again does not know yet."""
    if isinstance(snapshot.view, Unreachable) or refusal_of(there) is None or _is_divided(snapshot):
        return False
    if larger_budget(snapshot, there) is not None or _is_given_more(snapshot, there):
        return True
    recent = seconds_without_plan(snapshot) < _LASTS_AT_MOST_SECONDS
    return snapshot.before.finer_cut is not None and recent and _lacks_some(snapshot)


def _is_given_more(snapshot: InferenceJobSnapshot, there: Partition) -> bool:
    """Whether the pool's budget was raised above what a Partition is cut for, and agents have not
    adopted it yet, which takes them some seconds."""
    pool = snapshot.pool
    if pool is None or (pool_budget(pool) or 0) <= size_of(there):
        return False
    known = pool.condition("AgentsReady")
    if known is None or known.observed_generation != pool.generation:
        return known is not None
    recent = seconds_since(known.last_transition_time, snapshot.now) < AWAY_SECONDS
    return known.reason == UPDATING and recent


def lacks_devices(snapshot: InferenceJobSnapshot) -> bool:
    """Whether devices of the plan are missing, and it stays for them for a while."""
    placement = snapshot.placement
    ready = None if placement is None else placement.condition("Ready")
    return ready is not None and ready.status is FALSE and ready.reason == "DevicesMissing"


def _lacks_some(snapshot: InferenceJobSnapshot) -> bool:
    """Whether the pool has more nodes than devices that are there."""
    ready, total = _counts(snapshot)
    return ready < total


def _is_whole(snapshot: InferenceJobSnapshot) -> bool:
    """Whether each node of the pool is a device that is there. One that is lost, and that the
    coordinator remembers, will not be back then."""
    ready, total = _counts(snapshot)
    return ready >= total > 0


def _counts(snapshot: InferenceJobSnapshot) -> tuple[int, int]:
    """Devices that are there, as the pool and its coordinator say, and nodes; 0: not known."""
    status = None if snapshot.pool is None else snapshot.pool.status
    if status is None or status.devices is None:
        return 0, 0
    seen = sum(state is DeviceState.READY for state in _states(snapshot))
    return min(seen, status.devices.ready), status.devices.total


def _is_away(snapshot: InferenceJobSnapshot) -> bool:
    """Whether a device is away that may be back, or none is there."""
    gone = {DeviceState.LOST} if _is_whole(snapshot) else set[DeviceState]()
    return set(_states(snapshot)) - gone != {DeviceState.READY}


def without_place(snapshot: InferenceJobSnapshot) -> str | None:
    """Why no plan has room for the fragments that there are."""
    planned = _planned(snapshot)
    if planned is None or planned.status is not FALSE or planned.reason != "Infeasible":
        return None
    return planned.message


def _lasts(snapshot: InferenceJobSnapshot) -> bool:
    """Whether they have been without a place for long enough."""
    finer = snapshot.before.finer_cut
    cuts = 1 if finer is None else finer.cuts
    wanted = min(_LASTS_SECONDS * (1 << min(cuts - 1, 16)), _LASTS_AT_MOST_SECONDS)
    if _lacks_some(snapshot) or _is_away(snapshot):
        wanted = max(wanted, AWAY_SECONDS)
    return seconds_without_plan(snapshot) >= wanted


def seconds_without_plan(snapshot: InferenceJobSnapshot) -> float:
    """For how long there has been no plan."""
    planned = _planned(snapshot)
    if planned is None or planned.status is not FALSE:
        return 0.0
    return seconds_since(planned.last_transition_time, snapshot.now)


def _planned(snapshot: InferenceJobSnapshot) -> Condition | None:
    placement = snapshot.placement
    return None if placement is None else placement.condition("Planned")


def _have_less(snapshot: InferenceJobSnapshot) -> bool:
    """Whether each device that is there has less than what the Partition was cut for."""
    ready, partition = _ready(snapshot), snapshot.partition
    return partition is not None and 0 < max(ready, default=0) < size_of(partition)


def _ready(snapshot: InferenceJobSnapshot) -> tuple[int, ...]:
    """The budgets of the devices that are there; none while one may only be silent for a moment."""
    if isinstance(snapshot.view, Unreachable) or DeviceState.SILENT in _states(snapshot):
        return ()
    there = [each for each in snapshot.view.devices if each.state is DeviceState.READY]
    return tuple(each.budget_bytes for each in there)


def _states(snapshot: InferenceJobSnapshot) -> tuple[DeviceState, ...]:
    view = snapshot.view
    return () if isinstance(view, Unreachable) else tuple(each.state for each in view.devices)
