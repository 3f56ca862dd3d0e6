"""The shapes of a job's inputs: what a plan has to cover."""

from pathlib import Path

import numpy as np

from shoal_coordinator.storage.inputs import scan_inputs
from shoal_protocol.partition import TensorSpec

IMAGE = (TensorSpec(name="x", dtype="float", shape=(1, 3, "height", "width")),)
SENTENCE = (
    TensorSpec(name="ids", dtype="int64", shape=("batch", "length")),
    TensorSpec(name="mask", dtype="int64", shape=("batch", "length")),
)


def test_the_largest_envelope_covers_every_item_that_can_run(tmp_path: Path) -> None:
    for name, shape in (("a", (1, 3, 40, 8)), ("b", (1, 3, 4, 90)), ("c", (5, 3, 20, 20))):
        np.save(tmp_path / f"{name}.npy", np.zeros(shape, np.float32))
    np.save(tmp_path / "too_deep.npy", np.zeros((1, 4, 500, 500), np.float32))
    (tmp_path / "no_array.npy").write_bytes(b"")
    assert scan_inputs(tmp_path, IMAGE).envelopes()[-1] == {"x": (1, 3, 40, 90)}


def test_envelopes_grow_from_the_smallest_kind_of_item_to_all(tmp_path: Path) -> None:
    for name, width in (("a", 900), ("b", 8), ("c", 20), ("d", 8)):
        np.save(tmp_path / f"{name}.npy", np.zeros((1, 3, 4, width), np.float32))
    np.save(tmp_path / "unsuitable.npy", np.zeros((1, 4, 500, 500), np.float32))
    inputs = scan_inputs(tmp_path, IMAGE)
    assert [each["x"][-1] for each in inputs.envelopes()] == [8, 20, 900]
    beyond = [inputs.beyond(each) for each in inputs.envelopes()]
    assert beyond == [("a.npy", "c.npy"), ("a.npy",), ()]


def test_each_input_of_the_model_has_its_largest_shape(tmp_path: Path) -> None:
    for name, length in (("short", 4), ("long", 64)):
        ids = np.zeros((2, 1, length), np.int64)
        np.savez(tmp_path / f"{name}.npz", ids=ids, mask=ids)
    shapes = scan_inputs(tmp_path, SENTENCE).envelopes()[-1]
    assert shapes == {"ids": (1, 64), "mask": (1, 64)}


def test_where_no_item_can_run_there_is_no_envelope(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1, 4, 4, 4), np.float32))
    assert scan_inputs(tmp_path, IMAGE).envelopes() == ()


def test_of_inputs_of_any_rank_the_highest_counts(tmp_path: Path) -> None:
    any_rank = (TensorSpec(name="x", dtype="float", shape=None),)
    for name, shape in (("a", (9,)), ("b", (2, 3)), ("c", (1, 7))):
        np.save(tmp_path / f"{name}.npy", np.zeros(shape, np.float32))
    assert scan_inputs(tmp_path, any_rank).envelopes()[-1] == {"x": (2, 7)}
