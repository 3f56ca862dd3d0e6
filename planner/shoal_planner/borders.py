"""What crosses the ends of spans of consecutive fragments, for each item."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from shoal_protocol.frame_sizes import INLINE_BYTES, frame_bytes, received_frame_bytes
from shoal_protocol.partition import MODEL, Edge, PartitionDocument


class Border(NamedTuple):
    """Bytes into a span and out of it, where None says that nothing crosses there; and in how many
    transfers. An edge of unknown size counts as empty. The frames that carry other items over both
    take `frames_bytes` besides themselves."""

    coming: int | None
    going: int | None
    transfers: int
    frames_bytes: int

    @property
    def size_bytes(self) -> int:
        return (self.coming or 0) + (self.going or 0)


class Borders:
    """Of all spans of a document."""

    def __init__(self, document: PartitionDocument) -> None:
        self._edges, self._count = document.edges, len(document.fragments)
        self._known: list[list[Border]] = [[] for _ in document.fragments]
        self._further = [self._starting(start) for start in range(self._count)]

    def of(self, start: int, end: int) -> Border:
        """Of the fragments `[start, end)`."""
        known, number = self._known[start], end - start
        if len(known) < number:
            known.extend(islice(self._further[start], number - len(known)))
        return known[number - 1]

    @cached_property
    def into(self) -> Mapping[int, Sequence[Edge]]:
        """The edges into each fragment."""
        return _by(attrgetter("consumer"), self._edges)

    @cached_property
    def out_of(self) -> Mapping[int, Sequence[Edge]]:
        """The edges out of each fragment."""
        return _by(attrgetter("producer"), self._edges)

    def _starting(self, start: int) -> Iterator[Border]:
        """For the spans that begin at `start`, by end: one more fragment turns the edges into it
        from border into inside, or adds to what comes in; its own edges go out."""
        coming, going = _Crossing(), _Crossing()
        for index in range(start, self._count):
            for edge in self.into[index]:
                if edge.producer < start:
                    coming.add(edge)
                else:
                    going.add(edge, -1)
            for edge in self.out_of[index]:
                going.add(edge)
            frames = received_frame_bytes(coming.bytes or 0) + frame_bytes(going.bytes or 0)
            yield Border(coming.bytes, going.bytes, coming.transfers + going.transfers, frames)


class _Crossing:
    """Edges that cross an end of a span."""

    def __init__(self) -> None:
        self._edges = self._bytes = self.transfers = 0

    def add(self, edge: Edge, count: int = 1) -> None:
        self._edges += count
        self._bytes += count * (edge.bytes_per_item or 0)
        self.transfers += count * _is_transfer(edge)

    @property
    def bytes(self) -> int | None:
        """None: there is none."""
        return self._bytes if self._edges else None


def _by(end: Callable[[Edge], int], edges: Iterable[Edge]) -> Mapping[int, Sequence[Edge]]:
    found: defaultdict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        found[end(edge)].append(edge)
    return found


def _is_transfer(edge: Edge) -> bool:
    """Small inputs and results of a model travel with the instruction, and with its reply."""
    return MODEL not in {edge.producer, edge.consumer} or (edge.bytes_per_item or 0) > INLINE_BYTES
