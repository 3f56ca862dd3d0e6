"""What a stage costs on a device: the model that placement minimises.

A stage is a run of consecutive fragments `[start, end)` on one device, or on several that share
its items. Per item, a device computes `flops / speed`; what crosses the stage's border comes in
and goes out over the device's own link. A message is charged to both ends, which is what a relay
takes and an upper bound for a direct route; that way the cost of a stage depends on its own devices
alone. Computing, receiving and sending overlap between items, so that

    period  = max(compute + read + move, receive, send)   one item every so often, at length
    latency = compute + read + load + move + receive + send + delays             of one item
    after   = max(before, fetch) + latency                             of the first item, by stages

where `read` is weights that are read again, `load` what the first item waits for until fragments
are loaded, and `move` what the processor does to handle tasks and transfers. Where the rate between
two devices is known, it counts as soon as it is known who serves the other end (`Homes`); else each
end's own.

Replicas add their rates. Where a fragment's `work` is known, and a device's rates were measured,
computing takes the sum of the fragment's convolutions, products and traffic, each by its rate. Else
it takes its FLOPs, and where the memory's rate is known no less than reading the weights once, as
it does for a single word in a language model.

How a device holds its span follows from its budget (`Holding`):

- all fragments *whole*, where `resident_bytes` of all fit at once;
- else all of them *in blocks*, where `least_bytes` of all fit at once. What a fragment is granted
  between the two says how many of its weights stay in memory: with the least none, with all all of
  them, in between in proportion; the others are read again for each item. The bytes that remain
  go where each saves the most reading (`grants`); room for the activations of two items is left;
- else it *reloads* them: fragments are loaded and unloaded in turn; one that is alone stays. A
  fragment that is loaded serves all items that are admitted, so an item takes a part of a load
  (`items_in_turn`). These items come and go together: receiving overlaps with what the span's first
  fragment computes, and sending with the last one. Each fragment must fit by itself, at least in
  blocks. Where the device's disk has no room for all of them, each is fetched again for its turn.

What is held at once must have room on the device's disk together, what is reloaded one by one
(`disks`).

Where loads count (`cold`), the first item waits for those of each stage, one after the other: a
stage is loaded when the one before it has its first task. What a device does not have on its disk
is fetched and prepared before. It is fetched while the device has nothing else to do, so from the
beginning on, whatever the stages before it do. A replica takes items from when it has loaded, and
the period is the mean of the job's items.

Where it can, a device has room for the frames in which the next item comes and the one before
leaves while it runs the present one (`borders.frames_beside`); else these wait (`receives`).

Integers only: bytes and nanoseconds, rounded up. Where flops are unknown, resident bytes are used
for *balance*, and no time is predicted from them (`known`).
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from shoal_planner import loads
from shoal_planner.borders import Border, Borders
from shoal_planner.computing import Computing
from shoal_planner.device_costs import DeviceCost, Holding, Waits, after, mean_period, shared_period
from shoal_planner.devices import PER_MILLE, PoolDevice, Ratios
from shoal_planner.disks import Stored, has_room
from shoal_planner.grants import Grants, Room
from shoal_planner.links import NOWHERE, Homes, Transfer, between, over
from shoal_planner.loads import paged_bytes, time_of
from shoal_planner.ranges import Maxima, sums_of
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.turns import items_in_turn
from shoal_protocol.units import Bytes, Nanoseconds

_ITEMS_WAITING: Final = 2
"""A device that could fill its memory with weights leaves room for what so many items bring and
take away: the dispatcher gives it the second while it computes the first."""

_ByRate = Callable[[int, PoolDevice], int]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive fragments `[start, end)`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, fragment: int) -> bool:
        return self.start <= fragment < self.end

    @property
    def fragments(self) -> tuple[int, ...]:
        """Their indices in the partition, in order."""
        return tuple(range(self.start, self.end))


@dataclass(frozen=True, slots=True)
class Division:
    """A span with the devices that share its items."""

    span: Span
    devices: tuple[PoolDevice, ...]


class SpanCosts(ABC):
    """What a search asks: how a device would hold a span, and what the span costs there. Of a job
    of `loading_items` loads count; 0: they do not."""

    loading_items: int

    @property
    def cold(self) -> bool:
        """Whether loads count."""
        return self.loading_items > 0

    @property
    @abstractmethod
    def count(self) -> int:
        """Fragments in all."""

    @abstractmethod
    def resident(self, span: Span) -> Bytes:
        """What the span's fragments need together."""

    @abstractmethod
    def at_once(self, span: Span, device: PoolDevice) -> Holding | None:
        """How the device would hold all of the span at once; None: it cannot."""

    @abstractmethod
    def holding(self, span: Span, device: PoolDevice) -> Holding | None:
        """How the device would hold the span; None: a fragment has no room there by itself."""

    @abstractmethod
    def receives(self, span: Span, device: PoolDevice) -> bool:
        """Whether other items have room to come and go while the device, which holds the span, runs
        any of its fragments; else they wait on its disk."""

    def outgrows(self, span: Span, device: PoolDevice, *, in_turn: bool) -> bool:
        """Whether the device can hold neither the span, at once or in turn, nor one with more: by
        what is in it, whatever crosses its ends. It need not be found out."""
        del span, device, in_turn
        return False

    @abstractmethod
    def on(self, span: Span, device: PoolDevice, homes: Homes = NOWHERE) -> DeviceCost:
        """What an item of the span costs there, in nanoseconds; it must fit, at least fragment by
        fragment."""

    def period(self, division: Division) -> Nanoseconds:
        """One item every so often, from all the devices of a division together."""
        return self.together([self.on(division.span, each) for each in division.devices])

    def together(self, replicas: Sequence[DeviceCost]) -> Nanoseconds:
        """The period of replicas, by what a stage costs each."""
        if self.cold and len(replicas) > 1:
            return mean_period(replicas, self.loading_items)
        return shared_period([each.period for each in replicas])

    def waits(self, replicas: Sequence[DeviceCost]) -> Waits:
        """Of a stage, for the first item. Any of its devices may have it; but where loads count, it
        goes to the one that has loaded first."""
        if self.cold:
            return tuple({(each.fetch, each.latency) for each in replicas})
        return ((0, max(each.latency for each in replicas)),)

    def totals(self, divisions: Sequence[Division]) -> tuple[Nanoseconds, Nanoseconds]:
        """Period and latency of a whole pipeline."""
        homes, period, latency = homes_of(divisions), 0, 0
        for each in divisions:
            replicas = [self.on(each.span, device, homes) for device in each.devices]
            period = max(period, self.together(replicas))
            latency = after(latency, self.waits(replicas))
        return Nanoseconds(period), Nanoseconds(latency)


