"""A model's layers as a graph, and the devices and links that can run it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer. `seconds` per kind of device, as measured; where a kind is missing, `flops` count.

    `weight_bytes` stay in memory between items, `activation_bytes` are needed while it runs.
    """

    name: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    flops: float | None = None
    weight_bytes: float = 0
    activation_bytes: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """What a layer gives to others, by index. A producer of None is the model's input, a consumer
    of None its output."""

    producer: int | None
    consumers: tuple[int | None, ...]
    bytes: float


@dataclass(frozen=True)
class LayerGraph:
    """Layers in a topological order, and the tensors between them."""

    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        """Raises `ValueError` where there are no layers, or a tensor leads backwards."""
        if not self.layers:
            raise ValueError("a profile needs one layer at least")
        for tensor in self.tensors:
            for consumer in tensor.consumers:
                if None not in (tensor.producer, consumer) and not (
                    0 <= tensor.producer < consumer < len(self.layers)  # type: ignore[operator]
                ):  # None is ruled out above, which mypy does not follow through `in`
                    raise ValueError(f"layers are not in topological order at {tensor}")

    @cached_property
    def edges(self) -> frozenset[tuple[int, int]]:
        """Pairs of layers of which the second needs the first."""
        return frozenset(
            (tensor.producer, consumer)
            for tensor in self.tensors
            if tensor.producer is not None
            for consumer in tensor.consumers
            if consumer is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that can run layers. `flops_per_second` counts where a layer was not measured on its
    `kind`. Weights beyond the budget are read again for each item at `reload_bytes_per_second`;
    all of them once, before the first item."""

    name: str
    kind: str = ""
    budget_bytes: float = inf
    flops_per_second: float | None = None
    reload_bytes_per_second: float = 200e6

    def seconds(self, layer: Layer) -> float:
        """What one item of a layer takes here."""
        measured = layer.seconds.get(self.kind)
        if measured is not None:
            return measured
        if layer.flops is None or self.flops_per_second is None:
            raise ValueError(
                f"layer {layer.name} was not measured on {self.kind or self.name}, and its FLOPs "
                "or the device's speed are unknown: give one of them"
            )
        return layer.flops / self.flops_per_second


@dataclass(frozen=True, slots=True)
class Link:
    """From one device to another: one that is not known never limits."""

    bytes_per_second: float = inf
    latency_seconds: float = 0.0


COORDINATOR = "coordinator"
"""The end of a link that brings the model's inputs and takes its outputs."""


@dataclass(frozen=True)
class Pool:
    """Devices, and the links between pairs of them, the same in both directions.

    `links` by the names of both ends, in either order; `link` is that of all other pairs.
    """

    devices: tuple[Device, ...]
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)
    link: Link = Link()

    def __post_init__(self) -> None:
        """Raises `ValueError` where names are missing, repeated or reserved."""
        names = [device.name for device in self.devices]
        if not names or len(set(names)) < len(names) or COORDINATOR in names:
            raise ValueError(f"a pool needs devices with names of their own, not {names}")

    def between(self, one: str, other: str) -> Link:
        """The link between two devices by their names, or one and `COORDINATOR`: that never limits
        unless `links` has it."""
        known = self.links.get(frozenset((one, other)))
        if known is None:
            return Link() if COORDINATOR in (one, other) else self.link
        return known

    def alike(self) -> tuple[tuple[Device, ...], ...]:
        """Classes of devices that can take one another's place."""
        classes: list[list[Device]] = []
        for device in self.devices:
            for members in classes:
                if self._interchangeable(members[0], device):
                    members.append(device)
                    break
            else:
                classes.append([device])
        return tuple(map(tuple, classes))

    def _interchangeable(self, one: Device, other: Device) -> bool:
        if replace(one, name="") != replace(other, name=""):
            return False
        ends = [each.name for each in self.devices] + [COORDINATOR]
        return all(
            self.between(one.name, end) == self.between(other.name, end)
            for end in ends
            if end not in (one.name, other.name)
        )

    def only(self, devices: Sequence[Device]) -> "Pool":
        """A pool of some of its devices, with the same links."""
        return replace(self, devices=tuple(devices))
