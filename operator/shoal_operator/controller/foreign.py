"""Foreign objects reduced to what reconcilers read, so that the cache stays small.

The API server sends well formed objects; a field of another type counts as absent. Texts that many
objects share, such as kinds, namespaces and labels, are stored once (`sys.intern`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from sys import intern
from typing import Final

from shoal_api.schema import GROUP
from shoal_operator.reconcile.names import BUDGET, OWNER_UID, TEMPLATE
from shoal_operator.reconcile.snapshot import Node, WorkerPhase, Workload
from shoal_protocol.units import Bytes, parse_quantity, parse_whole

APPLIED: Final = "shoal.dev/applied"
"""Annotation of a child: digest of the manifest as it was applied."""
_ARCHITECTURE: Final = "kubernetes.io/arch"


@dataclass(frozen=True, slots=True)
class Raw:
    """A JSON object and ways to read it: what is absent or of another type is empty."""

    value: Mapping[str, object]

    def table(self, *path: str) -> "Raw":
        """The object at a path."""
        value: object = self.value
        for step in path:
            value = value.get(step) if isinstance(value, Mapping) else None
        return Raw(value if isinstance(value, Mapping) else {})

    def text(self, name: str) -> str:
        """A string."""
        value = self.value.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> int:
        """A whole number."""
        value = self.value.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def flag(self, name: str) -> bool:
        """Whether it is true."""
        return self.value.get(name) is True

    def items(self, name: str) -> tuple["Raw", ...]:
        """The objects of a list."""
        value = self.value.get(name)
        listed = value if isinstance(value, list) else []
        return tuple(Raw(each) for each in listed if isinstance(each, Mapping))

    def texts(self) -> dict[str, str]:
        """All strings of the object itself."""
        texts = ((name, value) for name, value in self.value.items() if isinstance(value, str))
        return {intern(name): intern(value) for name, value in texts}

    def condition(self, type_: str) -> "Raw":
        """A condition of the object's status."""
        found = (
            each for each in self.table("status").items("conditions") if each.text("type") == type_
        )
        return next(found, Raw({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which object, and which version of it. `applied`: the digest of what we last applied to it;
    `owner_uid`: whose child it is, by its label; `shoal_owner`: the uid of the first of its owners
    that is an object of ours. `leaving`: it is being deleted.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    version: int
    generation: int = 0
    applied: str = ""
    owner_uid: str = ""
    shoal_owner: str = ""
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A `batch/v1` Job. `message`: why it failed, by the Job controller."""

    identity: Identity
    phase: WorkerPhase
    message: str = ""
    ended_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadState:
    """A Deployment or a DaemonSet; `selector` finds its pods. `workload.message`: why its
    controller cannot create pods. `spec` is JSON: it is rarely read, and parsed it takes six times
    the memory.
    """

    identity: Identity
    workload: Workload
    selector: str
    spec: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node."""

    identity: Identity
    node: Node


def identity_of(document: Mapping[str, object]) -> Identity:
    """The identity of an object. Resource versions compare as numbers, as the API allows."""
    raw = Raw(document)
    metadata = raw.table("metadata")
    version = metadata.text("resourceVersion")
    return Identity(
        kind=intern(raw.text("kind")),
        namespace=intern(metadata.text("namespace")),
        name=metadata.text("name"),
        uid=metadata.text("uid"),
        version=int(version) if version.isdigit() else 0,
        generation=metadata.number("generation"),
        applied=metadata.table("annotations").text(APPLIED),
        owner_uid=intern(metadata.table("labels").text(OWNER_UID)),
        shoal_owner=_shoal_owner(metadata),
        leaving=bool(metadata.text("deletionTimestamp")),
    )


def _shoal_owner(metadata: Raw) -> str:
    for owner in metadata.items("ownerReferences"):
        if owner.text("apiVersion").partition("/")[0] == GROUP:
            return intern(owner.text("uid"))
    return ""


def job_state(document: Mapping[str, object]) -> JobState:
    """A `batch/v1` Job."""
    raw = Raw(document)
    failed = raw.condition("Failed")
    if raw.condition("Complete").text("status") == "True":
        phase = WorkerPhase.SUCCEEDED
    elif failed.text("status") == "True":
        phase = WorkerPhase.FAILED
    elif raw.table("status").number("ready"):
        phase = WorkerPhase.RUNNING
    else:
        phase = WorkerPhase.PENDING
    ended = {
        WorkerPhase.SUCCEEDED: raw.table("status").text("completionTime"),
        WorkerPhase.FAILED: failed.text("lastTransitionTime"),
    }.get(phase)
    message = failed.text("message") if phase is WorkerPhase.FAILED else ""
    identity = identity_of(document)
    return JobState(identity=identity, phase=phase, message=message, ended_at=ended or None)


def workload_state(document: Mapping[str, object]) -> WorkloadState:
    """A Deployment or a DaemonSet."""
    raw = Raw(document)
    status, identity = raw.table("status"), identity_of(document)
    seen = status.number("observedGeneration") >= identity.generation
    if identity.kind == "DaemonSet":
        wanted = status.number("desiredNumberScheduled")
        ready, updated = status.number("numberReady"), status.number("updatedNumberScheduled")
    else:
        wanted = raw.table("spec").number("replicas")
        ready, updated = status.number("readyReplicas"), status.number("updatedReplicas")
    labels = raw.table("spec", "selector", "matchLabels").texts()
    annotations = raw.table("metadata", "annotations")
    in_place = raw.table("spec", "updateStrategy").text("type") == "OnDelete"
    workload = Workload(
        name=identity.name,
        wanted=wanted,
        ready=ready,
        current=seen and (in_place or updated >= wanted),
        updated=updated if seen else 0,
        template=annotations.text(TEMPLATE),
        message=raw.condition("ReplicaFailure").text("message"),
        budget_bytes=Bytes(parse_whole(annotations.text(BUDGET)) or 0),
        in_place=in_place,
    )
    return WorkloadState(
        identity=identity,
        workload=workload,
        selector=",".join(f"{name}={value}" for name, value in sorted(labels.items())),
        spec=json.dumps(raw.table("spec").value, separators=(",", ":")),
    )


def node_state(document: Mapping[str, object]) -> NodeState:
    """A node."""
    raw = Raw(document)
    metadata = raw.table("metadata")
    labels = metadata.table("labels").texts()
    memory = raw.table("status", "allocatable").text("memory")
    taints = tuple(
        (taint.text("key"), taint.text("value"), taint.text("effect"))
        for taint in raw.table("spec").items("taints")
    )
    node = Node(
        name=metadata.text("name"),
        labels=labels,
        allocatable_memory=Bytes(int(parse_quantity(memory)) if memory else 0),
        ready=raw.condition("Ready").text("status") == "True",
        taints=taints,
        architecture=intern(
            raw.table("status", "nodeInfo").text("architecture") or labels.get(_ARCHITECTURE, "")
        ),
    )
    return NodeState(identity=identity_of(document), node=node)
