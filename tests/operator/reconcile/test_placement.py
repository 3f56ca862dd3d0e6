"""A plan stays in force until another gains enough."""

from dataclasses import replace
from typing import Any

import pytest

from reconcile.rules import decide
from reconcile.test_partition import cut, partition, ready_model
from reconcile.test_partition import written as written_partition
from reconcile.values import MIB, NOW, SETTINGS, condition, make, pool, word
from shoal_api.kinds import Partition, Placement
from shoal_api.kinds.placement import Cost, PlacementStatus
from shoal_operator.reconcile.decision import Decision, Terms
from shoal_operator.reconcile.partition import read_document
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    CoordinatorView,
    DeviceState,
    PlacementSnapshot,
    Run,
    RunState,
    StoredDocument,
    Unreachable,
)
from shoal_protocol.speeds import Speed
from shoal_protocol.units import Bytes

SOON, LATER = "2026-03-01T12:00:10Z", "2026-03-01T12:01:00Z"
UNREACHABLE = Unreachable(reason="connection refused")


def cut_partition() -> tuple[Partition, StoredDocument]:
    of, on = partition(fragments=3), ready_model()
    _, decision = cut(of, on)
    kept = read_document(decision.children[0])
    assert kept is not None
    return written_partition(of, decision), kept


PARTITION, KEPT = cut_partition()


def placement(generation: int = 1, **more: object) -> Placement:
    spec = {"partitionRef": {"name": "rec-3"}, "poolRef": {"name": "shelf"}, **more}
    return make(Placement, "rec-3-shelf", spec, generation=generation)


def device(
    name: str, state: DeviceState = DeviceState.READY, budget: int = 24 * MIB
) -> ConnectedDevice:
    return ConnectedDevice(
        name=name,
        state=state,
        architecture="arm64",
        budget_bytes=Bytes(budget),
        floor_bytes=Bytes(60 * MIB),
        cached_fragments=0,
        cached_bytes=Bytes(0),
        silent_seconds=0.0,
    )


def devices(*names: str, **more: DeviceState) -> CoordinatorView:
    made = tuple(device(name, more.get(name, DeviceState.READY)) for name in names)
    return CoordinatorView(begun=0.0, devices=made, runs={}, fragments=frozenset())


def see(
    of: Placement,
    view: CoordinatorView | Unreachable,
    now: str = NOW,
    measured: Run | None = None,
    cordoned: frozenset[str] = frozenset(),
    of_what: tuple[Partition, StoredDocument] = (PARTITION, KEPT),
) -> tuple[Placement, Decision, PlacementStatus]:
    decision = decide(
        PlacementSnapshot(
            now=now,
            settings=SETTINGS,
            placement=of,
            partition=of_what[0],
            document=of_what[1],
            pool=pool(),
            view=view,
            measured=measured,
            cordoned=cordoned,
        )
    )
    assert isinstance(decision.status, PlacementStatus)
    return replace(of, status=decision.status), decision, decision.status


def used(status: PlacementStatus) -> list[str]:
    return [name for stage in status.stages for name in stage.devices]


def test_a_plan_is_made_of_the_devices_that_are_connected() -> None:
    _, decision, status = see(placement(), devices("a", "b", "c"))
    assert (status.epoch, used(status)) == (1, ["a", "b", "c"])
    assert word(status, "Ready") == "True Ready"
    assert [note.reason for note in decision.notes] == ["PlannedPlacement"]
    assert decision.notes[0].message.startswith("3 stages on a, b, c; ")
    assert len(status.rejected) <= 8


def test_a_device_that_was_measured_to_be_slow_gets_the_least() -> None:
    slow = replace(device("a"), speed=Speed(processors=0.1))
    _, _, status = see(placement(), replace(devices("b", "c"), devices=(slow, device("b"))))
    assert PARTITION.status is not None
    flops = [each.flops or 0 for each in PARTITION.status.fragments]
    work = {
        stage.devices: sum(flops[index] for index in stage.fragments) for stage in status.stages
    }
    assert list(work) == [("b",)] or work["a",] < work["b",]


def test_a_plan_made_again_of_the_same_is_the_same() -> None:
    of, _, first = see(placement(), devices("a", "b", "c"))
    _, decision, second = see(of, devices("a", "b", "c"), now=LATER)
    assert (decision.notes, second) == ((), first)


@pytest.mark.parametrize("view", [devices("a", "b", "c", b=DeviceState.SILENT), UNREACHABLE])
def test_a_moment_of_silence_changes_no_plan(view: CoordinatorView | Unreachable) -> None:
    of, _, first = see(placement(), devices("a", "b", "c"))
    of, decision, second = see(of, view, now=SOON)
    assert (second.stages, second.epoch, decision.notes) == (first.stages, 1, ())
    assert word(second, "Planned") == "True Planned"
    ready = condition(second, "Ready").status.value
    assert ready == ("Unknown" if view is UNREACHABLE else "True")


