"""A pool's agents: which nodes, with what budget, as DaemonSets. Pure.

With `budget.memory` one DaemonSet serves all selected nodes. With `budget.percent` each node has
one of its own: nodes that shared one would have to be named in it, and naming one more would start
all the others' agents again. A node's share is of its size to 16 MiB, because that moves by a few
pages when it is started again. An agent starts with the floor that the chart allows plus its budget
as its memory limit (`limits` lowers it later), and it requests as much, so that it is not evicted
first.

An edit or an upgrade replaces agents a tenth at a time, one at least; nodes that are away do not
count. Kubernetes does that within one DaemonSet. Where each node has its own, those that have to
wait are not applied.

A budget replaces nobody. The template has the newest, for pods to come; where nothing else has
changed, pods stay when it changes (`OnDelete`), and agents adopt it while they run (`limits`). Only
where the cluster does not resize their pods are they replaced for it.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from shoal_api.kinds import DevicePool
from shoal_api.kinds.device_pool import TaintEffect, Toleration, TolerationOperator
from shoal_api.writing import write
from shoal_operator.reconcile.conditions import TRUE
from shoal_operator.reconcile.coordinators import (
    coordinator_mark,
    pool_selector,
    service_account,
)
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.manifests import (
    METRICS_PORT,
    PEER_PORT,
    TMP_MOUNT,
    Json,
    container,
    labels_of,
    manifest,
    pod_template,
    resources,
    scratch,
    served,
)
from shoal_operator.reconcile.names import (
    AGENT,
    AGENTS,
    BUDGET,
    ENROLMENT_AUDIENCE,
    TEMPLATE,
    agent_name,
    agents_name,
    chosen_name,
    distinct_agents_name,
    fingerprint,
    namespace_of,
    trust_name,
)
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_operator.reconcile.snapshot import DevicePoolSnapshot, Node, Unreachable, Workload
from shoal_operator.reconcile.times import seconds_since
from shoal_operator.reconcile.workers import coordinator_address
from shoal_protocol.units import Bytes

_CLASS_BYTES: Final = 16 << 20
_LEAST_BYTES: Final = 1 << 20
_SCRATCH_BYTES: Final = 64 << 20
_TOKEN_SECONDS: Final = 3600
DRAIN_SECONDS: Final = 25
_GRACE_SECONDS: Final = 40
_SESSIONS_SECONDS: Final = 30.0
"""What agents need to find a coordinator that is back."""
_CACHE: Final = "/var/cache/shoal"
_TOKEN: Final = "/var/run/secrets/shoal.dev"  # noqa: S105 - a folder
_TRUST: Final = "/etc/shoal/enrolment"
_TOLD: Final = "/etc/shoal/told"
"""Where an agent reads its budget: the kubelet writes it there whenever the annotation changes."""
_BUDGET: Final = "budget"
_IN_PLACE: Final = "OnDelete"
_RUN: Final = "/run/shoal"
_IDENTITY: Final = f"{_RUN}/identity"
"""Made by the agent, for a volume's own folder is everybody's."""
_IDENTITY_BYTES: Final = 1 << 20
_OF_KUBERNETES: Final = "node.kubernetes.io/"
"""Taints that say how a node is; DaemonSets tolerate them by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSet:
    """A DaemonSet: its nodes and the budget on each. `away`: how many of the nodes are not Ready.
    `template` is the mark of its pods' template, whatever the budget. To apply it leaves pods as
    they are (`in_place`), or else it may replace those that there are (`replaces`).
    """

    name: str
    budget_bytes: Bytes
    nodes: tuple[str, ...]
    away: int
    template: str
    manifest: Manifest
    in_place: bool = False
    replaces: bool = False


