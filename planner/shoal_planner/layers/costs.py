"""What a stage costs the group of devices that shares its items, and what a cut costs between two.

Per item, a device computes the layers of its stage. It needs their weights and the activations of
the neediest; where that is more than its budget, the weights that do not fit are read again for
each item, down to the budget that one layer needs by itself: below, the stage cannot be there.

The devices of a group share the items as fast as each can, so their rates add up. What crosses a
cut is spread over the pairs of sender and receiver in proportion to their *capacity*, the speed at
which a device would run the whole model: so the cost of a crossing depends on the two groups and
on the cut, not on where their stages begin and end. What is live at a cut crosses it, also what a
later stage alone needs. Stages and crossings overlap between items, so that

    period  = the largest of all stages and all crossings      one item every so often
    latency = the sum of all stages and crossings, each on the slowest device and link
    first   = the latency, where no stage starts before its weights are loaded

and N items take `first + (N - 1) * period` at most.

Devices that are alike count as a class: a group is a number of devices per class.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_planner.layers.arcs import Group
from shoal_planner.layers.cuts import Cuts, Floats
from shoal_planner.layers.graph import COORDINATOR, Device, Pool

_CACHED_NUMBERS: Final = 1 << 24


@dataclass(frozen=True)
class StageCosts:
    """[start, end], in seconds; infinite where a stage cannot be."""

    period: Floats
    latency: Floats


class Costs:
    """The costs of all stages between given cuts, and of crossing them, in a pool."""

    def __init__(self, cuts: Cuts, pool: Pool) -> None:
        self.cuts, self.pool = cuts, pool
        self.classes = pool.alike()
        self.like = tuple(members[0] for members in self.classes)
        layers = cuts.graph.layers
        self._seconds = [[device.seconds(layer) for layer in layers] for device in self.like]
        self._sums = [cuts.sums(seconds) for seconds in self._seconds]
        size = max(4, _CACHED_NUMBERS // len(cuts) ** 2)
        self._device = lru_cache(size)(self._computed)
        self._rate = lru_cache(size)(self._inverse)
        self.stage = lru_cache(size)(self._shared)
        self.load = lru_cache(size)(self._loaded)
        self._ends = lru_cache(None)(self._parts)
        self.crossing = lru_cache(None)(self._crossed)

    @cached_property
    def capacity(self) -> tuple[float, ...]:
        """Per class, items of the whole model in a second."""
        return tuple(1 / max(sum(seconds), 1e-12) for seconds in self._seconds)

    @cached_property
    def resident(self) -> Floats:
        """[start, end]: bytes that a stage needs at once to read nothing again."""
        layers = self.cuts.graph.layers
        activations = self.cuts.largest_between([each.activation_bytes for each in layers])
        return self._weights + activations

    @cached_property
    def least(self) -> Floats:
        """[start, end]: bytes that a stage needs at least: those of its neediest layer."""
        layers = self.cuts.graph.layers
        return self.cuts.largest_between([e.weight_bytes + e.activation_bytes for e in layers])

    @cached_property
    def _weights(self) -> Floats:
        return self.cuts.between([each.weight_bytes for each in self.cuts.graph.layers])

    def seconds(self, layer: int) -> tuple[float, ...]:
        """Per class, what an item of a layer takes."""
        return tuple(seconds[layer] for seconds in self._seconds)

    def again(self, device: Device) -> Floats:
        """[start, end]: bytes of weights that are read again for each item."""
        return np.maximum(self.resident - device.budget_bytes, 0.0)

    def _computed(self, place: int) -> Floats:
        """[start, end]: what an item takes on one device of a class."""
        device, sums = self.like[place], self._sums[place]
        seconds: Floats = np.maximum(sums[None, :] - sums[:, None], 0.0)
        if device.budget_bytes < self._whole:
            seconds += self.again(device) / device.reload_bytes_per_second
            seconds[self.least > device.budget_bytes] = inf
        seconds[~self.cuts.after] = inf
        return seconds

    @cached_property
    def _whole(self) -> float:
        """Bytes that the whole model needs at once."""
        return float(self.resident.max())

    def takes(self, place: int, start: int, end: int) -> float:
        """What an item of one stage takes on one device of a class."""
        return float(self._taken(place, start, end))

    def ending(self, end: int) -> Floats:
        """[class, start]: what an item takes one device, in the stages that end at a cut."""
        every = slice(None)
        return np.stack([self._taken(place, every, end) for place in range(len(self.like))])

    def _taken(self, place: int, start: int | slice, end: int) -> Floats:
        """[start]: what an item takes on one device of a class, in stages that end at a cut."""
        device, sums = self.like[place], self._sums[place]
        again = np.maximum(self.resident[start, end] - device.budget_bytes, 0.0)
        seconds = np.maximum(sums[end] - sums[start], 0.0) + again / device.reload_bytes_per_second
        able = self.cuts.after[start, end] & (self.least[start, end] <= device.budget_bytes)
        return np.where(able, seconds, inf)

    def loads(self, group: Group, start: int, end: int) -> float:
        """What the slowest of a group takes to load the weights of one stage."""
        return float(self._weights[start, end]) / self._slowest_reload(group)

    def together(self, group: Group, start: int, end: int) -> tuple[float, float]:
        """Of one stage, the period of a group and what an item takes its slowest device."""
        each = [(self.takes(p, start, end), count) for p, count in enumerate(group) if count]
        latency = max(own for own, _ in each)
        if latency == inf:
            return inf, inf
        fastest = min(own for own, _ in each)
        return 1 / sum(count / own for own, count in each) if fastest else 0.0, latency

    def _inverse(self, place: int) -> Floats:
        """[start, end]: items in a second on one device of a class."""
        with np.errstate(divide="ignore"):
            rates: Floats = 1 / self._device(place)
        return rates

    def _shared(self, group: Group) -> StageCosts:
        taken = [place for place, count in enumerate(group) if count]
        first = self._device(taken[0])
        if len(taken) == 1:
            return StageCosts(first / group[taken[0]], first)
        slowest, rates = first.copy(), group[taken[0]] * self._rate(taken[0])
        for place in taken[1:]:
            np.maximum(slowest, self._device(place), out=slowest)
            rates += group[place] * self._rate(place)
        with np.errstate(divide="ignore"):
            period = np.divide(1.0, rates, out=rates)
        period[np.isinf(slowest)] = inf
        return StageCosts(period, slowest)

    def _loaded(self, group: Group) -> Floats:
        """[start, end]: what the slowest of a group takes to load the weights of a stage."""
        return self._weights / self._slowest_reload(group)

    def _slowest_reload(self, group: Group) -> float:
        able = zip(self.like, group, strict=True)
        return min(each.reload_bytes_per_second for each, count in able if count)

    def shares(self, group: Group, start: int, end: int) -> tuple[tuple[Device, float], ...]:
        """Per class of a group a device of it, and the part of the items that each such takes."""
        taken = [place for place, count in enumerate(group) if count]
        rates = [1 / max(self.takes(place, start, end), 1e-12) for place in taken]
        total = sum(group[place] * rate for place, rate in zip(taken, rates, strict=True))
        return tuple((self.like[p], rate / total) for p, rate in zip(taken, rates, strict=True))

    @cached_property
    def _links(self) -> tuple[Floats, Floats]:
        """[one, other]: seconds per byte, and the delay, between classes and the coordinator, which
        is the last; of one class, between two of its devices."""
        ends = [(each[0].name, each[-1].name) for each in self.classes]
        ends.append((COORDINATOR, COORDINATOR))
        links = [[self.pool.between(one, other) for _, other in ends] for one, _ in ends]
        slow = [[1 / link.bytes_per_second for link in line] for line in links]
        delays = [[link.latency_seconds for link in line] for line in links]
        return np.array(slow), np.array(delays)

    def slowness(self, one: int, other: int) -> tuple[float, float]:
        """Of the link between two classes: seconds per byte, and its delay."""
        slow, delays = self._links
        return float(slow[one, other]), float(delays[one, other])

    def _crossed(self, before: Group | None, after: Group | None) -> tuple[float, float, float]:
        """Seconds per byte and item, seconds per byte on the slowest link, and its delay.

        None is the coordinator's end.
        """
        (senders, gives), (receivers, takes) = self._ends(before), self._ends(after)
        slow, delays = (each[senders[:, None], receivers] for each in self._links)
        per_item = (gives[:, None] * takes * slow).max()
        return float(per_item), float(slow.max()), float(delays.max())

    def _parts(self, group: Group | None) -> tuple[NDArray[np.intp], Floats]:
        """The classes of a group, each with the part of the bytes that one device of it moves."""
        if group is None:
            return np.array([len(self.classes)]), np.ones(1)
        counts = np.array(group)
        places = np.flatnonzero(counts)
        capacity = np.array(self.capacity)
        return places, capacity[places] / float(counts @ capacity)