@dataclass(frozen=True)
class Costs(SpanCosts):
    """The costs of a partition's spans."""

    document: PartitionDocument
    loading_items: int = 0

    @property
    def count(self) -> int:
        return len(self.document.fragments)

    @cached_property
    def _computing(self) -> Computing:
        return Computing(self.document.fragments)

    @property
    def known(self) -> bool:
        """Whether computing times can be predicted."""
        return self._computing.known

    def cached_by(self, pool: Iterable[PoolDevice]) -> Mapping[str, frozenset[int]]:
        """The fragments that each device has on its disk, by its name."""
        return {
            device.name: frozenset(f.index for f in self.document.fragments if f.digest in cached)
            for device in pool
            if (cached := frozenset(device.cached))
        }

    def predictable(self, pool: Sequence[PoolDevice]) -> bool:
        """Whether times of this pool can be predicted: nothing that matters for them is unknown."""
        sizes = all(edge.bytes_per_item is not None for edge in self.document.edges)
        return self.known and (sizes or all(each.link_bytes_per_second is None for each in pool))

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Bytes of each fragment's weights."""
        return tuple(fragment.weight_bytes for fragment in self.document.fragments)

    @cached_property
    def _resident(self) -> list[int]:
        return sums_of([fragment.resident_bytes for fragment in self.document.fragments])

    @cached_property
    def _least(self) -> list[int]:
        return sums_of([fragment.least_bytes for fragment in self.document.fragments])

    @cached_property
    def _largest_least(self) -> Maxima:
        return Maxima([fragment.least_bytes for fragment in self.document.fragments])

    @cached_property
    def stored(self) -> Stored:
        """What fragments take of a disk."""
        return Stored(self.document.fragments)

    @cached_property
    def _grants(self) -> Grants:
        return Grants(self.document.fragments)

    @cached_property
    def _items_in_turn(self) -> int:
        return items_in_turn(map(self.document.output_bytes, range(self.count)))

    @cached_property
    def _borders(self) -> Borders:
        return Borders(self.document)

    def frames(self, span: Span) -> int:
        """What other items take on their way into the span and out of it, besides themselves."""
        return self.crossing(span).frames_bytes

    def resident(self, span: Span) -> Bytes:
        """What the span's fragments need together."""
        fragments = self._resident[span.end] - self._resident[span.start]
        return Bytes(fragments + self.frames(span))

    def least(self, span: Span) -> Bytes:
        """What the span's fragments need together, all of them in blocks."""
        return Bytes(self._least[span.end] - self._least[span.start] + self.frames(span))

    def least_in_turn(self, span: Span, *, waiting: bool) -> Bytes:
        """What they need one by one, each in blocks; `waiting`: without room for other items."""
        largest = self._largest_least.of(span.start, span.end)
        return Bytes(largest if waiting else largest + self.frames(span))

    def outgrows(self, span: Span, device: PoolDevice, *, in_turn: bool) -> bool:
        start, end = span.start, span.end
        if in_turn:
            least, stored = self._largest_least.of(start, end), self.stored.largest(start, end)
        elif device.single and len(span) > 1:
            return True
        else:
            least, stored = self._least[end] - self._least[start], self.stored.together(start, end)
        return least > device.budget_bytes or not has_room(device, stored)

    def at_once(self, span: Span, device: PoolDevice) -> Holding | None:
        if self.outgrows(span, device, in_turn=False):
            return None
        if self.resident(span) <= device.budget_bytes:
            return Holding.WHOLE
        return Holding.IN_BLOCKS if self.least(span) <= device.budget_bytes else None

    def holding(self, span: Span, device: PoolDevice) -> Holding | None:
        held = self.at_once(span, device)
        if held is not None or self.outgrows(span, device, in_turn=True):
            return held
        alone = Holding.WHOLE if self.least(span) == self.resident(span) else Holding.IN_BLOCKS
        return alone if len(span) == 1 else Holding.RELOADED

    def receives(self, span: Span, device: PoolDevice) -> bool:
        least, budget = self.least_in_turn(span, waiting=False), device.budget_bytes
        return least <= budget or self.at_once(span, device) is not None

    def grants(self, span: Span, device: PoolDevice) -> tuple[Bytes, ...]:
        """What each fragment of the span gets of the device's memory while it is resident."""
        held, room = self.at_once(span, device), self._room(span, device)
        return self._grants.of(span.start, span.end, held or Holding.RELOADED, room)

    def _paged(self, span: Span, device: PoolDevice, holding: Holding) -> int:
        return self._grants.paged(span.start, span.end, holding, self._room(span, device))

    def _room(self, span: Span, device: PoolDevice) -> Room:
        border = self.crossing(span)
        waiting = max(_ITEMS_WAITING * border.size_bytes, border.frames_bytes)
        return Room(device.budget_bytes, waiting)

    def _compute(self, span: Span, device: PoolDevice) -> int:
        """Nanoseconds of one item while all of the span is in memory."""
        if device.ratios:
            return self._in_sum(self.by_rates, span, device, device.ratios)
        return self._computing.by_rates(span.start, span.end, device)

    def _load(self, span: Span, device: PoolDevice) -> int:
        """Nanoseconds to make all of the span's fragments resident, one after the other."""
        return self._in_sum(self.load_by_rate, span, device, device.load_ratios)

    def _again(self, span: Span, device: PoolDevice) -> int:
        """Nanoseconds to fetch what a turn finds on the disk no more. What was used least recently
        is dropped, which is what comes next: where not all have room, none is there."""
        if has_room(device, self.stored.together(span.start, span.end)):
            return 0
        return self._in_sum(self._fetched_again, span, device)

    def _in_sum(self, by_rate: _ByRate, span: Span, device: PoolDevice, ratios: Ratios = ()) -> int:
        """What all of the span's fragments take on a device, corrected by ratios."""
        known = self._sums[by_rate.__name__]
        if (sums := known.get(device)) is None:
            ratio, parts = dict(ratios), []
            for each in self.document.fragments:
                corrected = by_rate(each.index, device) * ratio.get(each.digest, PER_MILLE)
                parts.append(corrected // PER_MILLE)
            sums = known[device] = sums_of(parts)
        return sums[span.end] - sums[span.start]

    @cached_property
    def _sums(self) -> defaultdict[str, dict[PoolDevice, list[int]]]:
        """Of what fragments take, by the name of what says it of one of them, and by devices."""
        return defaultdict(dict)

    def _fetched(self, fragment: int, device: PoolDevice) -> int:
        return loads.fetched(self.document.fragments[fragment], device)

    def _fetched_again(self, fragment: int, device: PoolDevice) -> int:
        return loads.fetched_again(self.document.fragments[fragment], device)

    def _prepared(self, fragment: int, device: PoolDevice) -> int:
        return loads.prepared(self.document.fragments[fragment], device)

    def load_by_rate(self, fragment: int, device: PoolDevice) -> int:
        """Nanoseconds to make a fragment resident from the disk cache, by the device's rates
        alone."""
        return loads.from_cache(self.document.fragments[fragment], device)

    def by_rates(self, fragment: int, device: PoolDevice) -> int:
        """What a task of a fragment takes by the device's rates alone."""
        return self._computing.by_rates(fragment, fragment + 1, device)

    def times(self, span: Span, device: PoolDevice) -> tuple[Nanoseconds, ...]:
        """What a task of each of the span's fragments takes there, transfers apart."""
        holding, granted = self.holding(span, device), self.grants(span, device)
        times = []
        for fragment, grant in zip(
            self.document.fragments[span.start : span.end], granted, strict=True
        ):
            time = self._compute(Span(fragment.index, fragment.index + 1), device)
            if holding is not Holding.WHOLE:
                time += time_of(paged_bytes(fragment, grant), device.page_bytes_per_second)
            times.append(Nanoseconds(time))
        return tuple(times)

    def at_grant(self, index: int, device: PoolDevice, granted_bytes: int) -> Nanoseconds:
        """What a task of a fragment takes there where it is granted so much, transfers apart."""
        paged = paged_bytes(self.document.fragments[index], granted_bytes)
        computed = self._compute(Span(index, index + 1), device)
        return Nanoseconds(computed + time_of(paged, device.page_bytes_per_second))

    def on(self, span: Span, device: PoolDevice, homes: Homes = NOWHERE) -> DeviceCost:
        compute = self._compute(span, device)
        holding = self.holding(span, device)
        assert holding is not None, f"{span} has no room on {device.name}"
        read, load, fetch, again = 0, 0, 0, 0
        match holding:
            case Holding.IN_BLOCKS:
                read = time_of(self._paged(span, device, holding), device.page_bytes_per_second)
            case Holding.RELOADED:
                again = self._again(span, device)
                in_turn = self._load(span, device) + again
                read = self._part_of_a_load(in_turn)
                load = in_turn - read
                read += time_of(self._paged(span, device, holding), device.page_bytes_per_second)
        if self.cold:
            fetch = 0 if again else self._in_sum(self._fetched, span, device)
            load += self._in_sum(self._prepared, span, device)
            if holding is not Holding.RELOADED:
                load += self._load(span, device)
        border = self.crossing(span)
        receive = self._transfer(span, device, homes, border.coming, inward=True)
        send = self._transfer(span, device, homes, border.going, inward=False)
        overlap = 0
        if holding is Holding.RELOADED:
            first, last = Span(span.start, span.start + 1), Span(span.end - 1, span.end)
            overlap += min(receive.duration, self._compute(first, device))
            overlap += min(send.duration, self._compute(last, device))
        return DeviceCost(
            holding=holding,
            compute=Nanoseconds(compute),
            read=Nanoseconds(read),
            fetch=Nanoseconds(fetch),
            load=Nanoseconds(load),
            move=self._move(span, device),
            receive=receive.duration,
            send=send.duration,
            delay=Nanoseconds(receive.delay + send.delay),
            overlap=Nanoseconds(overlap),
        )

    def _part_of_a_load(self, in_turn: int) -> int:
        """What an item takes of the loads of all fragments, which several items share. Of a job
        that begins with them, those that share the first ones wait for them as one."""
        together = self._items_in_turn
        if not self.cold:
            return -(-in_turn // together)
        further = -(-self.loading_items // together) - 1
        return -(-in_turn * further // max(1, self.loading_items - 1))

    def _move(self, span: Span, device: PoolDevice) -> Nanoseconds:
        """What the processor does besides computing."""
        border, rate = self.crossing(span), device.moved_bytes_per_second
        handled = len(span) + border.transfers
        moved = time_of(border.size_bytes, rate) if rate else 0
        return Nanoseconds(handled * device.handling_nanoseconds + moved)

    def _transfer(
        self, span: Span, device: PoolDevice, homes: Homes, size: int | None, *, inward: bool
    ) -> Transfer:
        """What comes into the span or goes out of it, over the device's links."""
        if size is None or not homes:
            return over(device.link, size)
        edges = self._borders.into if inward else self._borders.out_of
        mine = [edge for index in span.fragments for edge in edges[index]]
        return between(device, mine, span.fragments, homes, inward=inward)

    def crossing(self, span: Span) -> Border:
        """What crosses the ends of a span. Where an edge of unknown size matters, `predictable` is
        False."""
        return self._borders.of(span.start, span.end)


def homes_of(divisions: Sequence[Division]) -> Homes:
    """Who serves each fragment, if that says anything about the links between them."""
    if not any(device.peers for division in divisions for device in division.devices):
        return NOWHERE
    return {index: each.devices for each in divisions for index in each.span.fragments}
