"""The report: what it says, that it follows its schema, and that it is never half there."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from cli.page.recorded import troubled
from fragment_pools import MIB, device, partition, placed
from shoal_cli.local.report import (
    SCHEMA_PATH,
    DeviceReport,
    Enforcement,
    FailedItem,
    FragmentHeld,
    JobReport,
    Latency,
    RunReport,
    StageReport,
    TaskTime,
    TierHits,
    Verification,
    to_json,
    write_report,
)
from shoal_planner.figures import Rates, figures
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective

VERIFICATION = Verification(
    items=8,
    of_items=10,
    skipped=0,
    mismatched=0,
    max_abs_diff=3e-7,
    max_rel_diff=2e-7,
    worst_item="lines.npz[3]",
    agreements=8,
    tolerance=1e-4,
    different_items=0,
    matched_items=0,
    reference_items=8,
    reference_abs_diff=1e-4,
    reference_rel_diff=5e-5,
    floor_bytes=60 << 20,
    peak_bytes=44 << 20,
    seconds=1.5,
)
JOB = JobReport(
    name="ocr",
    state="Complete",
    reason="",
    message="",
    model="rec",
    model_digest="sha256:" + "0" * 64,
    partition="rec-3",
    items=8,
    succeeded=8,
    failed=0,
    resumed=2,
    retries=1,
    seconds=2.0,
    items_per_second=4.0,
    latency=Latency(p50_seconds=0.1, p90_seconds=0.2, p99_seconds=0.3, maximum_seconds=0.3),
    tier_hits=TierHits(resident=24),
    stages=(
        StageReport(
            index=0,
            devices=("pi-4",),
            finished=8,
            compute_seconds=0.01,
            times=(
                TaskTime(device="pi-4", measured_seconds=0.01, predicted_seconds=0.02),
                TaskTime(device="pi-0", measured_seconds=0.01, predicted_seconds=None),
            ),
        ),
    ),
    failures=(),
    outputs="/out",
    verification=VERIFICATION,
)
DEVICE = DeviceReport(
    name="pi-4",
    budget_bytes=24 << 20,
    floor_bytes=60 << 20,
    peak_bytes_above_floor=20 << 20,
    fragments=(FragmentHeld(partition="rec-3", index=0, digest="sha256:" + "1" * 64),),
    loads=1,
    evictions=0,
    tier_hits=TierHits(resident=8),
    tasks=8,
    sent_bytes=1,
    received_bytes=2,
    fetched_bytes=3,
    restarts=0,
    limit_bytes=84 << 20,
    limit_failures=5,
    out_of_memory_kills=0,
)
IN_BLOCKS = replace(DEVICE.fragments[0], granted_bytes=8 << 20)
PLAN = figures(
    placed(
        plan(
            partition([10**8] * 2, [14 * MIB] * 2),
            [device("pi-4"), device("pi-5")],
            Objective.LATENCY,
        )
    )
).with_measured(Rates(items_per_second=4.0, latency_seconds=0.3), {0: 0.1, 1: 0.2})
PLANNED = replace(JOB, plan=PLAN)
REPORT = RunReport(
    shoal_version="0.1.0",
    started="2026-01-31T12:00:00+00:00",
    seconds=3.0,
    work="/work",
    enforcement=Enforcement(mode="cgroup v1", reason=""),
    coordinator_restarts=0,
    interrupted=False,
    jobs=(PLANNED,),
    devices=(DEVICE,),
)
FAILED = replace(
    JOB,
    state="Failed",
    reason="ItemsFailed",
    message="1 of 8 items failed; first: a.npz: wrong shape",
    failed=1,
    succeeded=7,
    failures=(FailedItem(item=3, input="a.npz", reason="wrong shape"),),
    verification=None,
)


def assert_follows_the_schema(report: RunReport) -> None:
    schema = json.loads(SCHEMA_PATH.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(to_json(report), allow_nan=False)), schema)


@pytest.mark.parametrize(
    "report",
    [
        REPORT,
        replace(REPORT, jobs=(JOB,)),
        replace(REPORT, jobs=(FAILED,), interrupted=True),
        replace(REPORT, devices=(replace(DEVICE, limit_bytes=None),)),
        replace(REPORT, devices=(replace(DEVICE, fragments=(IN_BLOCKS,)),)),
    ],
)
def test_a_report_follows_its_schema(report: RunReport) -> None:
    assert_follows_the_schema(report)


def test_the_schema_names_every_field_that_is_written() -> None:
    schema = json.loads(SCHEMA_PATH.read_text())
    document = json.loads(json.dumps(to_json(REPORT)))
    assert set(document) == set(schema["properties"])
    assert set(document["jobs"][0]) == set(schema["$defs"]["job"]["properties"])
    assert set(document["devices"][0]) == set(schema["$defs"]["device"]["properties"])
    verification = schema["$defs"]["job"]["properties"]["verification"]["anyOf"][0]
    assert set(document["jobs"][0]["verification"]) == set(verification["properties"])
    planned = schema["$defs"]["job"]["properties"]["plan"]["anyOf"][0]
    assert set(document["jobs"][0]["plan"]) == set(planned["properties"])
    stage, stages = document["jobs"][0]["plan"]["stages"][0], planned["properties"]["stages"]
    assert set(stage) == set(stages["items"]["properties"])
    devices = stages["items"]["properties"]["devices"]
    assert set(stage["devices"][0]) == set(devices["items"]["properties"])


def test_the_schema_names_every_field_of_cuts_and_timelines() -> None:
    schema, whole = json.loads(SCHEMA_PATH.read_text()), troubled()
    assert_follows_the_schema(whole)
    document = json.loads(json.dumps(to_json(whole)))
    cut = schema["$defs"]["job"]["properties"]["cut"]["anyOf"][0]["properties"]
    assert set(document["jobs"][0]["cut"]) == set(cut)
    for name in ("fragments", "edges"):
        assert set(document["jobs"][0]["cut"][name][0]) == set(cut[name]["items"]["properties"])
    death = schema["properties"]["deaths"]["items"]["properties"]
    assert set(document["deaths"][0]) == set(death)
    timeline = schema["$defs"]["timeline"]["properties"]
    assert set(document["timelines"][0]) == set(timeline)
    each = timeline["devices"]["items"]["properties"]
    assert set(document["timelines"][0]["devices"][1]) == set(each)
    change = each["changes"]["items"]["properties"]
    assert set(document["timelines"][0]["devices"][1]["changes"][0]) == set(change)


def test_the_main_figures_of_a_verification_stand_in_the_job_and_are_null_without_one() -> None:
    with_one, without = to_json(REPORT), to_json(replace(REPORT, jobs=(FAILED,)))
    assert with_one["jobs"][0]["max_abs_diff"] == 3e-7  # type: ignore[index]
    assert with_one["jobs"][0]["whole_model_peak_bytes"] == 44 << 20  # type: ignore[index]
    assert without["jobs"][0]["max_abs_diff"] is None  # type: ignore[index]


@pytest.mark.parametrize(
    "report",
    [
        replace(REPORT, jobs=(FAILED,)),
        replace(REPORT, interrupted=True),
        replace(REPORT, jobs=(replace(JOB, state="Cancelled"),)),
        replace(REPORT, jobs=(replace(JOB, verification=replace(VERIFICATION, mismatched=1)),)),
        replace(REPORT, jobs=(replace(JOB, verification=replace(VERIFICATION, max_rel_diff=1)),)),
    ],
)
def test_a_run_succeeds_only_if_every_item_did_and_nothing_differs(report: RunReport) -> None:
    assert REPORT.succeeded
    assert not report.succeeded


OVER = replace(DEVICE, name="pi-zero", peak_bytes_above_floor=25 << 20)


def test_budgets_are_enforced_only_where_every_device_was_limited_and_none_went_over() -> None:
    assert (REPORT.within_budget, REPORT.enforced) == (True, True)
    unlimited = replace(REPORT, devices=(DEVICE, replace(DEVICE, limit_bytes=None)))
    assert (unlimited.within_budget, unlimited.enforced) == (True, False)
    over = replace(REPORT, devices=(DEVICE, OVER))
    assert (over.within_budget, over.enforced) == (False, False)
    assert not replace(REPORT, devices=()).enforced


def test_right_results_of_a_device_over_its_budget_are_a_success_that_says_so() -> None:
    report = replace(REPORT, devices=(DEVICE, OVER))
    assert report.succeeded
    document = to_json(report)
    assert (document["succeeded"], document["within_budget"]) == (True, False)
    assert [device["within_budget"] for device in document["devices"]] == [True, False]  # type: ignore[attr-defined]
    assert_follows_the_schema(report)


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(REPORT, path)
    before = path.read_bytes()
    broken = replace(REPORT, seconds=float("nan"))
    with pytest.raises(ValueError, match="nan"):
        write_report(broken, path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]
