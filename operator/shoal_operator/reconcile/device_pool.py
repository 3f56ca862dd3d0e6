"""DevicePool: a coordinator, agents on the selected nodes, what keeps others out, and its Devices.

Everything is created at once, but agents once their coordinator answers. The conditions come from
the far end: the coordinator is ready when it answers, an agent when the coordinator has its
session. Pure.

There is no PodDisruptionBudget: of one coordinator it would only keep nodes from being drained, and
the pods of a DaemonSet are not evicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, assert_never

from shoal_api.columns import print_device_pool
from shoal_api.fields import Condition
from shoal_api.kinds import DevicePool
from shoal_api.kinds.device_pool import DeviceCounts, DevicePoolStatus
from shoal_operator.reconcile.agents import (
    AgentSet,
    agent_sets,
    agent_workloads,
    daemon_set_key,
    selected_nodes,
    selector_text,
    untolerated,
)
from shoal_operator.reconcile.certificates import (
    certificate_children,
    certificates_wanted,
    secrets_needed,
)
from shoal_operator.reconcile.condition_updates import (
    FALSE,
    TRUE,
    ConditionUpdate,
    conditions,
    holds_for,
)
from shoal_operator.reconcile.coordinators import coordinator_objects
from shoal_operator.reconcile.decision import (
    CancelJob,
    CoordinatorCall,
    Decision,
    Manifest,
    Note,
    ObjectKey,
    RemoveJob,
)
from shoal_operator.reconcile.devices import device_children, device_key, devices_gone
from shoal_operator.reconcile.names import namespace_of, why_no_device
from shoal_operator.reconcile.networks import network_policies, pod_monitor
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    DevicePoolSnapshot,
    DeviceState,
    Node,
    Unreachable,
    Workload,
)
from shoal_operator.reconcile.workers import coordinator_address

REQUEUE_SECONDS: Final = 30.0
UPDATING: Final = "Updating"
_NAMED: Final = 5
_POLICIES: Final = "networking.k8s.io"
"""The API group of network policies, which every cluster has."""


def reconcile_device_pool(snapshot: DevicePoolSnapshot) -> Decision:
    """What is to be done about a DevicePool."""
    pool, settings = snapshot.pool, snapshot.settings
    nodes = selected_nodes(pool, snapshot.nodes)
    sets = agent_sets(pool, nodes, settings)
    children = [
        *coordinator_objects(pool, settings, snapshot.claim, snapshot.own_jobs),
        *agent_workloads(snapshot, sets),
        *_optional(pool, settings),
    ]
    wanted = {each.name for each in sets}
    stale = [each.name for each in snapshot.agents if each.name not in wanted]
    namespace = namespace_of(pool)
    status = _status(snapshot, nodes, sets)
    gone = devices_gone(snapshot, frozenset(node.name for node in nodes))
    return Decision(
        status=status,
        children=tuple(children),
        devices=device_children(snapshot, gone),
        removals=(
            *(daemon_set_key(namespace, name) for name in stale),
            *_switched_off(pool, settings),
            *(device_key(pool, name) for name in sorted(gone)),
        ),
        calls=_orphans(snapshot),
        certificates=certificates_wanted(pool, settings),
        requeue_seconds=REQUEUE_SECONDS,
    )


def _optional(pool: DevicePool, settings: OperatorSettings) -> tuple[Manifest, ...]:
    """What an installation may do without."""
    return (
        *certificate_children(pool, settings),
        *network_policies(pool, settings),
        *pod_monitor(pool, settings),
    )


def _switched_off(pool: DevicePool, settings: OperatorSettings) -> tuple[ObjectKey, ...]:
    """Where that would be which this installation does without; it may have been another."""
    everything = replace(settings, cert_manager=True, network_policies=True, pod_monitors=True)
    wanted = {_key(each) for each in _optional(pool, settings)}
    known = (_POLICIES, *settings.other_groups)
    keys = (_key(each) for each in _optional(pool, everything))
    return tuple(
        key for key in keys if key not in wanted and key.api_version.partition("/")[0] in known
    )


def _key(child: Manifest) -> ObjectKey:
    metadata = child["metadata"]
    assert isinstance(metadata, Mapping), "a manifest without metadata"
    return ObjectKey(
        api_version=str(child["apiVersion"]),
        kind=str(child["kind"]),
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
    )


def _orphans(snapshot: DevicePoolSnapshot) -> tuple[CoordinatorCall, ...]:
    """Runs whose InferenceJob is gone are stopped, then forgotten."""
    if isinstance(snapshot.view, Unreachable) or snapshot.jobs is None:
        return ()
    name = snapshot.pool.metadata.name
    calls: list[CoordinatorCall] = []
    for job, run in sorted(snapshot.view.runs.items()):
        if job in snapshot.jobs:
            continue
        if run.state.is_over:
            calls.append(RemoveJob(pool=name, job=job))
        else:
            calls.append(CancelJob(pool=name, job=job, reason="its InferenceJob was deleted"))
    return tuple(calls)


# ---- the status ----------------------------------------------------------------------------------


def _updates(
    snapshot: DevicePoolSnapshot, nodes: Sequence[Node], sets: Sequence[AgentSet]
) -> list[ConditionUpdate]:
    coordinator = _coordinator(snapshot)
    agents = _agents(snapshot, nodes, sets)
    bad = next((each for each in (coordinator, agents) if each.status is not TRUE), None)
    ready = ConditionUpdate("Ready", TRUE, "Ready", agents.message)
    if bad is not None:
        ready = ConditionUpdate("Ready", FALSE, bad.reason, bad.message)
    return [coordinator, agents, ready]


def _coordinator(snapshot: DevicePoolSnapshot) -> ConditionUpdate:
    problem = _coordinator_problem(snapshot)
    if problem is not None:
        return ConditionUpdate("CoordinatorReady", FALSE, *problem)
    match snapshot.view:
        case Unreachable(reason=reason):
            message = f"the coordinator does not answer: {reason}"
            return ConditionUpdate("CoordinatorReady", FALSE, "CoordinatorUnreachable", message)
        case CoordinatorView():
            return ConditionUpdate("CoordinatorReady", TRUE, "Answers", "the coordinator answers")
        case _:
            assert_never(snapshot.view)


def _coordinator_problem(snapshot: DevicePoolSnapshot) -> tuple[str, str] | None:
    """What keeps the coordinator's pod from being ready: reason and message."""
    lacking = [name for name in secrets_needed(snapshot.pool) if name not in snapshot.secrets]
    workload, claim = snapshot.coordinator, snapshot.claim
    if workload is None:
        return "Creating", "the coordinator is being made"
    if lacking:
        by = "; cert-manager was asked for it" if snapshot.settings.cert_manager else ""
        return "WaitingForCertificates", f"Secret {lacking[0]} is not there yet{by}"
    if claim is not None and not claim.bound:
        why = claim.message or "no volume was provisioned yet"
        return "VolumePending", f"the coordinator's volume claim {claim.name} is pending: {why}"
    return _workload_problem(workload)


