"""What holds of every decision, whatever was seen."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from reconcile.values import SETTINGS, passes_its_schema, pool
from shoal_api.conditions import holds
from shoal_api.fields import Status
from shoal_api.kinds import AnyKind, Device, InferenceJob, Placement
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_api.schema import parse
from shoal_operator.reconcile import deciding
from shoal_operator.reconcile.coordinators import coordinator_mark
from shoal_operator.reconcile.deciding import subject
from shoal_operator.reconcile.decision import Applied, Decision, Manifest
from shoal_operator.reconcile.names import retries
from shoal_operator.reconcile.placement import question_of, with_answer
from shoal_operator.reconcile.snapshot import (
    DevicePoolSnapshot,
    ModelSnapshot,
    PartitionSnapshot,
    PlacementSnapshot,
    Snapshot,
    Unreachable,
    Workload,
)

S = TypeVar("S", bound=Snapshot)

CONDITIONS = {
    "Model": ["Fetched", "Verified", "Profiled", "Ready"],
    "Partition": ["Cut", "Ready"],
    "DevicePool": ["CoordinatorReady", "AgentsReady", "VolumeHasRoom", "Ready"],
    "Placement": ["Planned", "Ready", "WithinBudget"],
    "InferenceJob": ["Planned", "Suspended", "Complete", "Failed", "WithinBudget"],
}
COORDINATOR = Workload(
    name="shelf-coordinator",
    wanted=1,
    ready=1,
    current=True,
    template=coordinator_mark(pool(), SETTINGS),
)
"""Of the newest template, and ready."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_SOUND: set[tuple[str, Status]] = set()
"""Statuses that passed their schema already: asking again takes most of the time."""
_FOREIGN = {"status", "managedFields", "resourceVersion", "uid", "generation", "finalizers"}


def decide(snapshot: Snapshot, *refused: str) -> Decision:
    """The decision about any object, after every rule was asked of it. `refused`: what the cluster
    did not let the decision before do.
    """
    generation = subject(snapshot).metadata.generation or 0
    not_resized = snapshot.not_resized if isinstance(snapshot, DevicePoolSnapshot) else ""
    applied = Applied(generation=generation, refused=refused, not_resized=not_resized)
    snapshot = answered(snapshot)
    decision = deciding.decide(snapshot, applied)
    check(snapshot, applied, decision)
    return decision


def answered(snapshot: S) -> S:
    """With the plan that the controller has made before it reconciles a Placement."""
    if not isinstance(snapshot, PlacementSnapshot):
        return snapshot
    asking: PlacementSnapshot = replace(snapshot, answer=None, cut_answer=None)
    while (question := question_of(asking)) is not None:
        asking = with_answer(asking, question.answer())
    return cast("S", asking)


def with_status(snapshot: S, decision: Decision) -> S:
    """The same, when the decision's status was written and nothing else was done."""
    written = replace(subject(snapshot), status=decision.status)  # type: ignore[arg-type]
    field = {
        "Model": "model",
        "Partition": "partition",
        "DevicePool": "pool",
        "Placement": "placement",
        "InferenceJob": "job",
    }[type(written).__name__]
    change: dict[str, Any] = {field: written}
    return replace(snapshot, **change)


def check(snapshot: Snapshot, applied: Applied | None, decision: Decision) -> None:
    """Every rule."""
    about = subject(snapshot)
    kind = type(about).__name__
    status = decision.status
    if (kind, status) not in _SOUND:
        assert passes_its_schema(replace(about, status=status))  # type: ignore[arg-type]
        _SOUND.add((kind, status))
    assert status.observed_generation == about.metadata.generation
    more = ["Prefetched"] if isinstance(about, Placement) and about.spec.prefetch else []
    assert [each.type for each in status.conditions] == CONDITIONS[kind] + more
    assert not (holds(status.conditions, "Complete") and holds(status.conditions, "Failed"))
    for each in status.conditions:
        assert each.message or each.type not in {"Ready", "Planned", "Complete"}, each
    for child in decision.children:
        check_child(child)
    for device in decision.devices:
        check_child(device.device)
        if ("Device", device.status) not in _SOUND:
            parsed = parse(Device, dict(device.device))
            assert isinstance(parsed, Device), parsed
            assert passes_its_schema(replace(parsed, status=device.status))
            _SOUND.add(("Device", device.status))
    keys = {(key.kind, key.name) for key in decision.removals}
    assert not keys & {(str(child["kind"]), name_of(child)) for child in decision.children}
    if not isinstance(snapshot, ModelSnapshot | PartitionSnapshot) and isinstance(
        snapshot.view, Unreachable
    ):
        assert decision.calls == (), "an unreachable coordinator is called"
    _check_the_end(about, decision)
    assert deciding.decide(snapshot, applied) == decision, "the same is decided about the same"
    again = deciding.decide(answered(with_status(snapshot, decision)), applied)
    assert again.status == status, "the status alone changes nothing"
    if not _just_ended(about, decision):
        assert (again.children, again.removals) == (decision.children, decision.removals)
        assert again.calls == decision.calls


