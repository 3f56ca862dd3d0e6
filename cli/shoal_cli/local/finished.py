"""Jobs of which nothing is left to do: running them again returns at once.

When a job has completed, `WORK/finished/JOB.json` records what it was: its order, and the digests
of the model's files. The next run compares these with what is there now, and has the coordinator's
storage compare inputs and results. Only where all are unchanged nothing is cut, planned or started;
in every other case the run goes its usual way, which finds out, and says, what has changed.
"""

import contextlib
import hashlib
import json
from pathlib import Path

from shoal_cli.local.known_cuts import are_unchanged
from shoal_cli.local.orders import JobOrder
from shoal_cli.local.preparation import Prepared, partition_path
from shoal_cli.local.report import JobReport
from shoal_cli.local.workspace import Workspace
from shoal_coordinator.storage.job_files import finished_items
from shoal_protocol.durable_files import replace_file
from shoal_protocol.partition import document_from_json


def remember(order: JobOrder, prepared: Prepared, workspace: Workspace) -> None:
    """Record a job that has completed. Without the record the next run takes longer, no more."""
    path = _record(order, workspace)
    record = {"order": _fingerprint(order), "files": prepared.files}
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        replace_file(path, json.dumps(record).encode())


def find_finished(order: JobOrder, workspace: Workspace) -> JobReport | None:
    """The report of a job that is complete as it is; None where anything has changed."""
    try:
        record = json.loads(_record(order, workspace).read_bytes())
        if record["order"] != _fingerprint(order) or not are_unchanged(record["files"]):
            return None
        path = partition_path(workspace.store, order.plan.cut.name)
        document = document_from_json(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    items = finished_items(order.inputs, order.outputs, document, job=order.name, lossy=order.lossy)
    if items is None:
        return None
    return JobReport(
        name=order.name,
        state="Complete",
        reason="AlreadyComplete",
        message=(
            f"nothing to do: {order.outputs} has the results of all {items} items, "
            "and manifest, model and inputs are unchanged"
        ),
        model=order.plan.cut.model,
        model_digest=document.model_digest,
        partition=order.plan.cut.name,
        items=items,
        succeeded=items,
        resumed=items,
        outputs=str(order.outputs),
    )


def _record(order: JobOrder, workspace: Workspace) -> Path:
    return workspace.root / "finished" / f"{order.name}.json"


def _fingerprint(order: JobOrder) -> str:
    """Changes with anything that the manifests say about the job. An order is made of values."""
    return hashlib.sha256(repr(order).encode()).hexdigest()
