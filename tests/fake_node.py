"""A fake node: pods are taken to be running as a kubelet would say, workers really run.

For tests that have a control plane and no nodes. The node is an object with a heartbeat; the
scheduler puts pods on it. Of a `batch/v1` Job the container's `shoal` is run as a process on this
machine (`rewrite` says how); its status and output become the pod's, and its log is served as a
kubelet serves it, so that whoever reads it through the API server does so for real. Every other pod
is Running and ready as long as it is there, with the resources that its spec names now.
"""

import asyncio
import contextlib
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web

import forked
from shoal_cluster import ControlPlane
from shoal_operator.controller.api import Api, ApiError, Json
from shoal_operator.controller.foreign import Raw
from shoal_operator.reconcile.resources import NODE, POD
from shoal_protocol.pki.authority import Authority, Use

LAST_WORDS = 4096
BEAT_SECONDS = 5.0
GRACE_SECONDS = 120
"""How long a control plane is to wait for a beat: they come late from a process that has much else
to do, on a machine that is busy."""
POLL_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class Process:
    """What to give `shoal` in the place of a container's arguments, and its environment."""

    arguments: Sequence[str]
    environment: dict[str, str]


Rewrite = Callable[[Sequence[str]], Process]


class FakeNode:
    """One node; `log_port` is where its log server listens."""

    def __init__(
        self,
        api: Api,
        plane: ControlPlane,
        name: str,
        labels: dict[str, str],
        rewrite: Rewrite,
    ) -> None:
        self.name = name
        self._api = api
        self._plane = plane
        self._labels = labels
        self._rewrite = rewrite
        self._logs: dict[tuple[str, str], bytes] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._released: set[str] = set()
        self.log_port = 0

    async def beat(self) -> None:
        """Be a node that is ready, until cancelled."""
        await self._api.apply(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": self.name, "labels": self._labels},
            }
        )
        while True:
            await self._show_ready()
            await asyncio.sleep(BEAT_SECONDS)

    def observe(self, document: Json, group: asyncio.TaskGroup) -> None:
        """Do what a pod of this node asks for, as a task of `group`."""
        metadata = Raw(document).table("metadata")
        uid = metadata.text("uid")
        if metadata.text("deletionTimestamp"):
            if uid not in self._released:
                self._released.add(uid)
                group.create_task(self._let_go(document))
        elif uid not in self._running:
            self._running[uid] = group.create_task(self._run(document))
        elif _was_given_up(document) or _was_resized(document):
            group.create_task(self._show_running(document))

    async def log(self, request: web.Request) -> web.Response:
        """`/containerLogs/NAMESPACE/POD/CONTAINER`, as a kubelet serves it."""
        key = (request.match_info["namespace"], request.match_info["pod"])
        if key not in self._logs:
            raise web.HTTPNotFound(text="no such pod here")
        return web.Response(body=self._logs[key], content_type="text/plain")

    async def _show_ready(self) -> None:
        memory = {"cpu": "4", "memory": "8Gi", "pods": "110"}
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "fake",
            "lastHeartbeatTime": _now(),
        }
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.log_port}},
            "conditions": [condition],
            "capacity": memory,
            "allocatable": memory,
            "nodeInfo": {"architecture": "amd64"},
        }
        await self._status(NODE.api_version, NODE.kind, self.name, "", status)

    async def _let_go(self, document: Json) -> None:
        """A kubelet has the last word on a pod that is deleted."""
        metadata = Raw(document).table("metadata")
        task = self._running.get(metadata.text("uid"))
        if task is not None:
            task.cancel()
        place = (metadata.text("name"), f"--namespace={metadata.text('namespace')}")
        await asyncio.to_thread(
            self._plane.kubectl,
            *("delete", "pod", *place, "--force", "--grace-period=0", "--ignore-not-found"),
        )

    async def _run(self, document: Json) -> None:
        pod = Raw(document)
        metadata = pod.table("metadata")
        namespace, name = metadata.text("namespace"), metadata.text("name")
        containers = pod.table("spec").items("containers")
        await self._show_running(document)
        with contextlib.suppress(ApiError):
            if "batch.kubernetes.io/job-name" not in metadata.table("labels").value:
                return
            command = containers[0].value["command"]
            assert isinstance(command, list)
            status, output = await self._work(self._rewrite(command))
            self._logs[namespace, name] = output
            ended = {
                "exitCode": status,
                "reason": "Error" if status else "Completed",
                "message": output[-LAST_WORDS:].decode(errors="replace") if status else "",
                "finishedAt": _now(),
            }
            phase = "Failed" if status else "Succeeded"
            state = {"terminated": ended}
            await self._pod_status(namespace, name, phase, containers, state, ready=False)

    async def _show_running(self, document: Json) -> None:
        pod = Raw(document)
        metadata = pod.table("metadata")
        containers = pod.table("spec").items("containers")
        running = {"running": {"startedAt": _now()}}
        place = (metadata.text("namespace"), metadata.text("name"))
        with contextlib.suppress(ApiError):
            await self._pod_status(*place, "Running", containers, running, ready=True)

    async def _work(self, work: Process) -> tuple[int, bytes]:
        with tempfile.NamedTemporaryFile() as output:
            process = forked.start("shoal", work.arguments, Path(output.name), work.environment)
            try:
                await _readable(process.sentinel)
            except asyncio.CancelledError:
                process.kill()
                raise
            finally:
                process.join()
            assert process.exitcode is not None
            return process.exitcode, output.read()

    async def _pod_status(
        self,
        namespace: str,
        name: str,
        phase: str,
        containers: Sequence[Raw],
        state: Mapping[str, object],
        *,
        ready: bool,
    ) -> None:
        conditions = [{"type": each, "status": str(ready)} for each in ("Ready", "ContainersReady")]
        statuses = [
            {
                "name": each.text("name"),
                "resources": each.table("resources").value,
                "state": state,
                "ready": ready,
                "restartCount": 0,
                "image": "fake",
                "imageID": "fake",
            }
            for each in containers
        ]
        status = {"phase": phase, "conditions": conditions, "containerStatuses": statuses}
        await self._status(POD.api_version, POD.kind, name, namespace, status)

    async def _status(
        self, api_version: str, kind: str, name: str, namespace: str, status: Mapping[str, object]
    ) -> None:
        metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
        await self._api.apply(
            {"apiVersion": api_version, "kind": kind, "metadata": metadata, "status": status},
            "status",
        )


