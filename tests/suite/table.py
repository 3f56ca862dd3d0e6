"""The figures of `make suite`, one row for each model and number of devices.

    python tests/suite/table.py out/suite

`need`: of its fragments together, at the first budget; `smallest`: the smallest budget of a device
that it ran in; `peak`: the largest share of a budget that a device took; `difference`: the largest
from the whole model; `fault`: how a run broke the promise.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_MIB: Final = 1 << 20
_HEADINGS: Final = ("model", "devices", "runs", "need", "smallest", "peak", "difference", "fault")


def cells(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The figures of one model's runs on so many devices."""
    ran = [row for row in rows if row["outcome"] == "ran"]
    smallest = min((row["budget_bytes"] for row in ran), default=0)
    peak = max((row["peak"] for row in rows), default=0.0)
    fault = next((row["message"] for row in rows if row["outcome"] == "failed"), "")
    return (
        rows[0]["model"],
        str(rows[0]["devices"]),
        str(len(rows)),
        f"{rows[0]['need_bytes'] / _MIB:.1f} MiB",
        f"{smallest / _MIB:.1f} MiB" if ran else "none",
        f"{100 * peak:.1f} %",
        f"{max((row['difference'] for row in ran), default=0.0):.0e}",
        fault or ("over its budget" if peak > 1 else ""),
    )


def table(results: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """All of them below their headings, and how many there are."""
    lines = [_HEADINGS, *map(cells, results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    faults = sum(bool(line[-1]) for line in lines[1:])
    shown = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*shown, f"{len(lines) - 1} descents, {faults} with a fault"])


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).glob("*.json"))
    print(table(json.loads(each.read_bytes()) for each in files))
