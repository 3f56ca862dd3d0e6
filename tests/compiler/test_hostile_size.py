"""Models whose size alone is the attack: refused by their counts, or worked through in linear
time. The tests count work, since a time would depend on the machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from made_models import weight
from random_profiles import chain
from shoal_compiler import wire
from shoal_compiler.errors import ModelRefused
from shoal_compiler.graph import normalise
from shoal_compiler.profiler import Profiler
from shoal_compiler.safety import open_model
from shoal_compiler.trees import MAX_TREE_DEPTH
from shoal_planner import cuts
from shoal_planner.cuts import CutRequest, choose_cuts
from shoal_planner.segments import Growing, Layout

VALUE = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N"])
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]


def written(folder: Path, graph: onnx.GraphProto, *functions: onnx.FunctionProto) -> Path:
    opsets = [*OPSETS, *([helper.make_opsetid("local", 1)] if functions else [])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=list(functions))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def many(count: int) -> list[onnx.NodeProto]:
    return [helper.make_node("Relu", ["x"], ["y"])] * count


@pytest.fixture
def fields(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each field of the file that is read."""
    read: list[int] = []
    real = wire._Walk._field

    def counted(walk: wire._Walk, start: int, end: int) -> wire._Field:
        read.append(start)
        return real(walk, start, end)

    monkeypatch.setattr(wire._Walk, "_field", counted)
    return read


def test_too_many_nodes_are_refused_before_any_of_them_is_read(
    tmp_path: Path, fields: list[int]
) -> None:
    path = written(tmp_path, helper.make_graph(many(300_000), "g", [], [VALUE]))
    with pytest.raises(ModelRefused, match="more than 200000 nodes"):
        open_model(path)
    assert len(fields) < 200_100


def test_too_many_initializers_are_refused_before_any_of_them_is_read(
    tmp_path: Path, fields: list[int]
) -> None:
    tensors = [TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[0])] * 200_001
    path = written(tmp_path, helper.make_graph(many(1), "g", [], [VALUE], tensors))
    with pytest.raises(ModelRefused, match="more than 200000 initializers"):
        open_model(path)
    assert len(fields) < 200_100


def test_nodes_inside_of_branches_count_as_well(tmp_path: Path) -> None:
    branch = helper.make_graph(many(200_001), "branch", [], [VALUE])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch)
    path = written(tmp_path, helper.make_graph([node], "g", [], [VALUE]))
    with pytest.raises(ModelRefused, match="more than 200000 nodes"):
        open_model(path)


class Listed(dict[str, object]):
    """A dictionary that counts how often somebody goes through all of it."""

    times = 0

    def keys(self):  # type: ignore[no-untyped-def]
        Listed.times += 1
        return super().keys()


