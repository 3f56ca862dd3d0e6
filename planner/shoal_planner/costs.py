"""What a stage costs on a device: the model that placement minimises.

A stage is a run of consecutive fragments `[start, end)` on one device, or on several that share
its items. Per item, a device computes `flops / speed`; what crosses the stage's border comes in
and goes out over the device's own link. A message is charged to both ends, which is what a relay
takes and an upper bound for a direct route; that way the cost of a stage depends on its own devices
alone. Computing, receiving and sending overlap between items, so that

    period  = max(compute + read, receive, send)         one item every so often, in the long run
    latency = compute + read + receive + send + delays   of one item

where `read` is weights that are read again.

Replicas add their rates.

How a device holds its span follows from its budget (`Holding`):

- all fragments *whole*, where `resident_bytes` of all fit at once;
- else all of them *in blocks*, where `least_bytes` of all fit at once. What a fragment is granted
  between the two says how many of its weights stay in memory: with the least none, with all all of
  them, in between in proportion; the others are read again for each item, from the page cache.
  The bytes that remain go where each saves the most reading (`grants`), which is the best there
  is, since the saving grows in proportion; room for the activations of two items is left;
- else it *reloads* them: fragments are loaded and unloaded in turn, and for each item all weights
  are read from disk and prepared again. Each fragment must fit by itself, at least in blocks.

In each way there is room for the frames in which the next item comes and the one before leaves:
both go on while a device runs the present one.

Integers only: bytes and nanoseconds, rounded up. Where a fragment's flops are unknown, its
resident bytes are used for *balance*, and no time is predicted from them (`known`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Final

from shoal_protocol.frame_sizes import frame_bytes, received_frame_bytes
from shoal_protocol.partition import Edge, Fragment, PartitionDocument
from shoal_protocol.units import NANOSECONDS_PER_SECOND, Bytes, Nanoseconds

ASSUMED_FLOPS_PER_CPU: Final = 8_000_000_000
"""Until a device is measured: what one core of a small ARM board does in ONNX Runtime."""

RELOAD_BYTES_PER_SECOND: Final = 200_000_000
"""A fragment's weights from the disk cache, prepared again; an SD card is slower, a page cache
faster."""

PAGE_BYTES_PER_SECOND: Final = 2_000_000_000
"""Weights that are mapped again from the page cache: what a small board does, a PC is ten times as
fast. A cache that has lost them reads the disk."""

_ITEMS_WAITING: Final = 2
"""A device that could fill its memory with weights leaves room for what so many items bring and
take away: the dispatcher gives it the second while it computes the first."""
_NOISE: Final = 16
"""One part in so many of a budget is not granted to weights: what the transport takes varies,
by 0.6 MiB under load."""

_SCALE: Final = 10**24


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDevice:
    """A device as planning sees it. A link of None never limits; `single` is residency Single."""

    name: str
    budget_bytes: Bytes
    flops_per_second: int = ASSUMED_FLOPS_PER_CPU
    link_bytes_per_second: int | None = None
    latency_nanoseconds: Nanoseconds = Nanoseconds(0)
    single: bool = False

    def __post_init__(self) -> None:
        assert self.flops_per_second > 0, f"{self.name} computes nothing"
        assert self.link_bytes_per_second is None or self.link_bytes_per_second > 0, self.name


class Holding(StrEnum):
    """How a device holds the fragments of a span; the module's text says when it is which."""

    WHOLE = "whole"
    IN_BLOCKS = "in blocks"
    RELOADED = "reloaded"


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive fragments `[start, end)`."""

    start: int
    end: int

    @property
    def fragments(self) -> tuple[int, ...]:
        return tuple(range(self.start, self.end))


@dataclass(frozen=True, slots=True)
class Division:
    """A span with the devices that share its items."""

    span: Span
    devices: tuple[PoolDevice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCost:
    """What one item of a span costs on one device. `read` is weights, from the page cache or, where
    fragments are reloaded, from the disk; `delay` is the links' latency."""

    holding: Holding
    compute: Nanoseconds
    read: Nanoseconds
    receive: Nanoseconds
    send: Nanoseconds
    delay: Nanoseconds

    @property
    def busy(self) -> Nanoseconds:
        """How long the processor has to do with an item."""
        return Nanoseconds(self.compute + self.read)

    @property
    def transfer(self) -> Nanoseconds:
        return Nanoseconds(self.receive + self.send + self.delay)

    @property
    def period(self) -> Nanoseconds:
        return Nanoseconds(max(self.busy, self.receive, self.send, 1))

    @property
    def latency(self) -> Nanoseconds:
        return Nanoseconds(self.busy + self.transfer)


