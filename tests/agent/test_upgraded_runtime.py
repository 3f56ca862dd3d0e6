"""A cache that an agent with another ONNX Runtime has left."""

import os
import shutil
from pathlib import Path

import onnxruntime
import pytest

from agent.fragment_making import dense_model, write_fragment
from agent.test_preparation import MIB, Bench
from shoal_agent.runtime.prepared import folder_of


@pytest.mark.parametrize("whose", ["its own", "another fragment's"])
async def test_forms_of_the_runtime_before_leave_their_room_to_those_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    made = write_fragment(tmp_path, dense_model([256, 512, 256]), 8 * MIB)
    prepared = made
    if whose != "its own":
        prepared = write_fragment(tmp_path, dense_model([256, 512, 256], seed=1), 8 * MIB)
    with monkeypatch.context() as before:
        before.setattr(onnxruntime, "__version__", "1.0.0")
        assert await Bench(tmp_path).prepare(prepared) is not None
        stale = folder_of(prepared.folder, "whole")
        assert stale.is_dir()
    with (stale / "0" / "weights.bin").open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, 10 * MIB)
    bench = Bench(tmp_path, cache_bytes=15 * MIB)
    assert await bench.prepare(made) is not None
    assert not stale.exists()
    assert bench.cache.total_bytes < 10 * MIB


async def test_forms_of_this_runtime_stay(tmp_path: Path) -> None:
    made = write_fragment(tmp_path, dense_model([256, 512, 256]), 8 * MIB)
    assert await Bench(tmp_path).prepare(made) is not None
    form = folder_of(made.folder, "whole")
    written = form.stat().st_ino
    other = form.with_name("0" * 32)
    shutil.copytree(form, other)
    bench = Bench(tmp_path)
    assert not other.exists()
    assert await bench.prepare(made) is not None
    assert form.stat().st_ino == written
