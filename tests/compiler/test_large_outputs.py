"""What a plan has outside of the arena, an agent has a place for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from chaining import Tensors, run_chained
from compiler.test_workspaces import Case, reckoned_and_taken
from made_models import Made, weight
from random_profiles import chain
from real_models import MODELS, find, image
from shoal_agent.runtime.destinations import Destinations
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.profile import Profile, Role
from shoal_planner.segments import Growing, Layout
from shoal_protocol.arena_regions import OUTSIDE_BYTES
from shoal_protocol.partition import TensorSpec

MIB = 1 << 20
MOST_CUTS = 60


def grown(layout: Layout, start: int, end: int) -> Growing:
    growing = Growing(layout, start)
    while growing.end < end:
        growing.grow()
    return growing


def texts(rows: int) -> Tensors:
    return {name: np.repeat(a, rows, 0) for name, a in MODELS["minilm_l6"].inputs(0).items()}


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("squeezenet1_1", MODELS["squeezenet1_1"].inputs(0)),
        ("mobilenet_v2", MODELS["mobilenet_v2"].inputs(0)),
        ("minilm_l6", texts(8)),
        ("ppocr_rec", image("x", 6, 3, 48, 320)(0)),
    ],
)
def test_an_agent_has_a_place_for_what_a_plan_has_outside_of_the_arena(
    name: str, item: Tensors, tmp_path: Path
) -> None:
    path = find(name)
    profile = profile_model(path, {key: value.shape for key, value in item.items()})
    cuts = Layout(profile).legal[:MOST_CUTS]
    document = cut_model(path, profile, cuts, tmp_path)
    kept: dict[int, Tensors] = {}
    run_chained(tmp_path, document, item, kept)
    outside, ends = 0, (*cuts, len(profile.nodes))
    for fragment, start, end in zip(document.fragments, (0, *cuts), ends, strict=True):
        feed = {
            tensor: kept[edge.producer][tensor]
            for edge in document.into(fragment.index)
            for tensor in edge.tensors
        }
        folder = tmp_path / "fragments" / fragment.digest.removeprefix("sha256:")
        session = onnxruntime.InferenceSession(
            folder / "model.onnx", providers=["CPUExecutionProvider"]
        )
        placed = Destinations([session], {each.name for each in fragment.outputs}).of(feed)
        if grown(Layout(profile), start, end).outside_bytes:
            outside += 1
            last = next(each for each in profile.nodes[end - 1 :: -1] if each.role is Role.COMPUTE)
            assert set(last.outputs) & {each.name for each in fragment.outputs}
            assert set(last.outputs) <= placed.keys()
    assert outside > 0 or name == "ppocr_rec"


def widened(size: int, shape: tuple[int | str, ...], sizes: tuple[int, ...]) -> Profile:
    """Two layers; what the first one makes has that size and shape."""
    profile = chain(1000, 1000)
    spec = TensorSpec(name="t1", dtype="float", shape=shape)
    wide = replace(profile.tensors["t1"], spec=spec, bytes=size, sizes=sizes)
    return replace(profile, tensors={**profile.tensors, "t1": wide})


def test_a_large_output_whose_shape_is_known_counts_once() -> None:
    large = widened(8 * MIB, (1, 2 * MIB), (1, 2 * MIB))
    known = grown(Layout(large), 0, 1)
    assert known.outside_bytes > 8 * MIB  # with the arena's tables
    unknown = grown(Layout(widened(8 * MIB, ("rows", 2 * MIB), (1, 2 * MIB))), 0, 1)
    assert unknown.resident_bytes - known.resident_bytes > 8 * MIB
    # Between two nodes of one fragment it lies in the arena.
    both = grown(Layout(large), 0, 2)
    assert not both.outside_bytes
    assert both.touched_bytes > 8 * MIB


def test_what_is_small_beside_it_changes_nothing(tmp_path: Path) -> None:
    """The rows of an EmbedLayerNormalization lie outside, though not what it says of its mask."""
    case = Case(
        "EmbedLayerNormalization",
        {"i": np.zeros((1, 4096), np.int32), "t": None, "w": weight(512, 1024)}
        | {"wp": weight(4096, 1024), "wt": None, "wg": weight(1024), "wb": weight(1024)},
        outputs=("y", "m"),
    )
    model = case.model()
    onnx.save(model, tmp_path / "model.onnx")
    profile = profile_model(tmp_path / "model.onnx")
    assert grown(Layout(profile), 0, 1).outside_bytes >= 16 * MIB
    reckoned, taken = reckoned_and_taken(model, case.item(), tmp_path)
    assert taken <= reckoned < 1.2 * taken


@pytest.mark.parametrize("last", ["", " s = Shape(z)"])
def test_what_is_larger_than_a_region_of_the_arena_counts_once_too(
    last: str, tmp_path: Path
) -> None:
    """Alone, and where the model asks for its shape afterwards."""
    given = "float[25,1048576] z" + (", int64[2] s" if last else "")
    text = f"g (float[25,1048576] x) => ({given}) {{ y = Relu(x) z = Mul(x, y){last} }}"
    made = Made(text=text, weights={}, shapes={"x": (25, 1 << 20)})
    item = {"x": np.ones((25, 1 << 20), np.float32)}
    reckoned, taken = reckoned_and_taken(made.proto(), item, tmp_path)
    assert taken <= reckoned < 1.1 * taken


def test_an_output_that_is_let_go_when_its_shape_is_known_lies_in_the_arena() -> None:
    profile = chain(1000, 1000, 1000)
    large = replace(profile.tensors["t1"], bytes=8 * MIB, sizes=(1, 2 * MIB))
    large = replace(large, spec=TensorSpec(name="t1", dtype="float", shape=(1, 2 * MIB)))
    nodes = list(profile.nodes)
    nodes[1] = replace(nodes[1], role=Role.SHAPE)
    layout = Layout(replace(profile, nodes=tuple(nodes), tensors={**profile.tensors, "t1": large}))
    assert grown(layout, 0, 1).outside_bytes > 8 * MIB
    assert not grown(layout, 0, 2).outside_bytes


def test_what_is_copied_in_no_time_or_is_no_more_than_declared_lies_in_the_arena() -> None:
    small = OUTSIDE_BYTES - 4
    assert not grown(Layout(widened(small, (small // 4,), (small // 4,))), 0, 1).outside_bytes
    other = widened(8 * MIB, (1, MIB), (1, 2 * MIB))  # the model says what is not so
    assert not grown(Layout(other), 0, 1).outside_bytes
