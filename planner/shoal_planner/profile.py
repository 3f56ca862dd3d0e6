"""What is known of a model before it is cut: its nodes in a fixed order, their cost, its tensors.

`Profile.nodes` is a topological order, and a cut is a position in it: `cuts == (3, 7)` makes the
fragments of nodes 0..2, 3..6 and 7 to the end. Each node has a role, which says what happens when a
later fragment needs its output:

CONSTANT  depends on no input of the model. Never sent: each fragment that needs it makes it again.
          These nodes come first in the order, before any cut.
SHAPE     depends on the *shapes* of tensors only. A fragment that holds those tensors anyway makes
          it again; any other is sent the result, which is small.
COMPUTE   everything else. Runs in one fragment; its outputs are sent.

Unknown stays unknown: bytes and FLOPs are None where a shape is not known, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal_protocol.digests import Digest
from shoal_protocol.partition import TensorSpec, Work

HALF: Final = "float16"
"""Few of ONNX Runtime's kernels for processors take it; it converts before and after the others."""


class Halves(StrEnum):
    """What the runtime does with what a node takes of half precision. `TAKEN` ones have a kernel
    for it, but are converted, too, between nodes that are (`shoal_planner.halves`)."""

    NONE = "none"
    """It takes nothing of half precision."""
    CONVERTED = "converted"
    """It computes in single precision, and what it gives is converted back where that is needed."""
    ROUNDED = "rounded"
    """The same, but it gives halves: it is made of several nodes, and the last have kernels."""
    TAKEN = "taken"
    KEPT = "kept"
    """The same, and never converted."""
    WIDENED = "widened"
    """It is a conversion to single precision itself."""
    NARROWED = "narrowed"
    """It makes halves of what is of single precision."""
    SINGLE = "single"
    """It has a kernel for it, and is converted in the whole model: fragments have it in single
    precision, whatever is around it there."""

    @property
    def is_converted(self) -> bool:
        """Whether it computes in single precision, wherever it is."""
        return self in (Halves.CONVERTED, Halves.ROUNDED, Halves.SINGLE)


class Role(StrEnum):
    """What happens to a node's output that a later fragment needs (see the module's text)."""

    CONSTANT = "constant"
    SHAPE = "shape"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """One node. `label` is for people and unique; `source` is its index in the normalised graph.

    `inputs` are the tensors that it or its sub-graphs read, `weights` the initializers.
    `parameter_bytes` are theirs, `activation_bytes` its outputs', `workspaces` what the runtime
    needs besides in its arena while the node runs, in bytes, one after the other, `converted` its
    weights in single precision, which are there before its outputs, `halves` what becomes of what
    it takes of half precision, `neighbours` the tensors whose makers and readers decide on
    that, and `beside_bytes` what it takes then beside the arena, and gives back. `in_place` says
    that the runtime lets an output take the place of an input of the same size that nobody needs
    any more, `is_view` that what it gives is its first input, with another shape. `joined`: no cut
    is to be before it.
    `touched` are the weights of which the node reads some rows only, with the bytes of memory that
    those of one item take. `gathers`: in blocks, the device reads these rows itself, and that is
    what they take then; 0: it does not. `inner_nodes` counts those of the graphs inside it; for its
    attributes `attribute_bytes` are held. `work` is what a device has to do, as estimated.
    """

    label: str
    operator: str
    source: int
    role: Role
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    flops: int | None
    parameter_bytes: int
    activation_bytes: int | None
    workspaces: tuple[int, ...] = ()
    converted: tuple[int, ...] = ()
    halves: Halves = Halves.NONE
    neighbours: tuple[str, ...] = ()
    beside_bytes: int = 0
    in_place: bool = False
    joined: bool = False
    is_view: bool = False
    touched: tuple[tuple[str, int], ...] = ()
    gathers: int = 0
    inner_nodes: int = 0
    attribute_bytes: int = 0
    work: Work | None = None

    @property
    def works_in(self) -> tuple[int, ...]:
        """All that the runtime needs besides what the node reads and gives, in the arena."""
        return (*self.converted, *self.workspaces)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorProfile:
    """One tensor between nodes. `bytes` and `sizes`, of its axes, are for the shapes that were
    profiled.

    `spec` has the shape as the graph alone gives it, with symbolic axes. `obstacle` says why the
    tensor cannot be sent from one device to another; empty: it can. `values` are those of a few
    integers, where they follow from the shapes that were profiled. `sent_single`: nodes take and
    give it as halves, but the runtime keeps it in single precision in the whole model, so fragments
    are sent it so; `spec` and `bytes` are of that.
    """

    spec: TensorSpec
    bytes: int | None
    obstacle: str = ""
    sizes: tuple[int, ...] | None = None
    values: tuple[int, ...] | None = None
    sent_single: bool = False

    @property
    def is_half(self) -> bool:
        """Whether nodes take and give it as halves."""
        return self.sent_single or self.spec.dtype == HALF

    @property
    def model_bytes(self) -> int | None:
        """What it takes for a node that takes it as it is in the model."""
        return self.bytes // 2 if self.sent_single and self.bytes is not None else self.bytes

    @property
    def computed_bytes(self) -> int | None:
        """What it takes while the runtime computes with it: half precision as single."""
        factor = 2 if self.spec.dtype == HALF else 1
        return None if self.bytes is None else factor * self.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model's profile.

    `digest` is the model's: the sha256 of the ONNX file, or, where it has external data, of the
    lines `HEX  FILE` for the ONNX file (as `model.onnx`) and then each file of data in the order of
    names. `graph_digest` is that of the ONNX file alone. `size_bytes` counts all those files.
    `weights` are the initializers' bytes by name, `parameters` the number of their elements;
    `half_weights` are those of half precision.
    """

    digest: Digest
    graph_digest: Digest
    size_bytes: int
    opset: int
    parameters: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: tuple[NodeProfile, ...]
    tensors: Mapping[str, TensorProfile]
    weights: Mapping[str, int]
    half_weights: frozenset[str] = frozenset()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all initializers."""
        return sum(self.weights.values())

    @property
    def flops(self) -> int | None:
        """FLOPs of one item; None where any node's are unknown."""
        total = 0
        for node in self.nodes:
            if node.flops is None:
                return None
            total += node.flops
        return total
