"""The shortest way of one item through all cuts, on one device after the other, if each could serve
several stages. It is a bound for every plan, and where it comes to no device twice, the plan."""

from dataclasses import dataclass
from itertools import product

import numpy as np

from shoal_planner.layers.arcs import Group, units
from shoal_planner.layers.costs import Costs
from shoal_planner.layers.cuts import Floats


@dataclass(frozen=True, slots=True)
class Way:
    """What an item takes, and the devices that it comes to, each as a group of one."""

    seconds: float
    groups: tuple[Group, ...]


def shortest(costs: Costs) -> Way:
    """`best[class, end]` from `before[class, start]`, cut by cut."""
    moved, count, classes = costs.cuts.crossing, len(costs.cuts), len(costs.like)
    each = units(classes)
    slow, delay = _links(costs, each)
    before, best = (np.full((classes, count), np.inf) for _ in range(2))
    start, came = (np.zeros((classes, count), dtype=np.intp) for _ in range(2))
    first = [costs.crossing(None, unit) for unit in each]
    before[:, 0] = [per_byte * moved[0] + wait for _, per_byte, wait in first]
    for end in range(1, count):
        values = before + costs.ending(end)
        start[:, end] = values.argmin(axis=1)
        best[:, end] = values.min(axis=1)
        through = best[:, end, None] + slow * moved[end] + delay
        came[:, end] = through.argmin(axis=0)
        before[:, end] = through.min(axis=0)
    last = [costs.crossing(unit, None) for unit in each]
    total = best[:, -1] + np.array([per_byte * moved[-1] + wait for _, per_byte, wait in last])
    place, end = int(total.argmin()), count - 1
    groups = [each[place]]
    while (end := int(start[place, end])) > 0:
        place = int(came[place, end])
        groups.append(each[place])
    return Way(float(total.min()), tuple(reversed(groups)))


def _links(costs: Costs, units: list[Group]) -> tuple[Floats, Floats]:
    """Seconds per byte and delay between classes; a single device does not follow itself."""
    slow, delay = (np.empty((len(units),) * 2) for _ in range(2))
    for (one, mine), (other, its) in product(enumerate(units), repeat=2):
        _, slow[one, other], delay[one, other] = costs.crossing(mine, its)
        if one == other and len(costs.classes[one]) == 1:
            delay[one, other] = np.inf
    return slow, delay
