"""Items that are larger than planned: what they get of the arena leaves room for weights."""

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from agent.fragment_making import write_fragment
from made_models import Made, weight

PROBE = Path(__file__).with_name("larger_item_probe.py")
MIB = 1 << 20
BUDGET = 24 * MIB
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


@pytest.mark.parametrize(("rows_mib", "runs"), [(8, True), (18, False)])
def test_an_item_that_leaves_no_room_for_weights_is_stopped_before_it_takes_it(
    tmp_path: Path, rows_mib: int, *, runs: bool
) -> None:
    made = write_fragment(tmp_path, onnx.load(GROWING.save(tmp_path)), 16 * MIB)
    command = [sys.executable, PROBE, made.folder, LIMIT, rows_mib * 256]
    printed = subprocess.check_output(list(map(str, command)), text=True)
    found = json.loads(printed)
    assert (found["stopped"] == "") == runs, found
    assert found["peak"] <= BUDGET