class _There:
    """The DaemonSets that there are, and those whose pods cannot have another budget in place."""

    def __init__(self, sets: Iterable[Workload], refused: Container[str]) -> None:
        self._sets = {each.name: each for each in sets}
        self._refused = refused

    def becomes(self, name: str, template: str, budget_bytes: Bytes) -> tuple[bool, bool]:
        """Whether pods stay when a DaemonSet becomes what is wanted, and whether they are replaced;
        neither where it is that already. Pods that are not of the template that is there are being
        replaced: a budget that changes meanwhile comes with that."""
        known = self._sets.get(name)
        if known is None:
            return False, False
        if known.template == template:
            if not known.in_place and known.budget_bytes == budget_bytes:
                return False, False
            if name not in self._refused and (known.in_place or known.current):
                return True, False
        return False, True


# ---- which nodes ---------------------------------------------------------------------------------


def selected_nodes(pool: DevicePool, nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes that get an agent, by name."""
    matching = (node for node in nodes if _matches(pool, node))
    chosen = (node for node in matching if _untolerated_taint(pool, node) is None)
    return tuple(sorted(chosen, key=lambda node: node.name))


def untolerated(pool: DevicePool, nodes: Iterable[Node]) -> list[tuple[str, str]]:
    """Nodes with the pool's labels that a taint keeps its agents away from: name and taint."""
    matching = (node for node in nodes if _matches(pool, node))
    tainted = ((node.name, _untolerated_taint(pool, node)) for node in matching)
    return sorted((name, taint) for name, taint in tainted if taint is not None)


def selector_text(pool: DevicePool) -> str:
    """`{shoal.dev/pool: shelf}`."""
    return "{" + ", ".join(f"{k}: {v}" for k, v in sorted(pool.spec.node_selector.items())) + "}"


def _matches(pool: DevicePool, node: Node) -> bool:
    return all(node.labels.get(key) == text for key, text in pool.spec.node_selector.items())


def _untolerated_taint(pool: DevicePool, node: Node) -> str | None:
    """The first taint that keeps agents away."""
    for key, value, effect in node.taints:
        soft = effect == TaintEffect.PREFER_NO_SCHEDULE.value or key.startswith(_OF_KUBERNETES)
        if not soft and not any(_tolerates(t, key, value, effect) for t in pool.spec.tolerations):
            return f"{key}={value}:{effect}" if value else f"{key}:{effect}"
    return None


def _tolerates(toleration: Toleration, key: str, value: str, effect: str) -> bool:
    if toleration.effect is not None and toleration.effect.value != effect:
        return False
    exists = toleration.operator is TolerationOperator.EXISTS
    if toleration.key is None:
        return exists
    return toleration.key == key and (exists or (toleration.value or "") == value)


# ---- with what budget ----------------------------------------------------------------------------


def agent_sets(
    pool: DevicePool,
    nodes: Sequence[Node],
    settings: OperatorSettings,
    there: Sequence[Workload] = (),
    refused: Container[str] = (),
    taken: Container[str] = (),
) -> tuple[AgentSet, ...]:
    """The DaemonSets that there should be. Of those that are `there`, the pods of `refused` cannot
    have another budget in place. Those of other pools are called as in `taken`."""
    budget, name = pool.spec.budget, pool.metadata.name
    make = partial(_agent_set, pool, settings, _There(there, refused))
    own = {each.name for each in there}
    if budget.memory is not None:
        called = chosen_name(agent_name(name), distinct_agents_name(name), own, taken)
        return (make(called, budget.memory, nodes),)
    assert budget.percent is not None, "the schema asks for one of the two"
    sets = []
    for node in nodes:
        size = _percent_of(node, budget.percent, settings)
        if size >= _LEAST_BYTES:
            plain, distinct = agents_name(name, node.name), distinct_agents_name(name, node.name)
            called, place = chosen_name(plain, distinct, own, taken), _on_node(node.name)
            sets.append(make(called, Bytes(size), [node], affinity=place))
    return tuple(sets)


def _percent_of(node: Node, percent: int, settings: OperatorSettings) -> int:
    """Its share of a node's memory, as far as the agent's own floor leaves that."""
    allocatable = node.allocatable_memory // _CLASS_BYTES * _CLASS_BYTES
    share = min(allocatable * percent // 100, allocatable - settings.agent_floor)
    return share // _LEAST_BYTES * _LEAST_BYTES


# ---- the objects ---------------------------------------------------------------------------------


def agent_workloads(snapshot: DevicePoolSnapshot, sets: Sequence[AgentSet]) -> tuple[Manifest, ...]:
    """Service account, what agents trust when they enrol, and DaemonSets that may be applied now.

    New DaemonSets wait for that and for the coordinator's first answer: until then an agent could
    only collect warnings of what it cannot mount, and of a probe that finds no session.
    """
    pool, there = snapshot.pool, snapshot.agents
    account = service_account(pool, agent_name(pool.metadata.name), "agent")
    if not snapshot.enrolment_authority:
        return (account,)
    name, data = trust_name(pool.metadata.name), {"ca.crt": snapshot.enrolment_authority}
    trust = manifest(pool, "ConfigMap", name, labels_of(pool, "agent"), data=data)
    turn = _rollout(sets, there)
    if isinstance(snapshot.view, Unreachable):
        turn &= {each.name for each in there}
    if _lack_sessions(snapshot, sets):
        turn -= {each.name for each in sets if each.replaces}
    return (account, trust, *(each.manifest for each in sets if each.name in turn))


def _lack_sessions(snapshot: DevicePoolSnapshot, sets: Sequence[AgentSet]) -> bool:
    """Whether agents are without sessions since their coordinator is replaced, is to be, or has
    just been. Kubernetes takes them for unavailable then, and would replace all of them at once:
    what they have on their disks would be lost together."""
    pool, coordinator = snapshot.pool, snapshot.coordinator
    if coordinator is None or coordinator.is_behind or isinstance(snapshot.view, Unreachable):
        return True
    if coordinator.template != coordinator_mark(pool, snapshot.settings):
        return True
    away = {each.name: each.away for each in sets}
    if all(each.ready + away.get(each.name, 0) >= each.wanted for each in snapshot.agents):
        return False
    known = pool.condition("CoordinatorReady")
    if known is None or known.status is not TRUE:
        return True
    return seconds_since(known.last_transition_time, snapshot.now) < _SESSIONS_SECONDS


def _rollout(sets: Sequence[AgentSet], there: Sequence[Workload]) -> frozenset[str]:
    """The DaemonSets that may be applied now: those that replace nobody, and of the others as many
    as may be replaced at once.
    """
    wanted = {each.name for each in sets}
    known = {each.name: each for each in there if each.name in wanted}
    old = {each.name for each in sets if each.replaces}
    down = {name for name, each in known.items() if each.is_behind}
    away = {each.name for each in sets if each.away}
    idle = old & (down | away)  # Who does not run anyway loses nothing by it.
    room = max(0, _max_unavailable(len(sets)) - len(down - away - old))
    return frozenset((wanted - old) | idle | set(sorted(old - idle)[:room]))


def _max_unavailable(agents: int) -> int:
    """How many of so many agents may be replaced at the same time."""
    return max(1, agents // 10)


def _agent_set(
    pool: DevicePool,
    settings: OperatorSettings,
    there: _There,
    name: str,
    budget_bytes: Bytes,
    nodes: Sequence[Node],
    **more: object,
) -> AgentSet:
    """The DaemonSet of these nodes; `more` is of its pods' spec."""
    labels = labels_of(pool, "agent") | {AGENTS: name}
    # Two DaemonSets of one pool must not take each other's pods for theirs.
    selector = pool_selector(pool, "agent") | {AGENTS: name}

    agent, on_pods = _container(pool, settings), {**settings.agent_labels, **labels}
    template = pod_template(
        on_pods,
        settings.images,
        [agent],
        _volumes(pool, labels),
        serviceAccountName=agent_name(pool.metadata.name),
        terminationGracePeriodSeconds=_GRACE_SECONDS,
        nodeSelector=dict(pool.spec.node_selector),
        tolerations=[write(each) for each in pool.spec.tolerations],
        **({"priorityClassName": named} if (named := settings.agent_priority_class) else {}),
        **more,
    )
    mark, away = fingerprint([template]), sum(not node.ready for node in nodes)
    # What follows is another with each budget.
    template["metadata"] = {"labels": on_pods, "annotations": {BUDGET: str(budget_bytes)}}
    agent["resources"] = _resources(settings.agent_floor + budget_bytes)
    in_place, replaces = there.becomes(name, mark, budget_bytes)
    rolling = {"maxUnavailable": away + _max_unavailable(len(nodes))}
    spec = {
        "selector": {"matchLabels": selector},
        "updateStrategy": {"type": _IN_PLACE}
        if in_place
        else {"type": "RollingUpdate", "rollingUpdate": rolling},
        "template": template,
    }
    annotations = {"annotations": {TEMPLATE: mark, BUDGET: str(budget_bytes)}}
    return AgentSet(
        name=name,
        budget_bytes=budget_bytes,
        nodes=tuple(node.name for node in nodes),
        away=away,
        template=mark,
        manifest=manifest(pool, "DaemonSet", name, labels, annotations, spec=spec),
        in_place=in_place,
        replaces=replaces,
    )


def _resources(memory_bytes: int) -> Json:
    # It will use all of it, and must not be evicted first.
    return resources(memory_bytes, memory_bytes)


def _container(pool: DevicePool, settings: OperatorSettings) -> Json:
    """An agent's, before anybody knows its budget."""
    spec = pool.spec
    command = (
        *("python", "-OO", "-m", "shoal_agent"),
        *("--name", "$(NODE_NAME)"),
        *("--coordinator", coordinator_address(pool.metadata.name, namespace_of(pool))),
        # With a port, an IPv6 address would need brackets; without, the agent adds what it bound.
        *("--listen", f"0.0.0.0:{PEER_PORT}", "--advertise", "$(POD_IP)"),
        *("--budget-file", f"{_TOLD}/{_BUDGET}", "--residency", spec.residency.value),
        *("--cache", _CACHE, "--cache-size", str(spec.cache.size)),
        *("--metrics-address", f"0.0.0.0:{METRICS_PORT}"),
        *("--drain-seconds", str(DRAIN_SECONDS), "--log-level", "info", "--log-format", "json"),
        *("--enrol", settings.enrolment, "--enrol-ca", f"{_TRUST}/ca.crt"),
        *("--enrol-token", f"{_TOKEN}/token", "--identity-folder", _IDENTITY),
    )
    return container(
        AGENT,
        settings.images.agent,
        settings.images,
        command,
        settings.agent_floor,
        settings.agent_floor,
        env=[_field("NODE_NAME", "spec.nodeName"), _field("POD_IP", "status.podIP")],
        volumeMounts=[
            TMP_MOUNT,
            {"name": "cache", "mountPath": _CACHE},
            {"name": "identity", "mountPath": _RUN},
            {"name": "token", "mountPath": _TOKEN, "readOnly": True},
            {"name": "trust", "mountPath": _TRUST, "readOnly": True},
            {"name": "told", "mountPath": _TOLD, "readOnly": True},
        ],
        **served("peers", PEER_PORT),
    )


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": _field_of(path)}


def _field_of(path: str) -> Json:
    return {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}


def _volumes(pool: DevicePool, labels: dict[str, str]) -> list[Json]:
    told = f"metadata.annotations['{BUDGET}']"
    source = {"audience": ENROLMENT_AUDIENCE, "expirationSeconds": _TOKEN_SECONDS, "path": "token"}
    return [
        scratch(_SCRATCH_BYTES),
        {"name": "cache", **_cache(pool, labels)},
        # The key never touches a disk.
        {"name": "identity", "emptyDir": {"medium": "Memory", "sizeLimit": str(_IDENTITY_BYTES)}},
        {"name": "token", "projected": {"sources": [{"serviceAccountToken": source}]}},
        {"name": "trust", "configMap": {"name": trust_name(pool.metadata.name)}},
        {"name": "told", "downwardAPI": {"items": [{"path": _BUDGET, **_field_of(told)}]}},
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


def _on_node(name: str) -> Json:
    """On this node, as the controller of DaemonSets itself would write it."""
    field = {"key": "metadata.name", "operator": "In", "values": [name]}
    required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
