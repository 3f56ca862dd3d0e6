"""How much memory an arena takes for a sequence of allocations. Pure.

ONNX Runtime allocates activations in an arena, which the agent gives one large region of which only
what is touched is resident, and which gives nothing back while a model runs: best fit among free
chunks, a chunk is split unless next to nothing would be left of it, freed neighbours join. What
counts is how far up it was ever touched. Tensors of changing sizes leave holes, so that is more
than the most that is alive at once, and this replays it: counting live bytes alone came out up to
40 % short for text recognition and detection.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Final

_GRANULE: Final = 256
_UNSPLIT: Final = 64 << 10


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of the region; its neighbours in memory."""

    size: int
    number: int
    free: bool = False
    before: "Chunk | None" = None
    after: "Chunk | None" = None


@dataclass(slots=True)
class Arena:
    """`total_bytes` is how far up the region was ever touched."""

    total_bytes: int = 0
    _free: list[tuple[int, int]] = field(default_factory=list)
    _chunks: dict[int, Chunk] = field(default_factory=dict)
    _last: Chunk | None = None
    _numbers: int = 0

    def allocate(self, size: int) -> Chunk:
        """Take a chunk of at least `size` bytes."""
        wanted = max(1, -(-size // _GRANULE)) * _GRANULE
        index = bisect_left(self._free, (wanted, 0))
        if index == len(self._free):
            return self._extend(wanted)
        found = self._chunks[self._free[index][1]]
        self._withdraw(found)
        if found.size - wanted >= min(wanted, _UNSPLIT):
            rest = self._new(found.size - wanted, before=found)
            found.size = wanted
            self._offer(rest)
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

    def _extend(self, wanted: int) -> Chunk:
        """Take what is free at the upper end, and go on above it."""
        last = self._last
        if last is None or not last.free:
            self.total_bytes += wanted
            return self._new(wanted, before=last)
        self._withdraw(last)
        self.total_bytes += wanted - last.size
        last.size = wanted
        return last

    def _new(self, size: int, before: Chunk | None) -> Chunk:
        self._numbers += 1
        chunk = self._chunks[self._numbers] = Chunk(size, self._numbers, before=before)
        if before is not None:
            chunk.after = before.after
            before.after = chunk
        if chunk.after is None:
            self._last = chunk
        else:
            chunk.after.before = chunk
        return chunk

    def _join(self, first: Chunk, second: Chunk) -> None:
        first.size += second.size
        first.after = second.after
        if first.after is None:
            self._last = first
        else:
            first.after.before = first
        del self._chunks[second.number]

    def _offer(self, chunk: Chunk) -> None:
        chunk.free = True
        insort(self._free, (chunk.size, chunk.number))

    def _withdraw(self, chunk: Chunk) -> None:
        chunk.free = False
        del self._free[bisect_left(self._free, (chunk.size, chunk.number))]


@dataclass(slots=True)
class Tensors:
    """Tensors in an arena, by name, as nodes make them and let them go; with a size each."""

    arena: Arena
    held: dict[str, tuple[Chunk, int]] = field(default_factory=dict)

    def run(
        self,
        made: Iterable[tuple[str, int]],
        dying: Iterable[str],
        needed: Container[str],
        in_place: bool,
        workspace_bytes: int,
    ) -> None:
        """A node runs that makes tensors of so many bytes and is the last to need `dying`. Of what
        it makes, what nobody else needs is let go at once."""
        held, arena = self.held, self.arena
        ends = {name: held.pop(name) for name in dying if name in held}
        for name, size in made:
            chunk = None
            if in_place:
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
                arena.release(chunk)
        if workspace_bytes:
            arena.release(arena.allocate(workspace_bytes))
        for chunk, _ in ends.values():
            arena.release(chunk)

    def release(self, name: str) -> None:
        """Let a tensor go."""
        self.arena.release(self.held.pop(name)[0])
