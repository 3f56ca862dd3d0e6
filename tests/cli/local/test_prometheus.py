"""A real Prometheus scrapes `shoal run` at work: every panel has data, every rule is evaluated, and
what goes wrong fires its alert.
"""

import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import pytest
import yaml

from cli.local.workbench import WIDTH, Workbench, save_inputs
from monitoring import as_prometheus_takes_it, prometheus, queries
from rendered_chart import CHART
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_api.kinds.placement import Cost, PlacementStatus
from shoal_operator.controller.telemetry import OperatorMetrics
from shoal_protocol.exposition import ExpositionServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

BOARDS = sorted((CHART / "dashboards").glob("*.json"))
PATIENCE_SECONDS = 90.0
WINDOW = "3m"  # what was counted once stays in sight, however slow the machine
ALSO_EMPTY = (
    "certificate_expiration",  # no TLS on one machine
    "link_bytes_per_second",  # no activation of this model is large enough to measure a link
    "fragment_granted",  # every fragment is whole
    "fragment_wanted",
    "fragment_least",
    "fragment_lent",
    "load_seconds",  # each fragment is loaded once, perhaps before the first scrape
    "memory_estimate_ratio",
    'outcome!="loaded"',  # nothing is refused
)
SHORT_JOB = """\
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {name: short}
spec:
  partitionRef: {name: small-3}
  poolRef: {name: shelf}
  inputs: {uri: pvc://short/in}
  outputs: {uri: pvc://short/out}
"""


@dataclass(frozen=True)
class Server:
    """A running Prometheus."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer."""
        query = f"?{urlencode(parameters)}" if parameters else ""
        with urlopen(f"{self.url}/api/v1/{path}{query}", timeout=10) as answer:  # noqa: S310
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def has(self, query: str) -> bool:
        """Whether a query gives a number."""
        series = self.ask("query", query=query)["result"]
        return any(not math.isnan(float(each["value"][1])) for each in series)

    def is_ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/-/ready", timeout=10) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False

    def fires(self, alert: str) -> bool:
        return self.has(f'ALERTS{{alertname="{alert}",alertstate="firing"}}')


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def prometheus_of(folder: Path, *targets: str) -> Iterator[Server]:
    """One that scrapes every two seconds, which is also its patience; alerts do not wait."""
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        rule.pop("for", None)
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    configuration = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [{"job_name": "shoal", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_port()}"
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


def agent_of(bench: Workbench, device: str) -> int:
    """The process of a device's agent."""
    folder = str(bench.folder).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        line = path.read_bytes()
        if {b"shoal_agent", device.encode()} <= set(line.split(b"\0")) and folder in line:
            return int(path.parent.name)
    raise AssertionError(f"no agent of {device}")


@contextmanager
def running(bench: Workbench) -> Iterator[tuple[subprocess.Popen[str], Server, OperatorMetrics]]:
    """A long job, one of some seconds of which an item fails, and a Prometheus that sees them and
    an operator."""
    save_inputs(bench.inputs, files=60, stacked=2500)
    save_inputs(bench.folder / "short" / "in", files=60, stacked=100)
    np.savez(bench.folder / "short" / "in" / "odd.npz", x=np.zeros((2, 2, 3, WIDTH)))
    bench.manifest.write_text(bench.manifest.read_text() + SHORT_JOB)
    address = f"127.0.0.1:{free_port()}"
    operator = OperatorMetrics()
    with (
        ExpositionServer(lambda: None, registry=operator.registry) as exposition,
        prometheus_of(bench.folder, address, f"127.0.0.1:{exposition.port}") as server,
    ):
        run = bench.start("run", bench.manifest, "--metrics-address", address, "--report", "r.json")
        try:
            yield run, server, operator
        finally:
            run.kill()
            run.communicate()


def work(operator: OperatorMetrics) -> None:
    """What an operator of a healthy cluster counts, now and then."""
    operator.leader.set(1)
    operator.watch_age.labels(kind="Model").set(3)
    operator.objects.labels(kind="Model").set(1)
    operator.coordinators.labels(state="unreachable").set(0)
    operator.reconcile_failures.labels(kind="Model")
    operator.queue_seconds.observe(0.01)
    operator.reconcile_seconds.labels(kind="Model").observe(0.02)
    operator.events.labels(kind="Model").inc()
    operator.requests.labels(verb="get", code="200").inc()
    operator.calls.labels(method="SubmitJob", code="OK").inc()
    operator.authority_expiration = time.time() + 1e8
    operator.status_written(None, InferenceJobStatus())
    predicted, measured = Cost(items_per_second=40.0), Cost(items_per_second=38.0)
    operator.status_written(None, PlacementStatus(predicted=predicted, measured=measured))


def test_every_panel_has_data_and_failures_fire_their_alerts(bench: Workbench) -> None:
    asked = {as_prometheus_takes_it(query, WINDOW) for board in BOARDS for query in queries(board)}
    panels = {query for query in asked if not any(part in query for part in ALSO_EMPTY)}
    assert all(any(part in query for query in asked) for part in ALSO_EMPTY)
    with running(bench) as (run, server, operator):

        def all_seen() -> bool:
            work(operator)
            panels.difference_update([query for query in panels if server.has(query)])
            return not panels

        until(lambda: server.has("shoal_coordinator_jobs"), run)
        until(lambda: server.fires("ShoalJobFailed"), run)
        try:
            until(all_seen, run)
        except AssertionError:
            pytest.fail("\n".join(["these panels show nothing:", *sorted(panels)]))
        (group,) = server.ask("rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
        assert not server.fires("ShoalDeviceSilent")
        assert not server.fires("ShoalAgentOverBudget")
        os.kill(agent_of(bench, "two"), signal.SIGSTOP)
        until(lambda: server.fires("ShoalDeviceSilent"), run)
