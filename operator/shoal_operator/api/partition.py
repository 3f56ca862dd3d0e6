"""A model cut into fragments: the value that cutting makes, planning reads and dispatch runs.

The fragments form a DAG. Stage and fragment share one index; `MODEL` stands for the model itself:
as the producer of an edge it means the model's inputs, as the consumer the model's outputs. Fragments
are in topological order: every edge goes from a smaller to a larger index.
"""

from dataclasses import dataclass
from typing import Final, NewType

Digest = NewType("Digest", str)
"""`sha256:` and 64 hexadecimal digits."""

MODEL: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor's name, type and shape.

    `dtype` is ONNX's name in lower case (`float`, `int64`, `float16`, ...); in `shape` an int is a
    fixed size, a str a symbolic one (`batch`), and None one that nobody knows.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A self-contained sub-graph with its weights, named by the digest of its manifest.

    `weight_bytes` are the initializers' bytes. `resident_bytes` is what a device is to reckon with
    above its idle floor while the fragment is loaded and runs one item: weights, the most activations
    alive at once, and workspace. `flops` and `activation_bytes` are None where a shape is unknown:
    unknown stays unknown, never zero.
    """

    index: int
    digest: Digest
    nodes: int
    weight_bytes: int
    resident_bytes: int
    activation_bytes: int | None
    flops: int | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Tensors that `consumer` needs from `producer` (fragment indices, or `MODEL`); bytes per item."""

    producer: int
    consumer: int
    tensors: tuple[str, ...]
    bytes_per_item: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDocument:
    """What `partition.json` in the fragment store says."""

    model_digest: Digest
    fragments: tuple[Fragment, ...]
    edges: tuple[Edge, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        indices = [fragment.index for fragment in self.fragments]
        assert indices == list(range(len(indices))), f"fragments are numbered {indices}"
        for edge in self.edges:
            assert edge.producer < edge.consumer or edge.consumer == MODEL, f"{edge} goes back"

    def into(self, consumer: int) -> tuple[Edge, ...]:
        """The edges that end in a stage, by producer."""
        return tuple(edge for edge in self.edges if edge.consumer == consumer)

    def out_of(self, producer: int) -> tuple[Edge, ...]:
        """The edges that start in a stage, by consumer."""
        return tuple(edge for edge in self.edges if edge.producer == producer)
