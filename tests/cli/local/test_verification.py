"""Comparing with the whole model."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from shoal_cli.local import whole_model
from shoal_cli.local.report import Verification
from shoal_cli.local.verification import (
    Comparison,
    VerificationRequest,
    comparable,
    compare,
    difference,
)
from shoal_cli.local.whole_model import Way, WholeModel
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_coordinator.storage.catalogues import FixedFiles
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.results import ResultStore
from shoal_protocol.partition import document_to_json

FLOATS = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=3, max_side=4),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


@given(FLOATS)
def test_an_array_does_not_differ_from_itself(array: np.ndarray) -> None:
    assert comparable(array, array.copy())
    assert difference(array, array.copy()) == (0.0, 0.0)


@given(FLOATS, st.floats(1e-6, 1.0))
def test_a_shift_is_found_as_it_is(array: np.ndarray, shift: float) -> None:
    expected = np.clip(np.nan_to_num(array).astype(np.float64), -10, 10)
    absolute, relative = difference(expected, expected + shift)
    assert absolute == pytest.approx(shift, rel=1e-6)
    assert relative <= absolute * (1 + 1e-9)
    assert relative >= absolute / 11.1


def test_integers_of_any_sign_are_subtracted_without_wrapping() -> None:
    expected, actual = np.array([0], np.uint8), np.array([255], np.uint8)
    assert difference(expected, actual)[0] == 255.0


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(2), np.zeros(2, np.int64)),
        (np.array([1.0, np.nan]), np.array([1.0, 2.0])),
        (np.array([np.inf]), np.array([-np.inf])),
        (np.array(["one"]), np.array(["two"])),
        (np.array(["one"], object), np.array(["two"])),
        (np.array(["1"], object), np.array([1.0])),
    ],
)
def test_what_cannot_be_subtracted_is_a_mismatch(expected: np.ndarray, actual: np.ndarray) -> None:
    comparison = Comparison()
    comparison.add("a.npz", {"y": expected}, {"y": actual})
    assert (comparison.mismatched, comparison.worst_item) == (1, "a.npz")
    assert comparison.max_abs_diff == 0.0


@pytest.mark.parametrize("texts", [["two", "\u00fc", ""], []])
def test_text_equals_itself_as_the_runtime_gives_it_and_as_a_file_has_it(texts: list[str]) -> None:
    comparison = Comparison()
    comparison.add("a.npz", {"y": np.array(texts, object)}, {"y": np.array(texts, np.str_)})
    assert (comparison.mismatched, comparison.different) == (0, [])


def test_a_missing_output_is_a_mismatch() -> None:
    comparison = Comparison()
    comparison.add("a.npz", {"y": np.zeros(1), "z": np.zeros(1)}, {"y": np.zeros(1)})
    assert comparison.mismatched == 1


def test_the_largest_difference_and_its_item_are_kept() -> None:
    comparison = Comparison()
    whole = np.array([[1.0, 2.0, 3.0]])
    for place, shift in (("a", 1e-6), ("b", 1e-3), ("c", 1e-5)):
        comparison.add(place, {"y": whole}, {"y": whole + shift})
    comparison.add("d", {"y": whole}, {"y": whole[:, ::-1]})
    assert comparison.worst_item == "d"
    assert comparison.max_abs_diff == 2.0
    assert (comparison.items, comparison.agreements, comparison.mismatched) == (4, 3, 0)


ITEMS = 3
SWING = 0.01


def save_sensitive_model(path: Path, *, counts: bool) -> None:
    """One rounding in a Gelu, which ONNX Runtime computes at once or step by step, turns a Sin
    about: so the whole model differs from itself, by twice `SWING` at most; where it `counts`, in
    the size of an output."""
    numbers = {"root": 2**0.5, "one": 1.0, "half": 0.5, "steps": 2.0**22, "swing": SWING}
    nodes = [
        helper.make_node("Div", ["x", "root"], ["scaled"]),
        helper.make_node("Erf", ["scaled"], ["erf"]),
        helper.make_node("Add", ["erf", "one"], ["more"]),
        helper.make_node("Mul", ["x", "more"], ["product"]),
        helper.make_node("Mul", ["product", "half"], ["gelu"]),
        helper.make_node("Mul", ["gelu", "steps"], ["phase"]),
        helper.make_node("Sin", ["phase"], ["sin"]),
        helper.make_node("Mul", ["sin", "swing"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64]) for name in "xy")
    weights = [
        numpy_helper.from_array(np.array(value, np.float32), name)
        for name, value in numbers.items()
    ]
    outputs = [y]
    if counts:
        nodes.append(helper.make_node("Floor", ["sin"], ["negative"]))
        nodes.append(helper.make_node("NonZero", ["negative"], ["places"]))
        outputs.append(helper.make_tensor_value_info("places", TensorProto.INT64, [2, None]))
    graph = helper.make_graph(nodes, "sensitive", [x], outputs, weights)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


def of_sensitive_model(folder: Path, *, counts: bool = False) -> VerificationRequest:
    """The model, its partition and inputs; as results, the whole model's without optimisation."""
    model = folder / "model.onnx"
    save_sensitive_model(model, counts=counts)
    document = cut_model(model, profile_model(model), (), None)
    (folder / "partition.json").write_text(document_to_json(document))
    whole = WholeModel(model, Way.UNOPTIMISED)
    for name in ("in", "out"):
        (folder / name).mkdir()
    for item in range(ITEMS):
        x = np.random.default_rng(item).standard_normal((64, 64), np.float32)
        np.savez(folder / "in" / f"{item}.npz", x=x)
        results: dict[str, Any] = {**whole.run(whole.output_names, {"x": x})}
        np.savez(folder / "out" / f"{item}.npz", **results)
    return VerificationRequest(
        model=model,
        partition=folder / "partition.json",
        inputs=folder / "in",
        outputs=folder / "out",
        tolerance=1e-4,
    )


