"""A pool's agents: which nodes, with what budget, as DaemonSets. Pure.

With `budget.memory` one DaemonSet serves all selected nodes. With `budget.percent`, nodes of one
size, to 16 MiB, share one: a node's size differs by a few pages from its twin's. An agent's memory
limit is the idle floor plus its budget, and it asks for as much, so that it is not evicted first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from shoal_operator.api.kinds import DevicePool
from shoal_operator.api.kinds.device_pool import TaintEffect, Toleration, TolerationOperator
from shoal_operator.reconcile.coordinators import pool_selector, service_account
from shoal_operator.reconcile.decision import Manifest, ObjectKey
from shoal_operator.reconcile.names import agent_name, child_name, namespace_of, trust_name
from shoal_operator.reconcile.pods import (
    METRICS_PORT,
    PEER_PORT,
    TMP_MOUNT,
    Json,
    container,
    labels_of,
    metadata_of,
    pod,
    probe,
    scratch,
)
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_operator.reconcile.snapshot import Node
from shoal_operator.reconcile.workers import coordinator_address
from shoal_protocol.units import Bytes

AUDIENCE: Final = "shoal.dev/enrolment"
_CLASS_BYTES: Final = 16 << 20
_LEAST_BYTES: Final = 1 << 20
_SCRATCH_BYTES: Final = 64 << 20
_TOKEN_SECONDS: Final = 3600
DRAIN_SECONDS: Final = 25
_GRACE_SECONDS: Final = 40
_CACHE: Final = "/var/cache/shoal"
_TOKEN: Final = "/var/run/secrets/shoal.dev"  # noqa: S105 - a folder
_TRUST: Final = "/etc/shoal/enrolment"
_IDENTITY: Final = "/run/shoal/identity"
_IDENTITY_BYTES: Final = 1 << 20
_OF_KUBERNETES: Final = "node.kubernetes.io/"
"""Taints that say how a node is; DaemonSets tolerate them by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSet:
    """A DaemonSet: its nodes and the budget on each. `named`: the nodes are named one by one."""

    name: str
    budget_bytes: Bytes
    nodes: tuple[str, ...]
    named: bool


def daemon_set_key(namespace: str, name: str) -> ObjectKey:
    """Where a DaemonSet is, to remove it."""
    return ObjectKey(api_version="apps/v1", kind="DaemonSet", namespace=namespace, name=name)


# ---- which nodes ---------------------------------------------------------------------------------


