"""A small model, and a pool that stays warm for all tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import onnxruntime
import pytest

import shoal
from cli.local.workbench import save_model
from python.pools import SHAPES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("python")
    save_model(folder / "model.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(folder / "model.onnx")


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[shoal.Pool]:
    with shoal.pool(devices=3, budget="4Mi") as pool:
        yield pool


@pytest.fixture(scope="module")
def model(pool: shoal.Pool, folder: Path) -> shoal.Model:
    return pool.load(folder / "model.onnx", shapes=SHAPES)
