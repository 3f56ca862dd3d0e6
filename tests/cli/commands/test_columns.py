"""Tables on a narrow terminal."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from shoal_cli.commands.columns import Columns, ColumnTable

ROWS = [("item 1", "stage 0 on pi-4"), ("item 2", "runs now on pi-zero")]
NAMES: Columns[Sequence[str]] = [("item", lambda row: row[0]), ("most of it", lambda row: row[1])]
HEADINGS = ("took", "waited", "moved", "computed", "stored", "retries")


@pytest.mark.parametrize("width", [40, 46, 60, 80, 200])
def test_columns_that_are_never_to_spare_go_below_before_a_word_is_broken(width: int) -> None:
    columns: Columns[Sequence[str]] = [(heading, lambda row: "33.2 ms") for heading in HEADINGS]
    table = ColumnTable(rows=ROWS, names=NAMES, columns=columns, spare=("retries", "stored"))
    shown = io.StringIO()
    Console(file=shown, width=width).print(table)
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert lines[0].startswith("item most of it took")
    assert lines[2].startswith("item 1 stage 0 on pi-4 33.2 ms")
    assert all(any(heading in line for line in lines) for heading in HEADINGS)
    assert max(map(len, shown.getvalue().splitlines())) <= width
