"""Agents' pods with their memory limits, read when one may have another than it should.

Pods are not watched, and those of a large pool are megabytes. They are read when an agent, its
floor or its DaemonSet has changed, and then until every limit is in force or `SETTLING_SECONDS`
have passed: a cluster that does not resize pods in place is asked again after `RETRY_SECONDS`.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal_operator.controller.api import Api
from shoal_operator.controller.foreign import Raw
from shoal_operator.reconcile.agents import AGENT
from shoal_operator.reconcile.limits import floors, resizes
from shoal_operator.reconcile.names import AGENTS, BUDGET, OWNER_UID, namespace_of, uid_of
from shoal_operator.reconcile.resources import POD
from shoal_operator.reconcile.snapshot import AgentPod, DevicePoolSnapshot
from shoal_protocol.units import Bytes, parse_quantity, parse_whole

SETTLING_SECONDS: Final = 120.0
RETRY_SECONDS: Final = 600.0
_MAX_KNOWN: Final = 1024


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the limits depend on, since when, when the pods were read last, and whether every limit
    was in force then.
    """

    seen: object
    since: float
    at: float
    settled: bool


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
        seen, now = (known, snapshot.agents), asyncio.get_running_loop().time()
        reading = self._readings.pop(pool, None)
        if reading is None or reading.seen != seen:
            reading = _Reading(seen, now, now - RETRY_SECONDS, settled=False)
        self._readings[pool] = reading
        while len(self._readings) > _MAX_KNOWN:
            self._readings.popitem(last=False)
        settling = not reading.settled and now - reading.since < SETTLING_SECONDS
        if not settling and now - reading.at < RETRY_SECONDS:
            return ()
        labels = f"{OWNER_UID}={pool},{AGENTS}"
        listed = self._api.list(POD, namespace_of(snapshot.pool), labels=labels)
        pods = tuple([pod async for each in listed if (pod := agent_pod(each)) is not None])
        in_force = all(pod.limit_in_force_bytes in (None, pod.limit_bytes) for pod in pods)
        settled = in_force and not resizes(replace(snapshot, pods=pods))
        self._readings[pool] = _Reading(seen, reading.since, now, settled)
        return pods


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
        node=spec.text("nodeName"),
        budget_bytes=Bytes(budget),
        limit_bytes=limit,
        limit_in_force_bytes=_limit(status.items("containerStatuses")),
    )


def _limit(containers: tuple[Raw, ...]) -> Bytes | None:
    """The memory limit of the agent's container, in a pod's spec or in its status."""
    for each in containers:
        memory = each.table("resources", "limits").text("memory")
        if each.text("name") == AGENT and memory:
            return Bytes(int(parse_quantity(memory)))
    return None
