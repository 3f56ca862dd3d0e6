"""Items that are larger than planned, and trials of more than there is: what they get of the arena
leaves room for what is in memory already."""

import asyncio
import json
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest

from agent.fragment_making import InBlocks, MadeFragment, write_fragment
from agent.larger_item_probe import ARENA_BYTES, in_memory
from agent.own_process import in_own_process
from made_models import Made, weight
from shoal_agent.runtime import guard
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.prepared import NOTHING_PREPARED
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.processor import Processor
from shoal_agent.runtime.unplanned_runs import Scratch
from shoal_protocol.tensors import Array

PROBE = Path(__file__).with_name("larger_item_probe.py")
TRIAL = Path(__file__).with_name("trial_probe.py")
MIB = 1 << 20
BUDGET = 24 * MIB
SEVERAL = 236 * MIB
"""More than the first large region of the arena."""
LIMIT = BUDGET - BUDGET // 8
"""What such an item may take: see `limit_of_larger`."""
GROWING = Made(
    text="""g (int64[2] count) => (float[1,1024] y) {
        one = Constant<value_float = 1.0>()
        large = Expand(one, count)
        row = ReduceMax<axes = [0], keepdims = 1>(large)
        y = MatMul(row, W) }""",
    weights={"W": weight(1024, 1024)},
    shapes={},
)
"""As many rows as its input says, 4 KiB each, and then 4 MiB of weights."""
SCALED: Final = Made(
    text="""g (float[rows,1024] x) => (float[1,1024] y) {
        few = Slice(x, b0, b1)
        row = ReduceMax<axes = [0], keepdims = 1>(few)
        large = Mul(x, row)
        y = ReduceMax<axes = [0], keepdims = 1>(large) }""",
    weights={"b0": np.array([0]), "b1": np.array([256])},
    shapes={},
)
"""1 MiB of the rows that it takes, and then as many as those."""
_TURNS: Final = 8


HANDED_ON = Made(
    text="""g (int64[2] count) => (float[rows,1024] y) {
        one = Constant<value_float = 1.0>()
        y = Expand(one, count) }""",
    weights={},
    shapes={},
)
"""The same rows as its output, which is copied."""

REDUCED = Made(
    text="""g (int64[2] count) => (float[1,1024] y) {
        one = Constant<value_float = 1.0>()
        large = Expand(one, count)
        y = ReduceMax<axes = [0], keepdims = 1>(large) }""",
    weights={},
    shapes={},
)
"""The same rows, and next to nothing besides."""

SHIFTED = Made(
    text="""g (float[rows,1024] x) => (float[rows,1024] y) {
        row = ReduceMax<axes = [0], keepdims = 1>(x)
        y = Add(x, row) }""",
    weights={},
    shapes={},
)
"""As many rows as it takes, which it writes outside of the arena."""


SCATTERED = Made(
    text="""g (int64[2] count) => (float[1,1024] y) {
        one = Constant<value_float = 1.0>()
        zero = Constant<value_int = 0>()
        large = Expand(one, count)
        index = Expand(zero, count)
        set = ScatterElements<axis = 0>(large, index, large)
        y = ReduceMax<axes = [0], keepdims = 1>(set) }""",
    weights={},
    shapes={},
)
"""As many rows as its input says, four times, and twice outside of the arena."""


def looked_up() -> Made:
    """Rows of 4 KiB of a table of 64 MiB."""
    return Made(
        text="""g (int64[rows] x) => (float[1,1024] y) {
            row = Gather<axis = 0>(W, x)
            y = ReduceMax<axes = [0], keepdims = 1>(row) }""",
        weights={"W": weight(16384, 1024)},
        shapes={},
    )


def weights_after(count: int) -> Made:
    """As many rows as its input says, which stay until the end, and 4 MiB of weights for each layer
    that one row of them passes."""
    text = ["one = Constant<value_float = 1.0>()", "large = Expand(one, count)"]
    text.append("y0 = ReduceMax<axes = [0], keepdims = 1>(large)")
    text += [f"y{layer + 1} = MatMul(y{layer}, W{layer})" for layer in range(count)]
    text.append("least = ReduceMin<axes = [0], keepdims = 1>(large)")
    text.append(f"y = Add(y{count}, least)")
    return Made(
        text=f"g (int64[2] count) => (float[1,1024] y) {{ {' '.join(text)} }}",
        weights={f"W{layer}": weight(1024, 1024) for layer in range(count)},
        shapes={},
    )


