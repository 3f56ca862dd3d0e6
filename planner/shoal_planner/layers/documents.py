"""Profiles and pools from what files hold. Reading the files is the caller's.

A profile is JSON:

    {"layers":  [{"name": "conv1", "seconds": {"pi-4": 0.021, "desktop": 0.002}, "flops": 2.4e8,
                  "weight_bytes": 7000, "activation_bytes": 3211264}, ...],
     "tensors": [{"from": null, "to": ["conv1"], "bytes": 602112},
                 {"from": "conv1", "to": ["relu1", "add2"], "bytes": 3211264}, ...]}

in a topological order. `seconds` per kind of device, or `flops`; bytes default to 0. A `from` of
null is the model's input, a `to` of null its output.

Devices are JSON:

    {"devices": [{"name": "a", "kind": "pi-4", "budget_bytes": 67108864,
                  "flops_per_second": 8e9, "reload_bytes_per_second": 2e8}, ...],
     "links":   [{"between": ["a", "b"], "bytes_per_second": 1.25e6, "latency_seconds": 0.02}, ...],
     "link":    {"bytes_per_second": 1.25e7, "latency_seconds": 0.001}}

A device needs a name, and the kind that a profile was measured on or `flops_per_second`; without a
budget it holds any model. `link` is that of all pairs that `links` does not name; a link to
`coordinator` counts for the model's inputs and outputs; what is left out never limits.

Two published sets are read as they are: Scission's benchmark data as JSON (`machines`: rows of
first layer, last layer, seconds, bytes of output), and PipeDream's profiles as text (nodes with
times in milliseconds, then edges), which is of kind `gpu`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Final, TypeVar

from shoal_planner.layers.graph import Device, Layer, LayerGraph, Link, Pool, Tensor

PIPEDREAM_KIND: Final = "gpu"
_NODE: Final = re.compile(
    r"(?P<name>\S+) -- (?P<what>.*) -- forward_compute_time=(?P<forward>[\d.]+), "
    r"backward_compute_time=(?P<backward>[\d.]+), activation_size=(?P<activation>.+), "
    r"parameter_size=(?P<weights>[\d.]+)"
)

_MOST: Final = 1e30
"""Of anything: sums and products of such numbers are finite."""

T = TypeVar("T")


def read_profile(text: str) -> LayerGraph:
    """A profile in any of the three formats. Raises ValueError that says what is wrong."""
    if text.lstrip().startswith("node"):
        return pipedream(text, training=False)
    document = _object(text)
    if "machines" in document:
        return _checked(lambda: _scission(document["machines"]))
    return _checked(lambda: _graph(document))


def read_pool(text: str) -> Pool:
    """Devices and links. Raises ValueError that says what is wrong."""
    return _checked(lambda: _pool(_object(text)))


def pipedream(text: str, *, training: bool) -> LayerGraph:
    """A profile of PipeDream: one item is a batch, and in training it goes forward and back.

    The input's time is loading data; PipeDream's own optimiser sets it to zero.
    """
    nodes: dict[str, Layer] = {}
    moved: dict[str, float] = {}
    edges: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("\t"):
            one, _, other = line.strip().partition(" -- ")
            edges.append((one, other))
        elif found := _NODE.match(line):
            name, activation = found["name"], _summed(found["activation"])
            seconds = float(found["forward"]) + float(found["backward"]) * training
            seconds *= 0 if found["what"].startswith("Input") else 1e-3
            moved[name] = activation * (1 + training)
            nodes[name] = Layer(
                name=f"{name} {found['what']}",
                seconds={PIPEDREAM_KIND: seconds},
                weight_bytes=float(found["weights"]),
                activation_bytes=activation,
            )
        elif line.strip():
            raise ValueError(f"neither a node nor an edge of a PipeDream profile: {line!r}")
    return _checked(lambda: _ordered(nodes, moved, edges))


def _summed(sizes: str) -> float:
    """`12.0`, or of several tensors `[12.0; 4.0]`."""
    return sum(map(float, sizes.strip("[]").split(";")))


def _ordered(
    nodes: Mapping[str, Layer], moved: Mapping[str, float], edges: Sequence[tuple[str, str]]
) -> LayerGraph:
    """A graph from nodes in any order; what nobody needs is the model's output, and free."""
    needs: dict[str, set[str]] = {name: set() for name in nodes}
    feeds: dict[str, list[str]] = {name: [] for name in nodes}
    for one, other in edges:
        needs[other].add(one)
        feeds[one].append(other)
    order: dict[str, int] = {}
    waiting = list(nodes)
    while waiting:
        able = next((name for name in waiting if needs[name] <= order.keys()), None)
        if able is None:
            raise ValueError(f"the layers form a circle: {', '.join(waiting[:5])}")
        order[able] = len(order)
        waiting.remove(able)
    tensors = [
        Tensor(producer=order[name], consumers=tuple(order[e] for e in each), bytes=moved[name])
        for name, each in feeds.items()
        if each
    ]
    return LayerGraph(tuple(nodes[name] for name in order), tuple(tensors))


