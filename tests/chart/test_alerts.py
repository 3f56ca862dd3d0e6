"""Each alert fires when it should, and not otherwise, as promtool sees it; each has a runbook."""

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring import measured, promtool
from rendered_chart import CHART, PROMETHEUS, ROOT, render

RULES = CHART / "files" / "alerts.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"
HOUR, DAY = 3600, 86400


@dataclass(frozen=True)
class Case:
    """With these series, one value a minute, the alert fires or not at a time."""

    alert: str
    about: str
    series: dict[str, str]
    at: str
    fires: bool

    def __str__(self) -> str:
        return f"{self.alert}: {self.about}"


def fires(alert: str, about: str, at: str, **series: str) -> Case:
    return Case(alert, about, _named(series), at, fires=True)


def silent(alert: str, about: str, at: str, **series: str) -> Case:
    return Case(alert, about, _named(series), at, fires=False)


def _named(series: dict[str, str]) -> dict[str, str]:
    """NAME__VALUE=... is a series with the label that `LABELS` has for the name."""
    found = {}
    for key, values in series.items():
        name, _, value = key.partition("__")
        more = f',{LABELS[name]}="{value}"' if value else ""
        found[f'{name}{{namespace="edge",pool="shelf",pod="p"{more}}}'] = values
    return found