def layers(count: int) -> Made:
    """As many rows as its input says, and 4 MiB of weights for each layer, which reads all of them
    several times besides."""
    text, last = ["one = Constant<value_float = 1.0>()", "large = Expand(one, count)"], "one"
    for layer in range(count):
        for turn in range(_TURNS):
            kind = ("ReduceMax", "ReduceMin")[turn % 2]
            text.append(f"r{layer}_{turn} = {kind}<axes = [0], keepdims = 1>(large)")
            text.append(f"s{layer}_{turn} = Mul({last}, r{layer}_{turn})")
            last = f"s{layer}_{turn}"
        text.append(f"y{layer} = MatMul({last}, W{layer})")
        last = f"y{layer}"
    text.append(f"y = Identity({last})")
    return Made(
        text=f"g (int64[2] count) => (float[1,1024] y) {{ {' '.join(text)} }}",
        weights={f"W{layer}": weight(1024, 1024) for layer in range(count)},
        shapes={},
    )


def found_with(
    folder: Path,
    made: Made,
    rows_mib: int,
    *how: str,
    limit: int = LIMIT,
    blocks: InBlocks | None = None,
    beside: int = 0,
) -> dict[str, Any]:
    model = onnx.load(made.save(folder))
    fragment = write_fragment(folder, model, 80 * MIB, blocks, beside_bytes=beside)
    return ran(fragment, rows_mib, *how, limit=limit)


def ran(fragment: MadeFragment, rows_mib: int, *how: str, limit: int = LIMIT) -> dict[str, Any]:
    command = [sys.executable, PROBE, fragment.folder, limit, rows_mib * 256, *how]
    found: dict[str, Any] = json.loads(subprocess.check_output(list(map(str, command)), text=True))
    return found


@pytest.mark.parametrize(("rows_mib", "runs"), [(8, True), (18, False)])
def test_an_item_that_leaves_no_room_for_weights_is_stopped_before_it_takes_it(
    tmp_path: Path, rows_mib: int, *, runs: bool
) -> None:
    found = found_with(tmp_path, GROWING, rows_mib)
    assert (found["stopped"] == "") == runs, found
    assert found["peak"] <= BUDGET


@pytest.mark.parametrize(("rows_mib", "runs"), [(6, True), (14, False)])
def test_an_item_whose_outputs_leave_no_room_for_their_copy_is_stopped(
    tmp_path: Path, rows_mib: int, *, runs: bool
) -> None:
    found = found_with(tmp_path, HANDED_ON, rows_mib)
    assert (found["stopped"] == "") == runs, found
    assert found["peak"] <= BUDGET
    assert found["next_peak"] < 2 * MIB, "it has left nothing in memory"


@pytest.mark.parametrize(("rows_mib", "runs"), [(30, True), (62, False), (63, False)])
def test_what_the_arena_keeps_of_itself_is_part_of_what_an_untried_fragment_takes(
    tmp_path: Path, rows_mib: int, *, runs: bool
) -> None:
    """Its tables are 2 MiB here, and one node takes all the rest."""
    found = found_with(tmp_path, REDUCED, rows_mib, "untried", limit=ARENA_BYTES)
    assert (found["stopped"] == "") == runs, found
    assert found["peak"] <= ARENA_BYTES


@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize(("rows_mib", "runs"), [(9, True), (13, False), (20, False)])
def test_inputs_on_disk_and_outputs_beside_the_arena_are_part_of_what_a_run_takes(
    tmp_path: Path, rows_mib: int, where: str, *, runs: bool
) -> None:
    found = found_with(tmp_path, SHIFTED, rows_mib, "untried", where, limit=BUDGET)
    assert (found["stopped"] == "") == runs, found
    assert found["peak"] <= BUDGET


@pytest.mark.parametrize(("blocks", "runs"), [(None, False), (InBlocks(20), True)])
def test_of_an_untried_fragment_all_weights_count_that_are_in_memory_at_one_time(
    tmp_path: Path, blocks: InBlocks | None, *, runs: bool
) -> None:
    """64 MiB of weights and 8 of rows, in 24: a guard that looks now and then would be too late."""
    how = ("untried", "granted") if blocks else ("untried",)
    found = found_with(tmp_path, weights_after(16), 8, *how, limit=BUDGET, blocks=blocks)
    assert (found["stopped"] == "") == runs, found
    assert found["peak"] <= BUDGET


