"""Inputs of models that take bfloat16, for which NumPy has no type."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shoal_coordinator.storage.inputs import InputSet, InputUnsuitable, scan_inputs
from shoal_protocol.partition import TensorSpec

VALUES = np.array([[0.5, 1.5]], np.float32)


def scanned(folder: Path, array: np.ndarray) -> InputSet:
    np.save(folder / "a.npy", array)
    return scan_inputs(folder, (TensorSpec(name="x", dtype="bfloat16", shape=(1, 2)),))


@pytest.mark.parametrize(
    "array", [VALUES, VALUES.astype(ml_dtypes.bfloat16)], ids=["float32", "bfloat16"]
)
def test_a_refusal_says_how_values_keep_what_they_are(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(InputUnsuitable) as refused:
        scanned(tmp_path, array).read(0)
    _, advice = str(refused.value).split("save it with ")
    assert advice == ".astype(ml_dtypes.bfloat16).view('uint16')"
    as_advised = array.astype(ml_dtypes.bfloat16).view("uint16")
    read = scanned(tmp_path, as_advised).read(0)["x"]
    np.testing.assert_array_equal(read.view(ml_dtypes.bfloat16), VALUES)
