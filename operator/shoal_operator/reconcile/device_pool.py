"""DevicePool: a coordinator, agents on the selected nodes, what keeps others out, and its Devices.

Everything is created at once, but agents once their coordinator answers. The conditions come from
the far end: the coordinator is ready when it answers, an agent when the coordinator has its
session. Pure.

There is no PodDisruptionBudget: of one coordinator it would only keep nodes from being drained, and
the pods of a DaemonSet are not evicted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shoal_api.columns import print_device_pool
from shoal_api.fields import Condition
from shoal_api.kinds import DevicePool
from shoal_api.kinds.device_pool import DeviceCounts, DevicePoolStatus
from shoal_operator.reconcile.agents import (
    AgentSet,
    agent_sets,
    agent_workloads,
    selected_nodes,
    selector_text,
    untolerated,
)
from shoal_operator.reconcile.certificates import (
    certificate_children,
    certificates_wanted,
    secrets_needed,
)
from shoal_operator.reconcile.conditions import (
    FALSE,
    TRUE,
    UNKNOWN,
    Cause,
    ConditionUpdate,
    with_conditions,
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
from shoal_operator.reconcile.devices import device_children, devices_gone
from shoal_operator.reconcile.limits import (
    adopted,
    budgets,
    refusals,
    resizes,
)
from shoal_operator.reconcile.manifests import child_key
from shoal_operator.reconcile.names import namespace_of
from shoal_operator.reconcile.networks import network_policies, pod_monitor
from shoal_operator.reconcile.pool_budgets import UPDATING
from shoal_operator.reconcile.resources import key_of
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_operator.reconcile.snapshot import (
    DevicePoolSnapshot,
    DeviceState,
    Node,
    Unreachable,
    Workload,
)
from shoal_operator.reconcile.times import seconds_since
from shoal_operator.reconcile.volumes import Claim
from shoal_operator.reconcile.workers import coordinator_address
from shoal_protocol.identities import why_no_device
from shoal_protocol.units import counted, listed

REQUEUE_SECONDS: Final = 30.0
ASKED_SECONDS: Final = 2.0
"""After these a coordinator that has started is looked at again: an answer that says what was known
already wakes nobody."""
_AWAITED_SECONDS: Final = 300.0
_NAMED: Final = 5
_SHORT_PERCENT: Final = 10
"""Of a volume's size: with less it is nearly full."""
_MORE_PERCENT: Final = 5
"""So much more, and it is not any more."""
_NOT_ASKED: Final = Unreachable(reason="it has started, and was not asked yet")
_POLICIES: Final = "networking.k8s.io"
"""The API group of network policies, which every cluster has."""


def reconcile_device_pool(snapshot: DevicePoolSnapshot) -> Decision:
    """What is to be done about a DevicePool."""
    pool, settings, outdated = snapshot.pool, snapshot.settings, _is_outdated(snapshot)
    if outdated:
        snapshot = replace(snapshot, view=_NOT_ASKED)
    nodes = selected_nodes(pool, snapshot.nodes)
    sets = agent_sets(
        pool, nodes, settings, snapshot.agents, refusals(snapshot), snapshot.taken_sets
    )
    gone = devices_gone(snapshot, frozenset(node.name for node in nodes))
    wanted = {each.name for each in sets}
    stale = (each.name for each in snapshot.agents if each.name not in wanted)
    return Decision(
        status=_status(snapshot, nodes, sets),
        children=(
            *coordinator_objects(pool, settings, snapshot.claim, snapshot.own_jobs),
            *agent_workloads(snapshot, sets),
            *_optional(pool, settings),
        ),
        devices=device_children(snapshot, gone),
        budgets=budgets(snapshot),
        resizes=resizes(snapshot),
        removals=(
            *(child_key(pool, "DaemonSet", name) for name in stale),
            *_switched_off(pool, settings),
            *(child_key(pool, "Device", name) for name in sorted(gone)),
        ),
        calls=_orphans(snapshot),
        notes=(*_replacing(snapshot, sets), *_nearly_full(snapshot)),
        certificates=certificates_wanted(pool, settings),
        requeue_seconds=ASKED_SECONDS if outdated else REQUEUE_SECONDS,
    )


def is_awaited(pool: DevicePool | None, now: str) -> bool:
    """Whether a pool is not ready but may be at any moment, as while its pods are replaced: then
    its coordinator is asked often. What takes longer waits for a person."""
    ready = None if pool is None else pool.condition("Ready")
    if ready is None or ready.status is TRUE:
        return False
    return seconds_since(ready.last_transition_time, now) < _AWAITED_SECONDS


