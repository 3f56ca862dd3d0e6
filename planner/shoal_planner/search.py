"""The best division of a chain of fragments into stages on devices.

Theory. A division cuts the fragments, in topological order, into spans, and gives each span a
non-empty set of devices of its own. Its period is the largest of its spans', its latency the sum.
The best one of a prefix with given devices used is made of best ones of shorter prefixes, if "best"
keeps every *label* (period, latency, penalty) that no other label beats in all three: each of them
grows with its parts. So

    labels(end, used) = union over start, chosen of labels(start, used - chosen) + (span, chosen)

without the labels that are beaten. Devices that are alike are counted, not named: `used` and
`chosen` are vectors of counts per class, which makes a pool of equal devices easy, however large.

The number of steps is bounded before the search starts. Where it is too large, there is no search
among all groups: `wide_search` has another. No clock is involved: equal questions get equal
answers.

A label knows nothing of the other ends of its links, so each device's own link counts here. Where
rates between pairs of devices are known, `placement` weighs what was found by those, and improves
it by local moves.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import nsmallest
from itertools import islice, product
from math import inf
from typing import Final

from shoal_planner.costs import Division, Span, SpanCosts
from shoal_planner.device_costs import DeviceCost, Holding, Waits, after
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_planner.layers.arcs import number_of_subsets
from shoal_planner.ranges import sums_of

MAX_STEPS: Final = 200_000
MAX_LABELS: Final = 32
MAX_FOUND: Final = 9
_EQUAL: Final = 1e-6
"""Values that differ by less are rounded differently."""

Counts = tuple[int, ...]
Role = tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Devices that are alike, by name, also in what pins or an older plan say of them."""

    like: PoolDevice
    devices: tuple[PoolDevice, ...]


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a division must keep to, and what it should rather do.

    `required`: fragment -> device. `preferred`: (fragment, device). `present`: (fragment, device)
    of the plan that is in force: what stays need not move; what has to, counts by its `weights`, or
    as one. `cached`: device -> fragments that it has on its disk; of devices that are alike
    otherwise, those serve a span that have the most of it. Without `replicas` each stage has one
    device.
    """

    required: Mapping[int, str] = field(default_factory=dict)
    preferred: frozenset[tuple[int, str]] = frozenset()
    present: frozenset[tuple[int, str]] = frozenset()
    weights: Sequence[int] = ()
    cached: Mapping[str, frozenset[int]] = field(default_factory=dict)
    replicas: bool = True

    def role(self, device: str) -> Role:
        """What is particular about a device: of which fragments these wishes name it."""
        named = (self.required.items(), self.preferred, self.present)
        return tuple(frozenset(each for each, name in of if name == device) for of in named)

    def allow(self, span: Span, devices: Sequence[str]) -> bool:
        """Whether every pinned fragment of the span is on its device alone."""
        if len(devices) > 1 and not self.replicas:
            return False
        pinned = {device for each, device in self.required.items() if each in span}
        return not pinned or (len(pinned) == 1 and set(devices) == pinned)

    def cached_of(self, span: Span, device: str) -> int:
        """How many of a span's fragments a device has on its disk."""
        return len(self.cached.get(device, frozenset()).intersection(span.fragments))

    def penalty(self, span: Span, devices: Sequence[str]) -> int:
        """Wishes that are not followed, pins before moves."""
        ignored = sum(each in span and device not in devices for each, device in self.preferred)
        moves = sum(self._lacking(span, device) for device in devices) if self.present else 0
        return ignored * 1_000_000 + moves

    def _lacking(self, span: Span, device: str) -> int:
        """What a device has to get of a span: its fragments, or their weights."""
        weights = self._sums_of_weights
        whole = weights[span.end] - weights[span.start] if weights else len(span)
        held, sums = self._held.get(device, ((), (0,)))
        return whole - sums[bisect_left(held, span.end)] + sums[bisect_left(held, span.start)]

    @cached_property
    def _sums_of_weights(self) -> Sequence[int]:
        return sums_of(self.weights) if self.weights else ()

    @cached_property
    def _held(self) -> Mapping[str, tuple[Sequence[int], Sequence[int]]]:
        """By device: the fragments present there, in order, and sums of what they weigh."""
        held: dict[str, list[int]] = {}
        for fragment, device in sorted(self.present):
            held.setdefault(device, []).append(fragment)
        return {
            device: (its, sums_of([self.weights[each] if self.weights else 1 for each in its]))
            for device, its in held.items()
        }


@dataclass(frozen=True, slots=True)
class Step:
    """One span and the devices chosen for it, per class."""

    span: Span
    chosen: Counts


