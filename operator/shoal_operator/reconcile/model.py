"""Model: fetched, verified and profiled by one worker; then it is what it is. Pure.

What a Model is does not change: the digest that was seen first is given to every later worker, so
a file that changed behind the address fails verification. An edit of the spec (another address,
other shapes) makes another worker, and the old one is removed.

| worker                | Fetched | Verified | Profiled | Ready |
|-----------------------|---------|----------|----------|-------|
| waits or runs         | Unknown | Unknown  | Unknown  | False |
| succeeded             | True    | True     | True     | True  |
| refused, other digest | True    | False    | Unknown  | False |
| refused               | Unknown | Unknown  | False    | False |
| failed                | False   | Unknown  | Unknown  | False |

A failure that is no refusal (a store that does not answer) is tried again after ten minutes.
"""

from dataclasses import replace
from typing import Final, assert_never

from shoal_api.columns import print_model
from shoal_api.fields import ConditionStatus
from shoal_api.kinds.model import ModelStatus
from shoal_operator.reconcile.addresses import offline_text, outside, unsuitable
from shoal_operator.reconcile.condition_updates import (
    FALSE,
    TRUE,
    UNKNOWN,
    ConditionUpdate,
    conditions,
    holds_for,
)
from shoal_operator.reconcile.decision import Decision, Note
from shoal_operator.reconcile.inspection import read_inspection
from shoal_operator.reconcile.names import namespace_of
from shoal_operator.reconcile.snapshot import ModelSnapshot, Worker, WorkerPhase
from shoal_operator.reconcile.waiting import retry_in, worker_named, worker_text
from shoal_operator.reconcile.workers import (
    given_digest,
    inspect_worker,
    worker_job,
    worker_key,
)
from shoal_protocol.units import format_bytes

_TYPES: Final = ("Fetched", "Verified", "Profiled", "Ready")


def reconcile_model(snapshot: ModelSnapshot) -> Decision:
    """What is to be done about a Model."""
    model = snapshot.model
    before = model.status or ModelStatus()
    if holds_for(before.conditions, "Ready", model.metadata.generation or 0):
        return _decision(snapshot, before, None, keep=None)
    if (problem := _unusable(snapshot)) is not None:
        return _decision(snapshot, before, _ended("Fetched", *problem), keep=None)
    worker_spec = inspect_worker(model)
    worker = worker_named(snapshot.workers, worker_spec.name)
    if worker is None:
        updates = _waiting("Inspecting", f"{model.spec.source.uri} is about to be fetched")
        child = worker_job(model, worker_spec, snapshot.settings)
        return replace(_decision(snapshot, before, updates, keep=None), children=(child,))
    match worker.phase:
        case WorkerPhase.PENDING | WorkerPhase.RUNNING:
            text = worker_text(worker, f"{model.spec.source.uri} is being fetched")
            return _decision(snapshot, before, _waiting("Inspecting", text), keep=worker_spec.name)
        case WorkerPhase.SUCCEEDED:
            return _inspected(snapshot, worker)
        case WorkerPhase.FAILED:
            return _failed(snapshot, worker)
        case _:
            assert_never(worker.phase)


def _unusable(snapshot: ModelSnapshot) -> tuple[str, str] | None:
    """Why the address is not even tried: reason and message."""
    uri = snapshot.model.spec.source.uri
    if (problem := unsuitable(uri)) is not None:
        return "UnsuitableAddress", problem
    if snapshot.settings.offline and outside(uri):
        return "Offline", offline_text(uri)
    return None


