"""The examples as a reader runs them: real models over real agents, to the text."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20

pytestmark = pytest.mark.real


def run(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Run an example in a copy of the checkout; what it printed and its report."""
    made = shutil.ignore_patterns("in", "out", "models", "__pycache__")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=made)
    (folder / "bench").symlink_to(ROOT / "bench")
    (folder / ".venv").symlink_to(sys.prefix)
    command = [str(folder / "examples" / "run"), name]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, json.loads((folder / "out" / f"{name}.json").read_text())


def check_report(report: dict[str, Any], *, items: int, devices: int) -> None:
    """Every item done, equal to the whole model, and no device over a budget the whole exceeds."""
    (job,) = report["jobs"]
    assert (job["items"], job["succeeded"], job["failed"]) == (items, items, 0)
    assert 0 <= job["max_abs_diff"] <= 1e-5
    assert len(report["devices"]) == devices
    for device in report["devices"]:
        assert 0 < device["peak_bytes_above_floor"] <= device["budget_bytes"], device
        assert device["fragments"], device
        assert job["whole_model_peak_bytes"] > device["budget_bytes"]


def test_three_small_devices_read_the_text(tmp_path: Path) -> None:
    printed, report = run("ocr", tmp_path)
    check_report(report, items=24, devices=3)
    assert all(device["budget_bytes"] == 24 * MIB for device in report["devices"])
    assert "A shoal is many small fish\n  that move as one.\n" in printed
    (right, total) = re.findall(r"(\d+) of (\d+) characters are right", printed)[0]
    assert int(right) >= 0.95 * int(total)


@pytest.mark.minutes
def test_sentences_of_one_meaning_are_near_each_other(tmp_path: Path) -> None:
    printed, report = run("embeddings", tmp_path)
    check_report(report, items=8, devices=3)
    assert '"A man is eating food." and "A man is eating a piece of bread.": 0.7553' in printed


@pytest.mark.minutes
def test_pictures_go_through_a_network_over_four_devices(tmp_path: Path) -> None:
    printed, report = run("vision", tmp_path)
    check_report(report, items=24, devices=4)
    assert "24 pictures, 1000 logits each." in printed
