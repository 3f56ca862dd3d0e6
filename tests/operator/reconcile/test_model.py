"""A Model is fetched, verified and profiled by one worker, once."""

import json
from dataclasses import replace

import pytest

from reconcile.values import (
    DIGEST,
    NOW,
    OTHER_DIGEST,
    SETTINGS,
    condition,
    model,
    passes_its_schema,
    word,
)
from shoal_api.kinds import Model
from shoal_api.kinds.model import ModelStatus
from shoal_operator.reconcile.decision import Decision
from shoal_operator.reconcile.model import reconcile_model
from shoal_operator.reconcile.snapshot import ModelSnapshot, Worker, WorkerPhase
from shoal_operator.reconcile.workers import inspect_worker, worker_job, worker_key

LATER = "2026-03-01T12:11:00Z"


def inspected(digest: str = DIGEST) -> bytes:
    tensor = {"name": "x", "dtype": "float", "shape": [1, "width", None]}
    found = {
        "digest": digest,
        "size_bytes": 10 << 20,
        "opset": 17,
        "parameters": 2_700_000,
        "inputs": [tensor],
        "outputs": [tensor | {"name": "y"}],
    }
    return json.dumps(found).encode()


def worker(
    of: Model,
    phase: WorkerPhase,
    *,
    output: bytes | None = None,
    message: str = "",
    refused: bool = False,
) -> Worker:
    name = inspect_worker(of).name
    return Worker(
        name=name, phase=phase, output=output, message=message, refused=refused, ended_at=NOW
    )


def see(of: Model, *workers: Worker, now: str = NOW, offline: bool = False) -> Decision:
    settings = replace(SETTINGS, offline=offline)
    decision = reconcile_model(ModelSnapshot(now=now, settings=settings, model=of, workers=workers))
    assert isinstance(decision.status, ModelStatus)
    assert passes_its_schema(replace(of, status=decision.status))
    return decision


def written(of: Model, decision: Decision) -> Model:
    assert isinstance(decision.status, ModelStatus)
    return replace(of, status=decision.status)


def test_a_worker_fetches_no_more_than_its_disk_holds_twice() -> None:
    manifests = [
        worker_job(model(uri), inspect_worker(model(uri)), SETTINGS)
        for uri in ("s3://models/rec.onnx", "pvc://models/rec.onnx")
    ]
    fetching, mounting = (str(manifest["spec"]) for manifest in manifests)
    assert f"'--max-download', '{SETTINGS.worker_disk // 2}'" in fetching
    assert "--max-download" not in mounting


def test_a_new_model_gets_one_worker_and_all_conditions() -> None:
    decision = see(model())
    assert [child["kind"] for child in decision.children] == ["Job"]
    assert [each.type for each in decision.status.conditions] == [
        *("Fetched", "Verified", "Profiled", "Ready")
    ]
    assert word(decision.status, "Ready") == "False Inspecting"


def test_what_the_worker_found_is_told_and_the_worker_goes() -> None:
    of = model()
    decision = see(of, done := worker(of, WorkerPhase.SUCCEEDED, output=inspected()))
    status = decision.status
    assert isinstance(status, ModelStatus)
    assert {each.status.value for each in status.conditions} == {"True"}
    assert (status.digest, status.size_bytes, status.opset) == (DIGEST, 10 << 20, 17)
    assert status.inputs[0].shape == ("1", "width", "?")
    assert decision.removals == (worker_key(model(), done.name),)
    assert [note.reason for note in decision.notes] == ["FetchedModel"]


def test_sizes_that_nobody_has_said_are_named() -> None:
    of = model()
    told = condition(see(of, worker(of, WorkerPhase.SUCCEEDED, output=inspected())).status, "Ready")
    assert "sizes of x [1, width, ?] are not known" in told.message
    assert "spec.shapes" in told.message
    of = model(shapes=[{"input": "x", "shape": [1, 3, 48]}])
    told = condition(see(of, worker(of, WorkerPhase.SUCCEEDED, output=inspected())).status, "Ready")
    assert told.message == "fetched, verified and profiled"


def test_a_settled_model_stays_as_it_is() -> None:
    of = model()
    of = written(of, see(of, worker(of, WorkerPhase.SUCCEEDED, output=inspected())))
    again = see(of, now=LATER)
    assert again == Decision(status=again.status)
    assert again.status == of.status


