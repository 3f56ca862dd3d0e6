"""A pool that really runs, seen through a control plane whose nodes are fakes.

What workers do, the coordinator and the agents are real processes of this machine; the coordinator
is reached over a Unix socket. `world` is a fixture that modules of tests/operator share by name.
"""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pool import Pool, running_pool, write_items

from fake_node import FakeNode, Process, run_nodes, serving_logs
from operator_processes import Operators, RunningOperator, wait_until
from real_models import MODELS, find
from shoal_cluster import ControlPlane
from shoal_operator.controller.api import Api
from shoal_operator.controller.login import log_in
from shoal_operator.controller.telemetry import Telemetry

MODEL = "ppocr_cls"
ITEMS = 24
DEVICES = ("one", "two", "three")
NAMESPACE = "jobs"
MEMORY = "48Mi"
API = "shoal.dev/v1alpha1"


@dataclass(frozen=True, slots=True)
class World:
    """Everything that a job needs."""

    plane: ControlPlane
    pool: Pool
    claims: Path
    memory: str = MEMORY

    def get(self, kind: str, name: str) -> Any:
        return self.plane.access.get(kind, name, f"--namespace={NAMESPACE}")

    def condition(self, kind: str, name: str, type_: str) -> dict[str, Any]:
        conditions = self.get(kind, name).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == type_), {})

    def holds(self, kind: str, name: str, type_: str) -> bool:
        return bool(self.condition(kind, name, type_).get("status") == "True")

    async def wait(self, kind: str, name: str, type_: str, seconds: float = 240.0) -> None:
        """Until a condition holds; on failure it says what the object says."""
        try:
            await asyncio.to_thread(
                wait_until, type_, lambda: self.holds(kind, name, type_), seconds
            )
        except TimeoutError as error:
            status = self.get(kind, name).get("status")
            raise AssertionError(f"{kind} {name}: {type_}: {status}") from error

    def apply(self, kind: str, name: str, **spec: object) -> None:
        manifest = {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.plane.access.apply(manifest, namespace=NAMESPACE)

    def apply_pool(self) -> None:
        """What every job refers to."""
        shapes = [
            {"input": name, "shape": list(shape)} for name, shape in MODELS[MODEL].shapes().items()
        ]
        self.apply("Model", "m", source={"uri": "pvc://models/m.onnx"}, shapes=shapes)
        self.apply_devices()

    def apply_devices(self) -> None:
        labels, budget = {"shoal.dev/pool": "shelf"}, {"memory": self.memory}
        self.apply("DevicePool", "shelf", nodeSelector=labels, budget=budget)

    def patch(self, kind: str, name: str, **spec: object) -> None:
        """Edit an object's spec as a person would."""
        text = json.dumps({"spec": spec})
        self.kubectl("patch", kind, name, "--type=merge", f"--patch={text}")

    def kubectl(self, *arguments: str) -> str:
        """In the namespace of the jobs."""
        return self.plane.kubectl(f"--namespace={NAMESPACE}", *arguments)

    async def until(self, what: str, true: Callable[[], bool], seconds: float = 240.0) -> None:
        """Until something is so."""
        await asyncio.to_thread(wait_until, what, true, seconds)


@contextlib.asynccontextmanager
async def making_world(
    plane: ControlPlane,
    folder: Path,
    memory: str = MEMORY,
    *,
    latency_milliseconds: int = 0,
    **unequal: str,
) -> AsyncIterator[World]:
    """Model, inputs, claims, nodes and the pool, of devices with so much memory, those in `unequal`
    with another, whose links have a latency; no operator."""
    claims = folder / "claims"
    (claims / "models").mkdir(parents=True)
    shutil.copy(find(MODEL), claims / "models" / "m.onnx")
    inputs = [MODELS[MODEL].inputs(seed) for seed in range(ITEMS)]
    write_items(claims / "lines" / "in", inputs)
    plane.kubectl("create", "namespace", NAMESPACE)
    make_claims(plane)
    telemetry = Telemetry(asyncio.get_running_loop().time)
    api = Api(await log_in(plane.kubeconfig), telemetry, namespace=NAMESPACE)
    slow = {"link": {"latencyMilliseconds": latency_milliseconds}} if latency_milliseconds else {}
    devices = [{"name": name, "memory": unequal.get(name, memory), **slow} for name in DEVICES]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(api.close)
        running = running_pool(folder / "pool", devices, cgroups=False)
        pool = await stack.enter_async_context(running)
        target = pool.workspace.socket("bench.c")

        def rewrite(command: Sequence[str]) -> Process:
            return as_process(command, target, claims, folder)

        labels = {"shoal.dev/pool": "shelf", "kubernetes.io/arch": "amd64"}
        nodes = [FakeNode(api, plane, name, labels, rewrite) for name in DEVICES]
        async with serving_logs(nodes, folder):
            nodes_running = asyncio.create_task(run_nodes(api, nodes))
            try:
                yield World(plane, pool, claims, memory)
            finally:
                nodes_running.cancel()
                await asyncio.gather(nodes_running, return_exceptions=True)


@contextlib.contextmanager
def operating(running: Operators, world: World) -> Iterator[RunningOperator]:
    """An operator that reaches the pool's coordinator."""
    target = world.pool.workspace.socket("bench.c")
    operator = running.start("--coordinator", f"{NAMESPACE}/shelf={target}")
    operator.wait_until_leading()
    yield operator


def as_process(command: Sequence[str], target: str, claims: Path, folder: Path) -> Process:
    """A worker's command, with the coordinator and the claims of this machine."""
    words = [
        word.replace(f"shelf-coordinator.{NAMESPACE}.svc:7400", target).replace(
            "/volumes/", f"{claims}/"
        )
        for word in command
    ]
    assert words[0] == "shoal", command
    for option in ("--tls-ca", "--tls-certificate", "--tls-key"):
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "TMPDIR": str(folder)}
    return Process(words[1:], environment)


def make_claims(plane: ControlPlane) -> None:
    """Claims and volumes for them; nothing mounts them, but the scheduler wants to see them."""
    modes, capacity = ["ReadWriteOnce"], {"storage": "5Gi"}
    for name in ("models", "lines", "shelf-coordinator"):
        volume = {
            "accessModes": modes,
            "capacity": capacity,
            "hostPath": {"path": "/nowhere"},
            "claimRef": {"namespace": NAMESPACE, "name": name},
        }
        manifests: list[dict[str, object]] = [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name},
                "spec": volume,
            }
        ]
        if name != "shelf-coordinator":
            claim = {
                "accessModes": modes,
                "resources": {"requests": {"storage": "1Gi"}},
                "volumeName": name,
                "storageClassName": "",
            }
            manifests.append(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": name},
                    "spec": claim,
                }
            )
        plane.access.apply(*manifests, namespace=NAMESPACE)
    # The scheduler lets a pod wait for long that it saw before the pod's claims were bound.
    bound = ("--for=jsonpath={.status.phase}=Bound", "pvc/models", "pvc/lines")
    plane.kubectl("wait", f"--namespace={NAMESPACE}", *bound, "--timeout=60s")


def job_spec(**more: object) -> dict[str, object]:
    return {
        "modelRef": {"name": "m"},
        "poolRef": {"name": "shelf"},
        "inputs": {"uri": "pvc://lines/in"},
        "outputs": {"uri": "pvc://lines/out"},
    } | more
