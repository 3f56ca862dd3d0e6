"""Foreign objects reduced to what a decision needs, so that the cache stays small.

What comes from the API server is well formed; what a field does not say is taken as absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from shoal_api.schema import GROUP
from shoal_operator.reconcile.names import OWNER_UID, TEMPLATE
from shoal_operator.reconcile.snapshot import Node, WorkerPhase
from shoal_protocol.units import Bytes, parse_quantity

APPLIED: Final = "shoal.dev/applied"
"""Annotation of a child: digest of the manifest as it was applied."""
_ARCHITECTURE: Final = "kubernetes.io/arch"

T = TypeVar("T")


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
        return {name: value for name, value in self.value.items() if isinstance(value, str)}

    def condition(self, type_: str) -> "Raw":
        """A condition of the object's status."""
        found = (
            each for each in self.table("status").items("conditions") if each.text("type") == type_
        )
        return next(found, Raw({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose child something is."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool

    @property
    def is_shoals(self) -> bool:
        """Whether it is an object of ours."""
        return self.api_version.partition("/")[0] == GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which object, in which state. `applied`: what was last applied to it, where it is ours;
    `owner_uid`: for whom it was made, as its label says. `leaving`: it is being deleted.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    version: int
    generation: int = 0
    applied: str = ""
    owner_uid: str = ""
    owners: tuple[Owner, ...] = ()
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A `batch/v1` Job. `message`: the Job controller's own words when it failed."""

    identity: Identity
    phase: WorkerPhase
    message: str = ""
    ended_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadState:
    """A Deployment or a DaemonSet; `selector` finds its pods. `updated`: so many are of the newest
    template, none as long as its controller has not seen that; `current`: all are. `template`: the
    mark of what was applied. `message`: why its controller cannot make pods. `spec` as it stands:
    there are few of them.
    """

    identity: Identity
    wanted: int
    ready: int
    current: bool
    updated: int
    selector: str
    template: str = ""
    message: str = ""
    spec: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node."""

    identity: Identity
    node: Node


def identity_of(document: Mapping[str, object]) -> Identity:
    """Who an object is. Resource versions are compared as numbers, as the API allows."""
    raw = Raw(document)
    metadata = raw.table("metadata")
    version = metadata.text("resourceVersion")
    return Identity(
        kind=raw.text("kind"),
        namespace=metadata.text("namespace"),
        name=metadata.text("name"),
        uid=metadata.text("uid"),
        version=int(version) if version.isdigit() else 0,
        generation=metadata.number("generation"),
        applied=metadata.table("annotations").text(APPLIED),
        owner_uid=metadata.table("labels").text(OWNER_UID),
        owners=tuple(
            Owner(
                api_version=owner.text("apiVersion"),
                kind=owner.text("kind"),
                name=owner.text("name"),
                uid=owner.text("uid"),
                controller=owner.flag("controller"),
            )
            for owner in metadata.items("ownerReferences")
        ),
        leaving=bool(metadata.text("deletionTimestamp")),
    )


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
    return WorkloadState(
        identity=identity,
        wanted=wanted,
        ready=ready,
        current=seen and updated >= wanted,
        updated=updated if seen else 0,
        template=raw.table("metadata", "annotations").text(TEMPLATE),
        selector=",".join(f"{name}={value}" for name, value in sorted(labels.items())),
        message=raw.condition("ReplicaFailure").text("message"),
        spec=raw.table("spec").value,
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
        architecture=raw.table("status", "nodeInfo").text("architecture")
        or labels.get(_ARCHITECTURE, ""),
    )
    return NodeState(identity=identity_of(document), node=node)