def _just_ended(about: AnyKind, decision: Decision) -> bool:
    """An object that ends now (or is settled) drops what led there when its status is written."""
    before = about.status.conditions if about.status is not None else ()
    after = decision.status.conditions
    ends = ("Complete", "Failed", "Ready")
    return any(holds(after, word) and not holds(before, word) for word in ends) or (
        any(holds(before, word) and not holds(after, word) for word in ends)
    )


def _check_the_end(about: AnyKind, decision: Decision) -> None:
    """A terminal condition is never left, except by a retry, and what was written with it stays."""
    if not isinstance(about, InferenceJob) or about.status is None:
        return
    before = about.status.conditions
    wanted = 0 if about.spec.retry is None else about.spec.retry.number
    if holds(before, "Failed") and wanted > retries(about):
        assert isinstance(decision.status, InferenceJobStatus)
        assert decision.status.retry is not None
        assert decision.status.retry.number == wanted
    elif holds(before, "Complete") or holds(before, "Failed"):
        assert decision.status.conditions == before
        assert decision.children == ()


def name_of(child: Manifest) -> str:
    """A manifest's name."""
    metadata = child["metadata"]
    assert isinstance(metadata, Mapping)
    return str(metadata["name"])


def check_child(child: Manifest) -> None:
    """Names and labels that Kubernetes takes, and no field of anyone else."""
    metadata = child["metadata"]
    assert isinstance(metadata, Mapping)
    assert _NAME.fullmatch(str(metadata["name"])), metadata["name"]
    assert not _FOREIGN & (child.keys() | metadata.keys())
    assert set(child) <= {"apiVersion", "kind", "metadata", "spec", "data", "binaryData"} | (
        {"automountServiceAccountToken"} if child["kind"] == "ServiceAccount" else set()
    )
    labels = metadata["labels"]
    assert isinstance(labels, Mapping)
    assert labels["app.kubernetes.io/managed-by"] == "shoal-operator"
    for text in labels.values():
        assert _LABEL.fullmatch(text), text
    for pod in pods_in(child):
        check_pod(pod)


def pods_in(child: Manifest) -> list[Mapping[str, object]]:
    """The pods' specs in a manifest."""
    spec = child.get("spec")
    template = spec.get("template") if isinstance(spec, Mapping) else None
    pod = template.get("spec") if isinstance(template, Mapping) else None
    return [pod] if isinstance(pod, Mapping) else []


def check_pod(pod: Mapping[str, object]) -> None:
    """ "restricted" of the Pod Security standards, bounded, without an API token."""
    assert pod["automountServiceAccountToken"] is False
    security = pod["securityContext"]
    assert isinstance(security, Mapping)
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    kinds = {"emptyDir", "secret", "configMap", "projected", "downwardAPI"}
    kinds |= {"persistentVolumeClaim", "ephemeral"}
    volumes, containers = pod["volumes"], pod["containers"]
    assert isinstance(volumes, list)
    assert isinstance(containers, list)
    assert all(set(volume) - {"name"} <= kinds for volume in volumes)
    mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
    assert mounted == {volume["name"] for volume in volumes}
    for each in containers:
        inner = each["securityContext"]
        assert inner["allowPrivilegeEscalation"] is False
        assert inner["capabilities"] == {"drop": ["ALL"]}
        assert inner["readOnlyRootFilesystem"] is True
        limit, asked = (int(each["resources"][of]["memory"]) for of in ("limits", "requests"))
        assert asked == (limit if each["name"] == "agent" else min(limit, 192 << 20))
