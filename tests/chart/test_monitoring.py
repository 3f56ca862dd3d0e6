"""Alerts and dashboards ask for what the processes measure, in Prometheus' own language."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from rendered_chart import CHART, PROMETHEUS, render
from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.metrics import GAUGES, AgentCollector
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_operator.controller.telemetry import OperatorMetrics

BOARDS = sorted((CHART / "dashboards").glob("*.json"))
boards = pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)


def measured() -> set[str]:
    """The names of all samples that operator, coordinator and agent expose."""
    agent = CollectorRegistry()
    readings = dict.fromkeys(GAUGES, 0.0)
    agent.register(AgentCollector({"version": "1"}, Counters(), lambda: readings))
    registries = (OperatorMetrics().registry, CoordinatorMetrics().registry, agent)
    families = [family for registry in registries for family in registry.collect()]
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
    return {f"{family.name}{end}" for family in families for end in ends.get(family.type, ("",))}


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries(path: Path) -> list[str]:
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def assert_promtool_succeeds(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool (Debian: prometheus) is not here")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_promtool_takes(rules: object, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules))
    assert_promtool_succeeds("check", "rules", "--lint=all", "--lint-fatal", str(file))


def test_alerts_are_rules_that_prometheus_takes(tmp_path: Path) -> None:
    assert_promtool_takes(
        render({"prometheusRule.enabled": True}, PROMETHEUS)["PrometheusRule", "shoal-operator"][
            "spec"
        ],
        tmp_path,
    )


@pytest.mark.parametrize(
    ("values", "fires"),
    [("_x10 1x30", True), ("1x10 2x20", True), ("1x40", False)],
    ids=["the first error", "another error", "errors of long ago"],
)
def test_an_error_that_a_coordinator_contains_is_reported_for_a_while(
    values: str, fires: bool, tmp_path: Path
) -> None:
    name, labels = "ShoalCoordinatorContainsErrors", 'part="dispatcher",pod="shelf-coordinator"'
    asked = {
        "expr": f'count(ALERTS{{alertname="{name}",{labels}}}) or vector(0)',
        "eval_time": "20m",
        "exp_samples": [{"labels": "{}", "value": int(fires)}],
    }
    series = {"series": f"shoal_coordinator_failures_total{{{labels}}}", "values": values}
    scenario = {"interval": "1m", "input_series": [series], "promql_expr_test": [asked]}
    file = tmp_path / "scenario.yaml"
    rules = str(CHART / "files" / "alerts.yaml")
    file.write_text(yaml.safe_dump({"rule_files": [rules], "tests": [scenario]}))
    assert_promtool_succeeds("test", "rules", str(file))


def test_alerts_ask_for_what_is_measured() -> None:
    text = " ".join(alert["expr"] for alert in alerts())
    assert set(re.findall(r"\bshoal_\w+", text)) <= measured()


def test_an_alert_says_what_is_wrong_and_what_to_do() -> None:
    for alert in alerts():
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"].keys() == {"summary", "description"}


@boards
def test_panels_ask_for_what_is_measured(path: Path) -> None:
    asked = set(re.findall(r"\bshoal_\w+", " ".join(queries(path))))
    assert asked
    assert asked <= measured()


@boards
def test_panels_ask_in_prometheus_own_language(path: Path, tmp_path: Path) -> None:
    plain = [
        re.sub(r"\$__(rate_interval|range)", "5m", query).replace("$namespace", ".*")
        for query in queries(path)
    ]
    rules = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(plain)]
    assert_promtool_takes({"groups": [{"name": "panels", "rules": rules}]}, tmp_path)


@boards
def test_a_board_chooses_its_source_and_explains_its_panels(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["templating"]["list"][0]["type"] == "datasource"
    assert board["uid"] == f"shoal-{path.stem}"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
