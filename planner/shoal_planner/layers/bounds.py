"""What no plan can beat, whatever its cuts and groups.

In any plan a device is busy with its part of each layer's items for at most one period per item.
So for any weights of the devices that add up to one, the period is at least the weighted mean of
what the devices are busy, and that is at least the sum, over the layers, of the least weighted time
among the devices: a Lagrangian bound. The weights are improved step by step; each gives a bound
that holds. The first item takes at least the fastest device's time for every layer; where all cuts
are known, at least the shortest way through them on one device after the other, if each could serve
several stages; and loading at least the time in which all devices together read the weights once.
"""

from typing import Final

import numpy as np

from shoal_planner.layers.costs import Costs
from shoal_planner.layers.search import Times
from shoal_planner.layers.shortest import shortest

_ROUNDS: Final = 300


def bounds(costs: Costs, *, cold: bool) -> Times:
    """What no plan goes below."""
    layers = costs.cuts.graph.layers
    seconds = np.array([costs.seconds(index) for index in range(len(layers))])
    need = np.array([layer.weight_bytes + layer.activation_bytes for layer in layers])
    budgets = np.array([device.budget_bytes for device in costs.like])
    seconds[need[:, None] > budgets[None, :]] = np.inf
    first = float(seconds.min(axis=1).sum())
    if costs.cuts.complete:
        first = max(first, shortest(costs).seconds)
    if cold:
        together = zip(costs.classes, costs.like, strict=True)
        rate = sum(len(members) * like.reload_bytes_per_second for members, like in together)
        first = max(first, sum(layer.weight_bytes for layer in layers) / rate)
    counts = np.array([len(each) for each in costs.classes])
    return Times(_period(seconds, counts), first)


def _period(seconds: np.ndarray, counts: np.ndarray) -> float:
    """Multiplicative weights: a device that the last weights made busy counts more in the next."""
    logs = np.zeros(len(counts))
    best, rows = 0.0, np.arange(len(seconds))
    for number in range(1, _ROUNDS + 1):
        weights = np.exp(logs - logs.max())
        weights /= float((weights * counts).sum())
        weighted = seconds * weights[None, :]
        chosen = weighted.argmin(axis=1)
        least = weighted[rows, chosen]
        best = max(best, float(least.sum()))
        busy = np.zeros(len(counts))
        np.add.at(busy, chosen, seconds[rows, chosen] / counts[chosen])
        if not np.isfinite(busy).all() or not busy.max():
            return best
        logs += busy / busy.max() / np.sqrt(number)
    return best
