"""Items of an input without axes, such as a sampling rate, stacked in a file."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shoal_coordinator.storage.inputs import scan_inputs
from shoal_protocol.partition import TensorSpec


@pytest.mark.parametrize(
    ("dtype", "rates"), [("int64", np.array([8000, 16000])), ("string", np.array(["low", "high"]))]
)
def test_a_row_of_numbers_for_an_input_without_axes_is_an_array(
    tmp_path: Path, dtype: str, rates: np.ndarray
) -> None:
    """A number or text by itself is nothing that ONNX Runtime takes."""
    np.savez(tmp_path / "a.npz", rate=rates)
    with closing(
        scan_inputs(tmp_path, (TensorSpec(name="rate", dtype=dtype, shape=()),))
    ) as inputs:
        read = [inputs.read(item)["rate"] for item in range(2)]
    assert all(isinstance(each, np.ndarray) and each.shape == () for each in read), read
    assert [each.item() for each in read] == rates.tolist()