def _scission(machines: Mapping[str, Sequence[tuple[int, int, float, float]]]) -> LayerGraph:
    rows = next(iter(machines.values()))
    for machine, others in machines.items():
        if [row[:2] for row in others] != [row[:2] for row in rows]:
            raise ValueError(f"{machine} was measured in other blocks than the others")
    layers = tuple(
        Layer(
            name=f"{first}" if first == last else f"{first}-{last}",
            seconds={
                machine: _number(own[index][2], f"seconds of {machine}")
                for machine, own in machines.items()
            },
        )
        for index, (first, last, _, _) in enumerate(rows)
    )
    tensors = tuple(
        Tensor(producer=one, consumers=(other,), bytes=_number(rows[one][3], "bytes"))
        for one, other in pairwise(range(len(rows)))
    )
    return LayerGraph(layers, tensors)


def _graph(document: Mapping[str, Any]) -> LayerGraph:
    layers = tuple(
        Layer(
            name=each["name"],
            seconds={
                kind: _number(value, f"seconds of {kind}")
                for kind, value in each.get("seconds", {}).items()
            },
            flops=_amount(each, "flops", None),
            weight_bytes=_amount(each, "weight_bytes", 0.0),
            activation_bytes=_amount(each, "activation_bytes", 0.0),
        )
        for each in document["layers"]
    )
    place: dict[str | None, int | None] = {each.name: i for i, each in enumerate(layers)}
    place[None] = None
    tensors = tuple(
        Tensor(
            producer=place[each["from"]],
            consumers=tuple(place[name] for name in each["to"]),
            bytes=_amount(each, "bytes"),
        )
        for each in document["tensors"]
    )
    return LayerGraph(layers, tensors)


def _pool(document: Mapping[str, Any]) -> Pool:
    devices = tuple(
        Device(
            name=each["name"],
            kind=each.get("kind", ""),
            budget_bytes=_amount(each, "budget_bytes", inf),
            flops_per_second=_rate(each, "flops_per_second", None),
            reload_bytes_per_second=_rate(each, "reload_bytes_per_second", 200e6),
        )
        for each in document["devices"]
    )
    links = {frozenset(each["between"]): _link(each) for each in document.get("links", ())}
    return Pool(devices, links, _link(document.get("link", {})))


def _link(each: Mapping[str, Any]) -> Link:
    return Link(_rate(each, "bytes_per_second", inf), _amount(each, "latency_seconds", 0.0))


def _amount(each: Mapping[str, Any], name: str, *default: T) -> float | T:
    """The number of that name, from 0 on; the default where there is none."""
    if default and name not in each:
        return default[0]
    return _number(each[name], name)


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is no number")
    if not 0 <= value <= _MOST:
        raise ValueError(f"{name} is not from 0 to {_MOST:g}")
    return value


def _rate(each: Mapping[str, Any], name: str, *default: T) -> float | T:
    """The same, of a rate, which is not 0."""
    value = _amount(each, name, *default)
    if value == 0:
        raise ValueError(f"{name} is 0")
    return value


def _object(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("expected an object")
    return document


def _checked(read: Callable[[], T]) -> T:
    """What is missing or of another type, as a ValueError in words."""
    try:
        return read()
    except KeyError as missing:
        raise ValueError(f"{missing} is missing or unknown") from None
    except (TypeError, AttributeError, IndexError, StopIteration) as wrong:
        raise ValueError(f"not in the format: {wrong}") from None
