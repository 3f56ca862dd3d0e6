"""Graphs of layers and pools for tests of planning at that level, and the plainest reckoning of
what a plan gives."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise, product
from math import inf
from typing import TypeAlias

from hypothesis import strategies as st

from shoal_planner.layers.graph import COORDINATOR, Device, Layer, LayerGraph, Link, Pool, Tensor

MB = 1e6
Plan = list[tuple[frozenset[int], list[Device]]]
"""The layers of each stage, and its devices."""
Chosen: TypeAlias = tuple[int, ...] | None
"""Places of devices in a pool; None for the coordinator."""


def chain(seconds: Sequence[float], moved: Sequence[float] = (), weights: float = 0) -> LayerGraph:
    """Layers in a row; `moved[i]` bytes enter layer i, the last ones leave the model."""
    count = len(seconds)
    sizes = list(moved) or [0.0] * (count + 1)
    layers = [
        Layer(name=f"l{i}", seconds={"": each}, weight_bytes=weights)
        for i, each in enumerate(seconds)
    ]
    tensors = [
        Tensor(
            producer=i - 1 if i else None,
            consumers=(i if i < count else None,),
            bytes=sizes[i],
        )
        for i in range(count + 1)
    ]
    return LayerGraph(tuple(layers), tuple(tensors))


@st.composite
def graphs(draw: st.DrawFn, most: int = 6) -> LayerGraph:
    """Up to so many layers, with branches."""
    count = draw(st.integers(1, most))
    small = st.integers(0, 6)
    layers = tuple(
        Layer(
            name=f"l{i}",
            seconds={kind: draw(small) / 10 for kind in ("x", "y")},
            weight_bytes=draw(small) * MB,
            activation_bytes=draw(small) * MB / 2,
        )
        for i in range(count)
    )
    tensors = [Tensor(producer=None, consumers=(0,), bytes=draw(small) * MB)]
    for i in range(count):
        able: list[int | None] = [*range(i + 1, count), None]
        consumers = draw(st.lists(st.sampled_from(able[:3]), min_size=1, max_size=2, unique=True))
        tensors.append(Tensor(producer=i, consumers=tuple(consumers), bytes=draw(small) * MB))
    return LayerGraph(layers, tuple(tensors))


@st.composite
def pools(draw: st.DrawFn, most: int = 3) -> Pool:
    """Up to so many devices, some of them alike, with links that differ."""
    devices = tuple(
        Device(
            name=f"d{i}",
            kind=draw(st.sampled_from("xy")),
            budget_bytes=draw(st.sampled_from([inf, 4 * MB, 9 * MB, 15 * MB])),
            reload_bytes_per_second=draw(st.sampled_from([10 * MB, 50 * MB])),
        )
        for i in range(draw(st.integers(1, most)))
    )
    some = st.sampled_from([Link(), Link(10 * MB), Link(100 * MB, 0.05), Link(20 * MB, 0.01)])
    ends = [each.name for each in devices] + [COORDINATOR]
    pairs = [frozenset((a, b)) for place, a in enumerate(ends) for b in ends[place + 1 :]]
    links = {pair: draw(some) for pair in pairs if draw(st.booleans())}
    return Pool(devices, links, draw(some))


def every_plan(graph: LayerGraph, pool: Pool) -> Iterator[Plan]:
    """Each assignment of layers to numbered stages that no layer's producer comes behind, with
    each choice of devices."""
    count, most = len(graph.layers), min(len(graph.layers), len(pool.devices))
    for stages in range(1, most + 1):
        served = [
            owners
            for owners in product(range(-1, stages), repeat=len(pool.devices))
            if set(owners) >= set(range(stages))
        ]
        for place in product(range(stages), repeat=count):
            if set(place) != set(range(stages)):
                continue
            if any(place[one] > place[other] for one, other in graph.edges):
                continue
            layers = [frozenset(i for i in range(count) if place[i] == s) for s in range(stages)]
            for owners in served:
                yield [
                    (mine, [d for d, o in zip(pool.devices, owners, strict=True) if o == stage])
                    for stage, mine in enumerate(layers)
                ]


def weigh(graph: LayerGraph, pool: Pool, plan: Plan, *, cold: bool) -> tuple[float, float]:
    """(period, first) of a plan, straight from the definitions."""
    period = first = 0.0
    done: frozenset[int] = frozenset()
    groups = [None, *(devices for _, devices in plan), None]
    for (layers, devices), (before, after) in zip(plan, pairwise(groups), strict=False):
        busy, delay = crossing(graph, pool, done, before, after)
        works, load, takes = staying(graph, layers, devices)
        period = max(period, busy, works)
        first = max(first + delay, load if cold else 0.0) + takes
        done |= layers
    busy, delay = crossing(graph, pool, done, groups[-2], None)
    return max(period, busy), first + delay


def every_weight(graph: LayerGraph, pool: Pool, *, cold: bool) -> Iterator[tuple[float, float]]:
    """What `weigh` says of each plan that can run. No plan is left out; those that begin with the
    same stages share what these take, so ten layers on five devices can be tried too."""
    count, devices = len(graph.layers), pool.devices
    whole, all_devices = frozenset(range(count)), range(len(devices))
    groups = {
        chosen: [devices[i] for i in chosen]
        for size in range(1, len(devices) + 1)
        for chosen in combinations(all_devices, size)
    }
    stay = cache(lambda layers, chosen: staying(graph, layers, groups[chosen]))
    cross = cache(
        lambda done, before, after: crossing(
            graph, pool, done, groups.get(before), groups.get(after)
        )
    )
    following = cache(lambda done: [*_following(graph, done)])

    def extend(
        done: frozenset[int], used: frozenset[int], before: Chosen, period: float, first: float
    ) -> Iterator[tuple[float, float]]:
        if done == whole:
            busy, delay = cross(done, before, None)
            yield max(period, busy), first + delay
            return
        for after in groups:
            if not used.isdisjoint(after):
                continue
            busy, delay = cross(done, before, after)
            for layers in following(done):
                works, load, takes = stay(layers, after)
                if takes < inf:
                    so_far = max(first + delay, load if cold else 0.0) + takes
                    rest = done | layers, used.union(after), after
                    yield from extend(*rest, max(period, busy, works), so_far)

    yield from extend(frozenset(), frozenset(), None, 0.0, 0.0)


def _following(graph: LayerGraph, done: frozenset[int]) -> Iterator[frozenset[int]]:
    """Each set of layers that can be the next stage: all that make something for it are done, or
    are in it."""
    left = [i for i in range(len(graph.layers)) if i not in done]
    for size in range(1, len(left) + 1):
        for layers in combinations(left, size):
            known = done.union(layers)
            if all(one in known for one, other in graph.edges if other in layers):
                yield frozenset(layers)


def staying(
    graph: LayerGraph, layers: frozenset[int], devices: Sequence[Device]
) -> tuple[float, float, float]:
    """(period, load, seconds) of a stage; infinite where a device cannot hold a layer of it."""
    each_takes = [seconds(graph, layers, device) for device in devices]
    weights = sum(graph.layers[i].weight_bytes for i in layers)
    load = weights / min(each.reload_bytes_per_second for each in devices)
    if inf in each_takes:
        return inf, load, inf
    works = 1 / sum(1 / each for each in each_takes) if min(each_takes) > 0 else 0.0
    return works, load, max(each_takes)


def seconds(graph: LayerGraph, layers: frozenset[int], device: Device) -> float:
    own = [graph.layers[i] for i in layers]
    if max(each.weight_bytes + each.activation_bytes for each in own) > device.budget_bytes:
        return inf
    need = sum(each.weight_bytes for each in own) + max(each.activation_bytes for each in own)
    again = max(0.0, need - device.budget_bytes) / device.reload_bytes_per_second
    return sum(each.seconds[device.kind] for each in own) + again


def crossing(
    graph: LayerGraph,
    pool: Pool,
    done: frozenset[int],
    before: list[Device] | None,
    after: list[Device] | None,
) -> tuple[float, float]:
    """(busy, delay) of what is made and still needed, between two groups."""
    moved = 0.0
    for tensor in graph.tensors:
        made = tensor.producer is None or tensor.producer in done
        if made and any(each is None or each not in done for each in tensor.consumers):
            moved += tensor.bytes
    busy = slowest = latency = 0.0
    for (one, mine), (other, its) in product(ends(graph, before), ends(graph, after)):
        link = pool.between(one, other)
        busy = max(busy, mine * its * moved / link.bytes_per_second)
        slowest = max(slowest, moved / link.bytes_per_second)
        latency = max(latency, link.latency_seconds)
    return busy, slowest + latency


def ends(graph: LayerGraph, group: list[Device] | None) -> list[tuple[str, float]]:
    if group is None:
        return [(COORDINATOR, 1.0)]
    whole = [max(sum(layer.seconds[d.kind] for layer in graph.layers), 1e-12) for d in group]
    total = sum(1 / each for each in whole)
    return [(device.name, 1 / each / total) for device, each in zip(group, whole, strict=True)]
