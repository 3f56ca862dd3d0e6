"""docs/metrics.md says what the processes declare, in names that Prometheus' own linter accepts."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from monitoring import promtool, registries
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_protocol.exposition import ExpositionServer

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "metrics.md").read_text()


def test_the_table_is_current() -> None:
    command = [sys.executable, str(ROOT / "hack" / "metrics.py"), "--check"]
    check = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_a_name_of_the_table_is_the_one_that_is_served() -> None:
    metrics = CoordinatorMetrics()
    with (
        ExpositionServer(lambda: None, registry=metrics.registry) as server,
        urlopen(f"{server.url}/metrics", timeout=60) as answer,  # noqa: S310 - loopback
    ):
        served = answer.read().decode()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", TABLE, re.MULTILINE))
    samples = {
        sample.name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for family in text_string_to_metric_families(served)
        for sample in family.samples
    }
    assert samples
    assert samples - rows.keys() == set()


@pytest.mark.parametrize("process", ["coordinator", "agent", "operator"])
def test_names_follow_the_conventions_of_prometheus(process: str) -> None:
    text = generate_latest(registries()[process])
    check = subprocess.run(
        [promtool(), "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert check.returncode == 0, (check.stdout + check.stderr).decode()


def test_a_name_that_breaks_the_conventions_is_noticed() -> None:
    """That the linter does look: a counter must end in `_total`."""
    bad = b"# HELP shoal_tasks Tasks.\n# TYPE shoal_tasks counter\nshoal_tasks 1\n"
    check = subprocess.run(
        [promtool(), "check", "metrics"], input=bad, capture_output=True, check=False
    )
    assert b"_total" in check.stdout + check.stderr
    assert check.returncode != 0