LABELS = {
    "shoal_coordinator_jobs_ended_total": "outcome",
    "shoal_operator_jobs_ended_total": "outcome",
    "shoal_coordinator_items_ended_total": "outcome",
    "shoal_operator_jobs": "status",
    "shoal_operator_longest_wait_seconds": "status",
    "shoal_operator_coordinators": "state",
    "shoal_coordinator_devices": "state",
    "shoal_coordinator_failures_total": "part",
    "shoal_operator_watch_age_seconds": "kind",
    "shoal_operator_reconcile_failures_total": "kind",
}
CASES = [
    fires(
        "ShoalJobFailed", "before the first scrape", "8m",
        shoal_coordinator_jobs_ended_total__failed="_x5 1x30",
    ),
    fires(
        "ShoalJobFailed", "on a pool", "8m",
        shoal_coordinator_jobs_ended_total__failed="0x5 1x30",
    ),
    fires(
        "ShoalJobFailed", "before it came to a pool", "8m",
        shoal_operator_jobs_ended_total__failed="0x5 1x30",
        shoal_coordinator_jobs_ended_total__failed="0x40",
    ),
    silent(
        "ShoalJobFailed", "long ago", "30m",
        shoal_coordinator_jobs_ended_total__failed="0x5 1x40",
    ),
    silent(
        "ShoalJobFailed", "others succeeded", "30m",
        shoal_coordinator_jobs_ended_total__failed="3x40",
        shoal_coordinator_jobs_ended_total__complete="0+1x40",
    ),
    fires(
        "ShoalItemsFail", "every tenth", "20m",
        shoal_coordinator_items_ended_total__succeeded="0+9x40",
        shoal_coordinator_items_ended_total__failed="0+1x40",
    ),
    silent(
        "ShoalItemsFail", "every hundredth", "20m",
        shoal_coordinator_items_ended_total__succeeded="0+99x40",
        shoal_coordinator_items_ended_total__failed="0+1x40",
    ),
    silent(
        "ShoalItemsFail", "no items at all", "20m",
        shoal_coordinator_items_ended_total__succeeded="5x40",
        shoal_coordinator_items_ended_total__failed="0x40",
    ),
    fires(
        "ShoalJobsWait", "for a plan", "31m",
        shoal_operator_longest_wait_seconds__Pending="0+60x40", shoal_operator_leader="1x40",
    ),
    silent(
        "ShoalJobsWait", "not long", "31m",
        shoal_operator_longest_wait_seconds__Pending="0x20 0+60x20",
        shoal_operator_leader="1x40",
    ),
    silent(
        "ShoalJobsWait", "one for a while, then another", "39m",
        shoal_operator_jobs__Pending="2x40", shoal_operator_leader="1x40",
        shoal_operator_longest_wait_seconds__Pending="0+60x15 0+60x15 0+60x15",
    ),
    silent(
        "ShoalJobsWait", "as an operator knows that does not lead", "31m",
        shoal_operator_longest_wait_seconds__Pending="0+60x40", shoal_operator_leader="0x40",
    ),
    fires(
        "ShoalPoolStalls", "no task ends", "21m",
        shoal_coordinator_ready_tasks="3x40", shoal_coordinator_running_tasks="1x40",
        shoal_coordinator_task_compute_seconds_count="7x40",
    ),
    silent(
        "ShoalPoolStalls", "a slow one", "21m",
        shoal_coordinator_ready_tasks="3x40", shoal_coordinator_running_tasks="1x40",
        shoal_coordinator_task_compute_seconds_count="0+0.2x40",
    ),
    fires(
        "ShoalDeviceSilent", "an agent was killed", "12m",
        shoal_coordinator_devices__Ready="3x5 2x20", shoal_coordinator_devices__Lost="0x5 1x20",
    ),
    silent(
        "ShoalDeviceSilent", "an agent started again", "12m",
        shoal_coordinator_devices__Ready="3x5 2x2 3x20",
        shoal_coordinator_devices__Lost="0x5 1x2 0x20",
    ),
    fires("ShoalAgentWithoutSession", "cut off", "6m", shoal_agent_session_connected="0x20"),
    silent(
        "ShoalAgentWithoutSession", "it comes back", "6m",
        shoal_agent_session_connected="0x3 1x20",
    ),
    fires(
        "ShoalAgentOverBudget", "a run ended above it", "6m",
        shoal_agent_over_budget_runs_total="0x3 1x20",
    ),
    fires(
        "ShoalAgentOverBudget", "the peak of a load", "6m",
        shoal_agent_over_budget_runs_total="0x20",
        shoal_agent_peak_bytes="60x3 126x20", shoal_agent_budget_bytes="100x20",
    ),
    silent(
        "ShoalAgentOverBudget", "a peak of long ago", "30m",
        shoal_agent_over_budget_runs_total="0x40",
        shoal_agent_peak_bytes="60x3 126x40", shoal_agent_budget_bytes="100x40",
    ),
    silent(
        "ShoalAgentOverBudget", "within it", "6m",
        shoal_agent_over_budget_runs_total="0x20",
        shoal_agent_peak_bytes="100x20", shoal_agent_budget_bytes="100x20",
    ),
    silent(
        "ShoalAgentOverBudget", "the budget became smaller than a peak of before", "6m",
        shoal_agent_over_budget_runs_total="0x20",
        shoal_agent_peak_bytes="90x20", shoal_agent_budget_bytes="100x3 60x20",
    ),
    silent(
        "ShoalAgentOverBudget", "the budget became smaller long ago", "18m",
        shoal_agent_over_budget_runs_total="0x40",
        shoal_agent_peak_bytes="90x40", shoal_agent_budget_bytes="100x3 60x40",
    ),
    fires(
        "ShoalVolumeFillsUp", "nine tenths are used", "12m",
        shoal_coordinator_volume_free_bytes="4x20", shoal_coordinator_volume_size_bytes="100x20",
        shoal_coordinator_volume_removable_bytes="5x20",
    ),
    silent(
        "ShoalVolumeFillsUp", "it is full of fragments that no job uses", "12m",
        shoal_coordinator_volume_free_bytes="0x20", shoal_coordinator_volume_size_bytes="100x20",
        shoal_coordinator_volume_removable_bytes="50x20",
    ),
    silent(
        "ShoalVolumeFillsUp", "half is used", "12m",
        shoal_coordinator_volume_free_bytes="50x20", shoal_coordinator_volume_size_bytes="100x20",
        shoal_coordinator_volume_removable_bytes="0x20",
    ),
    fires(
        "ShoalCertificateExpires", "of an agent", "12m",
        shoal_agent_certificate_expiration_timestamp_seconds=f"{3 * HOUR}x20",
    ),
    fires(
        "ShoalCertificateExpires", "of a coordinator", "12m",
        shoal_coordinator_certificate_expiration_timestamp_seconds=f"{13 * DAY}x20",
    ),
    fires(
        "ShoalCertificateExpires", "of the operator", "12m",
        shoal_operator_certificate_expiration_timestamp_seconds=f"{29 * DAY}x20",
    ),
    silent(
        "ShoalCertificateExpires", "just before they are renewed", "12m",
        shoal_agent_certificate_expiration_timestamp_seconds=f"{8 * HOUR}x20",
        shoal_coordinator_certificate_expiration_timestamp_seconds=f"{30 * DAY}x20",
        shoal_operator_certificate_expiration_timestamp_seconds=f"{365 * DAY}x20",
    ),
    fires(
        "ShoalCoordinatorContainsErrors", "the first error", "20m",
        shoal_coordinator_failures_total__dispatcher="_x10 1x30",
    ),
    fires(
        "ShoalCoordinatorContainsErrors", "another error", "20m",
        shoal_coordinator_failures_total__dispatcher="1x10 2x20",
    ),
    silent(
        "ShoalCoordinatorContainsErrors", "errors of long ago", "20m",
        shoal_coordinator_failures_total__dispatcher="1x40",
    ),
    fires(
        "ShoalCoordinatorUnreachable", "one of three", "6m",
        shoal_operator_coordinators__reachable="2x20",
        shoal_operator_coordinators__unreachable="1x20", shoal_operator_leader="1x20",
    ),
    silent(
        "ShoalCoordinatorUnreachable", "none", "6m",
        shoal_operator_coordinators__reachable="3x20",
        shoal_operator_coordinators__unreachable="0x20", shoal_operator_leader="1x20",
    ),
    fires("ShoalNoOperatorLeads", "there is none", "6m"),
    fires("ShoalNoOperatorLeads", "all wait", "6m", shoal_operator_leader="0x20"),
    silent("ShoalNoOperatorLeads", "one leads", "6m", shoal_operator_leader="1x20"),
    fires(
        "ShoalOperatorBlind", "a frozen watch", "5m",
        shoal_operator_watch_age_seconds__Model="301+60x20",
    ),
    silent(
        "ShoalOperatorBlind", "a quiet watch", "5m",
        shoal_operator_watch_age_seconds__Model="30x20",
    ),
    fires(
        "ShoalReconcileFails", "again and again", "21m",
        shoal_operator_reconcile_failures_total__Model="0+10x30",
    ),
    silent(
        "ShoalReconcileFails", "once", "21m",
        shoal_operator_reconcile_failures_total__Model="0x10 1x20",
    ),
]  # fmt: skip


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


