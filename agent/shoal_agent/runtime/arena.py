"""The arena of ONNX Runtime that all sessions of an agent share."""

from collections.abc import Callable
from typing import Final

import numpy as np
import onnxruntime

from shoal_agent.runtime import huge_pages
from shoal_agent.runtime.mapped_pages import (
    PageRange,
    drop,
    huge_part,
    pages_around,
    touch_in_huge_pages,
    touch_in_small_pages,
    touched_bytes,
    whole_pages,
)
from shoal_protocol.arena_regions import (
    MORE_THAN_BUDGET,
    REGION_BYTES,
    SMALL_REGION_BYTES,
    UNSPLIT_BYTES,
)

_GROW_BY_DOUBLING: Final = 0
_LEAST_REGION_BYTES: Final = 1 << 20
ARENA: Final = onnxruntime.OrtMemoryInfo(
    "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
)
_GRANULE: Final = 256
"""The arena refuses every region that is not a multiple of it, as half of `20M` is not."""


def register_arena(budget_bytes: int) -> int:
    """Have all sessions of this process take their activations from one arena. Returns what it may
    take, which is more than the budget: where a budget is larger than the first region, a tensor as
    large as that has room in those after it."""
    first_bytes = region_bytes(budget_bytes)
    others_bytes = _with_more(budget_bytes) if budget_bytes > first_bytes else 0
    # What sessions take for as long as they are open counts too, and would cut the region short.
    size_bytes = first_bytes + max(_LEAST_REGION_BYTES, others_bytes)
    configuration = {
        "max_mem": size_bytes,
        "arena_extend_strategy": _GROW_BY_DOUBLING,
        "initial_chunk_size_bytes": SMALL_REGION_BYTES,
        "initial_growth_chunk_size_bytes": region_bytes(budget_bytes),
        "max_dead_bytes_per_chunk": UNSPLIT_BYTES,
    }
    onnxruntime.create_and_register_allocator(ARENA, onnxruntime.OrtArenaCfg(configuration))
    return size_bytes


def region_bytes(budget_bytes: int) -> int:
    """Of the first large region of an arena for this budget: so much more that tensors within it
    lie as they would in a region without an end, but for rare cases. The arena takes the smallest
    piece that suffices, and near its end what is left there would be smaller than pieces that are
    free before."""
    return max(_LEAST_REGION_BYTES, min(_with_more(budget_bytes), REGION_BYTES))


def _with_more(size_bytes: int) -> int:
    size_bytes += size_bytes // MORE_THAN_BUDGET
    return size_bytes - size_bytes % (2 * _GRANULE)


def reserved(size_bytes: int) -> onnxruntime.OrtValue | None:
    """So much of the arena in one piece, which nobody reads or writes; None: it is not free."""
    try:
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            [size_bytes], np.uint8, memory_info=ARENA
        )
    except Exception:  # the runtime's exceptions have no common base
        return None


class WorkingRegion:
    """The region of the arena that blocks work in, of which a part stays in memory between two of
    them: a page that is given back and comes again is one that the kernel has to clear.

    For a moment all of the region is taken as a value, which nobody reads or writes, so that its
    pages may be dropped. Where others may take of it, where it cannot be had and where nobody has
    worked in it, the arena is emptied.

    What comes again comes in huge pages, as far as whoever works there reckons with them: one costs
    less than ten others.
    """

    def __init__(
        self,
        budget_bytes: int,
        empty_arena: Callable[[], None],
        is_shared: Callable[[], bool],
    ) -> None:
        """`budget_bytes` is what the arena was made for; `is_shared` says whether others may take
        of it."""
        self.size_bytes = region_bytes(budget_bytes)
        self._empty_arena = empty_arena
        self._is_shared = is_shared
        self._may_ask = huge_pages.may_ask()
        self._pages = self._huge = PageRange(0, 0)

    def empty(self) -> None:
        """Give back all of the arena that is not in use, and this region with it."""
        self.leave()
        self._pages = PageRange(0, 0)
        self._empty_arena()

    def keep(self, size_bytes: int, most_bytes: int = 0) -> bool:
        """Give back what lies beyond so many bytes, while nothing is in use; whether that could be:
        else all was given back. So much is touched from now on, in huge pages, if no more than
        `most_bytes` are in memory then."""
        if not self._is_shared() and (region := reserved(self.size_bytes)) is not None:
            pages = whole_pages(region.data_ptr(), self.size_bytes)
            was_worked_in = pages == self._pages
            if not was_worked_in:
                self._pages, self._huge = pages, PageRange(pages.start, pages.start)
            if was_worked_in or self.touched_bytes() > 0:
                most_bytes = most_bytes if self._may_ask else 0
                self._give_back(size_bytes, huge_part(pages, size_bytes, most_bytes))
                return True
            del region
        self.empty()
        return False

    def leave(self) -> None:
        """Others may work here from now on, who reckon with what they touch."""
        if self._huge.size:
            touch_in_small_pages(self._pages)
            self._huge = PageRange(self._pages.start, self._pages.start)

    def _give_back(self, size_bytes: int, huge: PageRange) -> None:
        """A huge page is given back as a whole, since the kernel keeps it while some of it is there
        still, and comes where nothing is."""
        end, before = self._pages.end, self._huge
        if huge == before:
            kept = max(huge.end, pages_around(self._pages.start, size_bytes).end)
            drop([PageRange(kept, end)])
            return
        drop([PageRange(min(before.end, huge.end), end)])
        touch_in_huge_pages(huge)
        touch_in_small_pages(PageRange(huge.end, end))
        self._huge = huge

    def touched_bytes(self) -> int:
        """How far it has been worked in since it was kept from."""
        return touched_bytes(self._pages)
