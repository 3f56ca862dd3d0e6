"""Files beside the inputs of a job that only look like some."""

import os
from contextlib import closing
from pathlib import Path

import numpy as np

from shoal_coordinator.storage.inputs import passed_over, scan_inputs
from shoal_protocol.partition import TensorSpec

VECTOR = (TensorSpec(name="x", dtype="float", shape=(3,)),)


def test_what_looks_like_inputs_and_is_not_taken_can_be_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", x=np.zeros(3, np.float32))
    (tmp_path / "link.npz").symlink_to("good.npz")
    (tmp_path / "dangling.npz").symlink_to("nowhere")
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    for name in ("UP.NPZ", "notes.txt", ".hidden.npz"):
        (tmp_path / name).touch()
    assert passed_over(tmp_path) == ["UP.NPZ", "dangling.npz", "folder.npy", "pipe.npz"]
    with closing(scan_inputs(tmp_path, VECTOR)) as inputs:
        assert [file.name for file in inputs.files] == ["good.npz", "link.npz"]
