"""Which of a coordinator's answers count as a change."""

from dataclasses import replace
from types import MappingProxyType

from shoal_operator.controller import views
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    CoordinatorView,
    DeviceState,
    Excess,
    Run,
    RunState,
    Unreachable,
)
from shoal_protocol.speeds import Link, Speed
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import coordinator_pb2 as pb

DEVICE = ConnectedDevice(
    name="pi",
    state=DeviceState.READY,
    architecture="arm64",
    budget_bytes=Bytes(1),
    floor_bytes=Bytes(1),
    cached_fragments=0,
    cached_bytes=Bytes(0),
    silent_seconds=0.1,
)
RUN = views.run_of(pb.JobStatus(name="j", state=pb.JobStatus.RUNNING, items=9, succeeded=1))
VIEW = CoordinatorView(
    begun=1.0,
    devices=(DEVICE,),
    runs=MappingProxyType({"j": RUN}),
    fragments=frozenset({"sha256:1"}),
)


def parts(old: views.View, new: views.View) -> set[str]:
    return {views.topic("ns", "shelf", part)[2] for part in views.differences(old, new)}


def test_time_that_passes_is_no_change() -> None:
    later = replace(
        VIEW,
        begun=9.0,
        devices=(replace(DEVICE, silent_seconds=1.5),),
        runs=MappingProxyType({"j": replace(RUN, seconds=2.0, items_per_second=0.5)}),
    )
    assert parts(VIEW, later) == set()


def test_what_a_device_or_its_link_was_measured_to_do_is_news_for_plans() -> None:
    faster = replace(DEVICE, speed=Speed(processors=2.0))
    linked = replace(DEVICE, link=Link(bytes_per_second=1e8))
    larger = replace(DEVICE, cache_bytes=Bytes(1 << 30))
    for each in (faster, linked, larger):
        assert parts(VIEW, replace(VIEW, devices=(each,))) == {"shelf/devices", "shelf/fleet"}


def test_a_status_says_what_was_measured_and_an_old_one_says_nothing() -> None:
    assert views.device_of(pb.DeviceStatus(name="pi")).speed == Speed()
    status = pb.DeviceStatus(name="pi", link_bytes_per_second=1e8, round_trip_seconds=0.0)
    status.speed.processors = 0.5
    assert views.device_of(status).speed == Speed(processors=0.5)
    assert views.device_of(status).link == Link(bytes_per_second=1e8)


def test_a_device_over_its_budget_is_news_when_that_begins_grows_and_ends() -> None:
    def seen(peak: int, seconds: float) -> CoordinatorView:
        excess = Excess(peak_bytes=Bytes(peak), budget_bytes=Bytes(1), seconds=seconds)
        return replace(VIEW, devices=(replace(DEVICE, excess=excess),))

    assert parts(VIEW, seen(2, 0.5)) == {"shelf/excesses"}
    assert parts(seen(2, 0.5), seen(2, 9.5)) == set()
    assert parts(seen(2, 0.5), seen(3, 0.5)) == {"shelf/excesses"}
    assert parts(seen(2, 599.0), seen(2, 601.0)) == {"shelf/excesses"}
    assert parts(seen(2, 601.0), seen(2, 603.0)) == set()


def test_what_a_coordinator_says_of_an_excess_is_read() -> None:
    over = pb.BudgetExcess(peak_bytes=126, budget_bytes=100, seconds=1.5)
    read = views.device_of(pb.DeviceStatus(name="pi", budget_excess=over)).excess
    assert read == Excess(peak_bytes=Bytes(126), budget_bytes=Bytes(100), seconds=1.5)
    assert views.device_of(pb.DeviceStatus(name="pi")).excess is None


def test_progress_of_a_run_concerns_its_job_only() -> None:
    runs = MappingProxyType({"j": replace(RUN, succeeded=2)})
    assert parts(VIEW, replace(VIEW, runs=runs)) == {"shelf/run/j"}


def test_the_end_of_a_run_concerns_its_placement_and_the_pool_as_well() -> None:
    concerned = {"shelf/run/j", "shelf/end/j", "shelf/runs"}
    runs = MappingProxyType({"j": replace(RUN, state=RunState.COMPLETE)})
    assert parts(VIEW, replace(VIEW, runs=runs)) == concerned
    assert parts(VIEW, replace(VIEW, runs=MappingProxyType({}))) == concerned


