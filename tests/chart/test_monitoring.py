"""Dashboards ask for what the processes measure, in Prometheus' own language."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from monitoring import measured, promtool
from rendered_chart import CHART

BOARDS = sorted((CHART / "dashboards").glob("*.json"))
boards = pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)


def queries(path: Path) -> list[str]:
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


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
