"""Why a job is where it is: the one sentence that matters most, and the rest."""

import pytest

from cli.live.overviews import MIB, device, digest, job, overview, stage, task
from shoal_cli.live.reasons import ClusterJob, Why, on_cluster, why
from shoal_cli.live.view import view_of
from shoal_protocol.v1 import coordinator_pb2 as pb


def reasons(*parts: pb.DeviceOverview | pb.JobOverview) -> Why:
    view = view_of(overview(*parts))
    return why(view.jobs[0], view)


LOST = pb.DeviceStatus.LOST
PENDING, FAILED = pb.JobStatus.PENDING, pb.JobStatus.FAILED


def test_a_job_without_any_device_says_so() -> None:
    assert reasons(job(state=PENDING)).headline == (
        "ocr waits: no device has ever connected to this coordinator"
    )


def test_a_job_whose_devices_are_all_gone_names_them() -> None:
    said = reasons(device("pi-4", state=LOST), job(state=PENDING, items=0))
    assert said.headline == "ocr waits: no device is ready (pi-4 is Lost)"
    assert said.findings == ("pi-4 is lost: its agent is gone, or cannot reach the coordinator",)


def test_a_device_that_was_told_to_stop_is_not_called_lost() -> None:
    said = reasons(device("pi-4", state=LOST, has_left=True), job(state=PENDING, items=0))
    assert said.headline == "ocr waits: no device is ready (pi-4 has left)"
    assert said.findings == ("pi-4 has left in order: its agent was told to stop",)


def test_a_stage_that_no_device_serves_is_named_with_what_it_needs_and_why_not() -> None:
    lacking = pb.Candidate(
        device="pi-4",
        need_bytes=40 * MIB,
        have_bytes=24 * MIB,
        free_bytes=20 * MIB,
        reason="the fragment does not fit",
    )
    unserved = stage(1, ready=3, starving_seconds=2.0, candidates=[lacking])
    said = reasons(device("pi-4", 24 * MIB), job(stage(0, "pi-4", compute=0.1), unserved))
    assert said.headline == (
        f"ocr waits, 0 of 100 items: stage 1 of 2 (fragment {digest(1)[:19]}) needs 40 MiB "
        "resident, and no device serves it"
    )
    (shown,) = said.stages
    (candidate,) = shown.candidates
    assert (candidate.need_bytes, candidate.have_bytes) == (40 * MIB, 24 * MIB)
    assert candidate.reason == "the fragment does not fit"


def test_a_stage_that_is_being_loaded_is_no_riddle() -> None:
    said = reasons(device("pi-4"), job(stage(0, ready=3, loading=["pi-4"])))
    assert said.headline.endswith("needs 40 MiB resident, and is being loaded on pi-4")


def test_a_later_stage_that_has_no_work_yet_is_not_complained_about() -> None:
    said = reasons(device("pi-4"), job(stage(0, "pi-4", compute=0.1), stage(1)))
    assert said.stages == ()
    assert said.headline == "ocr runs, 0 of 100 items"


def test_the_stage_that_sets_the_pace_is_named() -> None:
    stages = (stage(0, "pi-4", compute=0.5), stage(1, "jetson", compute=0.1))
    said = reasons(device("pi-4"), job(*stages, succeeded=10, items_per_second=1.8))
    assert said.headline == (
        "ocr runs, 10 of 100 items: stage 0 on pi-4 sets the pace, 2 items/s at most"
    )


@pytest.mark.parametrize(("compute", "rate"), [(0.45, 1.8), (0.1, 0.5)])
def test_where_stages_are_even_or_devices_idle_no_stage_sets_the_pace(
    compute: float, rate: float
) -> None:
    stages = (stage(0, "pi-4", compute=0.5), stage(1, "jetson", compute=compute))
    said = reasons(device("pi-4"), job(*stages, items_per_second=rate))
    assert said.headline == "ocr runs, 0 of 100 items"


def test_where_the_slowest_items_spent_their_time_is_said_in_shares() -> None:
    shown = job(stage(0, "pi-4"))
    timing = pb.ItemTiming(item=0, seconds=10.0, tasks=[task(0, "pi-4", 0.0, 6.0, 9.0, 3.0)])
    shown.slowest.append(timing)
    assert reasons(device("pi-4"), shown).findings == (
        "the slowest items spent their time so: 60% waiting for a free place on a device, "
        "30% computing, 10% storing results",
    )