def test_a_device_that_stays_away_is_planned_around_after_its_grace() -> None:
    of, _, _ = see(placement(), devices("a", "b", "c", "d"))
    assert (
        used(of.status or PlacementStatus())
        == ["a", "b", "c", "d"][: len(used(of.status or PlacementStatus()))]
    )
    gone = used(of.status or PlacementStatus())[0]
    view = devices(*(name for name in "abcd" if name != gone))
    of, decision, status = see(of, view)
    assert word(status, "Ready") == "False DevicesMissing"
    assert (status.epoch, decision.requeue_seconds) == (1, 30)
    of, decision, status = see(of, view, now=SOON)
    assert (status.epoch, decision.requeue_seconds) == (1, 20)
    _, decision, status = see(of, view, now=LATER)
    assert status.epoch == 2
    assert gone not in used(status)
    assert [note.reason for note in decision.notes] == ["ReplannedPlacement"]
    assert f"without {gone}" in decision.notes[0].message


def test_a_plan_whose_partition_was_away_has_no_grace_for_devices_that_are_away_now() -> None:
    of, _, _ = see(placement(), devices("a", "b", "c", "d"))
    uncut = replace(PARTITION, status=None)
    of, _, status = see(of, devices("a", "b", "c", "d"), of_what=(uncut, KEPT))
    assert word(status, "Planned") == "False PartitionNotReady"
    _, _, status = see(of, devices("b", "c", "d"))
    assert word(status, "Ready") == "True Ready"
    assert (status.epoch, "a" in used(status)) == (2, False)


def test_a_device_that_returns_in_time_changes_nothing() -> None:
    of, _, first = see(placement(), devices("a", "b", "c"))
    of, _, _ = see(of, devices("a", "c"))
    _, _, status = see(of, devices("a", "b", "c"), now=SOON)
    assert (status.stages, status.epoch) == (first.stages, 1)
    assert word(status, "Ready") == "True Ready"


def test_devices_that_come_back_one_by_one_find_the_plan_as_it_was() -> None:
    of, _, first = see(placement(), devices("a", "b", "c"))
    of, _, none = see(of, devices(), now=SOON)
    assert word(none, "Ready") == "Unknown WaitingForDevices"
    of, _, some = see(of, devices("a"), now=LATER)
    assert (some.epoch, some.stages) == (1, first.stages)
    _, _, all_ = see(of, devices("a", "b", "c"), now=LATER)
    assert (all_.epoch, word(all_, "Ready")) == (1, "True Ready")


def test_the_others_stay_where_they_were_when_one_is_replaced() -> None:
    of, _, first = see(placement(), devices("b", "c", "d"))
    assert used(first) == ["b", "c", "d"]
    of, _, _ = see(of, devices("a", "c", "d"))
    _, _, status = see(of, devices("a", "c", "d"), now=LATER)
    assert used(status) == ["a", "c", "d"]


def test_a_plan_that_gains_little_is_not_taken_and_one_that_gains_much_is() -> None:
    of, _, first = see(placement(), devices("a", "b", "c"))
    _, _, kept = see(of, devices("a", "b", "c", "d"), now=LATER)
    assert (kept.epoch, kept.stages) == (1, first.stages)
    six = devices("a", "b", "c", "d", "e", "f")
    _, decision, status = see(of, six, now=LATER)
    assert status.epoch == 2
    assert set(used(status)) == set("abcdef")
    assert [note.reason for note in decision.notes] == ["ReplannedPlacement"]


def test_what_fits_nowhere_is_refused_in_words() -> None:
    small = replace(devices("pi"), devices=(device("pi", budget=16 * MIB),))
    _, decision, status = see(placement(), small)
    assert word(status, "Planned") == "False Infeasible"
    text = "fragment 0 of rec-3 needs 20 MiB resident; pi has 16 MiB; "
    assert condition(status, "Ready").message.startswith(text)
    assert status.stages == ()
    assert [note.warning for note in decision.notes] == [True]


def test_what_no_disk_has_room_for_is_refused_in_words() -> None:
    tiny = tuple(replace(device(name), cache_bytes=Bytes(4 * MIB)) for name in ("pi", "jetson"))
    _, _, status = see(placement(), replace(devices("pi"), devices=tiny))
    assert word(status, "Planned") == "False Infeasible"
    said = condition(status, "Ready").message
    assert "on a device's disk; of the devices with enough memory there are for fragments" in said
    assert "jetson 4 MiB, pi 4 MiB; cut finer or raise the cache's size (cache.size of the" in said


