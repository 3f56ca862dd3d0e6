"""A real Prometheus with the chart's rules, for tests."""

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from monitoring import prometheus
from rendered_chart import CHART
from shoal_cluster.ports import lasting_port

PATIENCE_SECONDS = 90.0


@dataclass(frozen=True)
class Server:
    """A running Prometheus."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer."""
        query = f"?{urlencode(parameters)}" if parameters else ""
        with urlopen(f"{self.url}/api/v1/{path}{query}", timeout=60) as answer:  # noqa: S310
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def has(self, query: str) -> bool:
        """Whether a query gives a number."""
        series = self.ask("query", query=query)["result"]
        return any(not math.isnan(float(each["value"][1])) for each in series)

    def is_ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/-/ready", timeout=60) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False

    def fires(self, alert: str) -> bool:
        return self.has(f'ALERTS{{alertname="{alert}",alertstate="firing"}}')


@contextmanager
def prometheus_of(
    folder: Path,
    targets: Mapping[str, Mapping[str, str]],
    *,
    scrape_seconds: int = 2,
    alert_seconds: int = 0,
) -> Iterator[Server]:
    """One that scrapes addresses, and adds their labels; an alert that waits waits so long."""
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        if "for" in rule:
            rule["for"] = f"{alert_seconds}s"
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    often = f"{scrape_seconds}s"
    found = [{"targets": [address], "labels": dict(labels)} for address, labels in targets.items()]
    configuration = {
        "global": {"scrape_interval": often, "scrape_timeout": often, "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [{"job_name": "shoal", "static_configs": found}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{lasting_port()}"
    command = [prometheus(), f"--config.file={folder}/prometheus.yaml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stderr=log) as it:
        try:
            server = Server(f"http://{address}")
            until(server.is_ready, it)
            yield server
        finally:
            it.kill()


def until(true: Callable[[], object], process: subprocess.Popen[Any]) -> None:
    """Wait for what happens while a process runs."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < give_up, "it did not happen in time"
        assert process.poll() is None, process.communicate()
        time.sleep(0.3)
