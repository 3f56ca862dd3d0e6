"""How much memory an arena takes for a sequence of allocations. Pure.

ONNX Runtime allocates activations in an arena of regions (`shoal_protocol.arena_regions`): a small
one, a large one, each further one twice as large. Of a region only what was touched is
resident, and nothing is given back while a model runs. An allocation takes the smallest free chunk
that suffices (the untouched end of a region is one as well), of which the rest is split off unless
it is next to nothing; freed neighbours join. What counts is how far up each region was ever
touched, and the tables that the arena keeps of a region. Tensors of changing sizes leave holes, so
that is more than the most that is alive at once, and this replays it: counting live bytes alone
came out up to 40 % short for text recognition and detection.

On a device with little memory the first large region is smaller than here, and so is its table. It
has more room still than there is memory, so that tensors lie as they do here.

Items that follow find all regions, and free. Each region is at least as large as those before it,
so they take the same chunks as the first, but for regions of one size: which of them is taken first
is a matter of addresses. So each of these counts as far up as any of them was touched.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from shoal_planner.profile import NodeProfile
from shoal_protocol.arena_regions import (
    MORE_THAN_BUDGET,
    REGION_BYTES,
    SMALL_REGION_BYTES,
    TABLE_SHARE,
    UNSPLIT_BYTES,
)

ARENA_MARGIN: Final = 8
"""The estimate adds one part in so many: the runtime frees in a slightly different order."""
ARENA_BYTES: Final = 1 << 20
"""Comes with the arena once it is in use at all, besides its tables."""
SMALL_BYTES: Final = 64 << 10
"""Up to here activations fit into what the idle agent holds."""
TABLE_BYTES: Final = 1 << 20
"""What the table of the first large region counts as; see `more_of_table_bytes`."""
_GRANULE: Final = 256


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of a region; its neighbours in memory."""

    size: int
    number: int
    region: int
    offset: int
    free: bool = False
    before: "Chunk | None" = None
    after: "Chunk | None" = None


