"""What the cluster does not let the operator do is reported where people look for it."""

from dataclasses import replace

from reconcile.rules import check, decide
from reconcile.test_device_pool import snapshot
from reconcile.test_inference_job import PLANNED, works, written
from reconcile.values import NOW, condition, pool, word
from shoal_api.kinds.device_pool import DevicePoolStatus
from shoal_operator.reconcile import deciding
from shoal_operator.reconcile.deciding import refused_status
from shoal_operator.reconcile.decision import Applied, Decision
from shoal_operator.reconcile.snapshot import DevicePoolSnapshot, WorkerPhase

NO = "PersistentVolumeClaim shelf-coordinator is refused: it cannot grow; undo that"
LATER = "2026-03-01T12:00:30Z"


def after(seen: DevicePoolSnapshot, decision: Decision) -> DevicePoolSnapshot:
    """The status was written; time has passed."""
    assert isinstance(decision.status, DevicePoolStatus)
    return replace(seen, pool=replace(seen.pool, status=decision.status), now=LATER)


def edited(seen: DevicePoolSnapshot) -> DevicePoolSnapshot:
    return replace(
        seen, pool=replace(seen.pool, metadata=replace(seen.pool.metadata, generation=2))
    )


def test_a_pool_whose_claim_is_refused_is_not_ready_and_says_why() -> None:
    first = decide(snapshot())
    assert word(first.status, "Ready") == "True Ready"
    refused = decide(after(snapshot(), first), NO)
    assert word(refused.status, "Ready") == "False NotApplied"
    assert condition(refused.status, "Ready").message == NO
    assert condition(refused.status, "Ready").last_transition_time == LATER
    assert word(refused.status, "AgentsReady") == "True AllConnected"
    assert ("NotApplied", NO) in [(note.reason, note.message) for note in refused.notes]
    allowed = decide(after(snapshot(), refused))
    assert word(allowed.status, "Ready") == "True Ready"
    assert [note.reason for note in allowed.notes] == ["PoolReady"]


def test_a_new_operator_does_not_tell_ready_of_what_was_refused_before_it_has_tried() -> None:
    refused = decide(snapshot(), NO)
    seen = after(snapshot(), refused)
    assert word(deciding.decide(seen, None).status, "Ready") == "False NotApplied"
    assert word(decide(seen).status, "Ready") == "True Ready"


def test_of_a_new_spec_nothing_is_ready_before_its_children_were_applied() -> None:
    seen = edited(after(snapshot(), decide(snapshot())))
    for applied in (None, Applied(generation=1)):
        decision = deciding.decide(seen, applied)
        check(seen, applied, decision)
        assert word(decision.status, "Ready") == "False Applying"
        assert condition(decision.status, "Ready").observed_generation == 2
    assert word(decide(seen).status, "Ready") == "True Ready"
    assert word(decide(seen, NO).status, "Ready") == "False NotApplied"


def test_a_new_operator_tells_ready_of_a_spec_that_was_ready_at_once() -> None:
    seen = after(snapshot(pool()), decide(snapshot(pool())))
    assert word(deciding.decide(seen, None).status, "Ready") == "True Ready"


def test_a_job_whose_worker_is_refused_says_so_and_goes_on_when_it_is_allowed() -> None:
    waiting = decide(PLANNED, "Job ocr-aabbccdd-transfer-inputs is refused: quota; undo that")
    assert word(waiting.status, "Complete") == "False NotApplied"
    assert "quota" in condition(waiting.status, "Complete").message
    assert word(waiting.status, "Planned") == "True Planned"
    going = decide(works(written(PLANNED, waiting), "in", WorkerPhase.RUNNING))
    assert word(going.status, "Complete") == "False TransferringInputs"


def test_what_stood_in_the_status_of_an_object_that_cannot_be_read_stays() -> None:
    cut = {"type": "Cut", "status": "True", "lastTransitionTime": NOW}
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": NOW}
    status = {"fragments": [{"index": 0}], "observedGeneration": 1, "conditions": [cut, ready]}
    told = refused_status("Partition", status, "spec.modelRef: is missing", 2, LATER)
    assert told == {
        **status,
        "conditions": [
            cut,
            {
                "type": "Ready",
                "status": "False",
                "reason": "Invalid",
                "message": "spec.modelRef: is missing",
                "observedGeneration": 2,
                "lastTransitionTime": NOW,
            },
        ],
    }
    new = refused_status("InferenceJob", {}, "odd", 1, LATER)
    assert new is not None
    assert new["conditions"][0]["type"] == "Planned"  # type: ignore[index]


def test_of_a_job_that_has_ended_nothing_is_told_any_more_even_if_it_cannot_be_read() -> None:
    failed = {"type": "Failed", "status": "True", "lastTransitionTime": NOW}
    assert refused_status("InferenceJob", {"conditions": [failed]}, "odd", 2, LATER) is None