async def run_nodes(api: Api, nodes: Sequence[FakeNode]) -> None:
    """Be these nodes until cancelled; one list of the pods serves all of them."""
    named = {node.name: node for node in nodes}
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(node.beat())
        while True:
            with contextlib.suppress(ApiError):
                async for document in api.list(POD):
                    found = named.get(Raw(document).table("spec").text("nodeName"))
                    if found is not None:
                        found.observe(document, group)
            await asyncio.sleep(POLL_SECONDS)


@contextlib.asynccontextmanager
async def serving_logs(nodes: Sequence[FakeNode], folder: Path) -> AsyncIterator[None]:
    """One HTTPS server per node, of an authority that nobody knows: kubelets are like that."""
    authority = Authority.make("kubelets", datetime.now(UTC))
    issued = authority.issue("kubelet", datetime.now(UTC), hosts=["127.0.0.1"], use=Use.BOTH)
    pair = folder / "kubelet.pem"
    pair.write_bytes(issued.key + issued.certificate)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair)
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            application = web.Application()
            path = "/containerLogs/{namespace}/{pod}/{container}"
            application.router.add_get(path, node.log)
            runner = web.AppRunner(application)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
            await site.start()
            node.log_port = runner.addresses[0][1]
        yield


async def _readable(descriptor: int) -> None:
    """Return once there is something to read from it."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _was_given_up(document: Json) -> bool:
    """Whether a pod that runs was taken for dead because its node was late; a kubelet says then
    that it is ready.
    """
    pod = Raw(document)
    ready = pod.condition("Ready").text("status")
    return pod.table("status").text("phase") == "Running" and ready == "False"


def _was_resized(document: Json) -> bool:
    """Whether a pod that runs is to have other resources than it has."""
    pod = Raw(document)
    wanted = [each.table("resources") for each in pod.table("spec").items("containers")]
    status = pod.table("status")
    given = [each.table("resources") for each in status.items("containerStatuses")]
    return status.text("phase") == "Running" and given != wanted


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
