"""The whole model's memory, on machines that let the kernel's mark be reset and on others."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from cli.local.workbench import WIDTH, save_model
from shoal_cli.local import whole_model as module
from shoal_cli.local.whole_model import WholeModel


@pytest.mark.parametrize("hardened", [False, True])
def test_a_whole_model_is_measured_whether_marks_can_be_reset_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardened: bool
) -> None:
    if hardened:
        monkeypatch.setattr(module, "_CLEAR", tmp_path)  # nobody can write to a folder
    save_model(tmp_path / "small.onnx")
    whole = WholeModel(tmp_path / "small.onnx")
    outputs = whole.run(["y"], {"x": np.ones((2, WIDTH), np.float32)})
    assert outputs["y"].shape == (2, WIDTH)
    assert whole.floor_bytes > 0
    assert 0 <= whole.peak_bytes < 1 << 30


@pytest.mark.parametrize("beside", [False, True], ids=["in the model", "beside the model"])
def test_a_model_is_loaded_whose_path_is_no_utf_8(tmp_path: Path, beside: bool) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe8les"))
    folder.mkdir()
    save_model(tmp_path / "small.onnx")
    model = onnx.load(tmp_path / "small.onnx")
    if beside:
        onnx.save_model(
            model,
            tmp_path / "small.onnx",
            save_as_external_data=True,
            location="w.bin",
            size_threshold=0,
        )
        (tmp_path / "w.bin").rename(folder / "w.bin")
    path = folder / os.fsdecode(b"petit mod\xe8le.onnx")
    (tmp_path / "small.onnx").rename(path)
    found = {each.name for each in folder.iterdir()}
    outputs = WholeModel(path).run(["y"], {"x": np.ones((2, WIDTH), np.float32)})
    assert outputs["y"].shape == (2, WIDTH)
    assert {each.name for each in folder.iterdir()} == found
