"""What documents show or count is so."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shoal_coordinator.dispatch.events import FailureKind
from shoal_operator.reconcile.manifests import GRPC_PORT, METRICS_PORT, PEER_PORT
from suite.subjects import ENTRIES

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "cli" / "shoal_cli" / "local" / "report.schema.json"
BENCHES = [
    bench
    for bench in sorted((ROOT / "bench").glob("*.py"))
    if re.search(
        r"(argument_parser|parse_arguments|run_in_folder|ArgumentParser)\(", bench.read_text()
    )
    and bench.stem != "measurement"
]


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.stem)
def test_each_bench_is_in_the_table_of_the_benches(bench: Path) -> None:
    """The Makefile says that all are there."""
    assert f"| `bench/{bench.name}` |" in (ROOT / "docs" / "benchmarks.md").read_text()


def fields_of(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The fields of a JSON Schema, in whatever is inside of it, and where each is."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields_of(field, f"{path}.{name}")
    rows = [schema["items"]] if "items" in schema else []
    for each in (*rows, *schema.get("anyOf", []), *schema.get("$defs", {}).values()):
        yield from fields_of(each, path)


def test_every_field_of_the_report_is_described() -> None:
    fields = list(fields_of(json.loads(REPORT.read_text())))
    assert len(fields) > 100
    assert [path for path, field in fields if not field.get("description")] == []


def test_the_report_that_is_shown_is_one() -> None:
    schema = json.loads(REPORT.read_text())
    (shown,) = re.findall(
        r"```json\n(.*?)```", (ROOT / "docs" / "report.md").read_text(), re.DOTALL
    )
    report = json.loads(shown.replace('"sha256:..."', f'"sha256:{"0" * 64}"'))
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(report)] == []


@pytest.mark.parametrize("document", ["Makefile", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_as_many_models_are_in_the_suite_as_is_said(document: str) -> None:
    counts = re.findall(r"[Rr]uns? (\d+) models", (ROOT / document).read_text())
    assert counts == [str(len(ENTRIES))]


@pytest.mark.parametrize("name", ["ItemsFail", "JobFailed", "CoordinatorContainsErrors"])
def test_runbooks_have_failed_jobs_retried(name: str) -> None:
    """A job that is deleted and applied again is another one to its coordinator, which computes
    every item."""
    text = (ROOT / "docs" / "runbooks" / f"Shoal{name}.md").read_text()
    assert "kubectl shoal retry JOB" in text


@pytest.mark.parametrize("name", ["troubleshooting.md", "runbooks/ShoalVolumeFillsUp.md"])
def test_what_is_on_a_volume_is_shown_where_nothing_is_on_it_yet(name: str, tmp_path: Path) -> None:
    (command,) = re.findall(r" -- (du [^`\n]*)", (ROOT / "docs" / name).read_text())
    fresh = command.replace("/var/lib/shoal", str(tmp_path)).split()
    assert str(tmp_path) in fresh
    done = subprocess.run(fresh, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_ports_to_open_are_those_that_are_listened_on() -> None:
    deployment = (ROOT / "helm/shoal/templates/deployment.yaml").read_text()
    ports = [GRPC_PORT, PEER_PORT, METRICS_PORT, *re.findall(r"containerPort: (\d+)", deployment)]
    table = (ROOT / "docs" / "install.md").read_text()
    listed = re.findall(r"^\|[^|]+\|[^|]+\| (\d+) \|$", table, re.MULTILINE)
    assert sorted(listed) == sorted([*map(str, ports), "53"])


def test_the_runbook_of_failed_items_explains_each_reason_that_is_counted() -> None:
    text = (ROOT / "docs" / "runbooks" / "ShoalItemsFail.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == set(FailureKind)
