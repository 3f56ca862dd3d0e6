"""The whole model's memory, on machines that let the kernel's mark be reset and on others."""

from pathlib import Path

import numpy as np
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
