"""Rows of a table that a fragment has not read take no memory where there is none."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from agent.fragment_making import write_fragment
from cached_pages import cached_bytes, need_a_disk
from made_models import Made, weight
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.prepared import NOTHING_PREPARED
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES, MemoryMeter

MIB = 1 << 20
ROWS, WIDTH = 32 << 10, 256


@pytest.fixture(scope="module")
def words() -> Made:
    """A table of 32 MiB, of which an item reads four rows."""
    return Made(
        text="""g (int64[1,4] ids) => (float[1,4,256] y) {
            rows = Gather(T, ids)
            y = MatMul(rows, W) }""",
        weights={"T": weight(ROWS, WIDTH), "W": weight(WIDTH, WIDTH)},
        shapes={"ids": (1, 4)},
    )


@pytest.mark.parametrize(("limit_mib", "cached"), [(24, False), (96, True)])
def test_what_a_trial_has_not_used_is_cached_where_there_is_room_only(
    words: Made, tmp_path: Path, limit_mib: int, *, cached: bool
) -> None:
    need_a_disk(tmp_path)
    model = onnx.load(words.save(tmp_path))
    made = write_fragment(tmp_path / "f", model, 8 * MIB, largest={"ids": (1, 4)})
    for path in made.folder.iterdir():
        with path.open("r+b") as file:
            os.fsync(file.fileno())
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=limit_mib * MIB)
    meter.settle(LIBRARY_RESERVE_BYTES)
    limit = limit_mib * MIB
    _, tried = runtime.open_and_try("f", made.folder, 8 * MIB, NOTHING_PREPARED, limit)
    assert tried.taken_bytes is not None
    assert not tried.stopped
    held = sum(cached_bytes(path) for path in made.folder.iterdir())
    assert (held > 31 * MIB) == cached
    ids = np.array([[7, 11_000, 22_000, ROWS - 1]])
    table, square = (words.weights[name] for name in ("T", "W"))
    result = runtime.run("f", {"ids": ids}, Stopper()).outputs["y"]
    np.testing.assert_allclose(result, table[ids] @ square, rtol=1e-4, atol=1e-5)
    more = sum(cached_bytes(path) for path in made.folder.iterdir()) - held
    assert more <= MIB, "nothing was read ahead of four rows"
    runtime.close("f")
