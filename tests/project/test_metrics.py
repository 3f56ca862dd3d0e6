"""docs/metrics.md says what the processes declare."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

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
        urlopen(f"{server.url}/metrics", timeout=10) as answer,  # noqa: S310 - loopback
    ):
        served = answer.read().decode()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", TABLE, re.MULTILINE))
    samples = {
        sample.name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for family in text_string_to_metric_families(served)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert samples
    assert samples - rows.keys() == set()