@cache
def in_chart(runbooks: str = "") -> dict[str, Any]:
    values = {"prometheusRule.enabled": True, "prometheusRule.runbooks": runbooks}
    spec: dict[str, Any] = render(values, PROMETHEUS)["PrometheusRule", "shoal-operator"]["spec"]
    return spec


def assert_promtool_accepts(*arguments: str) -> None:
    command = [promtool(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_alert_fires_when_it_should(case: Case, tmp_path: Path) -> None:
    query = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}}) or vector(0)'
    assert_gives(tmp_path, case.series, case.at, query, {"{}": int(case.fires)})


def assert_gives(
    folder: Path, series: dict[str, str], at: str, query: str, values: dict[str, float]
) -> None:
    """With the rules and these series, a query gives these values."""
    samples = [{"labels": labels, "value": value} for labels, value in values.items()]
    asked = {"expr": query, "eval_time": at, "exp_samples": samples}
    given = [{"series": name, "values": values} for name, values in series.items()]
    scenario = {"interval": "1m", "input_series": given, "promql_expr_test": [asked]}
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [scenario]}))
    assert_promtool_accepts("test", "rules", str(file))


def items_ended(pool: str, outcome: str) -> str:
    labels = f'namespace="edge",pool="{pool}",outcome="{outcome}"'
    return f"shoal_coordinator_items_ended_total{{{labels}}}"


