"""A job that is complete: running it again starts nothing, until anything changes."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
import onnx
import pytest

from cli.local.workbench import (
    Ran,
    Workbench,
    assert_results_are_the_whole_models,
    make_workbench,
    save_inputs,
)
from shoal_cli.local.report import SCHEMA_PATH
from small_disk import small_disk

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]


def run(bench: Workbench, *options: str) -> Ran:
    return bench.run("run", bench.manifest, "--report", bench.report, *options)


def run_again(bench: Workbench, *options: str) -> Ran:
    """As `run`, in this process: where no agent starts."""
    return bench.command("run", bench.manifest, "--report", bench.report, *options)


def said(ran: Ran) -> str:
    """What it printed, with its lines joined."""
    return " ".join((ran.out + ran.err).split())


def job_of(ran: Ran) -> Any:
    return ran.report["jobs"][0]  # type: ignore[index]


def started(ran: Ran) -> bool:
    """Whether any process ran: each has a log."""
    return any((Path(str(ran.report["work"])) / "logs").iterdir())


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workbench, Path, Ran]:
    """A workbench on which a job has run to its end, a copy of its folder, and how it ran."""
    bench = make_workbench(tmp_path_factory.mktemp("finished"))
    ran = run(bench, "--verify")
    assert ran.status == 0, ran.err
    assert started(ran)
    copy = bench.folder.with_name("copy")
    shutil.copytree(bench.folder, copy)
    return bench, copy, ran


@pytest.fixture
def finished(ended: tuple[Workbench, Path, Ran]) -> Workbench:
    """The workbench as the run left it, in the folder of the run."""
    bench, copy, _ = ended
    shutil.rmtree(bench.folder)
    shutil.copytree(copy, bench.folder)
    return bench


def test_a_run_writes_the_whole_models_results_and_reports_what_it_took(
    ended: tuple[Workbench, Path, Ran], finished: Workbench
) -> None:
    _, _, ran = ended
    assert_results_are_the_whole_models(finished)
    jsonschema.validate(ran.report, json.loads(SCHEMA_PATH.read_text()))
    job = job_of(ran)
    assert (job["items"], job["succeeded"], job["resumed"]) == (10, 10, 0)
    assert job["max_abs_diff"] <= 1e-5
    assert job["whole_model_peak_bytes"] > 0
    assert "verified 10 items" in ran.out
    assert [each["index"] for each in job["cut"]["fragments"]] == [0, 1, 2]
    devices = cast(list[dict[str, Any]], ran.report["devices"])
    for device in devices:
        assert 0 < device["peak_bytes_above_floor"] <= device["budget_bytes"]
        assert device["floor_bytes"] > device["budget_bytes"]
    tasks = {device["name"]: device["tasks"] for device in devices}
    assert sum(tasks.values()) == 3 * 10
    (timeline,) = cast(list[dict[str, Any]], ran.report["timelines"])
    assert [each["name"] for each in timeline["devices"]] == ["one", "three", "two"]
    for each in timeline["devices"]:
        # Where a device loads for long, the others have done all the work by then.
        assert (sum(each["computing_seconds"]) > 0) == (tasks[each["name"]] > 0)
        assert sum(each["busy_seconds"]) >= max(each["computing_seconds"])
    for name in ("computing_seconds", "loading_seconds", "memory_bytes"):
        assert any(sum(each[name]) > 0 for each in timeline["devices"])


def test_a_finished_job_is_not_cut_planned_or_started_again(finished: Workbench) -> None:
    written = {path: path.stat().st_mtime_ns for path in finished.outputs.glob("*.npz")}
    again = run_again(finished)
    assert (again.status, started(again)) == (0, False), again.err
    assert {path: path.stat().st_mtime_ns for path in finished.outputs.glob("*.npz")} == written
    assert "cutting" not in again.err
    assert (
        f"job: nothing to do: {finished.outputs} has the results of all 10 items, "
        "and manifest, model and inputs are unchanged" in said(again)
    )
    job = job_of(again)
    assert (job["state"], job["items"], job["resumed"]) == ("Complete", 10, 10)
    jsonschema.validate(again.report, json.loads(SCHEMA_PATH.read_text()))


def test_what_looks_like_an_input_and_is_none_is_named(finished: Workbench) -> None:
    assert "no inputs" not in said(run_again(finished))
    (finished.inputs / "away.npz").symlink_to("nowhere")
    for number in range(6):
        (finished.inputs / f"{number}.NPZ").touch()
    again = run_again(finished)
    assert again.status == 0
    text = "or .npy: 0.NPZ, 1.NPZ, 2.NPZ, 3.NPZ, 4.NPZ and 2 more"
    assert text in said(again)
    assert any(text in note for note in cast(list[str], again.report["notes"]))


def test_a_finished_job_can_be_verified_without_agents(finished: Workbench) -> None:
    again = run_again(finished, "--verify")
    assert (again.status, started(again)) == (0, False), again.err
    assert "verified 10 items against the whole model" in said(again)


def test_a_sample_is_verified_and_a_result_that_is_wrong_is_still_found(
    finished: Workbench,
) -> None:
    sample = run_again(finished, "--verify=3")
    assert sample.status == 0, sample.err
    assert "verified 3 of 10 items against the whole model" in said(sample)
    path = finished.outputs / "01.npz"
    with np.load(path) as results:
        wrong = results["y"] + 0.25
    np.savez(path, y=wrong)
    every = run_again(finished, "--verify")
    assert every.status == 1
    assert "DIFFERENT: more than the tolerance of 0.0001" in said(every)


@pytest.mark.minutes
def test_a_difference_that_the_whole_model_has_from_itself_is_said_to_be_its_own(
    bench: Workbench,
) -> None:
    model = onnx.load(bench.model)
    noise = onnx.helper.make_node("RandomNormalLike", ["x"], ["noise"], scale=0.1)
    (last,) = (node for node in model.graph.node if "y" in node.output)
    last.output[0] = "quiet"
    model.graph.node.append(noise)
    model.graph.node.append(onnx.helper.make_node("Add", ["quiet", "noise"], ["y"]))
    onnx.save(model, bench.model)
    ran = run(bench, "--verify")
    assert ran.status == 0, said(ran)
    assert "the difference is no larger than the model's own: the whole model differs" in said(ran)
    assert "DIFFERENT" not in ran.out


def lose_a_result(bench: Workbench) -> None:
    next(bench.outputs.glob("*.npz")).unlink()


def want_other_budgets(bench: Workbench) -> None:
    bench.write_manifest(budget="24Mi")


@pytest.mark.parametrize(
    "change", [pytest.param(lose_a_result, marks=pytest.mark.minutes), want_other_budgets]
)
def test_what_is_missing_or_wanted_otherwise_is_done(
    finished: Workbench, change: Callable[[Workbench], None]
) -> None:
    change(finished)
    again = run(finished)
    assert (again.status, started(again)) == (0, True), again.err
    assert len(list(finished.outputs.glob("*.npz"))) == len(list(finished.inputs.glob("*.npz")))


def test_an_input_that_was_added_runs_alone(finished: Workbench) -> None:
    shutil.copy(finished.inputs / "00.npz", finished.inputs / "00-again.npz")
    again = run(finished)
    assert again.status == 0, again.err
    job = job_of(again)
    assert job["resumed"] == 10
    assert job["items"] == job["succeeded"] > 10
    assert_results_are_the_whole_models(finished)


def change_an_input(bench: Workbench) -> None:
    path = bench.inputs / "01.npz"
    with np.load(path) as arrays:
        changed = arrays["x"] + 1
    np.savez(path, x=changed)


def change_the_model(bench: Workbench) -> None:
    model = onnx.load(bench.model)
    weight = model.graph.initializer[3]
    weight.raw_data = weight.raw_data[4:] + weight.raw_data[:4]
    onnx.save(model, bench.model)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (change_an_input, "hold results of inputs that have changed since (01.npz)"),
        (change_the_model, "hold results of another 'job', of another model"),
    ],
)
def test_results_of_what_has_changed_since_are_refused(
    finished: Workbench, change: Callable[[Workbench], None], why: str
) -> None:
    change(finished)
    again = run_again(finished, "--verify")
    assert again.status == 2
    assert why in said(again)
    assert "verifi" not in said(again), "the results are those of another run"
    quiet = run_again(finished, "--quiet")
    assert (quiet.status, quiet.out) == (2, "")
    assert why in said(quiet)


@pytest.mark.minutes
def test_a_full_disk_stops_a_run_which_resumes_when_there_is_room(bench: Workbench) -> None:
    save_inputs(bench.inputs, files=120, stacked=1)
    with small_disk(bench.outputs, "128k"):
        full = run(bench)
        assert full.status == 1
        job = job_of(full)
        assert (job["reason"], job["failed"]) == ("ResultsUnwritten", 0)
        assert "No space left on device; make room there, then run the job again" in said(full)
        assert 0 < job["succeeded"] < 120
        subprocess.run(["mount", "-o", "remount,size=4m", str(bench.outputs)], check=True)
        last = run(bench)
        assert last.status == 0, last.err
        assert job_of(last)["resumed"] >= job["succeeded"]
        assert_results_are_the_whole_models(bench)
