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
    take `frames_bytes` besides themselves (`frames_beside`)."""

    coming: int | None
    going: int | None
    transfers: int
    frames_bytes: int

    @property
    def size_bytes(self) -> int:
        return (self.coming or 0) + (self.going or 0)


def frames_beside(coming_bytes: int, going_bytes: int) -> int:
    """What the frames take that carry one item to a device and another away from it, beside what it
    runs. Who cuts a model for one device and who places its fragments there both ask here, so that
    what one finds room for has room for the other."""
    return received_frame_bytes(coming_bytes) + frame_bytes(going_bytes)


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
            frames = frames_beside(coming.at_once_bytes, going.at_once_bytes)
            yield Border(coming.bytes, going.bytes, coming.transfers + going.transfers, frames)


class _Crossing:
    """Edges that cross an end of a span."""

    def __init__(self) -> None:
        self._edges = self._bytes = self.transfers = 0
        self._inputs_bytes = self._largest_inputs_bytes = 0

    def add(self, edge: Edge, count: int = 1) -> None:
        self._edges += count
        self._bytes += count * (edge.bytes_per_item or 0)
        self.transfers += count * _is_transfer(edge)
        if edge.producer == MODEL:
            size = edge.bytes_per_item or 0
            self._inputs_bytes += size
            self._largest_inputs_bytes = max(self._largest_inputs_bytes, size)

    @property
    def bytes(self) -> int | None:
        """None: there is none."""
        return self._bytes if self._edges else None

    @property
    def at_once_bytes(self) -> int:
        """What of an item may be under way together. The model's inputs are read again for each
        fragment that takes them, when its turn comes: those of one fragment are."""
        return self._bytes - self._inputs_bytes + self._largest_inputs_bytes


def _by(end: Callable[[Edge], int], edges: Iterable[Edge]) -> Mapping[int, Sequence[Edge]]:
    found: defaultdict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        found[end(edge)].append(edge)
    return found


def _is_transfer(edge: Edge) -> bool:
    """Small inputs and results of a model travel with the instruction, and with its reply."""
    return MODEL not in {edge.producer, edge.consumer} or (edge.bytes_per_item or 0) > INLINE_BYTES