RECORDED: dict[str, tuple[dict[str, str], dict[str, float]]] = {
    "shoal:items_failed:ratio_rate15m": (
        {
            items_ended("a", "failed"): "0+1x30",
            items_ended("a", "succeeded"): "0+3x30",
            items_ended("b", "succeeded"): "0+3x30",
        },
        {'{namespace="edge",pool="a"}': 0.25},
    ),
    "shoal:volume_free:ratio": (
        {
            'shoal_coordinator_volume_free_bytes{namespace="edge",pool="a"}': "15x30",
            'shoal_coordinator_volume_removable_bytes{namespace="edge",pool="a"}': "10x30",
            'shoal_coordinator_volume_size_bytes{namespace="edge",pool="a"}': "100x30",
        },
        {'{namespace="edge",pool="a"}': 0.25},
    ),
    "shoal:longest_wait_seconds:max_of_leader": (
        {
            'shoal_operator_longest_wait_seconds{namespace="s",pod="one",status="Pending"}': "2x30",
            'shoal_operator_longest_wait_seconds{namespace="s",pod="two",status="Pending"}': "7x30",
            'shoal_operator_leader{namespace="s",pod="one"}': "1x30",
            'shoal_operator_leader{namespace="s",pod="two"}': "0x30",
        },
        {'{namespace="s",status="Pending"}': 2},
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_rule_has_the_value_that_it_is_named_after(name: str, tmp_path: Path) -> None:
    series, values = RECORDED[name]
    expected = {f"{name}{labels}": value for labels, value in values.items()}
    assert_gives(tmp_path, series, "20m", name, expected)


def test_every_recorded_rule_is_tested_and_used_by_an_alert() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert recorded == RECORDED.keys()
    text = " ".join(alert["expr"] for alert in alerts())
    assert set(re.findall(r"\bshoal:[\w:]+", text)) == recorded


def test_every_alert_is_seen_to_fire_and_to_be_silent() -> None:
    names = {alert["alert"] for alert in alerts()}
    assert {case.alert for case in CASES if case.fires} == names
    assert {case.alert for case in CASES if not case.fires} == names


def test_the_rules_of_the_chart_are_those_that_prometheus_takes(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(in_chart()))
    assert_promtool_accepts("check", "rules", "--lint=all", "--lint-fatal", str(file))


def test_alerts_ask_for_what_is_measured() -> None:
    text = " ".join(rule["expr"] for rule in rules())
    assert set(re.findall(r"\bshoal_\w+", text)) <= measured()


def test_an_alert_says_what_is_wrong_and_what_to_do() -> None:
    for alert in alerts():
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    urls = {alert["alert"]: alert["annotations"]["runbook_url"] for alert in alerts()}
    assert urls == {name: f"docs/runbooks/{name}.md" for name in urls}
    written = {path.stem for path in RUNBOOKS.glob("Shoal*.md")}
    assert written == urls.keys()


@pytest.mark.parametrize("path", sorted(RUNBOOKS.glob("Shoal*.md")), ids=lambda path: path.stem)
def test_a_runbook_has_the_four_parts_and_asks_for_what_is_measured(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"# {path.stem}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
        "Trigger",
        "Diagnose",
        "Mitigate",
        "Verify",
    ]
    assert set(re.findall(r"\bshoal_(?:agent|coordinator|operator)_\w+", text)) <= measured()


def test_runbooks_are_linked_where_the_site_is() -> None:
    (group,) = in_chart("https://docs.example.com/runbooks/")["groups"]
    urls = {rule["annotations"]["runbook_url"] for rule in group["rules"] if "alert" in rule}
    assert "https://docs.example.com/runbooks/ShoalJobFailed.html" in urls
    assert all(url.startswith("https://docs.example.com/runbooks/Shoal") for url in urls)