def with_fault(request: VerificationRequest, fault: float) -> Verification:
    """What verification says where the last item's result is wrong by so much."""
    path = request.outputs / f"{ITEMS - 1}.npz"
    with np.load(path) as results:
        arrays: dict[str, Any] = {name: results[name] for name in results.files}
    arrays["y"] += np.float32(fault)
    np.savez(path, **arrays)
    return compare(request, lambda _done, _items: None)


def test_where_no_item_has_a_result_nothing_is_said_of_the_whole_models_memory(
    tmp_path: Path,
) -> None:
    request = of_sensitive_model(tmp_path)
    for path in request.outputs.iterdir():
        path.unlink()
    found = compare(request, lambda _done, _items: None)
    assert (found.items, found.skipped, found.peak_bytes) == (0, ITEMS, 0)


def test_a_result_of_other_options_is_the_models_own(tmp_path: Path) -> None:
    found = with_fault(of_sensitive_model(tmp_path), 0)
    assert found.max_rel_diff > found.tolerance, "the model is not as sensitive as it should be"
    assert (found.different_items, found.matched_items) == (ITEMS, ITEMS)
    assert found.matches_other_options
    assert found.passed


def test_a_size_that_follows_other_options_is_the_models_own(tmp_path: Path) -> None:
    found = with_fault(of_sensitive_model(tmp_path, counts=True), 0)
    assert found.mismatched > 0, "the model is not as sensitive as it should be"
    assert found.passed


def test_a_fault_as_small_as_the_models_own_difference_is_not_called_equal(tmp_path: Path) -> None:
    found = with_fault(of_sensitive_model(tmp_path), SWING / 2)
    assert (found.different_items, found.matched_items) == (ITEMS, ITEMS - 1)
    assert not found.matches_other_options
    assert found.own_rounding


@pytest.mark.parametrize("counts", [False, True])
def test_a_larger_fault_is_a_difference(tmp_path: Path, counts: bool) -> None:
    found = with_fault(of_sensitive_model(tmp_path, counts=counts), 10 * SWING)
    assert not found.matches_other_options
    assert not found.passed


def test_a_result_of_as_many_threads_as_an_agent_has_is_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DependsOnThreads(WholeModel):
        """As kernels do that divide an array by their threads, and quantise each part by itself."""

        def __init__(self, path: Path, way: Way = Way.DEFAULT, *, threads: int | None = None):
            super().__init__(path, Way.UNOPTIMISED, threads=threads)
            self._apart = np.float32(0 if threads == 2 else 0.1)

        def run(self, *arguments: Any) -> dict[str, Any]:
            return {name: y + self._apart for name, y in super().run(*arguments).items()}

    request = of_sensitive_model(tmp_path)
    monkeypatch.setattr(whole_model, "WholeModel", DependsOnThreads)
    assert not with_fault(request, 0).passed
    assert with_fault(replace(request, threads=2), 0).passed


def test_options_with_which_the_whole_model_does_not_run_say_nothing_of_its_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RunsAsItIs(WholeModel):
        """As a model of which a kernel is missing unless the runtime has folded its node."""

        def __init__(self, path: Path, way: Way = Way.DEFAULT, *, threads: int | None = None):
            super().__init__(path, way, threads=threads)
            self._way = way

        def run(self, *arguments: Any) -> dict[str, Any]:
            if self._way is not Way.DEFAULT:
                raise whole_model.ModelUnusable("no kernel")
            return super().run(*arguments)

    request = replace(of_sensitive_model(tmp_path), tolerance=10 * SWING)
    monkeypatch.setattr(whole_model, "WholeModel", RunsAsItIs)
    found = with_fault(request, 0)
    assert found.passed
    assert (found.items, found.reference_items) == (ITEMS, 0)


def test_hundreds_of_rows_that_differ_in_shape_are_compared(tmp_path: Path) -> None:
    rows = 600
    (tmp_path / "in").mkdir()
    x = np.zeros((rows, 1, 2), np.float32)
    x[:, 0, 0] = np.arange(rows) % 2
    np.save(tmp_path / "in" / "a.npy", x)
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["y"]), helper.make_node("Relu", ["x"], ["y.1"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 2))],
        [
            helper.make_tensor_value_info("y", TensorProto.INT64, (2, None)),
            helper.make_tensor_value_info("y.1", TensorProto.FLOAT, (1, 2)),
        ],
    )
    model = tmp_path / "model.onnx"
    opset = helper.make_opsetid("", 13)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), model)
    document = cut_model(model, profile_model(model), (), None)
    (tmp_path / "partition.json").write_text(document_to_json(document))
    catalogue = FixedFiles([ResultFile("a.npz", 0, rows, stacked=True)])
    names = ["y", "y.1"]  # the second is not what row 1 of the first is called
    with closing(
        ResultStore(tmp_path / "out", job="job", identity="", catalogue=catalogue, names=names)
    ) as results:
        for row in range(rows):
            results.add(row, {"y": np.zeros((2, row % 2), np.int64), "y.1": x[row]})
        assert results.finish(range(rows)) == {}
        assert results.complete() is None
    request = VerificationRequest(
        model=model,
        partition=tmp_path / "partition.json",
        inputs=tmp_path / "in",
        outputs=tmp_path / "out",
        tolerance=1e-4,
    )
    found = compare(request, lambda _done, _items: None)
    assert (found.items, found.mismatched, found.max_abs_diff) == (rows, 0, 0.0)
