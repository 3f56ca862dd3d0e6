"""The arena of activations, emptied between two blocks."""

from pathlib import Path

import numpy as np
import pytest

from agent.fragment_making import InBlocks, MadeFragment, dense_model, write_fragment
from agent.test_blocks import StopsBefore
from shoal_agent.runtime.failures import Stopper, Terminated
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.prepared import NOTHING_PREPARED
from shoal_agent.runtime.process_memory import MemoryMeter

MIB = 1 << 20


def made_in(folder: Path, emptied: tuple[int, ...]) -> MadeFragment:
    """First 20 MiB of activations and 8 of weights, then 3 and 17: 26 or 40 in all, measured."""
    return write_fragment(
        folder,
        dense_model([64, 16384, 64, 2048, 2048]),
        64 * MIB,
        InBlocks(4, emptied=emptied),
        largest={"x": (160, 64)},
    )


def item() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((160, 64), dtype=np.float32)}


@pytest.mark.parametrize(("emptied", "beyond_least"), [((), 0), ((0, 2), 0), ((0, 2), 2 * MIB)])
def test_where_the_arena_is_emptied_weights_have_the_place_of_activations(
    tmp_path: Path, emptied: tuple[int, ...], beyond_least: int
) -> None:
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=64 * MIB)
    made, x = made_in(tmp_path, emptied), item()
    runtime.open("whole", made.folder)
    whole = runtime.run("whole", x, Stopper()).outputs["y"]
    runtime.close("whole")
    meter.settle()
    # Of the arena 16 MiB are held back in the trial: they must not keep it from being emptied.
    limit, granted = 48 * MIB, made.least_bytes + beyond_least
    _, tried = runtime.open_and_try("f", made.folder, granted, NOTHING_PREPARED, limit)
    assert tried.taken_bytes is not None
    assert not tried.stopped
    # Within a larger grant there is said to be room for an arena that is kept.
    assert (tried.taken_bytes < 33 * MIB) == (bool(emptied) and not beyond_least)
    for _ in range(2):
        assert np.array_equal(runtime.run("f", x, Stopper()).outputs["y"], whole)


def test_the_first_block_works_in_what_the_last_one_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a run was stopped another block may have left more: then the arena is emptied."""
    made, times = made_in(tmp_path, (0, 2)), list[None]()
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)
    shrink = runtime.shrink

    def counted() -> None:
        times.append(None)
        shrink()

    monkeypatch.setattr(runtime, "shrink", counted)
    runtime.open("f", made.folder, made.least_bytes)

    def emptied(stopper: Stopper) -> int:
        times.clear()
        runtime.run("f", item(), stopper)
        return len(times)

    assert [emptied(Stopper()) for _ in range(3)] == [2, 1, 1]
    with pytest.raises(Terminated, match="between two of its blocks"):
        emptied(StopsBefore(2))
    assert [emptied(Stopper()) for _ in range(2)] == [2, 1]
    runtime.grant("f", made.least_bytes)
    assert emptied(Stopper()) == 2
