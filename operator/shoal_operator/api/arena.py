"""How much memory an arena takes for a sequence of allocations. Pure.

ONNX Runtime allocates activations in an arena that grows by what is asked for and gives nothing
back while a model runs: best fit among free chunks, a chunk is split when it is at least twice what
is asked for, freed neighbours of one region join. So a model whose tensors change size needs more
than the most that is alive at once, and this replays it: counting live bytes alone came out 40 %
short for text recognition and detection.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final

_GRANULE: Final = 256


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of a region; its neighbours in memory."""

    size: int
    number: int
    free: bool = False
    before: "Chunk | None" = None
    after: "Chunk | None" = None


@dataclass(slots=True)
class Arena:
    """`total_bytes` is what the arena has taken from the system; it never shrinks."""

    total_bytes: int = 0
    _free: list[tuple[int, int]] = field(default_factory=list)
    _chunks: dict[int, Chunk] = field(default_factory=dict)
    _numbers: int = 0

    def allocate(self, size: int) -> Chunk:
        """Take a chunk of at least `size` bytes."""
        wanted = max(1, -(-size // _GRANULE)) * _GRANULE
        index = bisect_left(self._free, (wanted, 0))
        if index == len(self._free):
            self.total_bytes += wanted
            return self._new(wanted)
        found = self._chunks[self._free.pop(index)[1]]
        found.free = False
        if found.size >= 2 * wanted:
            rest = self._new(found.size - wanted)
            found.size = wanted
            rest.before, rest.after = found, found.after
            if rest.after is not None:
                rest.after.before = rest
            found.after = rest
            self._offer(rest)
        return found

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back to the arena."""
        if chunk.after is not None and chunk.after.free:
            self._join(chunk, chunk.after)
        if chunk.before is not None and chunk.before.free:
            chunk, second = chunk.before, chunk
            self._withdraw(chunk)
            self._join(chunk, second)
        self._offer(chunk)

    def _new(self, size: int) -> Chunk:
        self._numbers += 1
        chunk = self._chunks[self._numbers] = Chunk(size, self._numbers)
        return chunk

    def _join(self, first: Chunk, second: Chunk) -> None:
        if second.free:
            self._withdraw(second)
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        del self._chunks[second.number]

    def _offer(self, chunk: Chunk) -> None:
        chunk.free = True
        insort(self._free, (chunk.size, chunk.number))

    def _withdraw(self, chunk: Chunk) -> None:
        chunk.free = False
        del self._free[bisect_left(self._free, (chunk.size, chunk.number))]
