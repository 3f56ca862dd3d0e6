"""The bench of memory runs and says what it promises; its figures are not for a test."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from memory_changes import FEW, Pair, alternate_budgets_and_models
from memory_peers import PeerUnable, check_installed, check_same

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["curve", "changes", "limits", "agents"])
def test_a_quick_run_prints_a_table_and_writes_its_measurements(part: str, tmp_path: Path) -> None:
    written = tmp_path / "memory.json"
    where = ("--json", written, "--pictures", tmp_path)
    run = subprocess.run(
        [sys.executable, BENCH / "memory.py", "--quick", "--part", part, *where],
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    measurements = json.loads(written.read_text())
    assert measurements
    for measurement in measurements:
        assert set(measurement) == {"name", "value", "unit", "peer", "ratio", "goal", "met"}
        assert measurement["value"] >= 0
        assert measurement["name"] in run.stdout
    if part == "curve":
        ET.parse(tmp_path / "mobilenet_v2.svg")  # noqa: S314 - our own


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("pair", [FEW], ids=["few"])
def test_budgets_change_and_models_alternate_without_excess_or_leak(
    pair: Pair, tmp_path: Path
) -> None:
    outcome = alternate_budgets_and_models(pair, tmp_path)
    assert (outcome.changes, outcome.switches) == (pair.changes, pair.switches)
    assert outcome.worst_share <= 1
    assert outcome.different == 0
    assert outcome.evicted == []
    assert outcome.left_bytes <= 4 << 20


def test_a_peer_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "ncnn", raising=False)
    with pytest.raises(PeerUnable, match=r"not installed: pip install .* requirements/bench.txt"):
        check_installed("ncnn")


def test_a_peer_whose_results_are_others_is_not_believed() -> None:
    ours = [np.ones((1, 10), np.float32)]
    check_same([np.ones(10, np.float32) * 1.0001], ours)
    with pytest.raises(PeerUnable, match="its results differ"):
        check_same([np.full(10, 2.0)], ours)
    with pytest.raises(PeerUnable, match="its results differ: nan"):
        check_same([np.full(10, np.nan)], ours)
    with pytest.raises(PeerUnable, match="in place of"):
        check_same([np.ones(9)], ours)