def _is_outdated(snapshot: DevicePoolSnapshot) -> bool:
    """Whether what is known was said before the coordinator's pod was ready, or of the newest
    template: by the one before it, to which agents were connected that are not to this one."""
    workload, view = snapshot.coordinator, snapshot.view
    if workload is None or workload.is_behind or isinstance(view, Unreachable):
        return False
    return workload.behind_at is not None and view.begun <= workload.behind_at


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
    wanted = {key_of(each) for each in _optional(pool, settings)}
    known = (_POLICIES, *settings.other_groups)
    keys = (key_of(each) for each in _optional(pool, everything))
    return tuple(
        key for key in keys if key not in wanted and key.api_version.partition("/")[0] in known
    )


def _orphans(snapshot: DevicePoolSnapshot) -> tuple[CoordinatorCall, ...]:
    """Runs whose InferenceJob is gone are stopped, then forgotten. Of one that had no run yet the
    inputs are removed."""
    if isinstance(snapshot.view, Unreachable):
        return ()
    name, gone = snapshot.pool.metadata.name, "its InferenceJob was deleted"
    left = snapshot.view.unsubmitted - snapshot.view.runs.keys() - snapshot.jobs
    runs = tuple(
        RemoveJob(pool=name, job=job)
        if run.state.is_over
        else CancelJob(pool=name, job=job, reason=gone)
        for job, run in sorted(snapshot.view.runs.items())
        if job not in snapshot.jobs
    )
    return (*runs, *(RemoveJob(pool=name, job=job) for job in sorted(left)))


# ---- the status ----------------------------------------------------------------------------------


def _updates(
    snapshot: DevicePoolSnapshot, nodes: Sequence[Node], sets: Sequence[AgentSet]
) -> list[ConditionUpdate]:
    coordinator = ConditionUpdate("CoordinatorReady", TRUE, "Answers", "the coordinator answers")
    if (problem := _coordinator_problem(snapshot)) is not None:
        coordinator = ConditionUpdate("CoordinatorReady", FALSE, *problem)
    agents = _agents(snapshot, nodes, sets)
    ready = ConditionUpdate("Ready", TRUE, "Ready", agents.message)
    for each in (agents, coordinator):
        if each.status is not TRUE:
            ready = replace(each, type="Ready")
    return [coordinator, agents, _volume(snapshot), ready]


def _volume(snapshot: DevicePoolSnapshot) -> ConditionUpdate:
    """Whether there is room on the coordinator's volume. Who is short of it has to have a little
    more again, so that it does not go to and fro."""
    type_, view = "VolumeHasRoom", snapshot.view
    if isinstance(view, Unreachable) or view.store is None:
        return ConditionUpdate(type_, UNKNOWN, "NotKnown", "the coordinator does not say it")
    store, known = view.store, snapshot.pool.condition(type_)
    short = known is not None and known.status is FALSE
    enough = (_SHORT_PERCENT + short * _MORE_PERCENT) * store.size_bytes // 100
    text = "a tenth of the volume is free, or of fragments without a job"
    if store.free_bytes + store.removable_bytes >= enough:
        return ConditionUpdate(type_, TRUE, "HasRoom", f"at least {text}")
    advice = "delete jobs that have ended, or raise spec.coordinator.storage.size"
    return ConditionUpdate(type_, FALSE, "NearlyFull", f"less than {text}; {advice}")


def _nearly_full(snapshot: DevicePoolSnapshot) -> tuple[Note, ...]:
    """That the volume is nearly full."""
    volume = _volume(snapshot)
    if volume.status is not FALSE:
        return ()
    return (Note("VolumeNearlyFull", volume.message, warning=True),)


def _coordinator_problem(snapshot: DevicePoolSnapshot) -> Cause | None:
    """What keeps the coordinator from being ready."""
    workload, claim, view = snapshot.coordinator, snapshot.claim, snapshot.view
    lacking = [name for name in secrets_needed(snapshot.pool) if name not in snapshot.secrets]
    cause = None
    if workload is None:
        cause = Cause("Creating", "the coordinator is being made")
    elif lacking:
        by = "; cert-manager was asked for it" if snapshot.settings.cert_manager else ""
        cause = Cause("WaitingForCertificates", f"Secret {lacking[0]} is not there yet{by}")
    elif (volume := _volume_problem(claim, workload)) is not None:
        cause = volume
    elif workload.message:
        cause = Cause("CoordinatorFailing", workload.message)
    elif not workload.ready:
        cause = Cause("Starting", "the coordinator's pod is starting")
    elif not workload.current:
        cause = Cause(UPDATING, "the coordinator is being replaced by one of the newest template")
    elif isinstance(view, Unreachable):
        text = f"the coordinator does not answer: {view.reason}"
        cause = Cause("CoordinatorUnreachable", text)
    return cause


