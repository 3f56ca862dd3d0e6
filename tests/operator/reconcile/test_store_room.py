"""A cut waits where its pool's store has no room for it, and goes on by itself."""

from dataclasses import replace
from typing import Any

import pytest

from reconcile.rules import decide, name_of
from reconcile.test_deliveries import EMPTY, deliveries
from reconcile.test_device_pool import children
from reconcile.test_device_pool import snapshot as pool_snapshot
from reconcile.test_inference_job import PLANNED, kinds, knows, run, status_of
from reconcile.values import NOW, condition, word
from shoal_api.kinds.inference_job import FinerCut
from shoal_operator.reconcile.conditions import Cause
from shoal_operator.reconcile.decision import CancelJob, SubmitJob
from shoal_operator.reconcile.job_preparation import preceded_by
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    InferenceJobSnapshot,
    RunState,
    Worker,
    WorkerPhase,
)
from shoal_operator.reconcile.volumes import Claim, StoreRoom
from shoal_operator.reconcile.workers import deliver_worker, worker_job
from shoal_protocol.units import Bytes

GIB = 1 << 30
LATER = "2026-03-01T12:05:00Z"
assert PLANNED.document is not None
DOCUMENT = PLANNED.document.document
NEED = sum(each.weight_bytes for each in DOCUMENT.fragments)
FIRST = DOCUMENT.fragments[0]
SUITS = StoreRoom(size_bytes=5 * GIB, free_bytes=5 * GIB)
FULL = StoreRoom(size_bytes=5 * GIB, free_bytes=NEED // 2)
SMALL = StoreRoom(size_bytes=NEED - 1, free_bytes=NEED - 1)


def with_store(
    of: InferenceJobSnapshot, store: StoreRoom, *there: str, **more: Any
) -> InferenceJobSnapshot:
    """The coordinator has so much room, and these fragments."""
    assert isinstance(of.view, CoordinatorView)
    view = replace(of.view, store=store, fragments=frozenset(there))
    return replace(of, view=view, **more)


def without_known_size(of: InferenceJobSnapshot) -> InferenceJobSnapshot:
    """The model's own size bounds nothing."""
    assert of.model is not None
    assert of.model.status is not None
    status = replace(of.model.status, size_bytes=None)
    return replace(of, model=replace(of.model, status=status))


UNBOUNDED = without_known_size(PLANNED)


def no_room(of: InferenceJobSnapshot, ended_at: str) -> Worker:
    """The delivery has found no room."""
    assert of.partition is not None
    assert of.model is not None
    assert of.document is not None
    worker = deliver_worker(of.partition, of.model, of.document.arguments, "shelf")
    text = "shoal: no room there\n  shelf: would need 9 MiB, 1 MiB of 5 GiB are free"
    return Worker(
        name=worker.name,
        phase=WorkerPhase.FAILED,
        message=text,
        no_room=True,
        ended_at=ended_at,
        end_seen=1.0,
    )


def test_a_cut_is_delivered_where_there_is_room() -> None:
    assert deliveries(with_store(UNBOUNDED, SUITS))


@pytest.mark.parametrize("size", [FULL, SMALL])
def test_a_cut_without_room_waits_and_says_need_and_have(size: StoreRoom) -> None:
    decision = decide(with_store(UNBOUNDED, size))
    assert deliveries(with_store(UNBOUNDED, size)) == []
    assert kinds(decision) == ["Partition", "Placement"], "inputs would take room as well"
    assert word(decision.status, "Complete") == "False WaitingForRoom"
    assert word(decision.status, "Failed") == "False NotFailed"
    message = condition(decision.status, "Complete").message
    assert "Partition ocr would need " in message
    assert "in the store of shelf, which has " in message
    assert "raise spec.coordinator.storage.size of DevicePool shelf to " in message
    ends = "jobs that use the rest have ended" in message
    assert ends == (size is FULL), "no end of a job gives more than there is altogether"
    (note,) = (each for each in decision.notes if each.reason == "WaitingForRoom")
    assert note.warning
    assert message.startswith(f"{note.message}, which has ")
    assert decision.requeue_seconds


def test_a_wait_is_told_once_however_much_room_there_is_meanwhile() -> None:
    said = {
        (each.message, each.since)
        for free in (0, NEED // 4, NEED // 2)
        for each in decide(with_store(UNBOUNDED, replace(FULL, free_bytes=free))).notes
        if each.reason == "WaitingForRoom"
    }
    assert len(said) == 1


def test_what_would_give_way_counts_as_room_but_not_the_cut_itself() -> None:
    removable = replace(FULL, removable_bytes=NEED)
    assert deliveries(with_store(UNBOUNDED, removable))
    lacking = NEED - FIRST.weight_bytes
    own = StoreRoom(
        size_bytes=5 * GIB,
        free_bytes=lacking - 1,
        removable_bytes=FIRST.weight_bytes,
        unused=frozenset({FIRST.digest}),
    )
    assert not deliveries(with_store(UNBOUNDED, own, FIRST.digest))
    assert deliveries(with_store(UNBOUNDED, replace(own, free_bytes=lacking), FIRST.digest))


def test_weights_that_fragments_share_are_reckoned_with_the_models_size() -> None:
    assert PLANNED.model is not None
    assert PLANNED.model.status is not None
    status = replace(PLANNED.model.status, size_bytes=NEED // 2)
    shared = replace(PLANNED, model=replace(PLANNED.model, status=status))
    assert deliveries(with_store(shared, FULL))


def test_a_coordinator_that_says_nothing_of_its_room_is_delivered_to() -> None:
    assert deliveries(EMPTY)


def test_a_delivery_that_found_no_room_is_tried_again_when_there_is_some() -> None:
    later = replace(UNBOUNDED, now=LATER)
    full = with_store(later, FULL, workers=(no_room(UNBOUNDED, NOW),))
    waits = decide(full)
    assert word(waits.status, "Complete") == "False WaitingForRoom"
    assert word(waits.status, "Failed") == "False NotFailed"
    assert waits.removals == ()
    just_now = decide(
        with_store(UNBOUNDED, SUITS, workers=(no_room(UNBOUNDED, NOW),)),
    )
    assert word(just_now.status, "Complete") == "False WaitingForRoom"
    assert "1 MiB of 5 GiB are free" in condition(just_now.status, "Complete").message
    assert just_now.removals == (), "it would not find more"
    again = decide(with_store(full, SUITS))
    assert [key.name for key in again.removals] == [no_room(UNBOUNDED, NOW).name]
    assert deliveries(with_store(UNBOUNDED, SUITS)), "with the worker gone, another one begins"


def test_inputs_that_find_no_room_wait_too() -> None:
    delivered = with_store(UNBOUNDED, SUITS, *(each.digest for each in DOCUMENT.fragments))
    (worker,) = (each for each in decide(delivered).children if each["kind"] == "Job")
    spec: Any = worker["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    assert rules[1]["onExitCodes"]["values"] == [2, 4], "Kubernetes does not try it again at once"
    failed = replace(no_room(UNBOUNDED, NOW), name=name_of(worker))
    decision = decide(replace(delivered, workers=(failed,)))
    assert word(decision.status, "Complete") == "False WaitingForRoom"
    assert word(decision.status, "Failed") == "False NotFailed"


# ---- a model that was cut anew while its job runs ------------------------------------------------


def cut_anew(store: StoreRoom, **more: Any) -> InferenceJobSnapshot:
    """A job runs by an older plan, of fragments that are no longer the Partition's."""
    running = knows(UNBOUNDED, run(RunState.RUNNING, succeeded=3, plan=0))
    return with_store(running, store, **more)


def test_a_run_goes_on_by_the_old_cut_while_the_new_one_has_no_room() -> None:
    decision = decide(cut_anew(FULL))
    assert decision.calls == ()
    assert word(decision.status, "Complete") == "False Running"
    assert word(decision.status, "Planned") == "True WaitingForRoom"
    for type_ in ("Complete", "Planned"):
        assert "would need " in condition(decision.status, type_).message
    assert "WaitingForRoom" in {each.reason for each in decision.notes}
    assert decision.requeue_seconds is not None
    assert decision.requeue_seconds <= 15


def test_a_delivery_without_room_ends_no_job_that_runs_or_ran() -> None:
    full = (no_room(UNBOUNDED, NOW),)
    running = decide(cut_anew(FULL, workers=full))
    assert word(running.status, "Planned") == "True WaitingForRoom"
    stopped = knows(UNBOUNDED, run(RunState.CANCELLED, succeeded=3, plan=0))
    waits = decide(with_store(stopped, FULL, workers=full))
    assert word(waits.status, "Failed") == "False NotFailed"
    assert word(waits.status, "Complete") == "False WaitingForRoom"
    items = status_of(waits).items
    assert items is not None
    assert items.succeeded == 3
    delivered = with_store(stopped, SUITS, *(each.digest for each in DOCUMENT.fragments))
    assert any(isinstance(call, SubmitJob) for call in decide(delivered).calls)


def test_a_run_whose_fragments_have_no_place_gives_its_room_to_the_new_cut() -> None:
    assert UNBOUNDED.partition is not None
    spec = UNBOUNDED.partition.spec
    assert spec.max_fragment_size is not None
    finer = FinerCut(cuts=2, max_fragment_size_bytes=spec.max_fragment_size, message="too large")
    waits = cut_anew(FULL)
    status = replace(waits.before, finer_cut=finer)
    waits = replace(waits, job=replace(waits.job, status=status))
    decision = decide(waits)
    assert [type(call) for call in decision.calls] == [CancelJob]
    assert word(decision.status, "Complete") == "False CutAnew"
    assert "would need " in condition(decision.status, "Complete").message
    in_vain = replace(waits, view=cut_anew(SMALL).view)
    assert decide(in_vain).calls == (), "there would not be enough all the same"


def test_a_job_that_waits_for_room_delays_no_other() -> None:
    status = status_of(decide(with_store(UNBOUNDED, FULL)))
    first = replace(UNBOUNDED.job, status=status, spec=replace(UNBOUNDED.job.spec, priority=9))
    metadata = replace(first.metadata, name="first", creation_timestamp=NOW)
    first = replace(first, metadata=metadata)
    assert preceded_by(replace(PLANNED, rivals=(first,))) is None
    ready = replace(first, status=None)
    assert isinstance(preceded_by(replace(PLANNED, rivals=(ready,))), Cause)


# ---- what the coordinator is told ----------------------------------------------------------------


def told(claim: Claim | None, **spec: Any) -> str:
    """The size that the coordinator reads."""
    decision = decide(pool_snapshot(claim=claim, **spec))
    data: Any = children(decision, "ConfigMap")["shelf-coordinator"]["data"]
    return str(data["volume-size"])


def claim_of(size: int, capacity: int) -> Claim:
    return Claim(name="shelf-coordinator", bound=True, size=Bytes(size), capacity=Bytes(capacity))


def test_the_coordinator_is_told_how_large_its_volume_is() -> None:
    assert told(None) == str(5 * GIB), "what will be claimed"
    assert told(claim_of(20 * GIB, 20 * GIB)) == str(20 * GIB), "a claim does not shrink"
    assert told(claim_of(5 * GIB, 8 * GIB)) == str(8 * GIB), "a volume may exceed its claim"
    assert told(claim_of(8 * GIB, 5 * GIB)) == str(8 * GIB), "no class without sizes resizes"


def said(free: int, removable: int = 0, before: str = "") -> str:
    """What a pool says of its volume of a hundred bytes; `before`: what it said."""
    base = pool_snapshot()
    assert isinstance(base.view, CoordinatorView)
    room = StoreRoom(size_bytes=100, free_bytes=free, removable_bytes=removable)
    seen = replace(base, view=replace(base.view, store=room))
    if before == "nearly full":
        status: Any = decide(replace(base, view=replace(base.view, store=FULL_UP))).status
        seen = replace(seen, pool=replace(seen.pool, status=status))
    decision = decide(seen)
    told_of = "VolumeNearlyFull" in {each.reason for each in decision.notes}
    assert told_of == (word(decision.status, "VolumeHasRoom") == "False NearlyFull")
    return word(decision.status, "VolumeHasRoom")


FULL_UP = StoreRoom(size_bytes=100, free_bytes=0)


def test_a_pool_says_when_its_volume_is_nearly_full() -> None:
    assert said(free=10) == said(free=4, removable=6) == "True HasRoom"
    assert said(free=9) == said(free=4, removable=5) == "False NearlyFull"
    assert said(free=14, before="nearly full") == "False NearlyFull"
    assert said(free=15, before="nearly full") == "True HasRoom"
    unknown = decide(pool_snapshot()).status
    assert word(unknown, "VolumeHasRoom") == "Unknown NotKnown"
    view = pool_snapshot().view
    assert isinstance(view, CoordinatorView)
    usable = StoreRoom(size_bytes=5 * GIB - (64 << 20), free_bytes=4 * GIB)
    ready = decide(pool_snapshot(view=replace(view, store=usable))).status
    told = condition(ready, "VolumeHasRoom").message
    assert "GiB" not in told, "the coordinator keeps some of the claim free, which nobody knows of"
    assert word(unknown, "Ready") == "True Ready", "a full volume keeps no pool from its work"


def test_a_larger_claim_does_not_start_the_coordinator_again() -> None:
    before, after = (
        children(decide(pool_snapshot(claim=claim_of(size, size))), "Deployment")
        for size in (5 * GIB, 20 * GIB)
    )
    assert before == after
    pod: Any = before["shelf-coordinator"]["spec"]
    (container,) = pod["template"]["spec"]["containers"]
    place = container["command"].index("--store-size-file")
    folder, _, file = container["command"][place + 1].rpartition("/")
    assert file == "volume-size"
    assert folder in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_kubernetes_starts_a_worker_again_that_follows_and_finds_no_room() -> None:
    assert UNBOUNDED.partition is not None
    assert UNBOUNDED.model is not None
    spec = deliver_worker(UNBOUNDED.partition, UNBOUNDED.model, (), "shelf")
    made: Any = worker_job(UNBOUNDED.partition, replace(spec, endless=True), UNBOUNDED.settings)
    assert made["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [2]