@pytest.mark.parametrize("blocks", [None, InBlocks(1, working_bytes=3 * MIB)])
@pytest.mark.parametrize("where", ["in the page cache", "cold"])
def test_weights_beside_which_an_item_has_no_room_come_back_no_faster_than_they_are_dropped(
    tmp_path: Path, blocks: InBlocks | None, where: str
) -> None:
    """16 MiB of weights and 12 of rows, in 24. From the page cache, all of them came between two
    looks of the guard."""
    how = ["granted"] * (blocks is not None) + [where]
    found = found_with(tmp_path, weights_after(4), 12, *how, blocks=blocks)
    assert not found["stopped"], found
    assert found["peak"] <= BUDGET


@pytest.mark.parametrize("how", [(), ("untried",)])
def test_rows_of_a_table_bring_no_more_of_it_than_there_is_room_for(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    """512 rows of 4 KiB. From the page cache each of them brought 64 KiB with it."""
    found = found_with(tmp_path, looked_up(), 2, "looked up", *how)
    assert not found["stopped"], found
    assert found["peak"] <= BUDGET


def peaks_when_opened_again(folder: Path) -> list[int]:
    """Of a fragment that was tried when it was opened first, and whose files are in the page cache:
    with three items, each of 512 other rows."""
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=BUDGET)
    runtime.rehearse()
    meter.settle()
    runtime.open_and_try("f", folder, BUDGET, NOTHING_PREPARED, BUDGET)
    runtime.close("f")
    assert [path.read_bytes() for path in folder.iterdir()]
    runtime.open("f", folder, BUDGET)
    items = ({"x": np.arange(512) * 32 + 8 * turn} for turn in range(3))
    return [runtime.run("f", item, Stopper()).peak_bytes for item in items]


def test_rows_of_a_fragment_that_is_opened_again_bring_no_more_of_the_table(tmp_path: Path) -> None:
    """From the page cache, an item brought 31 MiB."""
    model = onnx.load(looked_up().save(tmp_path))
    made = write_fragment(tmp_path, model, BUDGET, largest={"x": (512,)})
    for path in made.folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    assert max(in_own_process(peaks_when_opened_again, made.folder)) <= BUDGET


def ran_unwatched(folder: Path) -> tuple[int, int]:
    """The first run of a fragment in blocks that was not tried, which no guard looks at: its peak,
    and what the weights that it did not keep would have taken besides."""
    guard._LOOK_SECONDS = 60.0  # type: ignore[misc]
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=BUDGET)
    runtime.rehearse()
    meter.settle()
    runtime.open("f", folder, 20 * MIB)
    item = {"count": np.array([8 * 256, 1024])}
    result = runtime.run("f", item, Stopper(), BUDGET, is_tried=False)
    return result.peak_bytes, result.unkept_bytes


def test_an_untried_fragment_in_blocks_says_what_it_would_take_with_the_weights_that_it_keeps(
    tmp_path: Path,
) -> None:
    """16 MiB of weights and 8 of rows, of which nobody knew, in 24."""
    model, blocks = onnx.load(weights_after(4).save(tmp_path)), InBlocks(4, working_bytes=MIB)
    made = write_fragment(tmp_path, model, 80 * MIB, blocks)
    peak, unkept = in_own_process(ran_unwatched, made.folder)
    assert peak <= 20 * MIB, "the rows, and a block of weights or two"
    assert 8 * MIB < unkept <= 16 * MIB
    assert peak + unkept > BUDGET


def test_weights_that_another_process_keeps_in_the_page_cache_leave_no_room_for_a_larger_item(
    tmp_path: Path,
) -> None:
    fragment = write_fragment(tmp_path, onnx.load(weights_after(4).save(tmp_path)), 80 * MIB)
    with open(fragment.folder / "weights.bin", "rb") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert sum(mapped[:: mmap.PAGESIZE]) > 0
            found = ran(fragment, 12)
        assert "more than 21 MiB" in found["stopped"]
        assert found["peak"] <= BUDGET
        os.fsync(file.fileno())
    assert not ran(fragment, 12)["stopped"]


def test_the_item_after_a_larger_one_has_room_for_all_weights(tmp_path: Path) -> None:
    found = found_with(tmp_path, layers(4), 12)
    assert not found["stopped"], found
    assert found["next_peak"] <= BUDGET


@pytest.mark.parametrize(("rows_mib", "stopped"), [(8, False), (20, True)])
def test_a_trial_takes_no_more_than_is_left_beside_what_is_in_memory(
    tmp_path: Path, rows_mib: int, *, stopped: bool
) -> None:
    values = {"count": (rows_mib * 256, 1024)}
    model = onnx.load(GROWING.save(tmp_path))
    made = write_fragment(tmp_path, model, BUDGET, largest={"count": [2]}, values=values)
    found = tried(made, BUDGET, BUDGET)
    assert found["stopped"] == stopped, found
    assert found["peak"] <= BUDGET


