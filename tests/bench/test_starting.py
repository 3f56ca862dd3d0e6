"""The bench of starts runs and says what it promises; its figures are not for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.minutes
def test_a_quick_run_prints_a_table_and_writes_its_measurements(tmp_path: Path) -> None:
    written = tmp_path / "starting.json"
    run = subprocess.run(
        [sys.executable, BENCH / "starting.py", "--quick", "--json", written],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    joined, result = json.loads(written.read_text())
    assert 0 < joined["ratio"] < result["ratio"]
    assert all(each["name"] in run.stdout for each in (joined, result))
