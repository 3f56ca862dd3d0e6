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

The worker's answer is JSON: `{"digest", "size_bytes", "opset", "parameters", "inputs": [{"name",
"dtype", "shape"}], "outputs": [...]}`, tensors as in `partition.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, assert_never

from shoal_api.columns import print_model
from shoal_api.fields import DIGEST, ConditionStatus
from shoal_api.kinds.model import Model, ModelStatus, TensorStatus
from shoal_api.shapes import Errors, Invalid
from shoal_operator.reconcile.addresses import offline, unsuitable
from shoal_operator.reconcile.conditions import (
    FALSE,
    TRUE,
    UNKNOWN,
    Cause,
    ConditionUpdate,
    shortened,
    with_conditions,
)
from shoal_operator.reconcile.decision import Decision, Note
from shoal_operator.reconcile.snapshot import ModelSnapshot, Worker, WorkerPhase
from shoal_operator.reconcile.workers import (
    given_digest,
    inspect_worker,
    retry_in,
    worker_job,
    worker_key,
    worker_named,
    worker_text,
)
from shoal_protocol.units import format_bytes, listed

_TYPES: Final = ("Fetched", "Verified", "Profiled", "Ready")
_TENSORS: Final = 256
_AXES: Final = 16
_OPSETS: Final = 1000
_NAMED: Final = 4


def reconcile_model(snapshot: ModelSnapshot) -> Decision:
    """What is to be done about a Model."""
    model = snapshot.model
    uri = model.spec.source.uri
    if model.holds("Ready"):
        return _decision(snapshot, None)
    if (problem := _unusable(snapshot)) is not None:
        return _decision(snapshot, _ended("Fetched", problem))
    worker_spec = inspect_worker(model)
    worker = worker_named(snapshot.workers, worker_spec.name)
    if worker is None:
        child = worker_job(model, worker_spec, snapshot.settings)
        decision = _decision(snapshot, _waiting(f"{uri} is about to be fetched"))
        return replace(decision, children=(child,))
    match worker.phase:
        case WorkerPhase.PENDING | WorkerPhase.RUNNING:
            text = worker_text(worker, f"{uri} is being fetched")
            return _decision(snapshot, _waiting(text), keep=worker.name)
        case WorkerPhase.SUCCEEDED:
            return _inspected(snapshot, worker)
        case WorkerPhase.FAILED:
            return _failed(snapshot, worker)
        case _:
            assert_never(worker.phase)


def _unusable(snapshot: ModelSnapshot) -> Cause | None:
    """Why the address is not even tried."""
    uri = snapshot.model.spec.source.uri
    if (problem := unsuitable(uri)) is not None:
        return Cause("UnsuitableAddress", problem)
    return offline(uri, snapshot.settings)


def _inspected(snapshot: ModelSnapshot, worker: Worker) -> Decision:
    model, uri = snapshot.model, snapshot.model.spec.source.uri
    if worker.output is None:
        # Its log is gone, so it runs again.
        return _decision(snapshot, _waiting("what the worker printed is gone; it starts again"))
    found = _read_inspection(worker.output)
    if isinstance(found, str):
        problem = f"worker {worker.name} answers what this operator does not read: {found}"
        updates = _ended("Profiled", Cause("InspectionUnreadable", problem))
        return _decision(snapshot, updates, keep=worker.name)
    given = given_digest(model)
    if given is not None and found.digest != given:
        return _mismatch(snapshot, worker, f"{uri} is {found.digest}, not {given}")
    size = format_bytes(found.size_bytes or 0)
    unknown = _unknown_sizes(model, found)
    profile = f"{found.parameters} parameters, opset {found.opset}{unknown}"
    ready = f"fetched, verified and profiled{unknown}"
    updates = (
        ConditionUpdate("Fetched", TRUE, "Fetched", f"{size} from {uri}"),
        ConditionUpdate("Verified", TRUE, "Verified", f"is {found.digest}"),
        ConditionUpdate("Profiled", TRUE, "Profiled", profile),
        ConditionUpdate("Ready", TRUE, "Ready", ready),
    )
    text = f"{size}, {found.parameters} parameters from {uri}"
    note = Note(reason="FetchedModel", message=text, since=worker.ended_at or "")
    return replace(_decision(snapshot, updates, status=found), notes=(note,))


def _unknown_sizes(model: Model, found: ModelStatus) -> str:
    """What a user may add, so that plans know what items take."""
    said = {each.input for each in model.spec.shapes}
    unknown = [
        f"{each.name} [{', '.join(each.shape)}]"
        for each in found.inputs
        if each.name not in said and not all(map(str.isdigit, each.shape))
    ]
    if not unknown:
        return ""
    return (
        f"; sizes of {listed(unknown, _NAMED)} are not known: with the largest in spec.shapes, "
        f"plans know what items take, and fragments can run in blocks"
    )