def test_tasks_that_load_first_are_a_finding_once_they_are_many() -> None:
    few, many = pb.TierHits(resident=99, evict=1), pb.TierHits(resident=50, cached=20, evict=30)
    assert reasons(device("pi-4"), job(tier_hits=few)).findings == ()
    (finding,) = reasons(device("pi-4"), job(tier_hits=many)).findings
    assert finding.startswith("50 of 100 tasks (50%) had to load their fragment first, 30 of them")


def test_the_first_load_of_a_fragment_is_no_finding() -> None:
    beginning = job(stage(0, "pi-4", "jetson"), tier_hits=pb.TierHits(idle=1, cached=1))
    assert reasons(device("pi-4"), device("jetson"), beginning).findings == ()


def test_nor_is_it_once_the_coordinator_has_let_go_of_the_stages() -> None:
    """Two devices loaded the only fragment, for ten items."""
    ended = job(
        state=pb.JobStatus.COMPLETE, succeeded=10, tier_hits=pb.TierHits(resident=8, idle=2)
    )
    assert reasons(device("pi-4"), device("jetson"), ended).findings == ()


def test_what_is_not_well_with_devices_of_the_job_is_said() -> None:
    pi = device("pi-4", 24 * MIB, peak_bytes=30 * MIB, state=pb.DeviceStatus.SILENT)
    pi.status.silent_seconds = 7
    pi.relayed_to.append("jetson")
    pi.fragments.append(
        pb.HeldFragment(digest=digest(0), failures=3, failure="disk full", retry_seconds=9)
    )
    other = device("attic", state=LOST)
    said = reasons(pi, other, device("jetson"), job(stage(0, "pi-4"), retries=2))
    assert said.findings == (
        "2 tasks had to be given again, "
        "after a device was lost, had failed or could not reach another",
        "pi-4 has given no sign of life for 7 s",
        "pi-4 was measured at 30 MiB of its 24 MiB: over its budget",
        "pi-4 cannot reach jetson: what it sends there goes through the coordinator",
        "pi-4 failed 3 times with ocr/0: disk full; again in 9 s",
    )


def test_a_stage_in_blocks_or_away_from_its_plan_is_a_finding() -> None:
    planned = stage(0, "pi-4", planned=["pi-4", "jetson"], granted_bytes=[12 * MIB, 40 * MIB])
    said = reasons(device("pi-4"), job(planned))
    assert said.findings == (
        "stage 0: the plan names pi-4, jetson; jetson does not serve it now",
        "stage 0 needs 40 MiB and runs in blocks on pi-4 with 12 MiB: it reads weights from the "
        "disk again",
    )


def test_several_devices_away_from_the_plan_do_not_serve_it() -> None:
    planned = stage(0, "pi-4", planned=["pi-4", "jetson", "attic"])
    (finding,) = reasons(device("pi-4"), job(planned)).findings
    assert finding.endswith("; jetson, attic do not serve it now")


def test_a_job_that_has_failed_says_why() -> None:
    failure = pb.ItemFailure(item=3, input="3.npz", reason="InvalidInput: wrong shape")
    said = reasons(job(state=FAILED, message="1 of 100 items failed", failed=1, failures=[failure]))
    assert said.headline == "ocr is Failed: 1 of 100 items failed"
    assert said.findings == ("failed: 3.npz: InvalidInput: wrong shape",)


def test_what_a_cluster_says_of_a_job_comes_first() -> None:
    problems = ("Placement ocr: Planned False (DoesNotFit): fragment 0 needs 96 MiB", "another")

    def said(reasons: Why | None, ended: str = "", problems: tuple[str, ...] = problems) -> Why:
        job = ClusterJob(pool="shelf", ended=ended, problems=problems, plan=("3 stages",))
        return on_cluster("ocr", job, reasons)

    waits = said(None)
    assert (waits.headline, waits.findings) == (f"ocr does not run: {problems[0]}", ("another",))
    assert said(None, problems=()).headline == (
        "ocr does not run: its coordinator does not have it yet"
    )
    running = Why(headline="ocr runs", findings=("slow",))
    assert said(running) == Why(
        headline="ocr runs", findings=(*problems, "slow"), plan=("3 stages",)
    )
    assert said(None, "Failed: ItemsFailed").headline == "ocr is Failed: ItemsFailed"