def test_the_profiler_does_not_go_through_all_weights_for_each_node(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])
    y = helper.make_tensor_value_info("a49", TensorProto.FLOAT, ["N", 4])
    nodes = [
        helper.make_node("Add", [f"a{each - 1}" if each else "x", f"w{each}"], [f"a{each}"])
        for each in range(50)
    ]
    tensors = [numpy_helper.from_array(weight(4), f"w{each}") for each in range(50)]
    model = open_model(written(tmp_path, helper.make_graph(nodes, "g", [x], [y], tensors)))
    graph = normalise(model)
    profiler = Profiler.of(replace(graph, weights=Listed(graph.weights)), {})  # type: ignore[arg-type]
    assert len(profiler._nodes()) == 50
    assert Listed.times < 10


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each node that the search for cuts visits."""
    visited: list[int] = []
    real = Growing.grow

    def counted(growing: Growing) -> None:
        visited.append(growing.end)
        real(growing)

    monkeypatch.setattr(Growing, "grow", counted)
    return visited


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.01])
def test_a_limit_is_kept_without_trying_each_pair_of_nodes(
    share: float, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "MOST_STEPS", 60_000)
    profile = chain(*([100_000] * 2000))
    layout = Layout(profile)
    whole = layout.segment(0, 2000).resident_bytes
    limit = max(int(whole * share), 4 << 20)
    steps.clear()
    chosen = choose_cuts(profile, CutRequest(max_bytes=limit))
    assert len(steps) < 3 * 60_000
    assert isinstance(chosen, tuple)
    assert all(piece.segment.resident_bytes <= limit for piece in layout.pieces(chosen))


def test_a_model_that_fits_whole_is_visited_once(steps: list[int]) -> None:
    assert choose_cuts(chain(*([1] * 1000)), CutRequest(max_bytes=1 << 40)) == ()
    assert len(steps) == 1000


def test_more_positions_are_tried_where_nearly_all_cost_is_in_one_node() -> None:
    profile = chain(*([1] * 300), 1 << 30, *([1] * 300))
    chosen = choose_cuts(profile, CutRequest(fragments=12))
    assert isinstance(chosen, tuple)
    assert len(chosen) == 11


def tree(depth: int, *, cycle: bool = False) -> onnx.NodeProto:
    """A chain of tests; each has a leaf on one side and the next test on the other."""
    count = 2 * depth + 1
    below = [*range(1, depth), 2 * depth]
    return helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        nodes_treeids=[0] * count,
        nodes_nodeids=list(range(count)),
        nodes_modes=["BRANCH_LEQ"] * depth + ["LEAF"] * (depth + 1),
        nodes_truenodeids=[*range(depth, 2 * depth), *([0] * (depth + 1))],
        nodes_falsenodeids=[*([*below[:-1], 0] if cycle else below), *([0] * (depth + 1))],
    )


def flat_tree(depth: int) -> onnx.NodeProto:
    """The same as `TreeEnsemble` has it."""
    return helper.make_node(
        "TreeEnsemble",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        nodes_trueleafs=[1] * depth,
        nodes_truenodeids=list(range(depth)),
        nodes_falseleafs=[*([0] * (depth - 1)), 1],
        nodes_falsenodeids=[*range(1, depth), depth],
    )


@pytest.mark.parametrize("make", [tree, flat_tree])
def test_a_tree_that_would_overflow_the_runtimes_stack_is_refused(
    make: Callable[[int], onnx.NodeProto], tmp_path: Path
) -> None:
    open_model(written(tmp_path, helper.make_graph([make(300)], "g", [], [VALUE])))
    deep = make(MAX_TREE_DEPTH + 2)
    with pytest.raises(ModelRefused, match="smaller maximum depth") as caught:
        open_model(written(tmp_path, helper.make_graph([deep], "g", [], [VALUE])))
    assert caught.value.node == f"{deep.output[0]} ({deep.op_type})"


def test_a_tree_that_contains_itself_is_refused(tmp_path: Path) -> None:
    node = tree(3, cycle=True)
    with pytest.raises(ModelRefused, match="contains itself"):
        open_model(written(tmp_path, helper.make_graph([node], "g", [], [VALUE])))


def test_a_deep_tree_that_a_function_is_given_is_refused(tmp_path: Path) -> None:
    """The node in the function names its attributes only; the caller has their values."""
    body, call = tree(MAX_TREE_DEPTH + 1), helper.make_node("f", ["x"], ["y"], domain="local")
    call.attribute.extend(body.attribute)
    for attribute in body.attribute:
        kind, name = attribute.type, attribute.name
        attribute.CopyFrom(onnx.AttributeProto(name=name, ref_attr_name=name, type=kind))
    function = helper.make_function(
        "local", "f", ["x"], ["y"], [body], OPSETS, [each.name for each in call.attribute]
    )
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1])
    path = written(tmp_path, helper.make_graph([call], "g", [x], [VALUE]), function)
    with pytest.raises(ModelRefused, match="smaller maximum depth"):
        normalise(open_model(path))


def forest(count: int) -> onnx.NodeProto:
    """As many trees of one test and two leaves."""
    return helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        nodes_treeids=[number for number in range(count) for _ in range(3)],
        nodes_nodeids=[0, 1, 2] * count,
        nodes_featureids=[0, 300, 0] * count,
        nodes_values=[0.5, 0.0, 0.0] * count,
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"] * count,
        nodes_truenodeids=[1, 0, 0] * count,
        nodes_falsenodeids=[2, 0, 0] * count,
        target_ids=[0, 0] * count,
        target_nodeids=[1, 2] * count,
        target_treeids=[number for number in range(count) for _ in range(2)],
        target_weights=[1.0, 2.0] * count,
        n_targets=1,
    )


def test_lists_of_attributes_are_read_many_values_at_a_time(
    tmp_path: Path, fields: list[int]
) -> None:
    """Of half a million values, in texts, integers of all lengths and floats."""
    node = forest(18_000)
    assert sum(len(each.ints) + len(each.floats) for each in node.attribute) > 400_000
    path = written(tmp_path, helper.make_graph([node], "g", [], [VALUE]))
    assert open_model(path).proto.graph.node[0] == node
    assert len(fields) < 500


def test_a_list_of_more_values_than_may_be_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_LISTED", 1000)
    path = written(tmp_path, helper.make_graph([forest(100)], "g", [], [VALUE]))
    with pytest.raises(ModelRefused, match=r"more than 1000 values .* fewer or shallower trees"):
        open_model(path)


def test_a_tree_whose_nodes_have_any_numbers_in_any_order_is_measured(tmp_path: Path) -> None:
    deep = tree(MAX_TREE_DEPTH + 2)
    for attribute in deep.attribute:
        if attribute.ints and attribute.name != "nodes_treeids":
            attribute.ints[:] = [2**62 - 3 * each for each in attribute.ints]
        attribute.ints[:] = attribute.ints[::-1]
        attribute.strings[:] = attribute.strings[::-1]
    with pytest.raises(ModelRefused, match="smaller maximum depth"):
        open_model(written(tmp_path, helper.make_graph([deep], "g", [], [VALUE])))
