"""What the processes measure, and Prometheus' own programs, for tests."""

import json
import re
import shutil
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.metrics import GAUGES, AgentCollector, registry_of
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_operator.controller.telemetry import OperatorMetrics

_ENDS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}


def registries() -> dict[str, CollectorRegistry]:
    """All metrics that there are, by process."""
    readings = dict.fromkeys(GAUGES, 0.0)
    agent = AgentCollector({"version": "1"}, Counters(), lambda: readings)
    return {
        "coordinator": CoordinatorMetrics().registry,
        "agent": registry_of(agent),
        "operator": OperatorMetrics().registry,
    }


def measured() -> set[str]:
    """The names of all samples."""
    families = [family for registry in registries().values() for family in registry.collect()]
    return {f"{family.name}{end}" for family in families for end in _ENDS.get(family.type, ("",))}


def queries(board: Path) -> list[str]:
    """What the panels of a dashboard ask for."""
    panels = json.loads(board.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def as_prometheus_takes_it(query: str, window: str = "5m", shown: str | None = None) -> str:
    """A panel's query with Grafana's variables filled in: everything is chosen. Rates are over
    `window`, and the dashboard shows `shown` (as long, unless it is given)."""
    query = query.replace("$__rate_interval", window).replace("$__range", shown or window)
    return re.sub(r"\$(namespace|pool)", ".*", query)


def promtool() -> str:
    """The program; the test is skipped where it is not installed."""
    return _program("promtool")


def prometheus() -> str:
    """As `promtool`, the server."""
    return _program("prometheus")


def _program(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} (Debian: prometheus) is not here")
    return program