@dataclass(frozen=True)
class Costs:
    """The costs of a partition's spans."""

    document: PartitionDocument

    @cached_property
    def known(self) -> bool:
        """Whether all flops are known, so that computing times can be predicted."""
        return all(fragment.flops is not None for fragment in self.document.fragments)

    def predictable(self, pool: Sequence[PoolDevice]) -> bool:
        """Whether times of this pool can be predicted: nothing that matters for them is unknown."""
        sizes = all(edge.bytes_per_item is not None for edge in self.document.edges)
        return self.known and (sizes or all(each.link_bytes_per_second is None for each in pool))

    @cached_property
    def _work(self) -> list[int]:
        fragments = self.document.fragments
        if self.known:
            return _sums([fragment.flops or 0 for fragment in fragments])
        return _sums([fragment.resident_bytes for fragment in fragments])

    @cached_property
    def _resident(self) -> list[int]:
        return _sums([fragment.resident_bytes for fragment in self.document.fragments])

    @cached_property
    def _least(self) -> list[int]:
        return _sums([fragment.least_bytes for fragment in self.document.fragments])

    @cached_property
    def _order_of_grants(self) -> list[int]:
        """The place of each fragment when spare bytes are granted: who saves most goes first."""
        savers = sorted(self.document.fragments, key=_saving_per_byte, reverse=True)
        places = {each.index: place for place, each in enumerate(savers)}
        return [places[index] for index in range(len(places))]

    @cached_property
    def _weights(self) -> list[int]:
        return _sums([fragment.weight_bytes for fragment in self.document.fragments])

    @cached_property
    def _crossing(self) -> dict[int, list[tuple[int | None, int | None]]]:
        return {}

    def frames(self, span: Span) -> int:
        """What other items take on their way into the span and out of it, besides themselves."""
        coming, going = self.crossing(span)
        return received_frame_bytes(coming or 0) + frame_bytes(going or 0)

    def resident(self, span: Span) -> Bytes:
        """What the span's fragments need together."""
        fragments = self._resident[span.end] - self._resident[span.start]
        return Bytes(fragments + self.frames(span))

    def least(self, span: Span) -> Bytes:
        """What the span's fragments need together, all of them in blocks."""
        return Bytes(self._least[span.end] - self._least[span.start] + self.frames(span))

    def least_in_turn(self, span: Span) -> Bytes:
        """What the span's fragments need one by one, each in blocks."""
        fragments = self.document.fragments[span.start : span.end]
        return Bytes(max(each.least_bytes for each in fragments) + self.frames(span))

    def at_once(self, span: Span, device: PoolDevice) -> Holding | None:
        """How the device would hold all of the span at once; None: it cannot."""
        if device.single and span.end - span.start > 1:
            return None
        if self.resident(span) <= device.budget_bytes:
            return Holding.WHOLE
        return Holding.IN_BLOCKS if self.least(span) <= device.budget_bytes else None

    def holding(self, span: Span, device: PoolDevice) -> Holding | None:
        """How the device would hold the span; None: a fragment has no room there by itself."""
        fits = self.least_in_turn(span) <= device.budget_bytes
        return self.at_once(span, device) or (Holding.RELOADED if fits else None)

    def grants(self, span: Span, device: PoolDevice) -> tuple[Bytes, ...]:
        """What each fragment of the span gets of the device's memory while it is resident."""
        fragments = self.document.fragments[span.start : span.end]
        held = self.at_once(span, device)
        if held is Holding.WHOLE:
            return tuple(Bytes(each.resident_bytes) for each in fragments)
        waiting = max(_ITEMS_WAITING * sum(filter(None, self.crossing(span))), self.frames(span))
        room = device.budget_bytes - max(waiting, device.budget_bytes // _NOISE)
        if held is None:
            return tuple(
                Bytes(
                    each.resident_bytes
                    if each.resident_bytes <= device.budget_bytes - waiting
                    else max(each.least_bytes, room)
                )
                for each in fragments
            )
        granted = {each.index: each.least_bytes for each in fragments}
        spare = max(0, room - sum(granted.values()))
        for each in sorted(fragments, key=lambda each: self._order_of_grants[each.index]):
            more = min(spare, each.resident_bytes - each.least_bytes)
            granted[each.index] += more
            spare -= more
        return tuple(map(Bytes, granted.values()))

    def _paged(self, span: Span, device: PoolDevice) -> int:
        fragments = self.document.fragments[span.start : span.end]
        return sum(map(paged_bytes, fragments, self.grants(span, device)))

    def on(self, span: Span, device: PoolDevice) -> DeviceCost:
        """What the span costs there; it must fit, at least fragment by fragment."""
        work = self._work[span.end] - self._work[span.start]
        compute = _time(work, device.flops_per_second)
        holding = self.holding(span, device)
        assert holding is not None, f"{span} has no room on {device.name}"
        match holding:
            case Holding.IN_BLOCKS:
                read = _time(self._paged(span, device), PAGE_BYTES_PER_SECOND)
            case Holding.RELOADED:
                weights = self._weights[span.end] - self._weights[span.start]
                read = _time(weights, RELOAD_BYTES_PER_SECOND)
            case Holding.WHOLE:
                read = 0
        receive, send, delays = 0, 0, 0
        for number, crossing in enumerate(self.crossing(span)):
            if crossing is None:
                continue
            delays += device.latency_nanoseconds
            link = device.link_bytes_per_second
            duration = _time(crossing, link) if link else 0
            receive, send = (duration, send) if number == 0 else (receive, duration)
        return DeviceCost(
            holding=holding,
            compute=Nanoseconds(compute),
            read=Nanoseconds(read),
            receive=Nanoseconds(receive),
            send=Nanoseconds(send),
            delay=Nanoseconds(delays),
        )

    def period(self, division: Division) -> Nanoseconds:
        """One item every so often, from all the devices of a division together."""
        return shared_period([self.on(division.span, each).period for each in division.devices])

    def totals(self, divisions: Sequence[Division]) -> tuple[Nanoseconds, Nanoseconds]:
        """Period and latency of a whole pipeline; of replicas, the slowest one's latency."""
        latency = sum(
            max(self.on(division.span, each).latency for each in division.devices)
            for division in divisions
        )
        return Nanoseconds(max(map(self.period, divisions))), Nanoseconds(latency)

    def crossing(self, span: Span) -> tuple[int | None, int | None]:
        """Bytes per item into the span and out of it; None: nothing crosses there.

        An edge of unknown size counts as empty here; where that matters, `predictable` is False.
        """
        if span.start not in self._crossing:
            self._crossing[span.start] = self._crossings_from(span.start)
        return self._crossing[span.start][span.end - span.start - 1]

    def _crossings_from(self, start: int) -> list[tuple[int | None, int | None]]:
        """For the spans that begin at `start`, by end: one more fragment turns the edges into it
        from border into inside, or adds to what comes in; its own edges go out."""
        coming: list[int] = []
        going: dict[Edge, int] = {}
        crossings: list[tuple[int | None, int | None]] = []
        for index in range(start, len(self.document.fragments)):
            for edge in self._into[index]:
                if edge.producer < start:
                    coming.append(edge.bytes_per_item or 0)
                else:
                    del going[edge]
            going.update((edge, edge.bytes_per_item or 0) for edge in self._out_of[index])
            into = sum(coming) if coming else None
            crossings.append((into, sum(going.values()) if going else None))
        return crossings

    @cached_property
    def _into(self) -> list[tuple[Edge, ...]]:
        return [self.document.into(fragment.index) for fragment in self.document.fragments]

    @cached_property
    def _out_of(self) -> list[tuple[Edge, ...]]:
        return [self.document.out_of(fragment.index) for fragment in self.document.fragments]


def shared_period(periods: Sequence[int]) -> Nanoseconds:
    """The period of replicas that share the items as fast as each can: their rates added."""
    if len(periods) == 1:
        return Nanoseconds(periods[0])
    return Nanoseconds(max(1, _SCALE // sum(_SCALE // period for period in periods)))


def _saving_per_byte(fragment: Fragment) -> Fraction:
    """Weights that need not be read again, for each byte that is granted beyond the least."""
    swapped = fragment.resident_bytes - fragment.least_bytes
    return Fraction(fragment.weight_bytes, swapped) if swapped else Fraction(0)


def paged_bytes(fragment: Fragment, granted: int) -> int:
    """Weights of a fragment that are read again for each item, by what it is granted."""
    lacking = fragment.resident_bytes - granted
    swapped = fragment.resident_bytes - fragment.least_bytes
    return -(-fragment.weight_bytes * lacking // swapped) if lacking else 0


def _time(amount: int, per_second: int) -> int:
    return -(-amount * NANOSECONDS_PER_SECOND // per_second)


def _sums(amounts: list[int]) -> list[int]:
    return [0, *accumulate(amounts)]