def test_nothing_is_told_of_the_placement_of_a_job_that_has_ended() -> None:
    """Who makes a budget smaller gets no warning for each job of last year."""
    small = replace(devices("a"), devices=(device("a", budget=16 * MIB),))
    snapshot = PlacementSnapshot(
        now=NOW,
        settings=SETTINGS,
        placement=placement(),
        partition=PARTITION,
        document=KEPT,
        pool=pool(),
        view=small,
    )
    assert [note.reason for note in decide(snapshot).notes] == ["Infeasible"]
    decision = decide(replace(snapshot, job_ended=True))
    assert word(decision.status, "Planned") == "False Infeasible"
    assert decision.notes == ()


def test_the_plan_of_a_job_that_has_ended_is_not_written_for_each_measurement() -> None:
    """Devices of a pool measure something else every few seconds, and jobs may be there by the
    thousand."""
    of, _, status = see(placement(), devices("a", "b", "c"))
    slow = Speed(convolution_flops_per_second=1e9, product_flops_per_second=1e9)
    view = devices("a", "b", "c")
    view = replace(view, devices=tuple(replace(each, speed=slow) for each in view.devices))
    snapshot = PlacementSnapshot(
        now=LATER,
        settings=SETTINGS,
        placement=of,
        partition=PARTITION,
        document=KEPT,
        pool=pool(),
        view=view,
    )
    assert decide(snapshot).status != status
    assert decide(replace(snapshot, job_ended=True)).status == status


def test_the_plan_of_a_job_that_has_ended_leaves_devices_that_are_gone() -> None:
    of, _, _ = see(placement(), devices("a", "b", "c"))
    of, _, _ = see(of, devices("a", "b"))
    snapshot = PlacementSnapshot(
        now=LATER,
        settings=SETTINGS,
        placement=of,
        partition=PARTITION,
        document=KEPT,
        pool=pool(),
        view=devices("a", "b"),
        job_ended=True,
    )
    status = decide(snapshot).status
    assert isinstance(status, PlacementStatus)
    assert (word(status, "Ready"), set(used(status))) == ("True Ready", {"a", "b"})


def test_an_edit_is_planned_at_once() -> None:
    of, _, _ = see(placement(), devices("a", "b", "c"))
    pin = {"fragment": 0, "device": "c"}
    edited = replace(placement(generation=2, pins=[pin]), status=of.status)
    _, _, status = see(edited, devices("a", "b", "c"))
    assert status.epoch == 2
    assert status.stages[0].devices == ("c",)


def test_the_epoch_never_falls() -> None:
    of, _, _ = see(placement(), devices("a", "b", "c"))
    of, _, _ = see(of, replace(devices("a"), devices=(device("a", budget=MIB),)))
    of, _, refused = see(of, replace(devices("a"), devices=(device("a", budget=MIB),)), now=LATER)
    assert word(refused, "Planned") == "False Infeasible"
    _, _, status = see(of, devices("a", "b", "c"), now=LATER)
    assert status.epoch == 2


MEASURED = Run(
    job="ocr-1",
    state=RunState.COMPLETE,
    message="",
    plan=1,
    terms=Terms(),
    items=24,
    active=0,
    succeeded=24,
    failed=0,
    seconds=2.0,
    items_per_second=12.0,
    latency_p50_seconds=0.25,
    tier_hits=(0, 0, 0, 0),
)


def test_a_placement_that_was_deleted_under_a_run_begins_after_the_plan_of_the_run() -> None:
    going = replace(MEASURED, state=RunState.RUNNING, plan=3)
    of, _, status = see(placement(), devices("a", "b", "c"), measured=going)
    assert status.epoch == 4
    _, _, status = see(of, devices("a", "b", "c"), now=LATER, measured=going)
    assert status.epoch == 4


def test_what_the_last_job_measured_is_told() -> None:
    of, _, status = see(placement(), devices("a", "b", "c"), measured=MEASURED)
    assert status.measured == Cost(latency_seconds=0.25, items_per_second=12.0)
    going = replace(MEASURED, state=RunState.RUNNING, items_per_second=3.0)
    _, _, status = see(of, devices("a", "b", "c"), measured=going)
    assert status.measured == Cost(latency_seconds=0.25, items_per_second=12.0)


def test_a_makespan_is_planned_for_the_items_of_the_newest_job_once_they_are_counted() -> None:
    wanted, view = placement(objective="Makespan"), devices("a", "b", "c")
    of, _, status = see(wanted, view)
    assert status.makespan is not None
    assert (status.makespan.items, status.makespan.assumed) == (100, True)
    assert "(their number is assumed)" in of.message("Planned")
    for run, known in [
        (replace(MEASURED, items=0), False),
        (replace(MEASURED, items=7, following=True), False),
        (replace(MEASURED, items=7), True),
    ]:
        of, _, status = see(of, view, measured=run)
        assert status.makespan is not None
        assert (status.makespan.items, status.makespan.assumed) == (7 if known else 100, not known)
    assert "7 items take" in of.message("Planned")
    assert status.epoch == 1
    assert see(placement(), view)[2].makespan is None


