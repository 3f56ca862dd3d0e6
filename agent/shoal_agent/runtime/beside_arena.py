"""What a run takes beside the arena of ONNX Runtime, where no plan knows what it needs: the arena
may have what that leaves."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from shoal_agent.runtime.ballast import SCRATCH_SHARE
from shoal_agent.runtime.block_fragment import BlockFragment
from shoal_agent.runtime.destinations import Placed
from shoal_agent.runtime.failures import OutOfBudget, exceeded
from shoal_agent.runtime.guard import OTHERS_BYTES, kernel_bytes
from shoal_agent.runtime.inputs import pages_on_disk
from shoal_agent.runtime.mapped_pages import PageRange, drop, resident_bytes, size_of
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.whole_fragment import WholeFragment
from shoal_protocol.arena_regions import TABLE_SHARE
from shoal_protocol.tensors import Array


class Beside:
    """Of one run that is about to begin, whose `weights` are dropped: it has up to `read_bytes` of
    them in memory at one time, and a node takes `scratch_bytes` for itself, as far as that is
    known. Inputs that are `on_disk` are out of memory, and to be brought in. What is `placed` is
    outside of the arena, rows of tables and large outputs; other outputs are copied when it has
    run, where there is room then."""

    def __init__(
        self,
        meter: MemoryMeter,
        feed: Mapping[str, Array],
        placed: Placed,
        weights: Sequence[PageRange],
        read_bytes: int,
        scratch_bytes: int = 0,
    ) -> None:
        self.on_disk = pages_on_disk(feed)
        drop([*weights, *self.on_disk])
        here = meter.used_bytes() + sum(array.nbytes for array in placed.values())
        self._certain_bytes = here + size_of(self.on_disk) + OTHERS_BYTES
        self._read_bytes, self._scratch_bytes = read_bytes, scratch_bytes

    def held_back(self, arena_bytes: int, limit_bytes: int, *, is_larger: bool) -> int:
        """What to hold back of the arena, of so many bytes, for this process to stay within the
        limit. An item that `is_larger` than those of a trial has a limit that leaves room for the
        arena's tables, and for what most nodes take. Raises `Exceeded`: that leaves nothing."""
        held = arena_bytes - limit_bytes + self._certain_bytes + self._read_bytes
        if is_larger:
            held += max(0, self._scratch_bytes - arena_bytes // SCRATCH_SHARE)
        else:
            held += kernel_bytes(limit_bytes)
            held += arena_bytes // TABLE_SHARE
            held += max(self._scratch_bytes, max(0, arena_bytes - held) // SCRATCH_SHARE)
        if held >= arena_bytes:
            reason = "its inputs and outputs, and what else there is, leave nothing"
            need = max(self._certain_bytes, limit_bytes + 1)
            raise exceeded(OutOfBudget(reason), need, limit_bytes)
        return held


def weights_to_come(fragment: BlockFragment | WholeFragment) -> int:
    """Of the weights that a run has in memory while it works with the most, those that are not
    there yet."""
    if isinstance(fragment, BlockFragment):
        size_bytes = fragment.kept_bytes + fragment.streamed_at_most_work
    else:  # what is prepared may have them twice, and a run reads one of both
        size_bytes = min(fragment.weights_at_once(), fragment.weight_bytes)
    with suppress(OSError):  # a hardened container
        size_bytes -= resident_bytes(fragment.weight_pages())
    return max(0, size_bytes)
