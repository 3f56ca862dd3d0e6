"""What is held for the attributes of nodes that have their model there."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from chaining import Tensors
from compiler.test_resident_estimate import MIB
from compiler.test_workspaces import reckoned_and_taken

FEATURES = 20


def model_of(operator: str, kind: int, width: int, **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node(operator, ["x"], ["y"], domain="ai.onnx.ml", **attributes)
    inputs = [helper.make_tensor_value_info("x", kind, [4, width])]
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info("y")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def trees(number: int, depth: int, targets: int = 1) -> onnx.ModelProto:
    """Full trees."""
    inner, nodes = 2**depth - 1, 2 ** (depth + 1) - 1
    places = [(tree, node) for tree in range(number) for node in range(nodes)]
    leaves = [each for each in places if each[1] >= inner for _ in range(targets)]
    return model_of(
        "TreeEnsembleRegressor",
        TensorProto.FLOAT,
        FEATURES,
        n_targets=targets,
        nodes_treeids=[tree for tree, _ in places],
        nodes_nodeids=[node for _, node in places],
        nodes_featureids=[node % FEATURES for _, node in places],
        nodes_values=[0.5] * len(places),
        nodes_modes=["LEAF" if node >= inner else "BRANCH_LEQ" for _, node in places],
        nodes_truenodeids=[0 if node >= inner else 2 * node + 1 for _, node in places],
        nodes_falsenodeids=[0 if node >= inner else 2 * node + 2 for _, node in places],
        target_treeids=[tree for tree, _ in leaves],
        target_nodeids=[node for _, node in leaves],
        target_ids=[place % targets for place in range(len(leaves))],
        target_weights=[0.25] * len(leaves),
    )


def flat_trees(number: int, depth: int) -> onnx.ModelProto:
    """Full trees as `TreeEnsemble` has them: all in one, inner nodes and leaves apart."""
    inner, leaves = 2**depth - 1, 2**depth
    every = [(tree, node) for tree in range(number) for node in range(inner)]
    last = [int(node >= inner // 2) for _, node in every]

    def below(side: int) -> list[int]:
        return [
            2 * node + side + (tree * leaves - inner if is_last else tree * inner)
            for (tree, node), is_last in zip(every, last, strict=True)
        ]

    def table(kind: np.dtype[Any], value: float, count: int) -> onnx.TensorProto:
        return numpy_helper.from_array(np.full(count, value, kind), "table")

    model = model_of(
        "TreeEnsemble",
        TensorProto.FLOAT,
        FEATURES,
        n_targets=1,
        aggregate_function=1,
        tree_roots=[tree * inner for tree in range(number)],
        nodes_featureids=[node % FEATURES for _, node in every],
        nodes_splits=table(np.dtype(np.float32), 0.5, len(every)),
        nodes_modes=table(np.dtype(np.uint8), 0, len(every)),
        nodes_truenodeids=below(1),
        nodes_trueleafs=last,
        nodes_falsenodeids=below(2),
        nodes_falseleafs=last,
        leaf_targetids=[0] * number * leaves,
        leaf_weights=table(np.dtype(np.float32), 0.25, number * leaves),
    )
    model.opset_import[1].version = 5
    return model


def labels(number: int) -> onnx.ModelProto:
    keys, values = list(range(number)), [0.5] * number
    return model_of("LabelEncoder", TensorProto.INT64, 1, keys_int64s=keys, values_floats=values)


def vectors(number: int, width: int) -> onnx.ModelProto:
    return model_of(
        "SVMRegressor",
        TensorProto.FLOAT,
        width,
        kernel_type="RBF",
        kernel_params=[0.1, 0.0, 3.0],
        n_supports=number,
        rho=[0.0],
        coefficients=[1.0] * number,
        support_vectors=[0.5] * number * width,
    )


def floats(width: int) -> Tensors:
    return {"x": np.ones((4, width), np.float32)}


@pytest.mark.parametrize(
    ("model", "item"),
    [
        pytest.param(lambda: trees(400, 6), floats(FEATURES), id="many trees"),
        pytest.param(lambda: trees(25, 10), floats(FEATURES), id="deep trees"),
        pytest.param(lambda: trees(200, 6, 4), floats(FEATURES), id="trees of four targets"),
        pytest.param(lambda: flat_trees(800, 6), floats(FEATURES), id="many flat trees"),
        pytest.param(lambda: flat_trees(50, 10), floats(FEATURES), id="deep flat trees"),
        pytest.param(lambda: labels(200_000), {"x": np.ones((4, 1), np.int64)}, id="labels"),
        pytest.param(lambda: vectors(2000, 500), floats(500), id="vectors"),
    ],
)
def test_what_attributes_say_is_reckoned(model: Any, item: Tensors, tmp_path: Path) -> None:
    reckoned, taken = reckoned_and_taken(model(), item, tmp_path)
    assert 5 * MIB < taken <= reckoned < 1.5 * taken + 4 * MIB


def sparse(number: int, width: int, values: int) -> onnx.ModelProto:
    """Layers with sparse weights."""
    places = np.arange(values, dtype=np.int64)
    tensors = [
        helper.make_sparse_tensor(
            numpy_helper.from_array(np.ones(values, np.float32), f"w{each}"),
            numpy_helper.from_array(places, f"i{each}"),
            [width, width],
        )
        for each in range(number)
    ]
    nodes = [
        helper.make_node("MatMul", [f"h{each}" if each else "x", f"w{each}"], [f"h{each + 1}"])
        for each in range(number)
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, width])],
        [helper.make_tensor_value_info(f"h{number}", TensorProto.FLOAT, [4, width])],
        sparse_initializer=tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize(
    ("model", "item"),
    [
        pytest.param(lambda: sparse(1, 2048, 20_000), floats(2048), id="one"),
        pytest.param(lambda: sparse(3, 1024, 20_000), floats(1024), id="three"),
        pytest.param(lambda: sparse(1, 1024, 500_000), floats(1024), id="of many values"),
    ],
)
def test_what_sparse_weights_take_while_they_are_loaded_is_reckoned(
    model: Any, item: Tensors, tmp_path: Path
) -> None:
    reckoned, taken = reckoned_and_taken(model(), item, tmp_path)
    assert 5 * MIB < taken <= reckoned < 1.5 * taken + 4 * MIB