def _workload_problem(workload: Workload) -> tuple[str, str] | None:
    if workload.message:
        return "CoordinatorFailing", workload.message
    if not workload.ready:
        return "Starting", "the coordinator's pod is starting"
    if not workload.current:
        return UPDATING, "the coordinator is being replaced by one of the newest template"
    return None


def _agents(
    snapshot: DevicePoolSnapshot, nodes: Sequence[Node], sets: Sequence[AgentSet]
) -> ConditionUpdate:
    def no(reason: str, message: str) -> ConditionUpdate:
        return ConditionUpdate("AgentsReady", FALSE, reason, message)

    if not nodes:
        return no("NoNodes", _why_no_nodes(snapshot))
    if isinstance(snapshot.view, Unreachable):
        return no("CoordinatorUnreachable", "who is connected is not known")
    states = {device.name: device.state for device in snapshot.view.devices}
    away = [node for node in nodes if states.get(node.name) is not DeviceState.READY]
    total, old = len(nodes), _not_updated(snapshot, sets)
    served = {name for each in sets for name in each.nodes}
    text = f"{total - len(away)} of {total} agents connected"
    if old:
        text += f", {len(served) - old} of {len(served)} updated"
    if not away and not old:
        return ConditionUpdate("AgentsReady", TRUE, "AllConnected", text)
    if not away:
        return no(UPDATING, text)
    trouble = next((each.message for each in snapshot.agents if each.message), "")
    details = [f"node {node.name} NotReady" for node in away if not node.ready]
    details += [trouble] if trouble else []
    details += [
        _whereabouts(node, states)
        if node.name in served
        else f"node {node.name} is too small: its share leaves nothing above the agent's floor"
        for node in away
        if node.ready
    ]
    shown = "; ".join(details[:_NAMED])
    more = f" and {len(details) - _NAMED} more" if len(details) > _NAMED else ""
    reason = "AgentsFailing" if trouble else "AgentsMissing"
    return no(reason, f"{text}; {shown}{more}")


