"""Who may talk to a pool's pods, and to whom they may talk; who reads their metrics. Pure builders.

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

from typing import Final

from shoal_api.kinds import DevicePool
from shoal_operator.reconcile.coordinators import pool_selector
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.names import COMPONENT, POOL, child_name
from shoal_operator.reconcile.pods import (
    GRPC_PORT,
    METRICS_PORT,
    PEER_PORT,
    Json,
    labels_of,
    metadata_of,
)
from shoal_operator.reconcile.settings import OperatorSettings

WORKER_COMPONENTS: Final = ("deliver", "transfer-inputs", "transfer-results")
_DNS: Final = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]


def network_policies(pool: DevicePool, settings: OperatorSettings) -> tuple[Manifest, ...]:
    """The policies; none where the installation does without."""
    if not settings.network_policies:
        return ()
    closed = _policy(pool, "closed", {"matchLabels": {POOL: pool.metadata.name}})
    return (
        closed,
        _coordinator(pool, settings),
        _agents(pool, settings),
        _workers(pool, settings),
    )


def _coordinator(pool: DevicePool, settings: OperatorSettings) -> Manifest:
    callers = [
        {"podSelector": {"matchLabels": pool_selector(pool, "agent")}},
        {"podSelector": _worker_pods(pool)},
        _operator(settings),
    ]
    ingress = [{"from": callers, "ports": _ports(GRPC_PORT)}, *_metrics(settings)]
    return _policy(
        pool, "coordinator", {"matchLabels": pool_selector(pool, "coordinator")}, ingress
    )


def _agents(pool: DevicePool, settings: OperatorSettings) -> Manifest:
    agents = {"podSelector": {"matchLabels": pool_selector(pool, "agent")}}
    coordinator = {"podSelector": {"matchLabels": pool_selector(pool, "coordinator")}}
    _, _, port = settings.enrolment.rpartition(":")
    ingress: list[Json] = [{"from": [agents], "ports": _ports(PEER_PORT)}, *_metrics(settings)]
    egress: list[Json] = [
        {"to": [coordinator], "ports": _ports(GRPC_PORT)},
        {"to": [agents], "ports": _ports(PEER_PORT)},
        {"to": [_operator(settings)], "ports": _ports(int(port))},
        {"ports": _DNS},
    ]
    selector: Json = {"matchLabels": pool_selector(pool, "agent")}
    return _policy(pool, "agents", selector, ingress, egress)


def _workers(pool: DevicePool, settings: OperatorSettings) -> Manifest:
    coordinator = {"podSelector": {"matchLabels": pool_selector(pool, "coordinator")}}
    egress: list[Json] = [{}]
    if settings.offline:
        egress = [{"to": [coordinator], "ports": _ports(GRPC_PORT)}, {"ports": _DNS}]
    return _policy(pool, "workers", _worker_pods(pool), [], egress)


def _worker_pods(pool: DevicePool) -> Json:
    among = {"key": COMPONENT, "operator": "In", "values": list(WORKER_COMPONENTS)}
    return {"matchLabels": {POOL: pool.metadata.name}, "matchExpressions": [among]}


def _operator(settings: OperatorSettings) -> Json:
    namespace = {"kubernetes.io/metadata.name": settings.namespace}
    return {
        "namespaceSelector": {"matchLabels": namespace},
        "podSelector": {"matchLabels": dict(settings.operator_labels)},
    }


def _metrics(settings: OperatorSettings) -> list[Json]:
    """Whoever is named; if nobody is, Prometheus may be in any namespace."""
    readers = [dict(each) for each in settings.metrics_from]
    if settings.pod_monitors and not readers:
        readers = [{"namespaceSelector": {}}]
    return [{"from": readers, "ports": _ports(METRICS_PORT)}] if readers else []


def _ports(*numbers: int) -> list[Json]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def _policy(
    pool: DevicePool,
    suffix: str,
    selector: Json,
    ingress: list[Json] | None = None,
    egress: list[Json] | None = None,
) -> Manifest:
    labels = labels_of(pool, "network", pool=pool.metadata.name)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata_of(pool, child_name(pool.metadata.name, suffix), labels),
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress or [],
            "egress": egress or [],
        },
    }


def pod_monitor(pool: DevicePool, settings: OperatorSettings) -> tuple[Manifest, ...]:
    """Has the Prometheus operator read the metrics of coordinator and agents."""
    if not settings.pod_monitors:
        return ()
    among = {"key": COMPONENT, "operator": "In", "values": ["coordinator", "agent"]}
    labels = labels_of(pool, "metrics", pool=pool.metadata.name) | dict(settings.monitor_labels)
    endpoint = {"port": "metrics", "path": "/metrics"}
    if settings.monitor_interval:
        endpoint["interval"] = settings.monitor_interval
    monitor: Manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata_of(pool, child_name(pool.metadata.name, "pods"), labels),
        "spec": {
            "selector": {
                "matchLabels": {POOL: pool.metadata.name},
                "matchExpressions": [among],
            },
            "podTargetLabels": [POOL, COMPONENT],
            "podMetricsEndpoints": [endpoint],
        },
    }
    return (monitor,)
