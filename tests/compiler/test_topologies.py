"""Each topology, cut at every position one by one and at all of them, equals the whole."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from chaining import Tensors, run_chained, run_whole
from made_models import TOPOLOGIES, Made, shuffled
from shoal_compiler.cutting import cut_model
from shoal_compiler.errors import ModelRefused
from shoal_compiler.profile import profile_model
from shoal_planner.segments import Layout
from shoal_protocol.partition import MODEL, document_from_json, document_to_json


def assert_equal(got: Tensors, wanted: Tensors, tolerance: float = 0.0) -> None:
    assert sorted(got) == sorted(wanted)
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype
        if tolerance:
            close = np.asarray(got[name], np.float64), np.asarray(value, np.float64)
            np.testing.assert_allclose(*close, atol=tolerance, rtol=0, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)


def some_cuts(layout: Layout) -> Iterator[tuple[int, ...]]:
    yield ()
    yield from ((position,) for position in layout.legal)
    yield layout.legal


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_cut_model_gives_what_the_whole_gives(name: str, tmp_path: Path) -> None:
    made = TOPOLOGIES[name]
    path = made.save(tmp_path)
    feeds = made.inputs()
    profile = profile_model(path, {key: value.shape for key, value in feeds.items()})
    wanted = run_whole(path, feeds)
    layout = Layout(profile)
    assert name == "nothing but constants" or layout.legal
    for cuts in some_cuts(layout):
        document = cut_model(path, profile, cuts, tmp_path / "store")
        assert len(document.fragments) == len(cuts) + 1
        assert document_from_json(document_to_json(document)) == document
        assert_equal(run_chained(tmp_path / "store", document, feeds), wanted, made.tolerance)


@pytest.mark.parametrize(
    "name", ["a residual network", "a branch that captures", "a shared weight"]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_and_the_names_of_nodes_do_not_matter(
    name: str, seed: int, tmp_path: Path
) -> None:
    made = TOPOLOGIES[name]
    path = made.save(tmp_path)
    wanted = run_whole(path, made.inputs())
    onnx.save(shuffled(made.proto(), seed), path)
    profile = profile_model(path)
    assert len({node.label for node in profile.nodes}) == len(profile.nodes)
    document = cut_model(path, profile, Layout(profile).legal, tmp_path / "store")
    assert_equal(run_chained(tmp_path / "store", document, made.inputs()), wanted)


def test_external_data_is_cut_like_any_other(tmp_path: Path) -> None:
    made = TOPOLOGIES["a branch that captures"]
    path = made.save(tmp_path, external=True)
    assert (tmp_path / "data.bin").stat().st_size
    profile = profile_model(path)
    document = cut_model(path, profile, Layout(profile).legal, tmp_path / "store")
    assert_equal(
        run_chained(tmp_path / "store", document, made.inputs()), run_whole(path, made.inputs())
    )


def test_fragments_serve_other_sizes_of_dynamic_axes_than_were_profiled(tmp_path: Path) -> None:
    made = TOPOLOGIES["shapes computed and used far away"]
    path = made.save(tmp_path)
    profile = profile_model(path, {"x": (3, 4, 4)})
    document = cut_model(path, profile, Layout(profile).legal, tmp_path / "store")
    for batch in (1, 2, 7):
        feeds = {"x": np.random.default_rng(batch).random((batch, 4, 4), np.float32)}
        assert_equal(run_chained(tmp_path / "store", document, feeds), run_whole(path, feeds))


def edges(made: Made, folder: Path, cuts: tuple[str, ...]) -> set[tuple[int, int, tuple[str, ...]]]:
    """The edges when a fragment begins with each of the nodes that make these tensors."""
    path = made.save(folder)
    profile = profile_model(path, made.shapes)
    layout = Layout(profile)
    positions = tuple(sorted(layout.makers[name] for name in cuts))
    document = cut_model(path, profile, positions, folder / "store")
    return {(each.producer, each.consumer, each.tensors) for each in document.edges}


def test_independent_branches_have_no_edge_between_them(tmp_path: Path) -> None:
    found = edges(TOPOLOGIES["independent branches with an output each"], tmp_path, ("b",))
    assert found == {
        (MODEL, 0, ("x",)),
        (MODEL, 1, ("z",)),
        (0, MODEL, ("y",)),
        (1, MODEL, ("v",)),
    }


def test_a_skip_crosses_fragments_directly(tmp_path: Path) -> None:
    found = edges(TOPOLOGIES["a residual network"], tmp_path, ("c", "f"))
    assert (0, 2, ("b",)) in found
    assert (0, 1, ("b",)) in found
    assert (MODEL, 1, ("x",)) in found


def test_a_late_input_goes_to_the_late_fragment_only(tmp_path: Path) -> None:
    found = edges(TOPOLOGIES["an input used late"], tmp_path, ("c",))
    assert {each for each in found if each[0] == MODEL} == {
        (MODEL, 0, ("x",)),
        (MODEL, 1, ("late",)),
    }


def test_an_input_handed_through_passes_the_last_fragment(tmp_path: Path) -> None:
    found = edges(TOPOLOGIES["an input that is an output"], tmp_path, ("b",))
    assert (MODEL, 1, ("through",)) in found
    assert (1, MODEL, ("through", "y")) not in found
    assert any(each[:2] == (1, MODEL) and "through" in each[2] for each in found)


def test_constants_and_shapes_are_made_again_instead_of_sent(tmp_path: Path) -> None:
    found = edges(TOPOLOGIES["constants computed from constants"], tmp_path, ("y",))
    assert (0, 1, ("b",)) in found
    assert len(found) == 3
    mask = TOPOLOGIES["a mask made from shapes"]
    # Where the tensor itself comes along, its shape is not sent, and neither is the mask.
    assert (0, 1, ("a",)) in edges(mask, tmp_path, ("b",))
    # Where it does not, the mask is: one tensor beside what the work needs.
    assert (0, 1, ("b", "m")) in edges(mask, tmp_path, ("c",))


def test_an_output_that_is_listed_twice_is_one(tmp_path: Path) -> None:
    made = TOPOLOGIES["an initializer that is an output"]
    model = made.proto()
    model.graph.output.append(model.graph.output[0])
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    profile = profile_model(path)
    assert [each.name for each in profile.outputs] == ["y", "W"]
    document = cut_model(path, profile, Layout(profile).legal, tmp_path / "store")
    feeds = made.inputs()
    assert_equal(run_chained(tmp_path / "store", document, feeds), run_whole(path, feeds))


def test_a_sequence_does_not_cross(tmp_path: Path) -> None:
    path = TOPOLOGIES["a sequence inside"].save(tmp_path)
    layout = Layout(profile_model(path))
    at = layout.makers["c"]
    assert at not in layout.legal
    assert "s would cross" in layout.obstacles[at]
    assert "sequence" in layout.obstacles[at]


def test_bfloat16_does_not_cross(tmp_path: Path) -> None:
    layout = Layout(profile_model(TOPOLOGIES["bfloat16 inside"].save(tmp_path)))
    assert "tensors of type bfloat16 are not sent" in layout.obstacles[layout.makers["b"]]


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (helper.make_tensor_type_proto(TensorProto.BFLOAT16, [1]), "let the model cast it"),
        (helper.make_tensor_type_proto(TensorProto.COMPLEX64, [1]), "real and imaginary parts"),
        (
            helper.make_sequence_type_proto(
                helper.make_map_type_proto(
                    TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
                )
            ),
            "leave out the ZipMap",
        ),
        (
            helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1])),
            "ConcatFromSequence",
        ),
        (
            helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1])),
            "OptionalGetElement",
        ),
    ],
)
def test_an_output_that_cannot_be_sent_is_refused_with_what_to_change(
    kind: onnx.TypeProto, remedy: str, tmp_path: Path
) -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_value_info("x", kind)],
        [helper.make_value_info("y", kind)],
    )
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "model.onnx")
    with pytest.raises(ModelRefused, match=remedy) as caught:
        profile_model(tmp_path / "model.onnx")
    assert caught.value.tensor in ("x", "y")


def test_control_flow_stays_whole_and_takes_along_what_it_captures(tmp_path: Path) -> None:
    found = edges(TOPOLOGIES["a branch that captures"], tmp_path, ("c", "d"))
    assert (0, 1, ("a", "b", "positive")) in found
    assert (1, 2, ("c",)) in found
