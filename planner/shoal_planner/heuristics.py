"""Divisions by rule of thumb: where a search must be cut short, and to be compared with."""

from collections.abc import Container, Sequence
from itertools import accumulate, pairwise

from shoal_planner.costs import Division, Span, SpanCosts
from shoal_planner.device_costs import Holding, shared_period
from shoal_planner.devices import PoolDevice
from shoal_planner.search import Wishes

Divisions = tuple[Division, ...]


def evenly(costs: SpanCosts, pool: Sequence[PoolDevice]) -> Divisions:
    """Equal numbers of fragments on the devices in the order of the pool, as one would by hand.

    Whether they fit there is not asked.
    """
    shares = min(costs.count, len(pool))
    return _in_proportion(costs, pool[:shares], [1] * shares)


def by_memory(costs: SpanCosts, pool: Sequence[PoolDevice]) -> Divisions:
    """Numbers of fragments in proportion to the devices' memory, the roomiest first (exo's rule).

    Whether they fit there is not asked.
    """
    roomiest = sorted(pool, key=lambda each: (-each.budget_bytes, each.name))
    most = costs.resident(Span(0, costs.count))
    return _in_proportion(costs, roomiest, [min(each.budget_bytes, most) for each in roomiest])


def _in_proportion(
    costs: SpanCosts, devices: Sequence[PoolDevice], amounts: Sequence[int]
) -> Divisions:
    count, total = costs.count, sum(amounts)
    borders = [0, *(count * amount // total for amount in accumulate(amounts))]
    spans = (Span(start, end) for start, end in pairwise(borders))
    return tuple(
        Division(span, (each,))
        for span, each in zip(spans, devices, strict=True)
        if span.end > span.start
    )


def packed(
    costs: SpanCosts, pool: Sequence[PoolDevice], holdings: Container[Holding]
) -> Divisions | None:
    """The roomiest devices first, each with as many fragments as it holds in one of these ways;
    None: too few."""
    count = costs.count
    divisions, start = [], 0
    for device in sorted(pool, key=lambda each: (each.single, -each.budget_bytes, each.name)):
        end = start
        while end < count and costs.at_once(Span(start, end + 1), device) in holdings:
            end += 1
        if end > start:
            divisions.append(Division(Span(start, end), (device,)))
            start = end
    return tuple(divisions) if start == count else None


def with_spares(
    costs: SpanCosts, divisions: Divisions, pool: Sequence[PoolDevice], wishes: Wishes
) -> Divisions:
    """Devices that nobody uses join the slowest stage that they suit, fastest first."""
    used = {device.name for division in divisions for device in division.devices}
    spares = [device for device in pool if device.name not in used]
    serving = [list(division.devices) for division in divisions]
    periods = [costs.period(division) for division in divisions]
    for spare in sorted(spares, key=lambda each: (-each.flops_per_second, each.name)):
        place = max(range(len(divisions)), key=lambda each: (periods[each], -each))
        span = divisions[place].span
        names = [device.name for device in (*serving[place], spare)]
        if not costs.at_once(span, spare) or not wishes.allow(span, names):
            continue
        serving[place].append(spare)
        periods[place] = shared_period((periods[place], costs.on(span, spare).period))
    return tuple(
        Division(division.span, tuple(devices))
        for division, devices in zip(divisions, serving, strict=True)
    )
