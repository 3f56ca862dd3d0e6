"""The CRDs: what is committed is what the kinds say, and every field explains itself."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kind_definitions import COLUMNS, definition
from kubernetes_schema import cel_holds, every_schema, problems
from shoal_api.kinds import KINDS, DevicePool, InferenceJob, KindNames, Model, Partition, Placement
from shoal_api.schema import openapi_schema, rules

ROOT = Path(__file__).resolve().parents[2]
kinds = pytest.mark.parametrize("names", KINDS.values(), ids=KINDS)


def schema_at(cls: type, path: str) -> dict[str, Any]:
    return dict(every_schema(openapi_schema(cls)))[path]


def test_what_is_committed_is_what_is_generated() -> None:
    command = [sys.executable, str(ROOT / "hack" / "kinds" / "write_kinds.py"), "--check"]
    check = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


@kinds
def test_a_file_in_crds_reads_as_the_definition(names: KindNames) -> None:
    text = (ROOT / "crds" / f"shoal.dev_{names.plural}.yaml").read_text()
    assert yaml.safe_load(text) == definition(names)


def test_no_two_kinds_share_a_name() -> None:
    names = [name for each in KINDS.values() for name in (each.plural, each.singular, each.short)]
    assert len(set(names)) == len(names)


@kinds
def test_every_field_says_meaning_bounds_default_and_example(names: KindNames) -> None:
    fields = [
        (path, each)
        for path, each in every_schema(openapi_schema(names.cls))
        if path.startswith((".spec.", ".status.")) and not path.endswith(("[]", "{}"))
    ]
    assert fields
    for path, each in fields:
        text = each["description"]
        has_records = "properties" in each or "properties" in each.get("items", {})
        assert has_records or "Value: " in text, path
        assert has_records or "Example: " in text, path
        assert each.get("default", {}) == {} or "Default: " in text, path


@kinds
def test_a_column_reads_a_field_that_is_there(names: KindNames) -> None:
    paths = dict(every_schema(openapi_schema(names.cls)))
    for column in COLUMNS[names.cls]:
        plain = column.path.split("[?")[0]
        assert plain in paths or plain == ".metadata.creationTimestamp", column


@kinds
def test_conditions_are_a_list_map_by_type(names: KindNames) -> None:
    conditions = schema_at(names.cls, ".status.conditions")
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


# ---- rules about change --------------------------------------------------------------------------


def refused(cls: type, path: str, before: object, after: object) -> list[str]:
    """Fields that the rules about change refuse when a value at a path is edited."""
    return [
        rule.get("fieldPath", "")
        for rule in schema_at(cls, path)["x-kubernetes-validations"]
        if "oldSelf" in rule["rule"] and not cel_holds(rule["rule"], after, oldSelf=before)
    ]


@pytest.mark.parametrize("path", [".spec.source", ".status"])
def test_a_digest_cannot_be_changed_once_it_is_set(path: str) -> None:
    one, two = {"digest": "one"}, {"digest": "two"}
    assert refused(Model, path, {}, one) == refused(Model, path, one, one) == []
    assert refused(Model, path, one, two) == refused(Model, path, one, {}) == [".digest"]


JOB: dict[str, Any] = {
    "modelRef": {"name": "m"},
    "poolRef": {"name": "p"},
    "inputs": {"uri": "in"},
    "outputs": {"uri": "out"},
    "mode": "Streaming",
    "policy": "Mabac",
    "objective": "Throughput",
    "backoffLimit": 3,
    "priority": 0,
    "suspend": False,
}


@pytest.mark.parametrize(
    "change",
    [
        {"suspend": True},
        {"priority": 7},
        {"parallelism": 2},
        {"activeDeadlineSeconds": 60},
        {"ttlSecondsAfterFinished": 0},
    ],
    ids=str,
)
def test_when_and_how_fast_a_job_runs_may_change(change: dict[str, object]) -> None:
    changed = JOB | change
    assert refused(InferenceJob, ".spec", JOB, changed) == []
    assert refused(InferenceJob, ".spec", changed, JOB) == []


@pytest.mark.parametrize(
    "change",
    [
        {"modelRef": {"name": "other"}},
        {"poolRef": {"name": "other"}},
        {"inputs": {"uri": "other"}},
        {"outputs": {"uri": "other"}},
        {"mode": "Barrier"},
        {"policy": "Fifo"},
        {"objective": "Latency"},
        {"backoffLimit": 0},
    ],
    ids=str,
)
def test_what_a_job_is_may_not_change(change: dict[str, object]) -> None:
    (name,) = change
    assert refused(InferenceJob, ".spec", JOB, JOB | change) == [f".{name}"]


def test_a_job_cannot_be_turned_to_another_kind_of_object() -> None:
    other = {name: value for name, value in JOB.items() if name != "modelRef"}
    other["partitionRef"] = {"name": "p"}
    assert refused(InferenceJob, ".spec", JOB, other) == [".modelRef"]


def test_a_volume_keeps_its_class_and_may_ask_for_more_and_for_less_again() -> None:
    path = ".spec.coordinator.storage"
    small, large = {"size": "5Gi"}, {"size": "10G"}
    assert refused(DevicePool, path, small, large) == []
    # Who asked for more than the storage class grants must be able to go back.
    assert refused(DevicePool, path, large, small) == []
    named = {"size": "5Gi", "storageClassName": "fast"}
    assert refused(DevicePool, path, small, named) == [".storageClassName"]
    assert refused(DevicePool, path, named, small) == [".storageClassName"]
    assert refused(DevicePool, path, named, named) == []


@pytest.mark.parametrize(("cls", "name"), [(Partition, "modelRef"), (Placement, "poolRef")])
def test_what_a_plan_is_about_may_not_change(cls: type, name: str) -> None:
    one, two = {name: {"name": "one"}}, {name: {"name": "two"}}
    both = {"partitionRef": {"name": "p"}}
    assert refused(cls, ".spec", both | one, both | two) == [f".{name}"]
    assert refused(cls, ".spec", both | one, both | one) == []


@kinds
def test_a_rule_about_one_field_points_at_it(names: KindNames) -> None:
    for path, each in every_schema(openapi_schema(names.cls)):
        for rule in each.get("x-kubernetes-validations", []):
            field = rule.get("fieldPath", "").removeprefix(".")
            assert not field or field in each["properties"], path
    assert not any(rule.exclusive for rule in rules(names.cls))


@kinds
def test_a_definition_is_small_enough_for_client_side_apply(names: KindNames) -> None:
    text = (ROOT / "crds" / f"shoal.dev_{names.plural}.yaml").read_text()
    assert len(text.encode()) < 200_000
    assert problems(openapi_schema(names.cls), {"spec": 3})
