"""The budgets that a Partition is cut for, if it says nothing itself. Pure."""

from collections.abc import Sequence
from typing import Final

from shoal_api.kinds import DevicePool, Partition
from shoal_operator.reconcile.snapshot import StoredDocument

UPDATING: Final = "Updating"
"""The reason of a pool's AgentsReady while agents adopt what was edited."""
_MORE: Final = 4
"""Budgets that have grown by one part in so many are worth another cut."""


def is_cut_for_pools(partition: Partition) -> bool:
    """Whether it is left to us for which budget a Partition is cut."""
    spec = partition.spec
    given = (spec.fragments, spec.max_fragment_size, spec.cuts, spec.cutting)
    return all(each is None for each in given)


def pool_budget(pool: DevicePool) -> int | None:
    """The least that a device of the pool may use; None while that is not known."""
    if pool.spec.budget.memory is not None:
        return pool.spec.budget.memory
    return None if pool.status is None else pool.status.smallest_budget_bytes


def smallest_budget(pools: Sequence[DevicePool]) -> int | None:
    """None while none is known."""
    budgets = [budget for pool in pools if (budget := pool_budget(pool)) is not None]
    return min(budgets, default=None)


def have_changed(pools: Sequence[DevicePool], stored: StoredDocument) -> bool:
    """Whether some devices cannot hold the largest fragment whole any more, or all of them could
    hold larger ones by far."""
    match stored.arguments, smallest_budget(pools):
        case ("--max-bytes", size, *_), int(now) if size.isdecimal() and now != int(size):
            largest = max(each.resident_bytes for each in stored.document.fragments)
            return now < min(largest, int(size)) or now >= int(size) * (_MORE + 1) // _MORE
    return False
