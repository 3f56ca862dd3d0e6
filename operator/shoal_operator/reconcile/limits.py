"""Memory limits of agents that run: the floor that each has measured, plus its budget. Pure.

A pod starts with the floor that the chart allows, because nobody knows its own yet. Once the agent
has measured that, the pod's limit follows it, in place: the agent goes on running, its DaemonSet's
template stays, and a pod that is made anew starts with the allowance again. An agent that was
started again in its pod may measure a little more than the time before, and takes no work where
its limit does not leave its budget; so limits are rounded up, and one that has no session for
`GRACE_SECONDS` gets the allowance back.

A floor is the agent's own word, and its limit is what keeps it from the rest of the node, also when
a model has broken into it: no floor counts for more than twice the allowance.
"""

from collections.abc import Mapping
from typing import Final

from shoal_operator.reconcile.agents import AGENT
from shoal_operator.reconcile.conditions import FALSE
from shoal_operator.reconcile.decision import Resize
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


def resizes(snapshot: DevicePoolSnapshot) -> tuple[Resize, ...]:
    """The pods that are to have another limit."""
    known = floors(snapshot)
    return tuple(
        Resize(pod=pod.name, uid=pod.uid, container=AGENT, memory_bytes=limit)
        for pod in snapshot.pods
        if pod.node in known and (limit := known[pod.node] + pod.budget_bytes) != pod.limit_bytes
    )


def _rounded_up(floor_bytes: int) -> int:
    return -(-(floor_bytes + _NOISE_BYTES) // _STEP_BYTES) * _STEP_BYTES
