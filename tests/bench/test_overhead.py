"""The bench of what Shoal costs runs and says what it promises; its figures are not for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hop import hops

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("part", ["hop", "dispatch"])
def test_a_quick_run_prints_a_table_and_writes_its_measurements(part: str, tmp_path: Path) -> None:
    written = tmp_path / "overhead.json"
    run = subprocess.run(
        [sys.executable, BENCH / "overhead.py", "--quick", "--part", part, "--json", written],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    measurements = json.loads(written.read_text())
    assert measurements
    for measurement in measurements:
        assert set(measurement) == {"name", "value", "unit", "peer", "ratio", "goal", "met"}
        assert measurement["value"] > 0
        assert (measurement["goal"] is None) == (measurement["met"] is None)
        assert measurement["name"] in run.stdout


def test_a_hop_is_measured_by_the_protocol_alone_and_from_agent_to_agent_over_both_links() -> None:
    measurements = list(hops(quick=True, sizes=(256,), receivers=1))
    assert [each.name for each in measurements] == [
        "hop of 256 B, protocol",
        "hop of 256 B, agent to agent",
        "hop of 256 B, local link",
        "hop of 256 B, bare socket",
    ]
    assert all(each.value > 0 and each.ratio for each in measurements)
