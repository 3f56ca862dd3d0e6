"""Masks of 0 and 255 that were viewed as truth values."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal_coordinator.storage.inputs import scan_inputs
from shoal_protocol.assembly import ActivationAssembler
from shoal_protocol.partition import TensorSpec
from shoal_protocol.tensors import ActivationKey, encode_activation

KEY = ActivationKey(job="job", epoch=1, item=0, producer=-1, consumer=0)
ROWS = np.array([[0, 255, 1], [0, 0, 0], [2, 1, 128]], np.uint8)


@pytest.mark.parametrize(
    ("shape", "array"),
    [
        ((3,), ROWS),
        ((3,), np.asfortranarray(ROWS)),
        ((3, 3), ROWS),
        ((), ROWS[0]),
    ],
    ids=["stacked", "by columns", "an item", "scalars"],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_whatever_is_not_0_is_true(
    tmp_path: Path,
    shape: tuple[int, ...],
    array: np.ndarray,
    save: Callable[..., None],
) -> None:
    save(tmp_path / "a.npz", x=array.view(bool))
    inputs = scan_inputs(tmp_path, (TensorSpec(name="x", dtype="bool", shape=shape),))
    read = [inputs.read(item)["x"] for item in range(len(inputs))]
    expected = array != 0
    np.testing.assert_array_equal(read, expected if len(read) > 1 else [expected])
    for item in read:  # and a device takes it
        (frame,) = encode_activation(KEY, "", {"x": item}, transfer=0)
        assert ActivationAssembler().feed(frame) is not None
    inputs.close()