@pytest.mark.parametrize(("rows_mib", "runs"), [(2, True), (3, False)])
@pytest.mark.parametrize("how", [(), ("untried",)])
def test_what_a_node_takes_outside_of_the_arena_is_part_of_what_a_run_takes(
    tmp_path: Path, rows_mib: int, how: tuple[str, ...], *, runs: bool
) -> None:
    """All of it comes within a few milliseconds."""
    found = found_with(tmp_path, SCATTERED, rows_mib, *how, beside=2 * rows_mib * MIB)
    assert (found["stopped"] == "") == runs, found
    assert found["peak"] <= BUDGET


@pytest.mark.parametrize(("rows_mib", "stopped"), [(1, False), (3, True)])
def test_what_a_node_takes_outside_of_the_arena_is_part_of_what_a_trial_takes(
    tmp_path: Path, rows_mib: int, *, stopped: bool
) -> None:
    made = write_fragment(
        tmp_path,
        onnx.load(SCATTERED.save(tmp_path)),
        BUDGET,
        largest={"count": [2]},
        values={"count": (rows_mib * 256, 1024)},
        beside_bytes=2 * rows_mib * MIB,
    )
    found = tried(made, BUDGET, BUDGET)
    assert found["stopped"] == stopped, found
    assert found["peak"] <= BUDGET


@pytest.mark.parametrize(
    ("planned", "taken", "beside"), [(0, 400, 80), (400, 400, 80), (100, 400, 320), (800, 400, 80)]
)
def test_what_a_node_takes_outside_of_the_arena_grows_as_its_inputs_do(
    planned: int, taken: int, beside: int
) -> None:
    feed: dict[str, Array] = {
        "x": np.zeros(taken // 8, np.float32),
        "n": np.zeros(taken // 16, np.int64),
    }
    assert Scratch(80, planned).beside(feed) == beside


def test_a_trial_takes_no_more_where_the_agent_began_with_a_larger_budget(tmp_path: Path) -> None:
    """The arena's tables of what it must not have then are no use of the fragment, but for that of
    the first region."""
    model, values = onnx.load(GROWING.save(tmp_path)), {"count": (256, 1024)}
    made = write_fragment(tmp_path, model, BUDGET, largest={"count": [2]}, values=values)
    same, larger = (tried(made, BUDGET, began) for began in (BUDGET, 7 * BUDGET))
    assert larger["taken"] - same["taken"] < 3 * MIB, (same, larger)
    assert larger["peak"] <= BUDGET


def tried(made: MadeFragment, limit: int, began: int) -> dict[str, Any]:
    command = [sys.executable, TRIAL, made.folder, limit, began]
    found: dict[str, Any] = json.loads(subprocess.check_output(list(map(str, command)), text=True))
    return found


def peaks_in_several_regions(folder: Path) -> list[int]:
    """Of items that are tried, and of which some fit into the first large region of the arena."""
    with ThreadPoolExecutor(1) as thread:
        meter = thread.submit(MemoryMeter).result()
        runtime = thread.submit(Runtime, meter, threads=1, limit_bytes=SEVERAL).result()
        thread.submit(runtime.rehearse).result()
        thread.submit(meter.settle).result()
        _, tried = thread.submit(
            runtime.open_and_try, "f", folder, SEVERAL, NOTHING_PREPARED, SEVERAL
        ).result()
        assert 200 * MIB < (tried.taken_bytes or 0) < SEVERAL
        processor = Processor(runtime, thread)

        async def peaks() -> list[int]:
            found = []
            for rows_mib in (100, 90, 100, 60, 90, 100):
                item = in_memory(rows_mib * 256)
                result = await processor.run(
                    "f",
                    item,
                    SEVERAL,
                    measured=True,
                    is_known=True,
                    is_tried=True,
                    is_larger=False,
                    planned_bytes=SEVERAL,
                )
                found.append(result.peak_bytes)
                del item, result
            return found

        return asyncio.run(peaks())


def test_items_that_take_other_regions_of_the_arena_find_nothing_there_of_those_before(
    tmp_path: Path,
) -> None:
    """Each once more in the arena: 100 MiB in a region of its own, beside up to 90 in the first."""
    model = onnx.load(SCALED.save(tmp_path))
    made = write_fragment(tmp_path, model, SEVERAL, largest={"x": (100 * 256, 1024)})
    peaks = in_own_process(peaks_in_several_regions, made.folder)
    assert max(peaks) <= SEVERAL
