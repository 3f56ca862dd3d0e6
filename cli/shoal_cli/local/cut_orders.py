"""How a model is to be cut. Apart from `orders`: the process that cuts reads no manifests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal_coordinator.storage.inputs import InputsRefused, scan_inputs
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_protocol.choices import Objective
from shoal_protocol.partition import Outgrown, TensorSpec
from shoal_protocol.seen_sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOrder:
    """How one model is to be cut, under the name of a Partition.

    With none of `fragments`, `max_bytes` and `tensors`: as suits the `devices`, for the
    `objective`. `planned`: cuts and devices are chosen together. `pinned`: fragments are tied to
    devices by their numbers. `beside` is what other models leave of the devices; empty where none
    runs on them. `shapes` are those of inputs with dynamic axes, by default those that cover every
    item in `sample`. `seen` are sizes of tensors inside the model, as items were seen to have them:
    the cut is for these, where they follow from no shapes. `outgrown` are divided afterwards, one
    after the other: see `shoal_planner.finer_cuts`. So many of the largest kinds of items in
    `sample` are `left_out` of what the cut covers: devices have measured that no cut for them fits.
    `smaller_first`: others may be left out too, for which another cut is made later.
    `items` are those of the job, where somebody says how many; `follows`: more may come than are in
    `sample`.
    """

    name: str
    model: str
    path: Path
    digest: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sample: Path | None = None
    fragments: int | None = None
    max_bytes: int | None = None
    tensors: tuple[str, ...] = ()
    devices: tuple[PoolDevice, ...] = ()
    beside: tuple[PoolDevice, ...] = ()
    objective: Objective = Objective.THROUGHPUT
    planned: bool = False
    pinned: bool = False
    seen: Sizes = field(default_factory=dict)
    outgrown: tuple[Outgrown, ...] = ()
    left_out: int = 0
    smaller_first: bool = False
    items: int | None = None
    follows: bool = False

    @property
    def is_free(self) -> bool:
        """Whether it is left to us where to cut."""
        return not (self.tensors or self.fragments or self.max_bytes or self.pinned)

    @property
    def goal(self) -> Goal:
        """What cuts and plans of it are to make small."""
        return Goal(self.objective, self.items)

    def open_inputs(self, inputs: Iterable[TensorSpec]) -> list[TensorSpec]:
        """Those of which neither the model nor the order says how large they are."""
        return [spec for spec in inputs if not (spec.name in self.shapes or _has_sizes(spec))]


def count_items(order: CutOrder, inputs: tuple[TensorSpec, ...]) -> int | None:
    """What somebody said, else those in the folder of inputs, by its headers. None: nobody knows,
    since there is no folder yet or more come into it; also where its inputs are refused, of which
    the job says why, and where the objective does not ask."""
    if order.sample is None or not are_counted(order):
        return order.items
    try:
        return len(scan_inputs(order.sample, inputs))
    except InputsRefused:
        return None


def _has_sizes(spec: TensorSpec) -> bool:
    return spec.shape is not None and all(isinstance(size, int) for size in spec.shape)


def are_counted(order: CutOrder) -> bool:
    """Whether a plan depends on how many items there are in the folder of inputs."""
    is_open = order.items is None and not order.follows
    return is_open and order.sample is not None and order.goal.cold