def _not_updated(snapshot: DevicePoolSnapshot, sets: Sequence[AgentSet]) -> int:
    """How many agents are not of the newest template, as far as their controllers know."""
    known = {each.name: each for each in snapshot.agents}
    old = 0
    for each in sets:
        workload = known.get(each.name)
        if workload is None or workload.template != each.template:
            old += len(each.nodes)
        elif not workload.current:
            old += max(1, len(each.nodes) - workload.updated)
    return old


def _whereabouts(node: Node, states: dict[str, DeviceState]) -> str:
    state = states.get(node.name)
    if (problem := why_no_device(node.name)) is not None:
        return f"node {node.name} cannot be a device: {problem}"
    if state is None or state is DeviceState.LOST:
        return f"the agent on node {node.name} is not connected"
    return f"the agent on node {node.name} is {state.value.lower()}"


def _why_no_nodes(snapshot: DevicePoolSnapshot) -> str:
    pool = snapshot.pool
    text = selector_text(pool)
    kept_away = untolerated(pool, snapshot.nodes)
    if kept_away:
        node, taint = kept_away[0]
        others = f" (and {len(kept_away) - 1} more)" if len(kept_away) > 1 else ""
        return f"node {node} matches {text}{others}, but has the taint {taint}; tolerate it"
    labels = ",".join(f"{key}={text}" for key, text in sorted(pool.spec.node_selector.items()))
    advice = f"; kubectl label node NAME {labels}" if labels else ""
    return f"no node matches {text}{advice}"


def _status(
    snapshot: DevicePoolSnapshot, nodes: Sequence[Node], sets: Sequence[AgentSet]
) -> DevicePoolStatus:
    pool, updates = snapshot.pool, _updates(snapshot, nodes, sets)
    before = pool.status or DevicePoolStatus()
    generation = pool.metadata.generation or 0
    budgets = {name: each.budget_bytes for each in sets for name in each.nodes}
    ready = 0
    if isinstance(snapshot.view, CoordinatorView):
        for device in snapshot.view.devices:
            if device.name in budgets and device.state is DeviceState.READY:
                ready += 1
    elif before.devices is not None:
        ready = min(before.devices.ready, len(budgets))
    status = DevicePoolStatus(
        observed_generation=generation,
        conditions=conditions(before.conditions, updates, generation=generation, now=snapshot.now),
        devices=DeviceCounts(total=len(nodes), ready=ready),
        budget_bytes=sum(budgets.values()),
        smallest_budget_bytes=min(budgets.values(), default=pool.spec.budget.memory),
        coordinator_endpoint=coordinator_address(pool.metadata.name, namespace_of(pool)),
    )
    return print_device_pool(status)


def pool_notes(pool: DevicePool, ready: Condition) -> tuple[Note, ...]:
    """That a pool became Ready, or is no longer."""
    before = pool.status or DevicePoolStatus()
    was_ready = holds_for(before.conditions, "Ready", pool.metadata.generation or 0)
    since = f"{ready.last_transition_time}, generation {pool.metadata.generation}"
    if ready.status is TRUE and not was_ready:
        return (Note(reason="PoolReady", message=ready.message, since=since),)
    if ready.status is FALSE and was_ready:
        warning = ready.reason != UPDATING
        note = Note(reason=ready.reason, message=ready.message, warning=warning, since=since)
        return (note,)
    return ()
