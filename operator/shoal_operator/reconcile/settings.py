"""How the operator was installed: what the chart's values say, as one frozen value."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_protocol.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """What pods run: image names with tag or digest, how they are pulled."""

    coordinator: str
    worker: str
    agent: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where pods may run, as core/v1 says it; empty: anywhere."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, object], ...] = ()
    affinity: Mapping[str, object] = field(default_factory=dict)

    def fields(self) -> dict[str, object]:
        """As fields of a pod's spec."""
        found: dict[str, object] = {
            "nodeSelector": dict(self.node_selector),
            "tolerations": [dict(each) for each in self.tolerations],
            "affinity": dict(self.affinity),
        }
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """What decisions depend on besides the cluster.

    `namespace` and `operator_labels` are where the operator's pods are and how they are labelled,
    so that others let them in. `enrolment`: HOST:PORT where agents get their certificates.
    `agent_floor`: what an idle agent may use; an agent's memory limit is this plus its budget.
    `coordinator_memory`, `worker_memory`: limits of a coordinator, and of a pod that fetches, cuts
    or carries; `worker_disk`: what such a pod may keep on its node meanwhile; `coordinator_place`,
    `worker_place`: where they may run. `cert_manager`: authorities are asked of cert-manager
    instead of made here. `pod_monitors`: the cluster has the Prometheus operator, which reads every
    `monitor_interval`, or as often as it does by itself. `metrics_from`: who may read metrics, as
    peers of a NetworkPolicy; none: everybody where there are pod monitors, else nobody. `offline`:
    nothing is fetched from outside the cluster (https, s3, oci are refused). `other_groups`: those
    of API groups that only some clusters have which this one has, so that what was made while
    more was switched on is looked for there.
    """

    images: Images
    enrolment: str
    agent_floor: Bytes
    worker_memory: Bytes
    namespace: str = "shoal-system"
    operator_labels: Mapping[str, str] = field(
        default_factory=lambda: {
            "app.kubernetes.io/name": "shoal",
            "app.kubernetes.io/component": "operator",
        }
    )
    coordinator_memory: Bytes = Bytes(512 << 20)
    worker_disk: Bytes = Bytes(10 << 30)
    coordinator_place: Place = field(default_factory=Place)
    worker_place: Place = field(default_factory=Place)
    cert_manager: bool = False
    pod_monitors: bool = False
    monitor_labels: Mapping[str, str] = field(default_factory=dict)
    monitor_interval: str = ""
    network_policies: bool = True
    metrics_from: tuple[Mapping[str, object], ...] = ()
    offline: bool = False
    other_groups: tuple[str, ...] = ()
