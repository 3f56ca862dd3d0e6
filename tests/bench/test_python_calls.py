"""The bench of calls from Python runs and says what it promises; its figures are not for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
@pytest.mark.minutes
def test_a_quick_run_prints_a_table_and_writes_its_measurements(tmp_path: Path) -> None:
    written = tmp_path / "calls.json"
    run = subprocess.run(
        [sys.executable, BENCH / "python_calls.py", "--quick", "--json", written],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    measurements = json.loads(written.read_text())
    assert len(measurements) == 4
    for measurement in measurements:
        assert measurement["ratio"] > 0
        assert measurement["name"] in run.stdout
