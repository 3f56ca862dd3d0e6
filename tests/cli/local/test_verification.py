"""Comparing with the whole model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal_cli.local.verification import Comparison, comparable, difference

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
    ],
)
def test_what_cannot_be_subtracted_is_a_mismatch(expected: np.ndarray, actual: np.ndarray) -> None:
    comparison = Comparison()
    comparison.add("a.npz", {"y": expected}, {"y": actual})
    assert (comparison.mismatched, comparison.worst_item) == (1, "a.npz")
    assert comparison.max_abs_diff == 0.0


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
