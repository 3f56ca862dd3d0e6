"""A real Prometheus scrapes `shoal run` at work: every panel has data, every rule is evaluated, and
what goes wrong fires its alert.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cli.local.workbench import WIDTH, Workbench, save_inputs
from monitoring import as_prometheus_takes_it, queries
from prometheus_server import Server, prometheus_of, until
from rendered_chart import CHART
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_api.kinds.placement import Cost, PlacementStatus
from shoal_cluster.ports import lasting_port
from shoal_operator.controller.telemetry import OperatorMetrics
from shoal_protocol.exposition import ExpositionServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

BOARDS = sorted((CHART / "dashboards").glob("*.json"))
WINDOW = "3m"  # what was counted once stays in sight, however slow the machine
ALSO_EMPTY = (
    "certificate_expiration",  # no TLS on one machine
    "link_bytes_per_second",  # no activation of this model is large enough to measure a link
    "fragment_granted",  # every fragment is whole
    "fragment_wanted",
    "load_seconds",  # each fragment is loaded once, perhaps before the first scrape
    "memory_estimate_ratio",
    'outcome!="loaded"',  # nothing is refused
)
CAMERA = """\
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {name: camera}
spec:
  partitionRef: {name: small-3}
  poolRef: {name: shelf}
  inputs: {uri: pvc://camera/in, follow: true}
  outputs: {uri: pvc://camera/out}
  activeDeadlineSeconds: 12
"""


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
    """A long job, one that waits for files until its deadline, and a Prometheus that sees them and
    an operator. Links are slow: the jobs last, and leave the processors to others meanwhile."""
    save_inputs(bench.inputs, files=60, stacked=500)
    (bench.folder / "camera" / "in").mkdir(parents=True)
    slow = bench.manifest.read_text().replace(
        "memory:", "link: {latencyMilliseconds: 200}, memory:", 3
    )
    bench.manifest.write_text(slow + CAMERA)
    address = f"127.0.0.1:{lasting_port()}"
    operator = OperatorMetrics()
    with (
        ExpositionServer(lambda: None, registry=operator.registry) as exposition,
        prometheus_of(bench.folder, {address: {}, f"127.0.0.1:{exposition.port}": {}}) as server,
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

        until(lambda: server.has("shoal_coordinator_item_failures_total"), run)
        # An item that fails; a rate needs a count that was seen before.
        np.savez(bench.folder / "camera" / "in" / "odd.npz", x=np.zeros((2, 2, 3, WIDTH)))
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
