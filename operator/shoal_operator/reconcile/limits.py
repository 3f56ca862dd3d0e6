"""Memory limits of agents that run: the floor that each has measured, plus its budget; and the
budgets that they are told. Pure.

A pod starts with the floor that the chart allows, because nobody knows its own yet. Once the agent
has measured that, the pod's limit follows it, in place: the agent goes on running, and a pod that
is made anew starts with the allowance again. An agent that was started again in its pod may measure
a little more than the time before, and takes no work where its limit does not leave its budget; so
limits are rounded up, and one that has no session for `GRACE_SECONDS` gets the allowance back.

A floor is the agent's own word, and its limit is what keeps it from the rest of the node, also when
a model has broken into it: no floor counts for more than twice the allowance.

A budget that was edited is adopted in place as well, where pods are to stay (`agents`). Before an
agent is told more than it has, its limit has room for that; and the limit is lowered when the agent
reports that it has adopted less.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from shoal_operator.reconcile.agent_pods import AgentPod
from shoal_operator.reconcile.conditions import FALSE
from shoal_operator.reconcile.decision import Resize, TellBudget
from shoal_operator.reconcile.names import AGENT
from shoal_operator.reconcile.snapshot import (
    DevicePoolSnapshot,
    DeviceState,
    Unreachable,
)
from shoal_operator.reconcile.times import seconds_since

GRACE_SECONDS: Final = 30.0
_MOST_ALLOWANCES: Final = 2
_STEP_BYTES: Final = 4 << 20
_NOISE_BYTES: Final = 2 << 20
"""By how much the floors of two starts of an agent differ, at most."""


def floors(snapshot: DevicePoolSnapshot) -> Mapping[str, int]:
    """By node: what to count for an idle agent. Nodes of which nothing is known are absent."""
    view = snapshot.view
    if isinstance(view, Unreachable):
        return {}
    allowance = snapshot.settings.agent_floor
    found = {
        each.name: min(_rounded_up(each.floor_bytes), _MOST_ALLOWANCES * allowance)
        for each in view.devices
        if each.state is not DeviceState.LOST and each.floor_bytes
    }
    for device in snapshot.devices:
        ready, status = device.condition("Ready"), device.status
        if ready is None or status is None or status.node is None or status.node in found:
            continue
        away = seconds_since(ready.last_transition_time, snapshot.now)
        if ready.status is FALSE and away >= GRACE_SECONDS:
            found[status.node] = allowance
    return found


def adopted(snapshot: DevicePoolSnapshot) -> Mapping[str, int]:
    """By node: the budget that its agent has, of those that are there."""
    if isinstance(snapshot.view, Unreachable):
        return {}
    devices = snapshot.view.devices
    return {each.name: each.budget_bytes for each in devices if each.state is not DeviceState.LOST}


def resizes(snapshot: DevicePoolSnapshot) -> tuple[Resize, ...]:
    """The pods that are to have another limit."""
    known, has = floors(snapshot), adopted(snapshot)
    staying = {pod.name: wanted for pod, wanted in _staying(snapshot)}
    found = []
    for pod in snapshot.pods:
        if (floor := known.get(pod.node)) is None:
            continue
        limit = floor + staying.get(pod.name, pod.budget_bytes)
        if pod.name in staying:
            # What the agent has not let go of yet. It says that itself: no limit is raised for it.
            limit = max(limit, min(floor + has.get(pod.node, 0), pod.limit_bytes))
        if limit != pod.limit_bytes:
            found.append(Resize(pod=pod.name, uid=pod.uid, container=AGENT, memory_bytes=limit))
    return tuple(found)


def budgets(snapshot: DevicePoolSnapshot) -> tuple[TellBudget, ...]:
    """The agents that are to be told another budget."""
    known = floors(snapshot)
    return tuple(
        TellBudget(pod=pod.name, uid=pod.uid, version=pod.version, budget_bytes=wanted)
        for pod, wanted in _staying(snapshot)
        if wanted < pod.budget_bytes
        or pod.budget_bytes < wanted <= pod.allowed_bytes - known.get(pod.node, pod.allowed_bytes)
    )


def is_adopting(snapshot: DevicePoolSnapshot) -> bool:
    """Whether an agent has not adopted the budget that it is to have, as far as pods were read."""
    has = adopted(snapshot)
    return any(
        pod.budget_bytes != wanted or has.get(pod.node, wanted) != wanted
        for pod, wanted in _staying(snapshot)
    )


def refusals(snapshot: DevicePoolSnapshot) -> Mapping[str, str]:
    """By set of agents: why a pod cannot have a limit for the budget that it is to have, where one
    that is made anew would have it."""
    known, allowance = floors(snapshot), snapshot.settings.agent_floor
    wanted = {each.name: each.budget_bytes for each in snapshot.agents}
    found: dict[str, str] = {}
    for pod in snapshot.pods:
        why = pod.infeasible or snapshot.not_resized
        if not why or pod.agents not in wanted:
            continue
        floor, budget = known.get(pod.node, allowance), wanted[pod.agents]
        if not floor + budget <= pod.allowed_bytes <= max(floor, allowance) + budget:
            found.setdefault(pod.agents, why)
    return found


def _staying(snapshot: DevicePoolSnapshot) -> Iterator[tuple[AgentPod, int]]:
    """Pods of sets whose pods stay, each with the budget that it is to have."""
    wanted = {each.name: each.budget_bytes for each in snapshot.agents if each.in_place}
    return ((pod, wanted[pod.agents]) for pod in snapshot.pods if pod.agents in wanted)


def _rounded_up(floor_bytes: int) -> int:
    return -(-(floor_bytes + _NOISE_BYTES) // _STEP_BYTES) * _STEP_BYTES
