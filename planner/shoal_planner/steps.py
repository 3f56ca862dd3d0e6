"""What running one node comes to, wherever its segment starts. A search for cuts asks for each node
a hundred times and more, so it is worked out once. Pure.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from shoal_planner.half_forms import converted_tables
from shoal_planner.profile import NodeProfile, Profile, TensorProfile
from shoal_protocol.arena_regions import OUTSIDE_BYTES
from shoal_protocol.partition import TensorSpec

NODE_BYTES: Final = 8 << 10
"""What the runtime needs for each node: kernel, names, shapes."""
CONVERSIONS: Final = 2
"""Nodes that the runtime adds to one that computes in single precision in place of halves."""
INNER: Final = 2
"""So many nodes of graphs inside a node take as much as one outside: 3000 took 3.6 KiB each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A node that runs: `made` are its outputs with the bytes that they take, `dying` the inputs
    that nobody needs after it, `sent_bytes` what of its outputs is sent while somebody needs it.
    `touched` are the weights of which it reads rows, with the bytes that those take in memory.
    `unknown`: the size of an output is not known.

    An agent gives what is large a place outside of the arena, before it runs, where the shape
    follows from those of its inputs (`shoal_agent.runtime.destinations`). If that is so of all that
    is large, `axes_outside` are the symbols that the inputs' shapes must have; else None. What is
    not large takes `small_bytes` of the arena.
    """

    node: NodeProfile
    runtime_nodes: int
    made: tuple[tuple[str, int], ...]
    dying: tuple[str, ...]
    sent_bytes: int
    touched: Mapping[str, int]
    unknown: bool
    axes_outside: frozenset[str] | None
    small_bytes: int


def steps_of(
    profile: Profile,
    last_uses: Mapping[str, int],
    sent: Mapping[str, int],
    items: int,
    *,
    gathered: bool,
) -> tuple[Step, ...]:
    """The steps of a profile, by position. `last_uses` and `sent` are those of its layout; the rows
    of so many items are in memory together, or those that a device reads itself are `gathered`."""
    return tuple(_steps(profile, last_uses, sent, 0 if gathered else items, items))


def _steps(
    profile: Profile,
    last_uses: Mapping[str, int],
    sent: Mapping[str, int],
    gathered_items: int,
    items: int,
) -> Iterator[Step]:
    whole = converted_tables(profile)
    for position, node in enumerate(profile.nodes):
        outputs = {name: profile.tensors[name] for name in node.outputs}
        yield Step(
            node=node,
            runtime_nodes=1
            + CONVERSIONS * node.halves.is_converted
            + node.inner_nodes // INNER
            + node.attribute_bytes // NODE_BYTES,
            made=tuple((name, each.computed_bytes or 0) for name, each in outputs.items()),
            dying=tuple(name for name in node.inputs if last_uses[name] == position),
            sent_bytes=_sum_of(sent, (name for name in outputs if name in last_uses)),
            touched={
                name: min(profile.weights[name], size * (gathered_items if node.gathers else items))
                for name, size in node.touched
                if position not in whole
            },
            unknown=any(each.bytes is None for each in outputs.values()),
            axes_outside=_axes_outside(node, outputs.values()),
            small_bytes=sum(
                each.computed_bytes or 0 for each in outputs.values() if not _is_large(each)
            ),
        )


def symbols(spec: TensorSpec) -> frozenset[str]:
    """The symbolic axes of a tensor."""
    return frozenset(axis for axis in spec.shape or () if isinstance(axis, str))


_SIZES_UNSURE: Final = frozenset({"com.microsoft.GroupQueryAttention"})
"""The runtime takes the caches that they give for as long as the past, finds that these are longer,
and then says nothing of their sizes: agents have no place for them."""


def _axes_outside(node: NodeProfile, outputs: Collection[TensorProfile]) -> frozenset[str] | None:
    # Graphs inside a node make what it gives, and what is converted is made in the arena first.
    large = [each for each in outputs if _is_large(each)]
    unsure = node.operator in _SIZES_UNSURE or node.inner_nodes
    if unsure or not large or not all(map(_may_be_outside, large)):
        return None
    return frozenset().union(*(symbols(each.spec) for each in large))


def _is_large(tensor: TensorProfile) -> bool:
    return tensor.bytes is None or tensor.bytes >= OUTSIDE_BYTES


def _may_be_outside(tensor: TensorProfile) -> bool:
    return has_known_shape(tensor) and tensor.computed_bytes == tensor.bytes


def is_outside(tensor: TensorProfile, axes: Container[str]) -> bool:
    """Whether an agent gives it a place outside of the arena, where inputs have such `axes`, though
    it may be of half precision."""
    known = _is_large(tensor) and has_known_shape(tensor)
    return known and all(axis in axes for axis in symbols(tensor.spec))


def has_known_shape(tensor: TensorProfile) -> bool:
    """Whether its shape follows from those of inputs, and is what the model says."""
    shape, sizes = tensor.spec.shape, tensor.sizes
    if not shape or sizes is None or len(shape) != len(sizes) or None in shape:
        return False
    pairs = zip(shape, sizes, strict=True)
    return all(axis == size for axis, size in pairs if isinstance(axis, int))


def _sum_of(sizes: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(sizes.get(name, 0) for name in names)
