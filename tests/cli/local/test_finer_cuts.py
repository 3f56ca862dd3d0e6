"""A fragment that takes more than was planned, and fits on no device, is divided."""

import re
from dataclasses import replace

import pytest

from cli.local.test_report import REPORT
from cli.local.workbench import Workbench
from shoal_cli.local.finer_cuts import is_too_large, merged
from shoal_cli.local.report import TierHits
from underestimated import HIDDEN, spoken, underestimated, write_inputs, write_spoken


@pytest.mark.real
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("first", "problem"),
    [
        pytest.param(HIDDEN, "16 MiB", id="every item"),
        pytest.param(
            1, " of 4 items failed; first: ", id="all but the first", marks=pytest.mark.minutes
        ),
    ],
)
def test_a_fragment_that_fits_nowhere_is_divided_and_the_job_succeeds(
    bench: Workbench, first: int, problem: str
) -> None:
    folder = bench.folder / "hidden"
    write_inputs(folder / "in", 4, first)
    path = underestimated().save(folder)
    # Under a limit the kernel takes mapped weights back, and the fragment fits as it is.
    measured = ("--enforce", "none")
    places = ("--inputs", folder / "in", "--outputs", folder / "out", "--report", bench.report)
    ran = bench.run(
        "run", path, *places, "--devices", "2", "--budget", "16Mi", "--verify", *measured
    )
    assert "now fragment 0 is divided" in ran.err
    notes, devices, jobs = (ran.report[name] for name in ("notes", "devices", "jobs"))
    assert isinstance(notes, list)
    assert isinstance(devices, list)
    assert isinstance(jobs, list)
    assert notes
    assert all("Budget: " in each and problem in each for each in notes), notes
    assert [each["name"] for each in devices] == ["device-1", "device-2"]
    # Its status may be 1: one node took more than a device has, before it could be stopped.
    assert [(each["state"], each["succeeded"]) for each in jobs] == [("Complete", 4)], ran.err
    assert jobs[0]["verification"]["mismatched"] == 0


@pytest.mark.real
def test_where_no_finer_cut_helps_an_item_fails_by_itself_and_the_others_run(
    bench: Workbench,
) -> None:
    """Of 20,000 rows one node takes 40 MiB and more, which no plan knows."""
    folder = bench.folder / "spoken"
    write_spoken(folder / "in", 20_000, 40, 60)
    places = ("--inputs", folder / "in", "--outputs", folder / "out", "--report", bench.report)
    path = spoken().save(folder)
    ran = bench.run("run", path, *places, "--devices", "2", "--budget", "16Mi")
    assert ran.status == 1, ran.err
    assert "it cannot be cut finer" in ran.err
    assert "items that it is too large for fail by themselves" in ran.err
    jobs = ran.report["jobs"]
    assert isinstance(jobs, list)
    (job,) = jobs
    assert (job["succeeded"], job["failed"]) == (2, 1)
    (failure,) = job["failures"]
    assert failure["input"] == "0.npz"
    assert re.search("^Budget: it .* 16 MiB.* node", failure["reason"]), failure


def test_what_a_device_did_in_both_runs_is_in_one_report() -> None:
    first, *others = REPORT.devices
    again = replace(
        first,
        loads=2,
        peak_bytes_above_floor=first.peak_bytes_above_floor - 1,
        tier_hits=TierHits(cached=3),
    )
    both, *rest = merged([first, *others, again])
    assert rest == others
    assert both.loads == first.loads + 2
    assert both.peak_bytes_above_floor == first.peak_bytes_above_floor
    assert both.tier_hits == first.tier_hits + TierHits(cached=3)


def test_only_a_job_of_which_a_fragment_fits_nowhere_is_cut_again() -> None:
    (job, *_) = REPORT.jobs
    assert not is_too_large(job)
    assert not is_too_large(replace(job, state="Failed", reason="ItemsFailed"))
    assert is_too_large(replace(job, state="Failed", reason="Budget"))