def test_another_address_is_verified_against_the_digest_that_was_seen_first() -> None:
    of = model()
    of = written(of, see(of, worker(of, WorkerPhase.SUCCEEDED, output=inspected())))
    edited = replace(model("https://mirror.example/rec.onnx", generation=2), status=of.status)
    worker_spec = inspect_worker(edited)
    assert worker_spec.name != inspect_worker(model()).name
    assert worker_spec.command[3:5] == ("--digest", DIGEST)
    decision = see(edited, worker(edited, WorkerPhase.SUCCEEDED, output=inspected(OTHER_DIGEST)))
    assert word(decision.status, "Verified") == "False DigestMismatch"
    assert word(decision.status, "Ready") == "False DigestMismatch"
    assert isinstance(decision.status, ModelStatus)
    assert decision.status.digest == DIGEST, "never silently another model"


def test_an_edit_makes_a_new_worker_and_removes_the_old_one() -> None:
    old = worker(model(), WorkerPhase.RUNNING)
    edited = model(shapes=[{"input": "x", "shape": [1, 3, 48, 320]}], generation=2)
    decision = see(edited, old)
    assert decision.removals == (worker_key(model(), old.name),)
    assert len(decision.children) == 1


def test_a_worker_that_refuses_is_not_tried_again() -> None:
    of = model()
    text = "rec.onnx: operator Foo is not known"
    refused = worker(of, WorkerPhase.FAILED, message=text, refused=True)
    of = written(of, see(of, refused))
    for now in (NOW, LATER):
        decision = see(of, refused, now=now)
        assert (decision.children, decision.removals) == ((), ())
        assert word(decision.status, "Profiled") == "False Refused"
        told = condition(decision.status, "Ready").message
        assert told.startswith(text)
        assert f"delete the job {refused.name}" in told, "a file that was replaced is tried again"


def test_a_refusal_of_the_digest_is_a_failure_of_verification() -> None:
    of = model(digest=DIGEST)
    text = f"rec.onnx is {OTHER_DIGEST}, not {DIGEST}"
    decision = see(of, worker(of, WorkerPhase.FAILED, message=text, refused=True))
    assert word(decision.status, "Fetched") == "True Fetched"
    assert word(decision.status, "Verified") == "False DigestMismatch"
    assert text in condition(decision.status, "Ready").message


def test_a_worker_that_failed_is_tried_again_after_ten_minutes() -> None:
    of = model()
    failed = worker(of, WorkerPhase.FAILED, message="the store does not answer")
    first = see(of, failed)
    assert (first.requeue_seconds, first.removals) == (600, ())
    assert word(first.status, "Fetched") == "False InspectionFailed"
    second = see(written(of, first), failed, now=LATER)
    assert [key.name for key in second.removals] == [failed.name]
    assert second.status == first.status, "it has failed until it is made again"
    assert len(see(written(of, second), now=LATER).children) == 1


@pytest.mark.parametrize(
    ("uri", "offline", "reason"),
    [
        ("https://models.example/rec.onnx", True, "Offline"),
        ("s3://models/rec.onnx", True, "Offline"),
        ("oci://registry.example/rec:1", True, "Offline"),
        ("file:///models/rec.onnx", False, "UnsuitableAddress"),
        ("models/rec.onnx", False, "UnsuitableAddress"),
        ("pvc://models/rec.onnx", True, "Inspecting"),
    ],
)
def test_what_cannot_be_fetched_here_is_refused_without_a_worker(
    uri: str, offline: bool, reason: str
) -> None:
    decision = see(model(uri), offline=offline)
    assert condition(decision.status, "Fetched").reason == reason
    assert len(decision.children) == (reason == "Inspecting")


@pytest.mark.parametrize("output", [b"nonsense", b"{}", b'{"digest": 3}'])
def test_an_answer_that_cannot_be_read_is_said_so(output: bytes) -> None:
    of = model()
    decision = see(of, worker(of, WorkerPhase.SUCCEEDED, output=output))
    assert word(decision.status, "Ready") == "False InspectionUnreadable"


def test_a_worker_whose_log_is_gone_starts_again() -> None:
    of = model()
    decision = see(of, gone := worker(of, WorkerPhase.SUCCEEDED))
    assert [key.name for key in decision.removals] == [gone.name]
    assert word(decision.status, "Ready") == "False Inspecting"


def test_what_the_scheduler_says_is_shown() -> None:
    of = model()
    text = '0/3 nodes are available: persistentvolumeclaim "models" not found'
    decision = see(of, worker(of, WorkerPhase.PENDING, message=text))
    assert condition(decision.status, "Ready").message == text