def test_each_stage_says_what_was_predicted_and_what_a_job_by_this_plan_measured() -> None:
    view, times = devices("a", "b", "c"), ((0, 0.1), (1, 0.2), (2, 0.4))
    of, _, status = see(placement(), view)
    assert [stage.measured_seconds for stage in status.stages] == [None] * 3
    assert all((stage.predicted_seconds or 0) > 0 for stage in status.stages)
    assert all((stage.period_seconds or 0) > 0 for stage in status.stages)
    assert all(each.latency_seconds for each in status.rejected if each.items_per_second)
    run = replace(MEASURED, fragment_seconds=times)
    of, _, status = see(of, view, measured=run)
    assert [stage.measured_seconds for stage in status.stages] == [0.1, 0.2, 0.4]
    other = replace(MEASURED, plan=7, fragment_seconds=((0, 9.0), (1, 9.0), (2, 9.0)))
    _, _, status = see(of, view, now=LATER, measured=other)
    assert [stage.measured_seconds for stage in status.stages] == [0.1, 0.2, 0.4]


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("partition", "PartitionNotFound"),
        ("document", "PartitionNotReady"),
        ("pool", "PoolNotFound"),
    ],
)
def test_it_waits_for_what_it_refers_to(missing: str, reason: str) -> None:
    snapshot = PlacementSnapshot(
        now=NOW,
        settings=SETTINGS,
        placement=placement(),
        partition=PARTITION,
        document=KEPT,
        pool=pool(),
        view=devices("a"),
    )
    nothing: dict[str, Any] = {missing: None}
    decision = decide(replace(snapshot, **nothing))
    assert word(decision.status, "Ready") == f"False {reason}"


def test_a_new_plan_does_without_devices_of_cordoned_nodes_unless_they_are_pinned() -> None:
    view, cordoned = devices("a", "b", "c", "d"), frozenset({"a"})
    _, _, status = see(placement(), view, cordoned=cordoned)
    assert used(status) == ["b", "c", "d"]
    pins = [{"fragment": 0, "device": "a"}]
    _, _, status = see(placement(pins=pins), view, cordoned=cordoned)
    assert "a" in used(status)


def test_a_plan_in_force_keeps_a_device_whose_node_is_cordoned() -> None:
    view = devices("a", "b", "c", "d")
    of, _, first = see(placement(), view)
    assert "a" in used(first)
    _, _, second = see(of, view, cordoned=frozenset({"a"}))
    assert second == first
    _, _, edited = see(replace(placement(2), status=first), view, cordoned=frozenset({"a"}))
    assert "a" not in used(edited)


def test_a_plan_in_force_that_a_cordoned_node_has_no_room_for_any_more_is_made_anew() -> None:
    view = devices("a", "b", "c", "d")
    of, _, first = see(placement(), view)
    assert "a" in used(first)
    small = (device("a", budget=2 * MIB), *view.devices[1:])
    _, _, second = see(of, replace(view, devices=small), cordoned=frozenset({"a"}))
    assert "a" not in used(second)
    assert word(second, "Planned") == "True Planned"


def test_a_pool_whose_nodes_are_all_cordoned_says_what_to_do() -> None:
    _, _, status = see(placement(), devices("a", "b"), cordoned=frozenset({"a", "b"}))
    assert word(status, "Planned") == "False WaitingForDevices"
    text = "every connected device of shelf is on a cordoned node; kubectl uncordon a"
    assert condition(status, "Planned").message == text


def test_a_fragment_that_no_device_holds_as_a_whole_is_placed_in_blocks() -> None:
    of, _ = cut_partition()
    least = tuple(replace(each, least_bytes=6 * MIB) for each in KEPT.document.fragments)
    kept = replace(KEPT, document=replace(KEPT.document, fragments=least))
    small = tuple(device(name, budget=9 * MIB) for name in "abc")
    decision = decide(
        PlacementSnapshot(
            now=NOW,
            settings=SETTINGS,
            placement=placement(),
            partition=of,
            document=kept,
            pool=pool(),
            view=CoordinatorView(begun=0.0, devices=small, runs={}, fragments=frozenset()),
        )
    )
    status = decision.status
    assert isinstance(status, PlacementStatus)
    assert word(status, "Ready") == "True Ready"
    need = KEPT.document.fragments[0].resident_bytes
    for each in status.fragments:
        assert (each.resident_bytes, each.least_bytes) == (need, 6 * MIB)
        assert 6 * MIB <= each.granted_bytes <= 9 * MIB
