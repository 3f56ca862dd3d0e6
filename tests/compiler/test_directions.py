"""Recurrent layers of both directions, as one layer for each."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from compiler.layers import Layer, profile_of
from compiler.test_slicing import cut_everywhere, small_limit
from made_models import weight
from shoal_compiler.profile import profile_model

__all__ = ["small_limit"]

HIDDEN, TAKEN, STEPS = 24, 30, 5
STEPS_OF_X = weight(STEPS, 1, TAKEN)
BOTH: dict[str, Any] = {"direction": "bidirectional", "hidden_size": HIDDEN}


def weights(gates: int, bias: int = 2) -> dict[str, np.ndarray]:
    return {
        "w": weight(2, gates * HIDDEN, TAKEN),
        "r": weight(2, gates * HIDDEN, HIDDEN, seed=1),
        "b": weight(2, bias * gates * HIDDEN, seed=2),
    }


def state(name: str) -> list[onnx.NodeProto]:
    """A state that is computed of the first step."""
    shape = f"{name}.shape"
    return [
        helper.make_node("Constant", [], [shape], value_ints=[2, 1, HIDDEN]),
        helper.make_node("ReduceMean", ["x"], [f"{name}.one"], keepdims=0),
        helper.make_node("Expand", [f"{name}.one", shape], [name]),
    ]


CASES = {
    "LSTM with states that are computed": (
        [*state("h"), *state("c")],
        helper.make_node("LSTM", ["x", "w", "r", "b", "", "h", "c"], ["y"], **BOTH),
        weights(4),
    ),
    "LSTM whose first states are one tensor": (
        state("h"),
        helper.make_node("LSTM", ["x", "w", "r", "b", "", "h", "h"], ["y"], **BOTH),
        weights(4),
    ),
    "LSTM whose first states are one weight": (
        [],
        helper.make_node("LSTM", ["x", "w", "r", "b", "", "h", "h"], ["y"], **BOTH),
        {**weights(4), "h": weight(2, 1, HIDDEN, seed=3)},
    ),
    "LSTM of which the last states are read": (
        [],
        helper.make_node("LSTM", ["x", "w", "r", "b"], ["", "", "y"], **BOTH),
        weights(4),
    ),
    "LSTM with other functions for each direction": (
        [],
        helper.make_node(
            "LSTM",
            ["x", "w", "r"],
            ["y"],
            activations=["Sigmoid", "Tanh", "Tanh", "Sigmoid", "Relu", "Tanh"],
            **BOTH,
        ),
        {name: value for name, value in weights(4).items() if name != "b"},
    ),
    "GRU": (
        [],
        helper.make_node("GRU", ["x", "w", "r", "b"], ["", "y"], linear_before_reset=1, **BOTH),
        weights(3),
    ),
    "RNN with a state": (
        state("h"),
        helper.make_node("RNN", ["x", "w", "r", "b", "", "h"], ["y"], **BOTH),
        {
            "w": weight(2, HIDDEN, 500),
            "r": weight(2, HIDDEN, HIDDEN, seed=1),
            "b": weight(2, 2 * HIDDEN, seed=2),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_direction_gives_what_it_gives_beside_the_other(tmp_path: Path, name: str) -> None:
    before, node, known = CASES[name]
    layer = Layer(node, weight(STEPS, 1, known["w"].shape[2]), known, before=before)
    profile = profile_of(layer, tmp_path)
    assert {f"{each}.{n}" for each in known for n in (0, 1)} <= set(profile.weights)
    assert not set(known) & set(profile.weights)
    cut_everywhere(tmp_path, profile, layer.x)


@pytest.mark.parametrize(
    "attributes",
    [
        {"direction": "forward"},
        {"direction": "bidirectional", "activation_alpha": [0.1] * 6},
        {"direction": "bidirectional", "layout": 1},
    ],
)
def test_a_layer_of_one_direction_or_with_more_to_divide_stays_whole(
    tmp_path: Path, attributes: dict[str, Any]
) -> None:
    ways = 2 if attributes["direction"] == "bidirectional" else 1
    known = {name: value[:ways] for name, value in weights(4).items()}
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], hidden_size=HIDDEN, **attributes)
    profile = profile_of(Layer(node, STEPS_OF_X, known), tmp_path)
    assert set(profile.weights) == set(known)


@pytest.mark.parametrize("name", ["w", "r", "b"])
def test_a_layer_that_has_something_for_one_direction_only_is_left_to_the_runtime_to_refuse(
    tmp_path: Path, name: str
) -> None:
    before, node, known = CASES["GRU"]
    less = {**known, name: known[name][:1]}
    profile = profile_of(Layer(node, STEPS_OF_X, less, before=before), tmp_path)
    assert set(profile.weights) == set(less)


def test_a_small_layer_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_compiler.profile.SLICE_BYTES", (1 << 20,))
    before, node, known = CASES["GRU"]
    profile_of(Layer(node, STEPS_OF_X, known, before=before), tmp_path)
    assert set(profile_model(tmp_path / "model.onnx").weights) == set(known)