def selected_nodes(pool: DevicePool, nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes that get an agent, by name."""
    chosen = (node for node in nodes if _matches(pool, node) and _repelling(pool, node) is None)
    return tuple(sorted(chosen, key=lambda node: node.name))


def untolerated(pool: DevicePool, nodes: Iterable[Node]) -> list[tuple[str, str]]:
    """Nodes with the pool's labels that a taint keeps its agents away from: name and taint."""
    repelling = ((node.name, _repelling(pool, node)) for node in nodes if _matches(pool, node))
    return sorted((name, taint) for name, taint in repelling if taint is not None)


def selector_text(pool: DevicePool) -> str:
    """`{shoal.dev/pool: shelf}`."""
    return "{" + ", ".join(f"{k}: {v}" for k, v in sorted(pool.spec.node_selector.items())) + "}"


def _matches(pool: DevicePool, node: Node) -> bool:
    return all(node.labels.get(key) == text for key, text in pool.spec.node_selector.items())


def _repelling(pool: DevicePool, node: Node) -> str | None:
    """The first taint that keeps agents away."""
    for key, value, effect in node.taints:
        soft = effect == TaintEffect.PREFER_NO_SCHEDULE.value or key.startswith(_OF_KUBERNETES)
        if not soft and not any(_tolerates(t, key, value, effect) for t in pool.spec.tolerations):
            return f"{key}={value}:{effect}" if value else f"{key}:{effect}"
    return None


def _tolerates(toleration: Toleration, key: str, value: str, effect: str) -> bool:
    if toleration.effect is not None and toleration.effect.value != effect:
        return False
    if toleration.key is None:
        return toleration.operator is TolerationOperator.EXISTS
    if toleration.key != key:
        return False
    exists = toleration.operator is TolerationOperator.EXISTS
    return exists or (toleration.value or "") == value


# ---- with what budget ----------------------------------------------------------------------------


def agent_sets(
    pool: DevicePool, nodes: Sequence[Node], settings: OperatorSettings
) -> tuple[AgentSet, ...]:
    """The DaemonSets that there should be."""
    budget, name = pool.spec.budget, pool.metadata.name
    if budget.memory is not None:
        names = tuple(node.name for node in nodes)
        whole = AgentSet(
            name=agent_name(name), budget_bytes=budget.memory, nodes=names, named=False
        )
        return (whole,)
    assert budget.percent is not None, "the schema asks for one of the two"
    classes: dict[int, list[str]] = {}
    for node in nodes:
        size = _percent_of(node, budget.percent, settings)
        if size >= _LEAST_BYTES:
            classes.setdefault(size, []).append(node.name)
    return tuple(
        AgentSet(
            name=child_name(name, f"agent-{size >> 20}mi"),
            budget_bytes=Bytes(size),
            nodes=tuple(names),
            named=True,
        )
        for size, names in sorted(classes.items())
    )


def _percent_of(node: Node, percent: int, settings: OperatorSettings) -> int:
    """Its share of a node's memory, as far as the agent's own floor leaves that."""
    allocatable = node.allocatable_memory // _CLASS_BYTES * _CLASS_BYTES
    share = min(allocatable * percent // 100, allocatable - settings.agent_floor)
    return share // _LEAST_BYTES * _LEAST_BYTES


# ---- the objects ---------------------------------------------------------------------------------


def agent_workloads(
    pool: DevicePool, sets: Sequence[AgentSet], settings: OperatorSettings, authority: str
) -> tuple[Manifest, ...]:
    """Service account, what agents trust when they enrol, and the DaemonSets."""
    labels = labels_of(pool, "agent", pool=pool.metadata.name)
    account = service_account(pool, agent_name(pool.metadata.name), labels)
    trust: Manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(pool, trust_name(pool.metadata.name), labels),
        "data": {"ca.crt": authority},
    }
    daemon_sets = (_daemon_set(pool, each, labels, settings) for each in sets)
    return (account, *((trust,) if authority else ()), *daemon_sets)


def _daemon_set(
    pool: DevicePool, agents: AgentSet, labels: dict[str, str], settings: OperatorSettings
) -> Manifest:
    # Two DaemonSets of one pool must not take each other's pods for theirs.
    selector = pool_selector(pool, "agent") | {"shoal.dev/agents": agents.name}
    labels = labels | {"shoal.dev/agents": agents.name}
    more: Json = {
        "serviceAccountName": agent_name(pool.metadata.name),
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "nodeSelector": dict(pool.spec.node_selector),
        "tolerations": [_toleration(each) for each in pool.spec.tolerations],
    }
    if agents.named:
        more["affinity"] = _on_nodes(agents.nodes)
    spec = pod(
        settings.images,
        [_container(pool, agents, settings)],
        _volumes(pool, labels),
        **more,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata_of(pool, agents.name, labels),
        "spec": {
            "selector": {"matchLabels": selector},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def _container(pool: DevicePool, agents: AgentSet, settings: OperatorSettings) -> Json:
    spec = pool.spec
    command = (
        *("python", "-m", "shoal_agent"),
        *("--name", "$(NODE_NAME)"),
        *("--coordinator", coordinator_address(pool.metadata.name, namespace_of(pool))),
        # With a port, an IPv6 address would need brackets; without, the agent adds what it bound.
        *("--listen", f"0.0.0.0:{PEER_PORT}", "--advertise", "$(POD_IP)"),
        *("--budget", str(agents.budget_bytes), "--residency", spec.residency.value),
        *("--cache", _CACHE, "--cache-size", str(spec.cache.size)),
        *("--metrics-address", f"0.0.0.0:{METRICS_PORT}"),
        *("--drain-seconds", str(DRAIN_SECONDS), "--log-level", "info", "--log-format", "json"),
        *("--enrol", settings.enrolment, "--enrol-ca", f"{_TRUST}/ca.crt"),
        *("--enrol-token", f"{_TOKEN}/token", "--identity-folder", _IDENTITY),
    )
    return container(
        "agent",
        settings.images.agent,
        settings.images,
        command,
        settings.agent_floor + agents.budget_bytes,
        keeps_memory=True,
        env=[_field("NODE_NAME", "spec.nodeName"), _field("POD_IP", "status.podIP")],
        ports=[
            {"name": "peers", "containerPort": PEER_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        startupProbe=probe("/healthz", periodSeconds=2, failureThreshold=60),
        livenessProbe=probe("/healthz", periodSeconds=10, failureThreshold=6),
        readinessProbe=probe("/readyz", periodSeconds=5, failureThreshold=2),
        volumeMounts=[
            TMP_MOUNT,
            {"name": "cache", "mountPath": _CACHE},
            {"name": "identity", "mountPath": _IDENTITY},
            {"name": "token", "mountPath": _TOKEN, "readOnly": True},
            {"name": "trust", "mountPath": _TRUST, "readOnly": True},
        ],
    )


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _volumes(pool: DevicePool, labels: dict[str, str]) -> list[Json]:
    token = {
        "audience": AUDIENCE,
        "expirationSeconds": _TOKEN_SECONDS,
        "path": "token",
    }
    return [
        scratch(_SCRATCH_BYTES),
        {"name": "cache", **_cache(pool, labels)},
        # The key never touches a disk.
        {"name": "identity", "emptyDir": {"medium": "Memory", "sizeLimit": str(_IDENTITY_BYTES)}},
        {"name": "token", "projected": {"sources": [{"serviceAccountToken": token}]}},
        {"name": "trust", "configMap": {"name": trust_name(pool.metadata.name)}},
    ]


def _cache(pool: DevicePool, labels: dict[str, str]) -> Json:
    """On the node's disk, or a volume per pod where a storage class is named."""
    cache = pool.spec.cache
    if cache.storage_class_name is None:
        return {"emptyDir": {"sizeLimit": str(cache.size)}}
    template = {
        "metadata": {"labels": labels},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": cache.storage_class_name,
            "resources": {"requests": {"storage": str(cache.size)}},
        },
    }
    return {"ephemeral": {"volumeClaimTemplate": template}}


def _on_nodes(names: Sequence[str]) -> Json:
    """Any of these nodes; a term names one, because Kubernetes takes one only."""
    terms = [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}
        for name in names
    ]
    required = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _toleration(toleration: Toleration) -> Json:
    fields: Json = {
        "key": toleration.key,
        "operator": toleration.operator.value,
        "value": toleration.value,
        "effect": None if toleration.effect is None else toleration.effect.value,
        "tolerationSeconds": toleration.toleration_seconds,
    }
    return {name: value for name, value in fields.items() if value is not None}
