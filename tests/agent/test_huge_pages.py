"""Where files are read in huge pages: the kernel needs room for what it reads ahead."""

import re
from pathlib import Path

import numpy as np
import pytest

from agent.fragment_making import InBlocks, dense_model, write_fragment
from agent.test_preparation import Bench
from shoal_agent.runtime import prepared as prepared_forms
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_protocol.units import Bytes

MIB = 1 << 20


def advised(folder: Path) -> set[bool]:
    """Of the mappings of a fragment's weights, whether they are read in huge pages."""
    text = Path("/proc/self/smaps").read_text()
    flags = re.findall(rf"{folder}/weights\.bin\n(?:[A-Z].*\n)*?VmFlags: (.*)\n", text)
    return {" hg" in each for each in flags}


def test_huge_pages_are_read_ahead_only_where_there_is_room_for_them(tmp_path: Path) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))
    least, meter = made.least_bytes, MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=64 * MIB)
    meter.settle()
    runtime.open("f", made.folder, least)
    assert advised(made.folder) == {True}
    runtime.close("f")
    taken = np.ones(60 * MIB - least, np.uint8)
    runtime.open("f", made.folder, least)
    assert advised(made.folder) == {False}
    del taken


@pytest.mark.parametrize(("free", "huge"), [(8 * MIB, True), (8 * MIB - 1, False)])
async def test_what_was_prepared_is_read_in_huge_pages_where_there_is_room_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, huge: bool
) -> None:
    dense = write_fragment(tmp_path, dense_model([256, 512, 256]), 8 * MIB)
    assert await Bench(tmp_path).prepare(dense) is not None
    read: list[Path] = []
    monkeypatch.setattr(prepared_forms, "read_in_huge_pages", read.append)
    assert await Bench(tmp_path, Bytes(free)).prepare(dense) is not None
    assert bool(read) == huge
