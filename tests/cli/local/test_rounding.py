"""Results of models that compute with half precision, compared with the whole model's."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shoal_cli.local.report import Verification
from shoal_cli.local.rounding import apart_by_rounding
from shoal_cli.local.verification import VerificationRequest, compare
from shoal_cli.local.whole_model import WholeModel
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_protocol.partition import document_to_json

UNIT = 2.0**-10
"""The distance of 1 from the half-precision number that comes next."""


def save_model(path: Path, number: int) -> None:
    """A layer with numbers of that type; what goes in and comes out is of single precision."""
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=number),
        helper.make_node("MatMul", ["narrow", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=TensorProto.FLOAT),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in "xy")
    numbers = np.random.default_rng(0).standard_normal((64, 64))
    weight = numbers.astype(helper.tensor_dtype_to_np_dtype(number))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


def with_fault(folder: Path, number: int, units: float) -> Verification:
    """What is said where the smallest number of a result is wrong by so many units of the half
    precision of its largest."""
    model = folder / "model.onnx"
    save_model(model, number)
    document = cut_model(model, profile_model(model), (), None)
    (folder / "partition.json").write_text(document_to_json(document))
    x = np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)
    (y,) = WholeModel(model).run(["y"], {"x": x}).values()
    assert np.abs(y).max() > 10
    y.flat[np.abs(y).argmin()] += units * UNIT * np.abs(y).max()
    for name, arrays in {"in": {"x": x}, "out": {"y": y}}.items():
        (folder / name).mkdir()
        np.savez(folder / name / "0.npz", allow_pickle=False, **arrays)
    request = VerificationRequest(
        model=model,
        partition=folder / "partition.json",
        inputs=folder / "in",
        outputs=folder / "out",
        tolerance=1e-4,
    )
    return compare(request, lambda _done, _items: None)


@pytest.mark.parametrize(
    ("number", "units", "passes"),
    [
        (TensorProto.FLOAT16, 1.9, True),
        (TensorProto.FLOAT16, 2.1, False),
        (TensorProto.FLOAT, 1.9, False),
    ],
)
def test_two_results_may_be_rounded_to_numbers_on_either_side(
    tmp_path: Path, number: int, units: float, *, passes: bool
) -> None:
    found = with_fault(tmp_path, number, units)
    assert found.max_rel_diff > found.tolerance
    assert found.passed is passes
    assert (found.different_items, found.rounded_items) == ((0, 1) if passes else (1, 0))
    assert not found.own_rounding


@pytest.mark.parametrize(
    ("number", "unit"),
    [(TensorProto.FLOAT16, UNIT), (TensorProto.FLOAT, 0.0), (TensorProto.DOUBLE, 0.0)],
)
def test_the_unit_is_of_the_coarsest_numbers_that_a_model_has(
    tmp_path: Path, number: int, unit: float
) -> None:
    save_model(tmp_path / "model.onnx", number)
    assert apart_by_rounding(tmp_path / "model.onnx") == 2 * unit
