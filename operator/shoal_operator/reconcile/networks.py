"""Who may talk to a pool's pods, and to whom they may talk; who reads their metrics. Pure.

All of a pool's pods are closed both ways first; then

| from        | to                    | for                                 |
|-------------|-----------------------|-------------------------------------|
| agents, workers, the operator | coordinator | sessions, files, calls        |
| agents      | agents of the pool    | activations                         |
| agents      | the operator          | enrolment                           |
| agents, workers | DNS               |                                     |
| workers     | anywhere, unless offline | stores of models, inputs, results |
| who is named, else anybody where a PodMonitor is made | metrics         |
"""

import re
from typing import Final

from shoal_api.kinds import DevicePool
from shoal_api.labels import COMPONENT, POOL
from shoal_operator.reconcile.coordinators import pool_selector
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.manifests import (
    GRPC_PORT,
    METRICS_PORT,
    PEER_PORT,
    Json,
    labels_of,
    manifest,
)
from shoal_operator.reconcile.names import child_name
from shoal_operator.reconcile.settings import OperatorSettings

_SERVERS: Final = ("coordinator", "agent")
"""What else there is of a pool are workers, of whatever kind, and serves nobody."""
_NOT_IN_NAMES: Final = re.compile(r"\W")
_META: Final = "__meta_kubernetes_pod_"
_TARGET_LABELS: Final[list[Json]] = [
    {"sourceLabels": [f"{_META}label_{_NOT_IN_NAMES.sub('_', POOL)}"], "targetLabel": "pool"},
    {
        "sourceLabels": [f"{_META}label_{_NOT_IN_NAMES.sub('_', COMPONENT)}"],
        "targetLabel": "component",
    },
    {
        "sourceLabels": ["component", f"{_META}node_name"],
        "regex": "agent;(.+)",
        "targetLabel": "device",
    },
]
_DNS: Final = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]


def network_policies(pool: DevicePool, settings: OperatorSettings) -> tuple[Manifest, ...]:
    """The policies; none where the installation does without."""
    if not settings.network_policies:
        return ()
    everything: Json = {"matchLabels": {POOL: pool.metadata.name}}
    rest = {"key": COMPONENT, "operator": "NotIn", "values": list(_SERVERS)}
    workers = {**everything, "matchExpressions": [rest]}
    coordinator: Json = {"matchLabels": pool_selector(pool, "coordinator")}
    agents: Json = {"matchLabels": pool_selector(pool, "agent")}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.namespace}},
        "podSelector": {"matchLabels": dict(settings.operator_labels)},
    }
    peers = [{"podSelector": agents}]
    callers = [*peers, {"podSelector": workers}, operator]
    _, _, enrolment = settings.enrolment.rpartition(":")
    to_coordinator = {"to": [{"podSelector": coordinator}], "ports": _ports(GRPC_PORT)}
    from_agents: list[Json] = [
        to_coordinator,
        {"to": peers, "ports": _ports(PEER_PORT)},
        {"to": [operator], "ports": _ports(int(enrolment))},
        {"ports": _DNS},
    ]
    from_workers: list[Json] = [to_coordinator, {"ports": _DNS}] if settings.offline else [{}]
    to_agents = [{"from": peers, "ports": _ports(PEER_PORT)}, *_metrics(settings)]
    from_callers = [{"from": callers, "ports": _ports(GRPC_PORT)}, *_metrics(settings)]
    return (
        _policy(pool, "closed", everything, [], []),
        _policy(pool, "coordinator", coordinator, from_callers, []),
        _policy(pool, "agents", agents, to_agents, from_agents),
        _policy(pool, "workers", workers, [], from_workers),
    )


def _metrics(settings: OperatorSettings) -> list[Json]:
    """Whoever is named; if nobody is, Prometheus may be in any namespace."""
    readers = [dict(each) for each in settings.metrics_from]
    if settings.pod_monitors and not readers:
        readers = [{"namespaceSelector": {}}]
    return [{"from": readers, "ports": _ports(METRICS_PORT)}] if readers else []


def _ports(number: int) -> list[Json]:
    return [{"port": number, "protocol": "TCP"}]


def _policy(
    pool: DevicePool, suffix: str, selector: Json, ingress: list[Json], egress: list[Json]
) -> Manifest:
    spec = {
        "podSelector": selector,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    name = child_name(pool.metadata.name, suffix)
    return manifest(pool, "NetworkPolicy", name, labels_of(pool, "network"), spec=spec)


def pod_monitor(pool: DevicePool, settings: OperatorSettings) -> tuple[Manifest, ...]:
    """Has the Prometheus operator read the metrics of coordinator and agents, with the labels that
    dashboards and alerts ask for: `pool`, `component`, and `device` on an agent's."""
    if not settings.pod_monitors:
        return ()
    among = {"key": COMPONENT, "operator": "In", "values": list(_SERVERS)}
    endpoint: Json = {"port": "metrics", "path": "/metrics", "relabelings": _TARGET_LABELS}
    if settings.monitor_interval:
        endpoint["interval"] = settings.monitor_interval
    spec = {
        "selector": {"matchLabels": {POOL: pool.metadata.name}, "matchExpressions": [among]},
        "podMetricsEndpoints": [endpoint],
    }
    labels = labels_of(pool, "metrics") | dict(settings.monitor_labels)
    name = child_name(pool.metadata.name, "pods")
    return (manifest(pool, "PodMonitor", name, labels, spec=spec),)
