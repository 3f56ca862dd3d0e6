"""Dashboards ask for what the processes measure, in Prometheus' own language."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from monitoring import as_prometheus_takes_it, measured, promtool, queries
from rendered_chart import CHART, ROOT

BOARDS = sorted((CHART / "dashboards").glob("*.json"))
boards = pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)


def assert_promtool_takes(rules: object, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules))
    command = [promtool(), "check", "rules", "--lint=all", "--lint-fatal", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@boards
def test_panels_ask_for_what_is_measured(path: Path) -> None:
    asked = set(re.findall(r"\bshoal_\w+", " ".join(queries(path))))
    assert asked
    assert asked <= measured()


@boards
def test_panels_ask_in_prometheus_own_language(path: Path, tmp_path: Path) -> None:
    plain = [as_prometheus_takes_it(query) for query in queries(path)]
    rules = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(plain)]
    assert_promtool_takes({"groups": [{"name": "panels", "rules": rules}]}, tmp_path)


@boards
def test_a_board_chooses_source_namespace_and_pool_and_explains_its_panels(path: Path) -> None:
    board = json.loads(path.read_text())
    chosen = [variable["name"] for variable in board["templating"]["list"]]
    pools = [] if path.stem == "operator" else ["pool"]
    assert chosen == ["datasource", "namespace", *pools]
    assert board["uid"] == f"shoal-{path.stem}"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


@boards
def test_a_number_is_of_now_in_colours_of_its_own_under_a_title_that_fits(path: Path) -> None:
    """Without `instant`, Grafana shows the last value of a series that has ended; without
    thresholds, whatever is above 80 is red; and it cuts a title that is too long."""
    for panel in json.loads(path.read_text())["panels"]:
        if panel["type"] != "stat":
            continue
        assert [target["instant"] for target in panel["targets"]] == [True], panel["title"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]
        assert len(panel["title"]) <= 19, panel["title"]


@boards
def test_every_series_has_a_legend(path: Path) -> None:
    """Else Grafana shows its labels, all of them."""
    for panel in json.loads(path.read_text())["panels"]:
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


@boards
def test_no_panel_covers_another(path: Path) -> None:
    places: set[tuple[int, int]] = set()
    for panel in json.loads(path.read_text())["panels"]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        own = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert x + w <= 24
        assert not own & places, panel["title"]
        places |= own


@boards
def test_every_query_of_a_pool_is_of_the_chosen_ones(path: Path) -> None:
    for query in queries(path):
        for metric, labels in re.findall(r"\b(shoal_(?:agent|coordinator)_\w+)(\{[^}]*)?", query):
            assert 'namespace=~"$namespace",pool=~"$pool"' in labels, metric


def test_the_boards_are_current() -> None:
    command = [sys.executable, str(ROOT / "hack" / "dashboards" / "write.py"), "--check"]
    check = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_the_largest_share_of_a_budget_is_the_measured_peak(tmp_path: Path) -> None:
    """Also where no scrape met it in use, and where the agent started again since."""
    (panel,) = [
        panel
        for panel in json.loads((CHART / "dashboards" / "memory.json").read_text())["panels"]
        if panel["title"] == "Highest peak"
    ]
    device = 'pool="shelf",device="pi-4"'
    series = {
        "shoal_agent_used_bytes": "93x20",
        "shoal_agent_peak_bytes": "93x3 126x3 95x20",
        "shoal_agent_budget_bytes": "100x20",
    }
    asked = {
        "expr": as_prometheus_takes_it(panel["targets"][0]["expr"], "15m"),
        "eval_time": "15m",
        "exp_samples": [{"labels": "{}", "value": 1.26}],
    }
    scenario = {
        "interval": "1m",
        "input_series": [
            {"series": f"{name}{{{device}}}", "values": values} for name, values in series.items()
        ],
        "promql_expr_test": [asked],
    }
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump({"tests": [scenario]}))
    command = [promtool(), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
