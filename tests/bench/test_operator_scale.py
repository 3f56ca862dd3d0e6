"""The bench of the operator runs and says what it promises; its figures are not for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_fixtures import or_skip
from shoal_cluster import ControlPlane

BENCH = Path(__file__).parents[2] / "bench"

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow, pytest.mark.minutes]


def test_a_quick_run_prints_a_table_and_writes_its_measurements(tmp_path: Path) -> None:
    or_skip(ControlPlane).stop()
    written = tmp_path / "operator.json"
    run = subprocess.run(
        [
            *(sys.executable, BENCH / "operator_scale.py", "--quick", "--json", written),
            *("--jobs", "6", "--devices", "3"),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        check=True,
    )
    measurements = {each["name"]: each for each in json.loads(written.read_text())}
    assert "API writes per job" in run.stdout
    assert measurements["writes per Device"]["value"] >= 2
    for name in ("restart: writes", "idle: writes per minute"):
        assert measurements[name]["value"] == 0, f"{name}: nothing has changed"
    assert measurements["measured rates compared with plans, per job"]["value"] >= 1
    memory = measurements["operator's memory, at most"]
    assert memory["goal"] is not None
    assert memory["met"]
