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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import inf
from typing import Final

import numpy as np

from shoal_planner.layers.cuts import Cuts, Floats
from shoal_planner.layers.graph import COORDINATOR, Device, Link, Pool

Group = tuple[int, ...]
"""How many devices of each class."""

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
        size = max(4, _CACHED_NUMBERS // len(cuts) ** 2)
        self._device = lru_cache(size)(self._computed)
        self.stage = lru_cache(size)(self._shared)
        self.load = lru_cache(size)(self._loaded)
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
        return np.clip(self.resident - device.budget_bytes, 0.0, None)

    def _computed(self, place: int) -> Floats:
        """[start, end]: what an item takes on one device of a class."""
        device = self.like[place]
        seconds = self.cuts.between(self._seconds[place])
        if device.budget_bytes < self.resident.max():
            seconds = seconds + self.again(device) / device.reload_bytes_per_second
            seconds[self.least > device.budget_bytes] = inf
        seconds[~self.cuts.after] = inf
        return seconds

    def _shared(self, group: Group) -> StageCosts:
        taken = [place for place, count in enumerate(group) if count]
        each = [self._device(place) for place in taken]
        slowest = each[0] if len(each) == 1 else np.maximum.reduce(each)
        if len(taken) == 1:
            period = slowest / group[taken[0]]
        else:
            with np.errstate(divide="ignore"):
                rates = sum(group[place] / own for place, own in zip(taken, each, strict=True))
                period = 1 / rates
            period[np.isinf(slowest)] = inf
        return StageCosts(period, slowest)

    def _loaded(self, group: Group) -> Floats:
        """[start, end]: what the slowest of a group takes to load the weights of a stage."""
        able = zip(self.like, group, strict=True)
        return self._weights / min(each.reload_bytes_per_second for each, count in able if count)

    def shares(self, group: Group, start: int, end: int) -> tuple[tuple[Device, float], ...]:
        """Per class of a group a device of it, and the part of the items that each such takes."""
        taken = [place for place, count in enumerate(group) if count]
        rates = [1 / max(float(self._device(place)[start, end]), 1e-12) for place in taken]
        total = sum(group[place] * rate for place, rate in zip(taken, rates, strict=True))
        return tuple((self.like[p], rate / total) for p, rate in zip(taken, rates, strict=True))

    @cached_property
    def _links(self) -> tuple[tuple[Link, ...], ...]:
        """Between classes; of one class, between two of its devices."""
        return tuple(
            tuple(self.pool.between(mine[0].name, other[-1].name) for other in self.classes)
            for mine in self.classes
        )

    def slowness(self, one: int, other: int) -> tuple[float, float]:
        """Of the link between two classes: seconds per byte, and its delay."""
        link = self._links[one][other]
        return 1 / link.bytes_per_second, link.latency_seconds

    def _crossed(self, before: Group | None, after: Group | None) -> tuple[float, float, float]:
        """Seconds per byte and item, seconds per byte on the slowest link, and its delay.

        None is the coordinator's end.
        """
        per_item, slowest, delay = 0.0, 0.0, 0.0
        for (one, mine), (other, its) in product(self._ends(before), self._ends(after)):
            link = self._link(one, other)
            per_item = max(per_item, mine * its / link.bytes_per_second)
            slowest = max(slowest, 1 / link.bytes_per_second)
            delay = max(delay, link.latency_seconds)
        return per_item, slowest, delay

    def _link(self, one: int | None, other: int | None) -> Link:
        if one is None or other is None:
            place = other if one is None else one
            assert place is not None
            return self.pool.between(self.like[place].name, COORDINATOR)
        return self._links[one][other]

    def _ends(self, group: Group | None) -> Sequence[tuple[int | None, float]]:
        """The classes of a group, each with the part of the bytes that one device of it moves."""
        if group is None:
            return [(None, 1.0)]
        total = sum(count * self.capacity[place] for place, count in enumerate(group))
        return [(place, self.capacity[place] / total) for place, n in enumerate(group) if n]