def _failed(snapshot: ModelSnapshot, worker: Worker) -> Decision:
    text = worker_text(worker, f"{snapshot.model.spec.source.uri} could not be inspected")
    if worker.refused:
        given = given_digest(snapshot.model)
        if given is not None and f"not {given}" in text:
            return _mismatch(snapshot, worker, text)
        text += f"; when it is another file, delete the job {worker.name} to have that looked at"
        updates = _ended("Profiled", Cause("Refused", text))
        return _warning(snapshot, worker, updates, Cause("RefusedModel", text))
    cause, remaining = Cause("InspectionFailed", text), retry_in(worker, snapshot.now)
    decision = _warning(snapshot, worker, _ended("Fetched", cause), cause, keep=remaining > 0)
    return replace(decision, requeue_seconds=max(1.0, remaining))


def _mismatch(snapshot: ModelSnapshot, worker: Worker, text: str) -> Decision:
    """The file is another: never silently another model."""
    cause = Cause(
        "DigestMismatch", f"{text}; other content is another Model: give it an object of its own"
    )
    updates = (
        ConditionUpdate("Fetched", TRUE, "Fetched"),
        ConditionUpdate("Verified", FALSE, *cause),
        ConditionUpdate("Profiled", UNKNOWN, "NotVerified"),
        ConditionUpdate("Ready", FALSE, *cause),
    )
    return _warning(snapshot, worker, updates, cause)


def _waiting(message: str) -> tuple[ConditionUpdate, ...]:
    steps = (ConditionUpdate(type_, UNKNOWN, "Inspecting", message) for type_ in _TYPES[:-1])
    return (*steps, ConditionUpdate("Ready", FALSE, "Inspecting", message))


def _ended(where: str, cause: Cause) -> tuple[ConditionUpdate, ...]:
    """Failed in one step; of the others nothing is known."""

    def status(type_: str) -> ConditionStatus:
        return FALSE if type_ in (where, "Ready") else UNKNOWN

    return tuple(ConditionUpdate(type_, status(type_), *cause) for type_ in _TYPES)


def _warning(
    snapshot: ModelSnapshot,
    worker: Worker,
    updates: tuple[ConditionUpdate, ...],
    cause: Cause,
    *,
    keep: bool = True,
) -> Decision:
    """The worker has failed, and an Event says so."""
    note = Note(*cause, warning=True, since=worker.ended_at or "")
    decision = _decision(snapshot, updates, keep=worker.name if keep else None)
    return replace(decision, notes=(note,))


def _decision(
    snapshot: ModelSnapshot,
    updates: tuple[ConditionUpdate, ...] | None,
    *,
    status: ModelStatus | None = None,
    keep: str | None = None,
) -> Decision:
    """The status with its conditions (None: as they are); all workers but `keep` are removed."""
    model = snapshot.model
    status = status or model.status or ModelStatus()
    if updates is None:
        status = replace(status, observed_generation=model.generation)
    else:
        status = with_conditions(status, model, updates, snapshot.now)
    counts = [
        len(partition.status.fragments)
        for partition in snapshot.partitions
        if partition.status is not None and partition.status.fragments
    ]
    removals = tuple(
        worker_key(model, worker.name) for worker in snapshot.workers if worker.name != keep
    )
    return Decision(status=print_model(status, counts), removals=removals)


# ---- the worker's answer -------------------------------------------------------------------------


def _read_inspection(output: bytes) -> ModelStatus | str:
    """What was found out, without conditions; or what is wrong with the answer."""
    try:
        parsed: object = json.loads(output)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    match parsed:
        case {
            "digest": str(digest),
            "size_bytes": int(size),
            "opset": int(opset),
            "parameters": int(parameters),
            "inputs": list(inputs),
            "outputs": list(outputs),
        }:
            if not _is_digest(digest):
                return f"{digest[:80]!r} is no digest"
            if size < 0 or parameters < 0 or not 1 <= opset <= _OPSETS:
                return f"size {size}, opset {opset}, {parameters} parameters cannot be"
            return ModelStatus(
                digest=digest,
                size_bytes=size,
                opset=opset,
                parameters=parameters,
                inputs=_tensors(inputs),
                outputs=_tensors(outputs),
            )
    return "fields are missing"


def _is_digest(text: str) -> bool:
    errors: Errors = []
    return not isinstance(DIGEST.read(text, (), errors), Invalid)


def _tensors(values: list[object]) -> tuple[TensorStatus, ...]:
    """As many as a status holds, with names cut to what it holds."""
    return tuple(_tensor(value) for value in values[:_TENSORS] if isinstance(value, Mapping))


def _tensor(value: Mapping[str, object]) -> TensorStatus:
    shape = value.get("shape")
    axes = shape if isinstance(shape, list) else ["..."]
    return TensorStatus(
        name=shortened(str(value.get("name") or "?"), 512),
        dtype=shortened(str(value.get("dtype") or "?"), 32),
        shape=tuple("?" if axis is None else shortened(str(axis), 64) or "?" for axis in axes)[
            :_AXES
        ],
    )