@dataclass(frozen=True, slots=True)
class Part:
    """What a span with the devices chosen for it adds to a division."""

    period: int
    waits: Waits
    penalty: int
    step: Step


@dataclass(frozen=True, slots=True)
class Label:
    """A division of a prefix."""

    period: int
    latency: int
    penalty: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Divisions, the best first, and the value that none goes below; None: that is not known."""

    divisions: tuple[tuple[Division, ...], ...]
    lower: float | None

    def gap(self, value: int) -> float | None:
        """By what part of the best possible value this one is larger at most; None: not known."""
        if self.lower is not None and value <= self.lower * (1 + _EQUAL):
            return 0.0
        return value / self.lower - 1 if self.lower else None


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is looked for: the best divisions, by a goal, on the devices of a pool. Without
    `reloading` every device holds its span at once; with it a device may load the fragments of its
    span in turn. With `waiting` it need have no room for other items meanwhile."""

    costs: SpanCosts
    pool: Sequence[PoolDevice]
    goal: Goal
    wishes: Wishes = Wishes()
    reloading: bool = False
    waiting: bool = False

    def fits(self, span: Span, device: PoolDevice) -> bool:
        """Whether a device can serve a span."""
        held = self.costs.holding(span, device)
        if held is None or (held is Holding.RELOADED and not self.reloading):
            return False
        return self.waiting or self.costs.receives(span, device)

    def outgrows(self, span: Span, device: PoolDevice) -> bool:
        """Whether a device can serve neither a span nor one with more."""
        return self.costs.outgrows(span, device, in_turn=False) and (
            not self.reloading or self.costs.outgrows(span, device, in_turn=True)
        )

    def serves(self, division: Division) -> bool:
        """Whether its devices can and may serve a span."""
        names = [device.name for device in division.devices]
        return self.wishes.allow(division.span, names) and all(
            self.fits(division.span, device) for device in division.devices
        )

    def value(self, divisions: Sequence[Division]) -> int:
        """What is to be small."""
        return self.goal.value(*self.costs.totals(divisions))

    def order(self, divisions: Sequence[Division], penalty: int = 0) -> tuple[int, int, int]:
        """The best first."""
        return self.goal.order(*self.costs.totals(divisions), penalty)


def search(question: Question) -> Found | None:
    """The divisions of least worth; None: there are too many."""
    costs, wishes, goal = question.costs, question.wishes, question.goal
    classes = classes_of(question)
    most = MAX_STEPS // number_of_subsets([len(each.devices) for each in classes])
    spans = list(islice(spans_of(question), most + 1))
    if len(spans) > most:
        return None
    choices = {span: _choices(question, span, classes) for span in spans}
    labels, uncut = _all_labels(costs.count, choices, [len(each.devices) for each in classes], goal)
    ordered = nsmallest(MAX_FOUND, labels, key=lambda label: _order(label, goal))
    values = [goal.value(label.period, label.latency) for label in ordered]
    lower = min(values, default=inf) if uncut else None
    found = (named(label.steps, classes, wishes) for label in ordered)
    return Found(tuple(found), lower)


def _order(label: Label, goal: Goal) -> tuple[object, ...]:
    devices = sum(sum(step.chosen) for step in label.steps)
    trace = tuple((step.span.end, tuple(-count for count in step.chosen)) for step in label.steps)
    return (
        goal.order(label.period, label.latency, label.penalty),
        len(label.steps),
        devices,
        trace,
    )


def spans_of(question: Question) -> Iterator[Span]:
    """The spans that some device can serve, and others what is around it, if there are so many: by
    end, then by start."""
    # Of devices that differ in budget only, the roomiest can serve whatever the others can.
    kinds: dict[tuple[bool, int | None], PoolDevice] = {}
    for device in sorted(question.pool, key=lambda each: each.budget_bytes):
        kinds[device.single, device.cache_bytes] = device
    roomiest, first, count = list(kinds.values()), 0, question.costs.count
    for end in range(1, count + 1):
        while first < end and all(question.outgrows(Span(first, end), each) for each in roomiest):
            first += 1  # nor is there a device for what begins there and has more
        every = (Span(start, end) for start in range(first, end))
        for span in every:
            others = (span.start > 0) + (span.end < count)  # that serve what is around it, at least
            if others < len(question.pool) and any(question.fits(span, each) for each in roomiest):
                yield span


def classes_of(question: Question) -> list[DeviceClass]:
    """The devices by what matters of them."""
    grouped: dict[tuple[PoolDevice, Role], list[PoolDevice]] = {}
    for device in sorted(question.pool, key=lambda each: each.name):
        role = question.wishes.role(device.name)
        grouped.setdefault((_unnamed(device), role), []).append(device)
    return [
        DeviceClass(like=like, devices=tuple(devices)) for (like, _), devices in grouped.items()
    ]


