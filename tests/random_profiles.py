"""Profiles of small models, random ones and chains, and every cut there is of one."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations

from hypothesis import strategies as st

from shoal_planner.pieces import Segment
from shoal_planner.profile import NodeProfile, Profile, Role, TensorProfile
from shoal_planner.segments import Layout
from shoal_protocol.digests import Digest
from shoal_protocol.partition import TensorSpec

NONE = Digest("sha256:" + "0" * 64)


def spec(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="float", shape=None)


# Made once: to make a strategy takes longer than to draw from it.
_WEIGHTS = tuple(f"w{number}" for number in range(4))
_WEIGHT_BYTES = st.integers(1, 4 << 20)
_HELD = st.lists(st.sampled_from(_WEIGHTS), max_size=2, unique=True)
# Small ones, and ones as large as weights: a cut through those costs memory on both sides.
_SIZE = st.one_of(st.integers(0, 5000), st.integers(0, 4 << 20))
_SIZE_IF_KNOWN = st.one_of(_SIZE, _SIZE, _SIZE, st.none())
_FLOPS = st.one_of(st.integers(0, 10**9), st.none())


@cache
def _some_of(tensors: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(tensors), min_size=1, max_size=3, unique=True)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Random DAGs: all roles, shared weights, skips, and tensors that cannot be sent."""
    weights = {name: draw(_WEIGHT_BYTES) for name in _WEIGHTS}
    tensors = {"x": TensorProfile(spec=spec("x"), bytes=draw(_SIZE))}
    roles = {"x": Role.COMPUTE}
    nodes = []
    for number in range(draw(st.integers(1, 9))):
        reads = draw(_some_of(tuple(sorted(tensors))))
        role = Role.COMPUTE
        if draw(st.integers(0, 4)) == 0 and all(roles[each] is not Role.COMPUTE for each in reads):
            role = Role.SHAPE
        elif draw(st.integers(0, 9)) == 0:
            role = Role.SHAPE  # takes the shape of what it reads
        name = f"t{number}"
        obstacle = "it is a sequence" if draw(st.integers(0, 14)) == 0 else ""
        tensors[name] = TensorProfile(
            spec=spec(name),
            bytes=draw(_SIZE_IF_KNOWN),
            obstacle=obstacle if role is Role.COMPUTE else "",
        )
        roles[name] = role
        held = draw(_HELD)
        nodes.append(
            NodeProfile(
                label=f"node {number}",
                operator="Op",
                source=number,
                role=role,
                inputs=tuple(reads),
                outputs=(name,),
                weights=tuple(held),
                flops=draw(_FLOPS),
                parameter_bytes=sum(weights[each] for each in held),
                activation_bytes=tensors[name].bytes,
                in_place=draw(st.booleans()),
            )
        )
    tensors[f"t{len(nodes) - 1}"] = TensorProfile(spec=spec(nodes[-1].outputs[0]), bytes=8)
    return Profile(
        digest=NONE,
        graph_digest=NONE,
        size_bytes=0,
        opset=17,
        parameters=0,
        inputs=(spec("x"),),
        outputs=(spec(nodes[-1].outputs[0]),),
        nodes=tuple(nodes),
        tensors=tensors,
        weights=weights,
    )


def every_cut(layout: Layout, count: int) -> Iterator[list[Segment]]:
    for cuts in combinations(layout.legal, count - 1):
        ends = (*cuts, len(layout.profile.nodes))
        yield [layout.segment(a, b) for a, b in zip((0, *cuts), ends, strict=True)]


def chain(*weights: int, obstacle: str = "", sent: int = 1000) -> Profile:
    """A chain of nodes with a weight each; the first tensor has `sent` bytes and `obstacle`."""
    tensors = {
        f"t{number}": TensorProfile(
            spec=spec(f"t{number}"),
            bytes=sent if number == 1 else 1000,
            obstacle=obstacle if number == 1 else "",
        )
        for number in range(len(weights) + 1)
    }
    nodes = tuple(
        NodeProfile(
            label=f"layer {number} (MatMul)",
            operator="MatMul",
            source=number,
            role=Role.COMPUTE,
            inputs=(f"t{number}",),
            outputs=(f"t{number + 1}",),
            weights=(f"w{number}",),
            flops=weight,
            parameter_bytes=weight,
            activation_bytes=sent if number == 0 else 1000,
        )
        for number, weight in enumerate(weights)
    )
    return Profile(
        digest=NONE,
        graph_digest=NONE,
        size_bytes=0,
        opset=17,
        parameters=0,
        inputs=(spec("t0"),),
        outputs=(spec(f"t{len(weights)}"),),
        nodes=nodes,
        tensors=tensors,
        weights={f"w{number}": weight for number, weight in enumerate(weights)},
    )
