"""How the operator was installed: what the chart's values say, as one frozen value.

The chart writes it as a file, whose fields are named as in a manifest: `agent_floor` is agentFloor.
"""

from collections.abc import Mapping
from typing import Final

from shoal_api.fields import DISK, MEMORY
from shoal_api.schema import Object, member, record
from shoal_api.shapes import Flag, Items, Json, Table, Text
from shoal_protocol.units import Bytes

_TEXT: Final = Text(max_length=1024)
_LABELS: Final = Table(values=Text(max_length=63, min_length=0), max_items=64)
_WORDS: Final = Items(of=_TEXT, max_items=64)
_CLASS: Final = Text(max_length=253, min_length=0)
_TABLES: Final = Items(of=Json(), max_items=64)


@record()
class Images:
    """What pods run: image names with tag or digest, and how they are pulled."""

    coordinator: str = member(_TEXT, "A pool's coordinator.")
    worker: str = member(_TEXT, "Pods that inspect, cut, deliver or transfer.")
    agent: str = member(_TEXT, "What runs on devices.")
    pull_policy: str = member(_TEXT, "As in core/v1.", default="IfNotPresent")
    pull_secrets: tuple[str, ...] = member(_WORDS, "Secrets for the registry.", default=[])


@record()
class Place:
    """Where pods may run, and before whom, as core/v1 says it; empty: anywhere."""

    node_selector: Mapping[str, str] = member(_LABELS, "As in core/v1.", default={})
    tolerations: tuple[Mapping[str, object], ...] = member(_TABLES, "As in core/v1.", default=[])
    affinity: Mapping[str, object] = member(Json(), "As in core/v1.", default={})
    priority_class_name: str = member(_CLASS, "As in core/v1.", default="")


@record()
class OperatorSettings:
    """What decisions depend on besides the cluster."""

    images: Images = member(Object(Images), "What pods run.")
    enrolment: str = member(_TEXT, "HOST:PORT where agents get their certificates.")
    agent_floor: Bytes = member(
        MEMORY,
        "What an idle agent may use beside its budget, until it has measured what it uses.",
        unit="bytes",
    )
    agent_priority_class: str = member(_CLASS, "Of agents' pods, as in core/v1.", default="")
    agent_labels: Mapping[str, str] = member(_LABELS, "More labels of agents' pods.", default={})
    worker_memory: Bytes = member(MEMORY, "Memory limit of a worker's pod.", unit="bytes")
    namespace: str = member(_TEXT, "Where the operator's pods are.", default="shoal-system")
    operator_labels: Mapping[str, str] = member(
        _LABELS,
        "Labels of the operator's pods, so that others let them in.",
        default={"app.kubernetes.io/name": "shoal", "app.kubernetes.io/component": "operator"},
    )
    coordinator_memory: Bytes = member(
        MEMORY, "Memory limit of a coordinator's pod.", unit="bytes", default="512Mi"
    )
    worker_disk: Bytes = member(
        DISK, "What a worker may keep on its node meanwhile.", unit="bytes", default="10Gi"
    )
    coordinator_place: Place = member(Object(Place), "Where coordinators may run.", default={})
    coordinator_labels: Mapping[str, str] = member(
        _LABELS, "More labels of coordinators' pods.", default={}
    )
    worker_place: Place = member(Object(Place), "Where workers may run.", default={})
    worker_labels: Mapping[str, str] = member(_LABELS, "More labels of workers' pods.", default={})
    cert_manager: bool = member(
        Flag(), "Whether cert-manager makes the certificates, not the operator.", default=False
    )
    pod_monitors: bool = member(
        Flag(), "Whether the cluster has the Prometheus operator, which is to read.", default=False
    )
    monitor_labels: Mapping[str, str] = member(_LABELS, "Labels of pod monitors.", default={})
    monitor_interval: str = member(
        Text(max_length=32, min_length=0),
        "How often Prometheus reads; empty: as often as it does by itself.",
        default="",
    )
    network_policies: bool = member(Flag(), "Whether pools get network policies.", default=True)
    metrics_from: tuple[Mapping[str, object], ...] = member(
        _TABLES,
        "Who may read metrics, as peers of a NetworkPolicy; none: everybody where there are pod "
        "monitors, else nobody.",
        default=[],
    )
    offline: bool = member(
        Flag(), "Whether nothing is fetched from outside the cluster.", default=False
    )
    other_groups: tuple[str, ...] = member(
        _WORDS,
        "Those of the API groups that only some clusters have which this one has, so that what was "
        "made while more was switched on is looked for there.",
        default=[],
    )
