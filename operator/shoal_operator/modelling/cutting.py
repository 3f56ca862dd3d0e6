"""A model and where to cut it -> fragments in the store."""

from collections.abc import Callable, Sequence
from pathlib import Path

from shoal_operator.api.partition import PartitionDocument
from shoal_operator.api.profile import Profile


def cut_model(
    path: Path,
    profile: Profile,
    cuts: Sequence[int],
    store: Path,
    progress: Callable[[int, int], None] | None = None,
) -> PartitionDocument:
    """Write the fragments to `store`; `progress` is told (fragments done, fragments in all)."""
    raise NotImplementedError
