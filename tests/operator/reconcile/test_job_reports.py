"""What an InferenceJob says of itself is true, whatever has happened around it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from reconcile.rules import decide
from reconcile.test_inference_job import (
    PLANNED,
    job,
    knows,
    planned,
    run,
    silent,
    status_of,
    works,
    written,
)
from reconcile.values import MIB, NOW, condition, pool, word
from shoal_operator.reconcile.decision import Decision
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    DeviceState,
    InferenceJobSnapshot,
    RunState,
    WorkerPhase,
)
from shoal_operator.reconcile.times import instant
from shoal_protocol.units import Bytes

RUNNING = knows(PLANNED, run(RunState.RUNNING, succeeded=8))
LATER = "2026-03-01T12:20:00Z"


def after(snapshot: InferenceJobSnapshot, **more: Any) -> InferenceJobSnapshot:
    """The same when what was decided is in the status, and something else has changed."""
    return replace(written(snapshot, decide(snapshot)), **more)


def without_pool(snapshot: InferenceJobSnapshot) -> Decision:
    """The pool was deleted after this was decided, and its coordinator with it."""
    return decide(silent(after(snapshot, pool=None)))


def message(decision: Decision) -> str:
    return condition(decision.status, "Complete").message


def test_a_running_job_whose_pool_was_deleted_says_so_and_where_its_results_are() -> None:
    decision = without_pool(RUNNING)
    assert word(decision.status, "Complete") == "False PoolNotFound"
    assert word(decision.status, "Planned") == "False PoolNotFound"
    assert message(decision) == (
        "there is no DevicePool shelf; the 8 finished items of 24 stay on the volume claim "
        "shelf-coordinator as long as this job exists; create DevicePool shelf again to resume, "
        "or delete the job"
    )
    assert [(note.reason, note.warning) for note in decision.notes] == [("PoolNotFound", True)]
    assert status_of(decision).items == status_of(decide(RUNNING)).items
    assert status_of(decision).columns.status == "Pending"  # type: ignore[union-attr]


def test_a_pool_that_is_being_deleted_is_named_as_such() -> None:
    there = pool()
    leaving = replace(there, metadata=replace(there.metadata, deletion_timestamp=NOW))
    decision = decide(silent(after(RUNNING, pool=leaving)))
    assert word(decision.status, "Complete") == "False PoolNotFound"
    assert message(decision).startswith("DevicePool shelf is being deleted; the 8 finished items")


def test_a_job_whose_pool_comes_back_resumes_where_it_was() -> None:
    gone = silent(after(RUNNING, pool=None))
    back = after(gone, pool=PLANNED.pool, view=RUNNING.view)
    decision = decide(back)
    assert word(decision.status, "Complete") == "False Running"
    assert status_of(decision).start_time == status_of(decide(RUNNING)).start_time


def test_a_suspended_job_whose_pool_was_deleted_is_suspended() -> None:
    suspended = replace(RUNNING, job=job(suspend=True))
    decision = without_pool(suspended)
    assert word(decision.status, "Suspended") == "True Suspended"
    assert "there is no DevicePool shelf" in condition(decision.status, "Suspended").message


def test_results_that_wait_for_a_pool_that_was_deleted_are_not_lost() -> None:
    ended = knows(PLANNED, run(RunState.COMPLETE, succeeded=24))
    decision = without_pool(ended)
    assert word(decision.status, "Complete") == "False TransferringResults"
    assert message(decision).startswith("there is no DevicePool shelf; the 24 finished items")
    assert decision.children == ()


def test_the_deadline_of_a_job_without_a_pool_keeps_what_is_finished() -> None:
    limited = knows(
        replace(PLANNED, job=job(activeDeadlineSeconds=600)), run(RunState.RUNNING, succeeded=8)
    )
    gone = silent(after(limited, pool=None, now=LATER))
    decision = decide(gone)
    assert word(decision.status, "Failed") == "False DeadlineExceeded"
    assert message(decision).startswith("there is no DevicePool shelf; the 8 finished items")


def test_all_that_is_missing_is_named_at_once() -> None:
    decision = decide(
        replace(PLANNED, partition=None, placement=None, document=None, model=None, pool=None)
    )
    assert word(decision.status, "Planned") == "False PoolNotFound"
    text = "there is no DevicePool shelf, and no Model rec"
    assert condition(decision.status, "Planned").message == text


def test_a_job_that_runs_says_how_far_it_is() -> None:
    assert message(decide(RUNNING)) == "8 of 24 items succeeded, 2 are active"
    failing = knows(PLANNED, run(RunState.RUNNING, succeeded=8, failed=1))
    assert message(decide(failing)) == "8 of 24 items succeeded, 1 failed, 2 are active"


@pytest.mark.parametrize("state", [RunState.PENDING, RunState.RUNNING])
def test_the_counts_stay_until_a_coordinator_that_started_again_has_counted(
    state: RunState,
) -> None:
    counting = replace(run(state), items=0, active=0)
    items = status_of(decide(knows(after(RUNNING), counting))).items
    assert items is not None
    assert (items.total, items.succeeded, items.active) == (24, 8, 0)


def test_a_job_completes_its_results_when_the_coordinator_says_so() -> None:
    """Counts do not say it: an item that has ended may be withdrawn and run again."""
    counted = run(RunState.RUNNING, succeeded=24, active=0)
    assert word(decide(knows(PLANNED, counted)).status, "Complete") == "False Running"
    decision = decide(knows(PLANNED, replace(counted, completing=True)))
    assert word(decision.status, "Complete") == "False Completing"
    text = "24 of 24 items succeeded; the coordinator completes their results"
    assert message(decision) == text
    assert status_of(decision).columns.status == "Completing"  # type: ignore[union-attr]


def test_a_job_started_when_the_coordinator_says_its_first_task_did() -> None:
    """It ran for four seconds, and was suspended for a minute."""
    first = instant("2026-03-01T11:58:56Z")
    decision = decide(knows(PLANNED, run(RunState.RUNNING, succeeded=8, started_seconds=first)))
    assert status_of(decision).start_time == "2026-03-01T11:58:56Z"


@pytest.mark.parametrize("never", [0.0, -1.0, float("nan")])
def test_a_job_whose_results_all_exist_never_started_a_task(never: float) -> None:
    decision = decide(knows(PLANNED, run(RunState.COMPLETE, succeeded=24, started_seconds=never)))
    assert status_of(decision).start_time is None


@pytest.mark.parametrize("ahead", [instant(LATER), float("inf")])
def test_a_coordinator_whose_clock_is_ahead_starts_a_job_now(ahead: float) -> None:
    decision = decide(knows(PLANNED, run(RunState.RUNNING, succeeded=8, started_seconds=ahead)))
    assert status_of(decision).start_time == NOW


def test_a_job_that_only_transfers_its_results_does_not_say_that_it_runs() -> None:
    decision = decide(knows(PLANNED, run(RunState.COMPLETE, succeeded=24)))
    columns = status_of(decision).columns
    assert columns is not None
    assert (columns.items, columns.status) == ("24/24", "Completing")


@pytest.mark.parametrize("state", [RunState.CANCELLED, None])
def test_a_job_started_when_it_first_started_however_often_it_was_resumed(
    state: RunState | None,
) -> None:
    """Even where the coordinator has forgotten the run, and all begins again."""
    suspended = after(RUNNING, job=replace(job(suspend=True, generation=2), status=None))
    suspended = replace(suspended, job=replace(suspended.job, status=status_of(decide(RUNNING))))
    resumed = after(suspended, job=replace(job(generation=3), status=status_of(decide(suspended))))
    runs = [] if state is None else [run(state, succeeded=8)]
    again = after(knows(resumed, *runs), now=LATER)
    later = works(again, "in", WorkerPhase.SUCCEEDED)
    decision = decide(knows(later, run(RunState.RUNNING, succeeded=9, seconds=2.0)))
    assert status_of(decision).start_time == status_of(decide(RUNNING)).start_time


def test_a_job_names_the_devices_it_has_lost() -> None:
    assert isinstance(PLANNED.view, CoordinatorView)
    devices = (
        replace(PLANNED.view.devices[0], state=DeviceState.LOST),
        *PLANNED.view.devices[1:],
    )
    seen = replace(PLANNED, view=replace(PLANNED.view, devices=devices))
    decision = decide(knows(seen, run(RunState.RUNNING, succeeded=8)))
    assert ("LostDevice", "n1 is lost; its tasks go to other devices") in [
        (note.reason, note.message) for note in decision.notes
    ]
    left = (replace(devices[0], has_left=True), *devices[1:])
    seen = replace(PLANNED, view=replace(PLANNED.view, devices=left))
    decision = decide(knows(seen, run(RunState.RUNNING, succeeded=8)))
    assert "LostDevice" not in [note.reason for note in decision.notes], "its pod is replaced"


def planned_message(
    batches: tuple[bool, ...], budgets: Mapping[str, int] | None = None, **more: object
) -> str:
    """What is said of the plan of a job whose fragments take several items; of devices whose
    budgets are known."""
    snapshot = planned(**more)
    stored, view = snapshot.document, snapshot.view
    assert stored is not None
    assert isinstance(view, CoordinatorView)
    given = zip(stored.document.fragments, batches, strict=True)
    fragments = tuple(replace(each, batches=can) for each, can in given)
    of = replace(stored, document=replace(stored.document, fragments=fragments))
    devices = tuple(
        replace(each, budget_bytes=Bytes(budgets[each.name])) for each in view.devices if budgets
    )
    snapshot = replace(snapshot, document=of, view=replace(view, devices=devices))
    return condition(decide(snapshot).status, "Planned").message


PLAIN = planned_message((False, False, False))
BATCHES = {"batching": {"maxItems": 8}}


def test_a_job_with_batches_says_which_fragments_run_items_one_by_one() -> None:
    assert planned_message((True, True, True), **BATCHES) == PLAIN
    assert planned_message((True, False, False), batching={"maxItems": 1}) == PLAIN
    assert planned_message((True, False, False), **BATCHES) == (
        f"{PLAIN}; items run one by one in 2 of 3 fragments (1, 2): they meet there, or may"
    )


def test_a_job_with_batches_says_which_devices_have_no_room_for_them() -> None:
    """Three fragments of 20 MiB are on each device; ten of them are not weights."""
    budgets = {"n1": 64 * MIB, "n2": 80 * MIB, "n3": 64 * MIB}
    more, asked = planned_message, BATCHES
    assert more((True, True, True), dict.fromkeys(budgets, 80 * MIB), **asked) == PLAIN
    assert more((True, True, True), budgets, batching={"maxItems": 1}) == PLAIN
    meet = "; items run one by one in 2 of 3 fragments (0, 2): they meet there, or may"
    room = "fragment 1 on n1, n3 (each more needs 10 MiB, 4 MiB are free)"
    assert more((False, True, False), budgets, **asked) == (
        f"{PLAIN}{meet}; items run one by one for want of room: {room}"
    )


def test_an_event_says_the_reason_of_an_end_once() -> None:
    """A coordinator's message may begin with it."""
    said = "Budget: fragment 0 of ocr needs 7.6 MiB; n1 has 6 MiB"
    ended = run(RunState.FAILED, succeeded=0, reason="Budget", message=said)
    (note,) = decide(knows(PLANNED, ended)).notes
    assert note.message.startswith(said)
