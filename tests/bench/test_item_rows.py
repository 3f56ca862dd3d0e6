"""What an item takes, by the parts of the program."""

from pathlib import Path

import item_rows
import pytest

SOURCES = Path(__file__).parents[2]


def test_each_file_of_the_product_is_of_a_row() -> None:
    rows = {
        item_rows.row_of(str(path))
        for part in ("agent", "coordinator", "protos")
        for path in (SOURCES / part).rglob("*.py")
    }
    others = {"grpc.aio in the event loop", "asyncio", "ONNX Runtime"}
    assert rows | others == item_rows.ROWS.keys()
    assert item_rows.row_of("/usr/lib/python3.11/asyncio/events.py") == "asyncio"


def test_all_that_a_process_has_taken_is_in_its_rows() -> None:
    samples = {"/x/onnxruntime/capi/a.py": 1, "/x/shoal_coordinator/dispatch/jobs.py": 3}
    used = {"main": 4e9, "python": 2e9, "native": 1e9}
    rows = item_rows.rows_of("coordinator", {"samples": samples, "used": used})
    assert rows["the dispatcher"] == pytest.approx(3)
    assert sum(rows.values()) == pytest.approx(7)
