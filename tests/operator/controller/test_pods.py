"""Why a worker or an agent has no pod: its controller says so in events alone. And since when a
Deployment is whole."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

from shoal_operator.controller.api import Api, Json
from shoal_operator.controller.foreign import JobState, WorkloadState, job_state, workload_state
from shoal_operator.controller.pods import Pods
from shoal_operator.reconcile.resources import EVENT, Resource

QUOTA = "Error creating: pods is forbidden: failed quota: team: must specify limits.cpu"


class Server:
    """An API server with pods and events; it minds the kind alone that a list asks for."""

    def __init__(self, pods: tuple[Json, ...] = (), events: tuple[Json, ...] = ()) -> None:
        self._pods = pods
        self._events = events
        self.lists = list[str]()

    async def list(
        self, resource: Resource, namespace: str, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Json]:
        self.lists.append(fields if resource == EVENT else resource.kind)
        for each in self._events if resource == EVENT else self._pods:
            yield each


def pods_of(server: Server) -> Pods:
    return Pods(cast("Api", server))


def event(uid: str, message: str, at: str) -> Json:
    about = {"kind": "Job", "uid": uid}
    return {
        "involvedObject": about,
        "reason": "FailedCreate",
        "message": message,
        "lastTimestamp": at,
    }


def job(name: str) -> JobState:
    metadata = {"name": name, "namespace": "lab", "uid": f"uid-of-{name}"}
    return job_state({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata})


def agents(wanted: int) -> WorkloadState:
    metadata = {"name": "agents", "namespace": "lab", "uid": "uid-of-agents"}
    counts = {"desiredNumberScheduled": wanted, "numberReady": 1, "updatedNumberScheduled": wanted}
    return workload_state(
        {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "status": counts}
    )


def waiting(label: str, value: str, why: str) -> Json:
    status = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": why}]}
    return {"metadata": {"name": "p", "labels": {label: value}}, "status": status}


async def test_a_worker_says_what_its_pod_does_and_without_one_what_was_found_wrong_last() -> None:
    events = (
        event("uid-of-a", QUOTA, "2026-03-01T12:00:02Z"),
        event("uid-of-a", "before", "2026-03-01T12:00:01Z"),
        event("uid-of-c", "of another", "2026-03-01T12:00:03Z"),
    )
    pod = waiting("batch.kubernetes.io/job-name", "c", "Unschedulable")
    server = Server((pod,), events)
    pods = pods_of(server)
    said = [(await pods.worker(job(name))).message for name in ("a", "b", "c")]
    assert said == [f"FailedCreate: {QUOTA}", "", "pod p: Unschedulable: "]
    assert server.lists == ["Pod", "involvedObject.kind=Job,type=Warning"], "once for all of them"


async def test_agents_that_lack_pods_say_why_unless_a_pod_does() -> None:
    failed = event("uid-of-agents", QUOTA, "2026-03-01T12:00:02Z")
    ready: Json = {"metadata": {"name": "q", "labels": {"shoal.dev/agents": "agents"}}}
    unready = waiting("shoal.dev/agents", "agents", "Unschedulable")

    async def said(wanted: int, *pods: Json) -> str:
        (agent,) = await pods_of(Server(pods, (failed,))).agents([agents(wanted)])
        return agent.message

    assert await said(2, ready) == f"FailedCreate: {QUOTA}"
    assert await said(2, ready, unready) == "pod p: Unschedulable: "
    assert await said(2, ready, ready) == "", "they only start still"
    assert await said(1, ready) == ""


def coordinator(ready: int) -> WorkloadState:
    metadata = {"name": "shelf-coordinator", "namespace": "lab", "uid": "uid-of-shelf"}
    counts = {"readyReplicas": ready, "updatedReplicas": 1}
    made = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}
    return workload_state({**made, "spec": {"replicas": 1}, "status": counts})


async def test_when_a_deployment_was_last_behind_is_known_once_it_is_ready_again() -> None:
    pods, clock = pods_of(Server()), asyncio.get_running_loop().time
    assert (await pods.workload(coordinator(1))).behind_at is None
    first = (await pods.workload(coordinator(0))).behind_at
    second = (await pods.workload(coordinator(0))).behind_at
    assert first is not None
    assert second is not None
    assert first < second < clock()
    assert (await pods.workload(coordinator(1))).behind_at == second