def _unnamed(device: PoolDevice) -> PoolDevice:
    """What matters of a device."""
    return replace(device, name="", peers=(), times=(), loads=())


def _choices(question: Question, span: Span, classes: Sequence[DeviceClass]) -> dict[Counts, Part]:
    """The vectors of devices that can serve a span, each with what the span then adds."""
    costs, wishes = question.costs, question.wishes
    able = [each for each in classes if question.fits(span, each.like)]
    cost = {id(each): costs.on(span, each.like) for each in able}
    ranges = [range(len(each.devices) + 1) if each in able else range(1) for each in classes]
    choices: dict[Counts, Part] = {}
    for chosen in product(*ranges):
        taken = [(each, count) for each, count in zip(classes, chosen, strict=True) if count]
        names = [device.name for each, count in taken for device in each.devices[:count]]
        if not taken or not wishes.allow(span, names):
            continue
        mine: list[DeviceCost] = [cost[id(each)] for each, count in taken for _ in range(count)]
        choices[chosen] = Part(
            period=costs.together(mine),
            waits=costs.waits(mine),
            penalty=wishes.penalty(span, names),
            step=Step(span, chosen),
        )
    return choices


def _all_labels(
    count: int,
    choices: Mapping[Span, Mapping[Counts, Part]],
    sizes: Sequence[int],
    goal: Goal,
) -> tuple[list[Label], bool]:
    """The labels of whole divisions of so many fragments, and whether none was dropped for want of
    room. The choices are in the order of the ends of their spans."""

    @cache
    def left(used: Counts) -> tuple[tuple[Counts, Counts], ...]:
        """What can still be chosen, with what is used then."""
        ranges = [range(size - taken + 1) for size, taken in zip(sizes, used, strict=True)]
        return tuple((each, tuple(map(int.__add__, used, each))) for each in product(*ranges))

    reached: list[dict[Counts, list[Label]]] = [{} for _ in range(count + 1)]
    reached[0][tuple(0 for _ in sizes)] = [Label(0, 0, 0, ())]
    uncut = True
    for span, serving in choices.items():
        here = reached[span.end]
        for used, before in reached[span.start].items():
            for chosen, total in left(used):
                part = serving.get(chosen)
                if part is None:
                    continue
                labels = here.setdefault(total, [])
                for label in before:
                    _extend(labels, label, part)
                if len(labels) > MAX_LABELS:
                    labels.sort(key=lambda label: _order(label, goal))
                    del labels[MAX_LABELS:]
                    uncut = False
    return [label for labels in reached[count].values() for label in labels], uncut


def _extend(labels: list[Label], label: Label, part: Part) -> None:
    """Keep what a label gives with a part unless another beats it; drop those that it beats. Most
    are beaten: so they are compared before they are made."""
    period = max(label.period, part.period)
    latency = after(label.latency, part.waits)
    penalty = label.penalty + part.penalty
    steps = len(label.steps) + 1
    for each in labels:
        if each.period <= period and each.latency <= latency and each.penalty <= penalty:
            alike = each.period == period and each.latency == latency and each.penalty == penalty
            if not alike or len(each.steps) <= steps:
                return
    labels[:] = [
        each
        for each in labels
        if each.period < period or each.latency < latency or each.penalty < penalty
    ]
    labels.append(Label(period, latency, penalty, (*label.steps, part.step)))


def named(
    steps: Sequence[Step], classes: Sequence[DeviceClass], wishes: Wishes
) -> tuple[Division, ...]:
    """The division with devices in the place of counts: of a class those that have the most of the
    span on their disks, then by name from the first."""
    wanted = {
        (number, place): count
        for number, step in enumerate(steps)
        for place, count in enumerate(step.chosen)
        if count
    }
    pairs = sorted(
        (-wishes.cached_of(steps[number].span, device.name), number, place, rank)
        for number, place in wanted
        for rank, device in enumerate(classes[place].devices)
    )
    chosen: list[list[PoolDevice]] = [[] for _ in steps]
    taken = set[tuple[int, int]]()
    for _, number, place, rank in pairs:
        if wanted[number, place] and (place, rank) not in taken:
            wanted[number, place] -= 1
            taken.add((place, rank))
            chosen[number].append(classes[place].devices[rank])
    for devices in chosen:
        devices.sort(key=lambda each: (-each.flops_per_second, each.name))
    return tuple(
        Division(step.span, tuple(devices)) for step, devices in zip(steps, chosen, strict=True)
    )