def _volume_problem(claim: Claim | None, coordinator: Workload) -> Cause | None:
    """What keeps the coordinator's volume from being there; not what keeps its pod from a node, for
    which the volume waits too."""
    if claim is None:
        return None
    if claim.leaving:
        text = (
            f"the volume claim {claim.name} is being deleted: with the coordinator's pod it goes, "
            f"and what is on it; delete that pod to begin with an empty volume"
        )
        return Cause("VolumeLeaving", text)
    if claim.bound or (claim.waits_for_pod and coordinator.message):
        return None
    why = claim.message or "no volume was provisioned yet"
    return Cause("VolumePending", f"the coordinator's volume claim {claim.name} is pending: {why}")


def _agents(
    snapshot: DevicePoolSnapshot, nodes: Sequence[Node], sets: Sequence[AgentSet]
) -> ConditionUpdate:
    def no(reason: str, message: str) -> ConditionUpdate:
        return ConditionUpdate("AgentsReady", FALSE, reason, message)

    if not nodes:
        return no("NoNodes", _why_no_nodes(snapshot))
    if isinstance(snapshot.view, Unreachable):
        return no("CoordinatorUnreachable", "who is connected is not known")
    if not snapshot.enrolment_authority:
        text = "the operator has no authority to enrol agents with; its log says why"
        return no("WaitingForCertificates", text)
    states = {device.name: device.state for device in snapshot.view.devices}
    away = [node for node in nodes if states.get(node.name) is not DeviceState.READY]
    total, old = len(nodes), _not_updated(snapshot, sets)
    served = {name for each in sets for name in each.nodes}
    text = f"{total - len(away)} of {counted(total, 'agent')} connected"
    if old:
        text += f", {len(served) - old} of {len(served)} updated{_why_so(snapshot, sets)}"
    if not away:
        return (
            no(UPDATING, text)
            if old
            else ConditionUpdate("AgentsReady", TRUE, "AllConnected", text)
        )
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
    reason = "AgentsFailing" if trouble else "AgentsMissing"
    return no(reason, f"{text}; {listed(details, _NAMED, '; ')}")


def _not_updated(snapshot: DevicePoolSnapshot, sets: Sequence[AgentSet]) -> int:
    """How many agents are not of the newest template, as far as their controllers know; and where
    pods stay, have not adopted its budget."""
    known, has = {each.name: each for each in snapshot.agents}, adopted(snapshot)
    old = 0
    for each in sets:
        workload = known.get(each.name)
        if each.in_place:
            old += sum(has.get(node, each.budget_bytes) != each.budget_bytes for node in each.nodes)
        elif workload is None or each.replaces:
            old += len(each.nodes)
        elif not workload.current:
            old += max(1, len(each.nodes) - workload.updated)
    return old


def _why_so(snapshot: DevicePoolSnapshot, sets: Sequence[AgentSet]) -> str:
    """Why pods are replaced for a budget, or what a budget waits for, as far as that is known."""
    if notes := _replacing(snapshot, sets):
        return f"; {notes[0].message}"
    waiting = (pod for pod in snapshot.pods if pod.deferred)
    return next((f"; pod {pod.name} waits: {pod.deferred}" for pod in waiting), "")


def _replacing(snapshot: DevicePoolSnapshot, sets: Sequence[AgentSet]) -> tuple[Note, ...]:
    """That pods are replaced for a budget, since they cannot have it in place."""
    refused = refusals(snapshot)
    for each in sets:
        if not each.in_place and each.name in refused:
            text = f"pods are replaced, for they are not resized: {refused[each.name]}"
            since = f"generation {snapshot.pool.metadata.generation}"
            return (Note("ReplacingAgents", text, warning=True, since=since),)
    return ()


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
    budgets = {name: each.budget_bytes for each in sets for name in each.nodes}
    ready = 0
    if not isinstance(snapshot.view, Unreachable):
        for device in snapshot.view.devices:
            if device.name in budgets and device.state is DeviceState.READY:
                ready += 1
    elif before.devices is not None:
        ready = min(before.devices.ready, len(budgets))
    status = DevicePoolStatus(
        devices=DeviceCounts(total=len(nodes), ready=ready),
        budget_bytes=sum(budgets.values()),
        smallest_budget_bytes=min(budgets.values(), default=pool.spec.budget.memory),
        coordinator_endpoint=coordinator_address(pool.metadata.name, namespace_of(pool)),
    )
    return print_device_pool(with_conditions(status, pool, updates, snapshot.now))


def pool_notes(pool: DevicePool, ready: Condition) -> tuple[Note, ...]:
    """That a pool became Ready, or is no longer."""
    was_ready = pool.holds("Ready")
    since = f"{ready.last_transition_time}, generation {pool.metadata.generation}"
    if ready.status is TRUE and not was_ready:
        return (Note("PoolReady", ready.message, since=since),)
    if ready.status is FALSE and was_ready:
        warning = ready.reason != UPDATING
        return (Note(ready.reason, ready.message, warning=warning, since=since),)
    return ()
