"""Agents' pods with their budgets and memory limits, read when one may have another than it should.

Pods are not watched, and those of a large pool are megabytes. They are read when an agent, its
floor, its budget or its DaemonSet has changed, or a Device shows no limit; and then until every
limit is in force or `SETTLING_SECONDS` have passed: a cluster that does not resize pods in place is
asked again after `RETRY_SECONDS`. What a budget waits for that is not adopted is looked at each
time.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal_operator.controller.api import Api
from shoal_operator.controller.foreign import Raw
from shoal_operator.reconcile.agent_pods import AgentPod
from shoal_operator.reconcile.limits import adopted, floors, is_adopting, resizes
from shoal_operator.reconcile.names import AGENT, AGENTS, BUDGET, OWNER_UID, namespace_of, uid_of
from shoal_operator.reconcile.resources import POD
from shoal_operator.reconcile.snapshot import DevicePoolSnapshot
from shoal_protocol.units import Bytes, parse_quantity, parse_whole

SETTLING_SECONDS: Final = 120.0
RETRY_SECONDS: Final = 600.0
_MAX_KNOWN: Final = 1024


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the limits depend on, since when, when the pods were read last, and whether every limit
    was in force then, or a budget not adopted.
    """

    seen: object
    since: float
    at: float
    settled: bool
    adopting: bool = False


class AgentPods:
    """Reads the pods of each pool."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._readings: OrderedDict[str, _Reading] = OrderedDict()

    async def read(self, snapshot: DevicePoolSnapshot) -> tuple[AgentPod, ...]:
        """The pool's pods; none where they need not be read. Raises `ApiError`."""
        pool, known = uid_of(snapshot.pool), floors(snapshot)
        if not known:
            return ()
        seen = (known, snapshot.agents, adopted(snapshot), _without_limit(snapshot))
        now = asyncio.get_running_loop().time()
        reading = self._readings.pop(pool, None)
        if reading is None or reading.seen != seen:
            reading = _Reading(seen, now, now - RETRY_SECONDS, settled=False)
        self._readings[pool] = reading
        while len(self._readings) > _MAX_KNOWN:
            self._readings.popitem(last=False)
        settling = not reading.settled and now - reading.since < SETTLING_SECONDS
        if not settling and not reading.adopting and now - reading.at < RETRY_SECONDS:
            return ()
        labels = f"{OWNER_UID}={pool},{AGENTS}"
        listed = self._api.list(POD, namespace_of(snapshot.pool), labels=labels)
        pods = tuple([pod async for each in listed if (pod := agent_pod(each)) is not None])
        in_force = all(pod.limit_in_force_bytes in (None, pod.limit_bytes) for pod in pods)
        with_pods = replace(snapshot, pods=pods)
        settled, adopting = in_force and not resizes(with_pods), is_adopting(with_pods)
        self._readings[pool] = _Reading(seen, reading.since, now, settled, adopting)
        return pods

    def are_adopting(self, snapshot: DevicePoolSnapshot) -> bool:
        """Whether budgets have been told a moment ago, and are about to be adopted: what kubelets
        do about that is not watched."""
        reading = self._readings.get(uid_of(snapshot.pool))
        now = asyncio.get_running_loop().time()
        return reading is not None and reading.adopting and now - reading.since < SETTLING_SECONDS


def _without_limit(snapshot: DevicePoolSnapshot) -> frozenset[str]:
    """Devices whose objects show no limit, as those do that were made anew."""
    status = (device.status for device in snapshot.devices)
    shown = {each.node for each in status if each is not None and each.limit_bytes}
    return frozenset(adopted(snapshot).keys() - shown)


def agent_pod(document: Mapping[str, object]) -> AgentPod | None:
    """An agent's pod as reconcilers see it; None where it does not run."""
    pod = Raw(document)
    metadata, spec, status = pod.table("metadata"), pod.table("spec"), pod.table("status")
    budget = parse_whole(metadata.table("annotations").text(BUDGET))
    limit = _limit(spec.items("containers"))
    running = status.text("phase") == "Running" and not metadata.text("deletionTimestamp")
    if not running or budget is None or limit is None:
        return None
    return AgentPod(
        name=metadata.text("name"),
        uid=metadata.text("uid"),
        version=metadata.text("resourceVersion"),
        node=spec.text("nodeName"),
        agents=metadata.table("labels").text(AGENTS),
        budget_bytes=Bytes(budget),
        limit_bytes=limit,
        limit_in_force_bytes=_limit(status.items("containerStatuses")),
        infeasible=_pending(pod, "Infeasible"),
        deferred=_pending(pod, "Deferred"),
    )


def _pending(pod: Raw, reason: str) -> str:
    """What a kubelet says of a limit that it has not set, for this reason."""
    pending = pod.condition("PodResizePending")
    said = pending.text("status") == "True" and pending.text("reason") == reason
    return f"{reason}: {pending.text('message')}" if said else ""


def _limit(containers: tuple[Raw, ...]) -> Bytes | None:
    """The memory limit of the agent's container, in a pod's spec or in its status."""
    for each in containers:
        memory = each.table("resources", "limits").text("memory")
        if each.text("name") == AGENT and memory:
            return Bytes(int(parse_quantity(memory)))
    return None
