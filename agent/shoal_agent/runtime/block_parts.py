"""The parts of a run in blocks between which the arena of activations is emptied.

The values that live on are moved out of it, and the part that begins works in what it has worked in
for the item before: so much stays in memory, and the rest is given back. That is known of items of
the same shapes only. Of others, and of the first one, all is given back.

What a part has touched at its end is then in memory from its first block on. So the plan reckons
with it for all of its blocks, where the grant has room for that. Else it has to be no more than the
plan reckons with for the first block: tensors in the worst order, of which there is mostly less.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from shoal_agent.runtime.arena import WorkingRegion
from shoal_protocol.blocks import Block, arena_kept, least_bytes
from shoal_protocol.tensors import Array


class Parts:
    """Those of `blocks`, which are to be planned with; none where the arena is not emptied."""

    def __init__(self, blocks: Sequence[Block], granted_bytes: int, region: WorkingRegion) -> None:
        self.blocks = tuple(blocks)
        self._region = region
        self._starts = {index for index, each in enumerate(blocks) if each.empties_arena}
        if not blocks[0].empties_arena:
            self._starts = set()
        self._reckoned: dict[int, int] = {}
        if self._starts and max(arena_kept(blocks)) <= region.size_bytes:
            self._reckoned = dict(self._reckoned_within(granted_bytes))
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._touched: dict[int, int] = {}
        self._last: int | None = None
        kept = arena_kept(blocks)
        self._leaves_little, self._left_little = kept[-1] <= kept[0], False

    def begin(self, feed: Mapping[str, Array]) -> None:
        """An item is to run."""
        shapes = {name: each.shape for name, each in feed.items()}
        if shapes != self._shapes:
            self.forget()
            self._shapes = shapes

    def end(self) -> None:
        """The item has run."""
        self._note()
        self._last = None  # others may work in the arena now
        self._left_little = self._leaves_little
        self._region.leave()

    def forget(self) -> None:
        """What is in the arena is not what parts have left in it that ran to their ends."""
        self._touched = {}
        self._last, self._left_little = None, False
        self._region.leave()

    def begins_at(self, index: int) -> bool:
        """Whether a part does: values are to be moved, and room is to be made."""
        return index in self._starts

    def make_room(self, index: int, outside_bytes: int = 0) -> None:
        """Give back what the part that begins does not work in, while nothing is in use, and so
        much of what the plan reckons with is not in the arena. Where nothing is known of the arena,
        the first part works in what the last has left of the item before, if that is no more than
        its first block takes."""
        left_little, self._left_little = self._left_little, False
        if not self._reckoned:
            if not left_little:
                self._region.empty()
            return
        self._note()
        touched, most = self._touched.get(index, 0), self._reckoned[index] - outside_bytes
        if not 0 < touched <= most:
            touched = most = 0
        self._last = index if self._region.keep(touched, most) else None

    def _note(self) -> None:
        """What the part that ends has touched."""
        if self._last is not None and self._last not in self._touched:
            self._touched[self._last] = self._region.touched_bytes()

    def _reckoned_within(self, granted_bytes: int) -> Iterator[tuple[int, int]]:
        """The parts, and what the plan reckons with for all of their blocks beside weights: what
        the last works in, where all may have that in memory."""
        starts = [*sorted(self._starts), len(self.blocks)]
        kept = arena_kept(self.blocks)
        for start, end in pairwise(starts):
            raised = tuple(
                replace(block, working_bytes=kept[end - 1] + block.beside_bytes)
                if start <= index < end
                else block
                for index, block in enumerate(self.blocks)
            )
            if least_bytes(raised) <= granted_bytes:
                self.blocks = raised
            yield start, arena_kept(self.blocks)[start]
