"""The chart's README says every value that a user may give."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rendered_chart import CHART

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    cells[1].strip(" `"): cells[3].strip()
    for cells in (line.split("|") for line in (CHART / "README.md").read_text().splitlines())
    if len(cells) > 4 and cells[1].startswith(" `")
}


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value and path != ("operator", "resources"):
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key))


def test_it_is_current() -> None:
    command = [sys.executable, str(ROOT / "hack" / "chart.py"), "--check"]
    check = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_it_has_each_value_with_its_meaning() -> None:
    assert list(ROWS) == list(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
    assert all(ROWS.values())
