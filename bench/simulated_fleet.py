"""Hundreds of simulated nodes, and whatever pods a control plane puts on them.

A node is an object that never changes, so the control plane has to be patient with nodes. A pod of
a `batch/v1` Job ends well as soon as it is bound, with the output that its component has; every
other pod is Running and ready. One watch sees them all, and a pod costs the API server one write,
so that what is measured beside it is not drowned. Logs are served as a kubelet serves them.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from shoal_operator.controller.api import Api, ApiError
from shoal_protocol.pki.authority import Authority, Use

CAPACITY: Final = {"cpu": "64", "memory": "1Ti", "pods": "1000", "ephemeral-storage": "100Ti"}
_JOB: Final = "batch.kubernetes.io/job-name"
_COMPONENT: Final = "app.kubernetes.io/component"
_AWAY: Final = (aiohttp.ClientError, TimeoutError, ApiError)
_AGAIN_SECONDS: Final = 0.5
_MERGE: Final = {"Content-Type": "application/merge-patch+json"}


@dataclass
class SimulatedFleet:
    """`outputs`: what a worker of a component prints."""

    api: Api
    nodes: tuple[str, ...]
    labels: Mapping[str, str]
    outputs: Mapping[str, bytes]
    log_port: int = 0
    _printed: dict[tuple[str, str], bytes] = field(default_factory=dict)
    _known: set[tuple[str, str]] = field(default_factory=set)

    async def run(self, ready: asyncio.Event) -> None:
        """Be these nodes until cancelled; `ready` is set when all are there."""
        async with self.api.open_session() as session, asyncio.TaskGroup() as group:
            for name in self.nodes:
                await self._make_node(session, name)
            ready.set()
            queue: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
            for _ in range(8):
                group.create_task(self._work(session, queue))
            while True:
                with contextlib.suppress(*_AWAY):
                    async for pod in self._watch(session):
                        queue.put_nowait(pod)
                # An API server that is away, or not yet itself, is asked again, but not at once.
                await asyncio.sleep(_AGAIN_SECONDS)

    async def log(self, request: web.Request) -> web.Response:
        """`/containerLogs/NAMESPACE/POD/CONTAINER`, as a kubelet serves it."""
        printed = self._printed.get((request.match_info["namespace"], request.match_info["pod"]))
        if printed is None:
            raise web.HTTPNotFound(text="no such pod here")
        return web.Response(body=printed, content_type="text/plain")

    # --- Nodes -----------------------------------------------------------------------------

    async def _make_node(self, session: aiohttp.ClientSession, name: str) -> None:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        labels = {**self.labels, "kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64"}
        await self._send(
            session,
            "/api/v1/nodes",
            {**node, "metadata": {"name": name, "labels": labels}},
            method="POST",
        )
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.log_port}},
            "conditions": [{"type": "Ready", "status": "True", "reason": "Simulated"}],
            "capacity": CAPACITY,
            "allocatable": CAPACITY,
            "nodeInfo": {"architecture": "amd64"},
        }
        await self._send(session, f"/api/v1/nodes/{name}/status", {"status": status})

    # --- Pods ------------------------------------------------------------------------------

    async def _watch(self, session: aiohttp.ClientSession) -> AsyncIterator[Mapping[str, Any]]:
        """Pods that have a node, as they change."""
        query = {"watch": "true", "fieldSelector": "spec.nodeName!=", "timeoutSeconds": "300"}
        url = f"{self.api.server}/api/v1/pods"
        # A line is as long as a pod is.
        timeout = aiohttp.ClientTimeout(total=None)
        async with session.get(url, params=query, timeout=timeout) as answer:
            if answer.status != 200:
                raise ApiError("GET pods", answer.status, "", await answer.text())
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] in ("ADDED", "MODIFIED"):
                    yield event["object"]

    async def _work(
        self, session: aiohttp.ClientSession, queue: asyncio.Queue[Mapping[str, Any]]
    ) -> None:
        while True:
            pod = await queue.get()
            try:
                await self._see(session, pod)
            except _AWAY:
                await asyncio.sleep(_AGAIN_SECONDS)
                queue.put_nowait(pod)

    async def _see(self, session: aiohttp.ClientSession, pod: Mapping[str, Any]) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        gone = "deletionTimestamp" in metadata
        resources = json.dumps([each["resources"] for each in pod["spec"]["containers"]])
        key = (metadata["uid"], "gone" if gone else resources)
        if key in self._known:
            return
        self._known.add(key)
        try:
            if gone:
                await self._send(session, path, {"gracePeriodSeconds": 0}, method="DELETE")
            else:
                await self._send(session, f"{path}/status", {"status": self._status(pod)})
        except _AWAY:
            self._known.remove(key)
            raise

    def _status(self, pod: Mapping[str, Any]) -> dict[str, object]:
        labels = pod["metadata"].get("labels", {})
        works = _JOB in labels
        if works:
            place = (pod["metadata"]["namespace"], pod["metadata"]["name"])
            self._printed[place] = self.outputs.get(labels.get(_COMPONENT, ""), b"")
        ended = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": _now()}}
        state = ended if works else {"running": {"startedAt": _now()}}
        return {
            "phase": "Succeeded" if works else "Running",
            "conditions": [
                {"type": each, "status": str(not works)} for each in ("Ready", "ContainersReady")
            ],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "resources": container["resources"],
                    "state": state,
                    "ready": not works,
                    "restartCount": 0,
                    "image": "simulated",
                    "imageID": "simulated",
                }
                for container in pod["spec"]["containers"]
            ],
        }

    async def _send(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: Mapping[str, object],
        *,
        method: str = "PATCH",
    ) -> None:
        headers = _MERGE if method == "PATCH" else {"Content-Type": "application/json"}
        data = json.dumps(body)
        url = self.api.server + path
        async with session.request(method, url, data=data, headers=headers) as answer:
            if answer.status >= 400 and answer.status not in (404, 409):
                raise ApiError(f"{method} {path}", answer.status, "", await answer.text())


@contextlib.asynccontextmanager
async def serving_logs(fleet: SimulatedFleet, folder: Path) -> AsyncIterator[None]:
    """One HTTPS server for all nodes, of an authority that nobody knows: kubelets are like that."""
    authority = Authority.make("kubelets", datetime.now(UTC))
    issued = authority.issue("kubelet", datetime.now(UTC), hosts=["127.0.0.1"], use=Use.BOTH)
    pair = folder / "kubelet.pem"
    pair.write_bytes(issued.key + issued.certificate)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair)
    application = web.Application()
    application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", fleet.log)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        fleet.log_port = runner.addresses[0][1]
        yield
    finally:
        await runner.cleanup()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
