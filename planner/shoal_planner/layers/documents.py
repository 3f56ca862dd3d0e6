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

What else an object has is refused: a misspelt budget would be none.

Two published sets are read as they are: Scission's benchmark data as JSON (`machines`: rows of
first layer, last layer, seconds, bytes of output), and PipeDream's profiles as text (nodes with
times in milliseconds, then edges), which is of kind `gpu`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from math import inf
from typing import Any, Final, TypeVar

from shoal_planner.layers.graph import COORDINATOR, Device, Layer, LayerGraph, Link, Pool, Tensor

PIPEDREAM_KIND: Final = "gpu"
_NODE: Final = re.compile(
    r"(?P<name>\S+) -- (?P<what>.*) -- forward_compute_time=(?P<forward>[\d.]+), "
    r"backward_compute_time=(?P<backward>[\d.]+), activation_size=(?P<activation>.+), "
    r"parameter_size=(?P<weights>[\d.]+)"
)

_MOST: Final = 1e30
"""Of anything: sums and products of such numbers are finite."""
_LEAST: Final = 1e-30
"""Of a rate: so are quotients."""

_OF_LINKS: Final = ("bytes_per_second", "latency_seconds")

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
    listed, tensors = document["layers"], document["tensors"]
    _only(document, "a profile", ("layers", "tensors"))
    layers = tuple(map(_layer, listed))
    place: dict[str | None, int | None] = {each.name: i for i, each in enumerate(layers)}
    if len(place) < len(layers):
        ((name, _),) = Counter(each.name for each in layers).most_common(1)
        raise ValueError(f"two layers are called {name}")
    place[None] = None
    return LayerGraph(layers, tuple(_tensor(each, place) for each in tensors))


def _layer(each: Mapping[str, Any]) -> Layer:
    _only(each, "a layer", (of.name for of in fields(Layer)))
    return Layer(
        name=_name(each["name"], "a layer's name"),
        seconds={
            kind: _number(value, f"seconds of {kind}")
            for kind, value in each.get("seconds", {}).items()
        },
        flops=_amount(each, "flops", None),
        weight_bytes=_amount(each, "weight_bytes", 0.0),
        activation_bytes=_amount(each, "activation_bytes", 0.0),
    )


def _tensor(each: Mapping[str, Any], place: Mapping[str | None, int | None]) -> Tensor:
    _only(each, "a tensor", ("from", "to", "bytes"))
    if not isinstance(each["to"], list):
        raise ValueError(f"{each['to']!r} is no list of layers that a tensor goes to")
    return Tensor(
        producer=place[each["from"]],
        consumers=tuple(place[name] for name in each["to"]),
        bytes=_amount(each, "bytes"),
    )


def _pool(document: Mapping[str, Any]) -> Pool:
    _only(document, "a file of devices", (of.name for of in fields(Pool)))
    devices = tuple(map(_device, document["devices"]))
    ends = {COORDINATOR, *(each.name for each in devices)}
    links: dict[frozenset[str], Link] = {}
    for each in document.get("links", ()):
        _only(each, "a link", ("between", *_OF_LINKS))
        between = _pair(each["between"], ends)
        if between in links:
            raise ValueError(f"two links are between {' and '.join(sorted(between))}")
        links[between] = _link(each)
    common = document.get("link", {})
    _only(common, "link", _OF_LINKS)
    return Pool(devices, links, _link(common))


def _device(each: Mapping[str, Any]) -> Device:
    _only(each, "a device", (of.name for of in fields(Device)))
    return Device(
        name=_name(each["name"], "a device's name"),
        kind=_name(each.get("kind", ""), "a device's kind"),
        budget_bytes=_amount(each, "budget_bytes", inf),
        flops_per_second=_rate(each, "flops_per_second", None),
        reload_bytes_per_second=_rate(each, "reload_bytes_per_second", 200e6),
    )


def _pair(between: object, ends: Iterable[str]) -> frozenset[str]:
    """The two ends of a link, of those that there are."""
    if not isinstance(between, list) or len(between) != 2 or between[0] == between[1]:
        raise ValueError(f"a link is between two devices, not {between!r}")
    for name in between:
        if name not in ends:
            raise ValueError(f"a link is between {between}, and there is no device {name}")
    return frozenset(between)


def _link(each: Mapping[str, Any]) -> Link:
    return Link(_rate(each, "bytes_per_second", inf), _amount(each, "latency_seconds", 0.0))


def _only(each: Mapping[str, Any], what: str, known: Iterable[str]) -> None:
    """Refuse what an object should not have."""
    names = tuple(known)
    for name in each:
        if name not in names:
            raise ValueError(f"{what} has no {name}; known are {', '.join(names)}")


def _name(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is text, not {value!r}")
    return value


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
    if isinstance(value, int | float) and value < _LEAST:
        raise ValueError(f"{name} is {value:g}")
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