@dataclass(slots=True)
class Arena:
    """`total_bytes` is how far up all regions were ever touched, with their tables. `_reached` is
    that of regions by their size. Of `_free` chunks there are size and number."""

    total_bytes: int = 0
    _free: list[tuple[int, int, Chunk]] = field(default_factory=list)
    _regions: list[int] = field(default_factory=list)
    _reached: dict[int, int] = field(default_factory=dict)
    _next_region_bytes: int = REGION_BYTES
    _numbers: int = 0

    def __post_init__(self) -> None:
        self._add_region(SMALL_REGION_BYTES)  # which the idle agent has

    def allocate(self, size: int) -> Chunk:
        """Take a chunk of at least `size` bytes."""
        wanted = -(-size // _GRANULE) * _GRANULE or _GRANULE
        index = bisect_left(self._free, (wanted,))
        if index == len(self._free):
            self._extend(wanted)
            index = bisect_left(self._free, (wanted,))
        found = self._free.pop(index)[2]
        found.free = False
        if found.size - wanted >= min(wanted, UNSPLIT_BYTES):
            self._split(found, wanted)
        self._touch(found)
        return found

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back to the arena."""
        if chunk.after is not None and chunk.after.free:
            self._withdraw(chunk.after)
            self._join(chunk, chunk.after)
        if chunk.before is not None and chunk.before.free:
            chunk, second = chunk.before, chunk
            self._withdraw(chunk)
            self._join(chunk, second)
        self._offer(chunk)

    def most_bytes(self, sizes: tuple[int, ...]) -> int | None:
        """What `total_bytes` grows by at most with blocks of these sizes, wherever they come to
        lie. None: they may need several further regions."""
        touched = workspace_bytes(tuple(filter(None, sizes)))
        if self.total_bytes + touched <= REGION_BYTES:
            return touched
        # What is left of a chunk goes with it if it is little, and two regions may have one size.
        taken = 2 * sum(size + min(size, UNSPLIT_BYTES) + _GRANULE for size in sizes if size)
        if not taken or taken <= self._free[-1][0]:
            return taken
        further = self._next_region_bytes
        return taken + self._region_bytes(further) if taken <= further else None

    def _region_bytes(self, size: int) -> int:
        """What one more region of a size counts as before anything lies there."""
        table = TABLE_BYTES if size == REGION_BYTES else size // TABLE_SHARE
        return self._reached.get(size, 0) + table

    def _extend(self, wanted: int) -> None:
        """Add a region that has room for so many bytes."""
        size = self._next_region_bytes
        while wanted > size:
            size *= 2
        # A region that had to be doubled is not doubled once more for the next one.
        self._next_region_bytes = max(size, 2 * self._next_region_bytes)
        self.total_bytes += self._region_bytes(size)
        self._add_region(size)

    def _add_region(self, size: int) -> None:
        self._offer(self._new(size, region=len(self._regions), offset=0))
        self._regions.append(size)
        self._reached.setdefault(size, 0)

    def _touch(self, chunk: Chunk) -> None:
        size = self._regions[chunk.region]
        beyond = chunk.offset + chunk.size - self._reached[size]
        if beyond > 0:
            self._reached[size] += beyond
            self.total_bytes += beyond * self._regions.count(size)

    def _split(self, chunk: Chunk, size: int) -> None:
        rest = self._new(chunk.size - size, chunk.region, chunk.offset + size)
        rest.before, rest.after = chunk, chunk.after
        if chunk.after is not None:
            chunk.after.before = rest
        chunk.after = rest
        chunk.size = size
        self._offer(rest)

    def _new(self, size: int, region: int, offset: int) -> Chunk:
        self._numbers += 1
        return Chunk(size, self._numbers, region, offset)

    def _join(self, first: Chunk, second: Chunk) -> None:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first

    def _offer(self, chunk: Chunk) -> None:
        chunk.free = True
        insort(self._free, (chunk.size, chunk.number, chunk))

    def _withdraw(self, chunk: Chunk) -> None:
        chunk.free = False
        del self._free[bisect_left(self._free, (chunk.size, chunk.number))]


def more_of_table_bytes(resident_bytes: int) -> int:
    """What the table of the first large region takes besides `TABLE_BYTES` on a device that has
    room for no more than so much: the region is as large as the budget asks for. With more room,
    that is for the rest of the table; and each further fragment has `TABLE_BYTES` of its own, of
    which no more than one is there."""
    more, of = MORE_THAN_BUDGET + 1, MORE_THAN_BUDGET * TABLE_SHARE
    beyond = max(0, more * resident_bytes - of * TABLE_BYTES) // (of - more)
    return min(beyond, REGION_BYTES // TABLE_SHARE - TABLE_BYTES)


def arena_bytes(touched_bytes: int, beside_bytes: int = 0) -> int:
    """What an arena comes to that was replayed up to so many bytes, with what is taken beside it,
    for which it has no room: it gives nothing back."""
    arena = touched_bytes + touched_bytes // ARENA_MARGIN
    return beside_bytes + (arena + ARENA_BYTES if arena > SMALL_BYTES else arena)


@dataclass(slots=True)
class Tensors:
    """Tensors in an arena, by name, as nodes make them and let them go; with a size each.
    `beside_bytes` is the most that a node took beside the arena, `alone_bytes` how far up it is
    touched where that has nothing but what a node works in: what the node gives may lie outside."""

    arena: Arena
    beside_bytes: int = 0
    alone_bytes: int = 0
    held: dict[str, tuple[Chunk, int]] = field(default_factory=dict)

    @property
    def touched_bytes(self) -> int:
        """How far up the arena was touched."""
        return max(self.arena.total_bytes, self.alone_bytes)

    def run(
        self,
        node: NodeProfile,
        made: Iterable[tuple[str, int]],
        dying: Iterable[str],
        needed: Container[str],
    ) -> None:
        """A node runs that makes tensors of so many bytes and is the last to need `dying`. Of what
        it makes, what nobody else needs is let go when it has run."""
        held, arena = self.held, self.arena
        converted = [arena.allocate(size) for size in node.converted]
        ends = {name: held.pop(name) for name in dying if name in held} if dying else {}
        unneeded = []
        for name, size in made:
            chunk = None
            if node.in_place:
                for other, (place, other_size) in ends.items():
                    if other_size == size:
                        del ends[other]
                        chunk = place
                        break
            if chunk is None:
                chunk = arena.allocate(size)
            if name in needed:
                held[name] = (chunk, size)
            else:
                unneeded.append(chunk)
        if node.converted or node.workspaces:
            self._work(node)
        self.beside_bytes = max(self.beside_bytes, node.beside_bytes)
        for chunk in (*unneeded, *converted, *(chunk for chunk, _ in ends.values())):
            arena.release(chunk)

    def _work(self, node: NodeProfile) -> None:
        """Take what the node works in, and give it back."""
        for chunk in [self.arena.allocate(size) for size in node.workspaces]:
            self.arena.release(chunk)
        self.alone_bytes = max(self.alone_bytes, workspace_bytes(node.works_in))

    def settled(self) -> dict[str, tuple[Chunk, int]]:
        """What is left."""
        return self.held

    def hold(self, name: str, size: int) -> None:
        """Make a tensor that no node here makes."""
        self.held[name] = (self.arena.allocate(size), size)

    def release(self, name: str) -> None:
        """Let a tensor go."""
        self.arena.release(self.held.pop(name)[0])


@cache
def workspace_bytes(sizes: tuple[int, ...]) -> int:
    """How far up an arena is touched that has nothing but blocks of these sizes."""
    arena = Arena()
    for size in sizes:
        arena.allocate(size)
    return arena.total_bytes