def test_how_many_items_a_run_has_is_news_for_its_plan_once_all_are_known() -> None:
    def counted(old: Run, **changed: object) -> bool:
        new = replace(old, **changed)  # type: ignore[arg-type] # of its fields
        return views.count_part("j") in set(views.run_differences("j", old, new))

    assert counted(replace(RUN, items=0), items=9)
    assert not counted(RUN, succeeded=5)
    following = replace(RUN, following=True)
    assert not counted(following, items=12)
    assert counted(following, following=False)


def test_more_items_are_progress_but_the_first_a_failure_and_the_end_are_news() -> None:
    def progress(old: Run, **changed: object) -> list[str]:
        new = replace(old, **changed)  # type: ignore[arg-type]
        before, after = (replace(VIEW, runs=MappingProxyType({"j": each})) for each in (old, new))
        return list(views.progress(before, after))

    assert progress(RUN, succeeded=2, seconds=3.0) == ["run/j"]
    assert progress(replace(RUN, succeeded=0), succeeded=1) == []
    assert progress(RUN, succeeded=2, failed=1) == []
    assert progress(RUN, succeeded=9, state=RunState.COMPLETE) == []
    assert progress(RUN, seconds=3.0) == []


def test_what_a_device_caches_is_nothing_to_plan_anew_for() -> None:
    cached = replace(VIEW, devices=(replace(DEVICE, cached_fragments=1),))
    assert parts(VIEW, cached) == {"shelf/devices"}
    lost = replace(VIEW, devices=(replace(DEVICE, state=DeviceState.LOST),))
    assert parts(VIEW, lost) == {"shelf/devices", "shelf/fleet", "shelf/lost"}


def test_a_device_that_is_silent_for_a_moment_is_nothing_to_plan_anew_for() -> None:
    silent = replace(VIEW, devices=(replace(DEVICE, state=DeviceState.SILENT),))
    assert parts(VIEW, silent) == {"shelf/devices"}


def test_a_coordinator_that_goes_away_concerns_everyone_once() -> None:
    gone = Unreachable(reason="connection refused")
    assert parts(VIEW, gone) == {"shelf/reach"}
    assert parts(gone, gone) == set()
    assert parts(gone, VIEW) == {"shelf/reach"}


def test_every_state_of_the_protocol_is_known() -> None:
    for state in pb.JobStatus.State.keys():  # noqa: SIM118 - no mapping, though it has keys
        assert views.run_of(pb.JobStatus(state=state)).state in RunState
    for device in pb.DeviceStatus.State.keys():  # noqa: SIM118
        assert views.device_of(pb.DeviceStatus(state=device)).state in DeviceState


def test_a_state_that_only_a_newer_coordinator_knows_is_a_run_that_continues() -> None:
    status = pb.JobStatus(name="ocr", items=24, succeeded=24)
    status.state = 99  # type: ignore[assignment]  # a value of a later version
    assert views.run_of(status).state is RunState.RUNNING


def test_a_device_in_a_state_of_a_newer_coordinator_is_neither_ready_nor_lost() -> None:
    status = pb.DeviceStatus(name="pi")
    status.state = 99  # type: ignore[assignment]  # a value of a later version
    assert views.device_of(status).state is DeviceState.SILENT


def test_a_run_says_since_when_it_runs_and_whether_it_completes_its_results() -> None:
    run = views.run_of(pb.JobStatus(name="ocr", completing=True, started_seconds=1.75e9))
    assert (run.completing, run.started_seconds) == (True, 1.75e9)


def test_a_run_says_which_devices_ran_it_and_one_more_is_progress() -> None:
    stages = [
        pb.StageStatus(times=[pb.TaskTime(device=name) for name in names]) for names in ("ba", "a")
    ]
    assert views.run_of(pb.JobStatus(name="j", stages=stages)).devices == ("a", "b")
    runs = MappingProxyType({"j": replace(RUN, devices=("a",))})
    assert list(views.progress(VIEW, replace(VIEW, runs=runs))) == ["run/j"]


def test_a_run_that_begins_to_complete_its_results_is_reported_at_once() -> None:
    runs = MappingProxyType({"j": replace(RUN, completing=True)})
    completing = replace(VIEW, runs=runs)
    assert parts(VIEW, completing) == {"shelf/run/j"}
    assert set(views.progress(VIEW, completing)) == set()


def test_a_pool_is_notified_of_the_first_result_of_a_run_and_not_of_the_next() -> None:
    def after(succeeded: int) -> CoordinatorView:
        run = replace(RUN, succeeded=succeeded)
        return replace(VIEW, runs=MappingProxyType({"j": run}))

    assert "shelf/runs" in parts(after(0), after(1))
    assert "shelf/runs" not in parts(after(1), after(2))