def _inspected(snapshot: ModelSnapshot, worker: Worker) -> Decision:
    model, uri = snapshot.model, snapshot.model.spec.source.uri
    before = model.status or ModelStatus()
    if worker.output is None:
        # Nobody knows any more what it said: it says it again.
        updates = _waiting("Inspecting", "what the worker printed is gone; it starts again")
        return _decision(snapshot, before, updates, keep=None)
    found = read_inspection(worker.output)
    if isinstance(found, str):
        problem = f"worker {worker.name} answers what this operator does not read: {found}"
        updates = _ended("Profiled", "InspectionUnreadable", problem)
        return _decision(snapshot, before, updates, keep=worker.name)
    given = given_digest(model)
    if given is not None and found.digest != given:
        return _mismatch(snapshot, worker, f"{uri} is {found.digest}, not {given}")
    size = format_bytes(found.size_bytes or 0)
    updates = (
        ConditionUpdate("Fetched", TRUE, "Fetched", f"{size} from {uri}"),
        ConditionUpdate("Verified", TRUE, "Verified", f"is {found.digest}"),
        ConditionUpdate(
            "Profiled", TRUE, "Profiled", f"{found.parameters} parameters, opset {found.opset}"
        ),
        ConditionUpdate("Ready", TRUE, "Ready", "fetched, verified and profiled"),
    )
    text = f"{size}, {found.parameters} parameters from {uri}"
    note = Note(reason="FetchedModel", message=text, since=worker.ended_at or "")
    found = replace(found, conditions=before.conditions)
    return replace(_decision(snapshot, found, updates, keep=None), notes=(note,))


def _failed(snapshot: ModelSnapshot, worker: Worker) -> Decision:
    model = snapshot.model
    before = model.status or ModelStatus()
    uri, given = model.spec.source.uri, given_digest(model)
    text = worker_text(worker, f"{uri} could not be inspected")
    since = worker.ended_at or ""
    if worker.refused:
        if given is not None and f"not {given}" in text:
            return _mismatch(snapshot, worker, text)
        updates = _ended("Profiled", "Refused", text)
        note = Note(reason="RefusedModel", message=text, warning=True, since=since)
        return replace(_decision(snapshot, before, updates, keep=worker.name), notes=(note,))
    updates = _ended("Fetched", "InspectionFailed", text)
    note = Note(reason="InspectionFailed", message=text, warning=True, since=since)
    remaining = retry_in(worker, snapshot.now)
    decision = _decision(snapshot, before, updates, keep=worker.name if remaining else None)
    return replace(decision, notes=(note,), requeue_seconds=max(1.0, remaining))


def _mismatch(snapshot: ModelSnapshot, worker: Worker, text: str) -> Decision:
    """The file is another: never silently another model."""
    before = snapshot.model.status or ModelStatus()
    text = f"{text}; other content is another Model: give it an object of its own"
    updates = (
        ConditionUpdate("Fetched", TRUE, "Fetched"),
        ConditionUpdate("Verified", FALSE, "DigestMismatch", text),
        ConditionUpdate("Profiled", UNKNOWN, "NotVerified"),
        ConditionUpdate("Ready", FALSE, "DigestMismatch", text),
    )
    since = worker.ended_at or ""
    note = Note(reason="DigestMismatch", message=text, warning=True, since=since)
    return replace(_decision(snapshot, before, updates, keep=worker.name), notes=(note,))


def _waiting(reason: str, message: str) -> tuple[ConditionUpdate, ...]:
    steps = (ConditionUpdate(type_, UNKNOWN, reason, message) for type_ in _TYPES[:-1])
    return (*steps, ConditionUpdate("Ready", FALSE, reason, message))


def _ended(where: str, reason: str, message: str) -> tuple[ConditionUpdate, ...]:
    """Failed in one step; of the others nothing is known."""

    def status(type_: str) -> ConditionStatus:
        return FALSE if type_ in (where, "Ready") else UNKNOWN

    return tuple(ConditionUpdate(type_, status(type_), reason, message) for type_ in _TYPES)


def _decision(
    snapshot: ModelSnapshot,
    status: ModelStatus,
    updates: tuple[ConditionUpdate, ...] | None,
    keep: str | None,
) -> Decision:
    """The status with its conditions (None: as they are); all workers but `keep` are removed."""
    model = snapshot.model
    generation = model.metadata.generation or 0
    if updates is not None:
        known = conditions(status.conditions, updates, generation=generation, now=snapshot.now)
        status = replace(status, conditions=known)
    status = replace(status, observed_generation=generation)
    counts = [
        len(partition.status.fragments)
        for partition in snapshot.partitions
        if partition.status is not None and partition.status.fragments
    ]
    namespace = namespace_of(model)
    removals = tuple(
        worker_key(namespace, worker.name) for worker in snapshot.workers if worker.name != keep
    )
    return Decision(status=print_model(status, counts), removals=removals)
