"""A job that is complete: running it again starts nothing, until anything changes."""

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import pytest

from cli.local.workbench import Ran, Workbench, save_inputs
from shoal_cli.local.report import SCHEMA_PATH
from small_disk import small_disk

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]


def run(bench: Workbench, *options: str) -> Ran:
    return bench.run("run", bench.manifest, "--report", bench.report, *options)


def said(ran: Ran) -> str:
    """What it printed, with its lines joined."""
    return " ".join((ran.out + ran.err).split())


def started(bench: Workbench, ran: Ran) -> bool:
    """Whether any process ran: each has a log."""
    return any((Path(str(ran.report["work"])) / "logs").iterdir())


@pytest.fixture
def finished(bench: Workbench) -> Workbench:
    ran = run(bench)
    assert ran.status == 0, ran.err
    assert started(bench, ran)
    return bench


def test_a_finished_job_is_not_cut_planned_or_started_again(finished: Workbench) -> None:
    again = run(finished)
    assert (again.status, started(finished, again)) == (0, False), again.err
    assert "cutting" not in again.err
    assert (
        f"job: nothing to do: {finished.outputs} has the results of all 10 items, "
        "and manifest, model and inputs are unchanged" in said(again)
    )
    (job,) = again.report["jobs"]  # type: ignore[misc]
    assert (job["state"], job["items"], job["resumed"]) == ("Complete", 10, 10)
    jsonschema.validate(again.report, json.loads(SCHEMA_PATH.read_text()))


def test_a_finished_job_can_be_verified_without_agents(finished: Workbench) -> None:
    again = run(finished, "--verify")
    assert (again.status, started(finished, again)) == (0, False), again.err
    assert "verified 10 items against the whole model" in said(again)


def lose_a_result(bench: Workbench) -> None:
    next(bench.outputs.glob("*.npz")).unlink()


def want_other_budgets(bench: Workbench) -> None:
    bench.write_manifest(budget="24Mi")


@pytest.mark.parametrize("change", [lose_a_result, want_other_budgets])
def test_what_is_missing_or_wanted_otherwise_is_done(
    finished: Workbench, change: Callable[[Workbench], None]
) -> None:
    change(finished)
    again = run(finished)
    assert (again.status, started(finished, again)) == (0, True), again.err
    assert len(list(finished.outputs.glob("*.npz"))) == len(list(finished.inputs.glob("*.npz")))


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


@pytest.mark.parametrize("change", [change_an_input, change_the_model])
def test_results_of_what_has_changed_since_are_refused(
    finished: Workbench, change: Callable[[Workbench], None]
) -> None:
    change(finished)
    again = run(finished)
    assert again.status == 2
    assert "of another model or other inputs" in said(again)


def test_a_full_disk_stops_a_run_which_resumes_when_there_is_room(bench: Workbench) -> None:
    save_inputs(bench.inputs, files=120, stacked=1)
    with small_disk(bench.outputs, "128k"):
        full = run(bench)
        assert full.status == 1
        (job,) = full.report["jobs"]  # type: ignore[misc]
        assert (job["reason"], job["failed"]) == ("ResultsUnwritten", 0)
        assert "No space left on device; make room there, then run the job again" in said(full)
        done = job["succeeded"]
        assert 0 < done < 120
    bench.outputs.rmdir()
