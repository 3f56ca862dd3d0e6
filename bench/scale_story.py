"""What `operator_scale` measures: a pool, its jobs from apply to Complete, rest, and a restart."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from measurement import VALUE, Measurement, Report
from scale_figures import Sample, latency, quantile, sample, what_was_written
from simulated_coordinator import MIB, SimulatedCoordinator, Work, serving
from simulated_fleet import SimulatedFleet, serving_logs
from zoo.materialise import materialise

from operator_processes import Operators, RunningOperator, operators, prepare
from shoal_cluster import ControlPlane
from shoal_cluster.control_plane import ApiWrite
from shoal_operator.controller.api import Api
from shoal_operator.controller.login import log_in
from shoal_operator.controller.telemetry import Telemetry

MODEL: Final = "squeezenet1_1"
SHAPE: Final = ("--shape", "image=1,3,224,224")
"""Without it no time is predicted."""
FRAGMENTS: Final = 3
PATIENCE_SECONDS: Final = 86_400
"""Simulated nodes never say again that they are there."""
NAMESPACE: Final = "scale"
API: Final = "shoal.dev/v1alpha1"
ACCOUNT: Final = "system:serviceaccount:shoal-system:shoal-operator"
# A job that names a Partition has a Placement and two workers of its own. What is
# reported: its plan, and how fast it was in the end; transferring inputs, running, transferring
# results, complete; and three Events.
LEAST_WRITES: Final = 3 + 2 + 4 + 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of everything."""

    jobs: int
    devices: int
    work: Work
    idle_seconds: float


FULL = Size(jobs=1000, devices=200, work=Work(), idle_seconds=40)
QUICK = Size(jobs=20, devices=10, work=Work(seconds=2.0), idle_seconds=3)


@dataclass(frozen=True, slots=True)
class Answers:
    """What workers print about the model."""

    inspection: bytes
    document: bytes

    @property
    def fragments(self) -> tuple[str, ...]:
        """Digests of the fragments."""
        return tuple(each["digest"] for each in json.loads(self.document)["fragments"])


# ---- what is there -------------------------------------------------------------------------------


def answers(folder: Path) -> Answers:
    """Inspect and cut a real model, as workers would."""
    model = materialise(MODEL, folder)
    shoal = (sys.executable, "-m", "shoal_cli")

    def run(*arguments: str) -> bytes:
        done = subprocess.run((*shoal, *arguments), capture_output=True, check=True)
        return done.stdout

    return Answers(
        inspection=run("inspect", str(model), "--json", *SHAPE),
        document=run("partition", str(model), "--document", "--fragments", str(FRAGMENTS), *SHAPE),
    )


def manifest(kind: str, name: str, **spec: object) -> dict[str, object]:
    """One of our objects."""
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}


def volume() -> dict[str, object]:
    """What the coordinator's claim is bound to; nothing mounts it."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "shelf"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "5Gi"},
            "hostPath": {"path": "/nowhere"},
            "claimRef": {"namespace": NAMESPACE, "name": "shelf-coordinator"},
        },
    }


def job(name: str) -> dict[str, object]:
    """One of the many."""
    return manifest(
        "InferenceJob",
        name,
        partitionRef={"name": "m-3"},
        poolRef={"name": "shelf"},
        inputs={"uri": f"s3://lines/{name}/in"},
        outputs={"uri": f"s3://lines/{name}/out"},
    )


# ---- the story -----------------------------------------------------------------------------------


class Bench:
    """One control plane, with everything that a job needs."""

    def __init__(
        self, plane: ControlPlane, started: Operators, target: str, size: Size, report: Report
    ) -> None:
        self._plane = plane
        self._operators = started
        self._target = target
        self._size = size
        self._report = report

    async def run(self) -> None:
        """The whole story, a part after the other."""
        operator = await self._start()
        empty = sample(operator)
        await self._pool(operator)
        await self._jobs(operator, empty)
        await self._idle(operator)
        await self._restart(operator)

    async def _start(self) -> RunningOperator:
        operator = self._operators.start("--coordinator", f"{NAMESPACE}/shelf={self._target}")
        await asyncio.to_thread(operator.wait_until_leading)
        return operator

    async def _pool(self, operator: RunningOperator) -> None:
        """The pool, all its Devices, and the Partition of the model."""
        before, start, devices = len(self._writes()), time.monotonic(), self._size.devices
        await self._apply(*shelf())
        await self._wait("partition/m-3", "Ready")
        await self._wait("devicepool/shelf", "Ready")
        await _until(lambda: operator.metric("shoal_operator_objects", kind="Device") == devices)
        await self._wait("devices", "Ready", "--all")
        seconds = time.monotonic() - start
        writes = [each for each in self._writes()[before:] if each.resource == "devices"]
        self._add(f"pool of {devices} Devices: ready", seconds, "s")
        # Its object, and its status.
        self._add("writes per Device", len(writes) / devices, "", peer=2.0)

    async def _jobs(self, operator: RunningOperator, empty: Sample) -> None:
        jobs, before = self._size.jobs, sample(operator)
        mark, start = len(self._all_writes()), time.monotonic()
        names = [f"job-{number:04}" for number in range(jobs)]
        for first in range(0, jobs, 100):
            await self._apply(*(job(name) for name in names[first : first + 100]))
        applied = time.monotonic() - start
        await self._until_complete(jobs)
        seconds = time.monotonic() - start
        after = sample(operator)
        everyone = self._all_writes()[mark:]
        writes = [each for each in everyone if each.user == ACCOUNT and each.resource != "leases"]
        others = [each for each in everyone if each.user != ACCOUNT]
        self._report.note(what_was_written(writes, jobs))
        self._report.note(f"applied within {applied:.1f} s; {len(others)} writes of others")
        self._add(f"{jobs} jobs: all Complete", seconds, "s")
        self._add("API writes per job", len(writes) / jobs, "", peer=float(LEAST_WRITES))
        for percent in (50, 99):
            took, peer = quantile(before, after, percent / 100), latency(writes, percent)
            self._add(f"reconcile p{percent}, against a write of it", took, "s", peer=peer)
        compared = operator.metric("shoal_operator_plan_rate_ratio_count")
        self._add("measured rates compared with plans, per job", compared / jobs, "", peer=1.0)
        reconciles = {
            kind: after.reconciles[kind] - before.reconciles.get(kind, 0.0)
            for kind in after.reconciles
        }
        self._report.note(f"reconciles: {reconciles}")
        self._add("reconciles per job", sum(reconciles.values()) / jobs, "")
        used = after.processor_seconds - before.processor_seconds
        self._add("operator's processor time per job", used / jobs, "s")
        self._add("operator's memory, at most", after.peak_bytes / MIB, "MiB", goal=VALUE <= 256)
        size = await self._size_of_objects()
        grown = after.resident_bytes - empty.resident_bytes
        self._add(
            "memory that it grew by, against its objects as JSON",
            grown / MIB,
            "MiB",
            peer=size / MIB,
        )

    async def _idle(self, operator: RunningOperator) -> None:
        """All is done: nothing is to be written, and next to nothing to be done."""
        # Workers that have served their time are still being taken away.
        await asyncio.sleep(2)
        before, mark = sample(operator), len(self._writes())
        await asyncio.sleep(self._size.idle_seconds)
        after = sample(operator)
        share = (after.processor_seconds - before.processor_seconds) / (after.at - before.at)
        writes = self._writes()[mark:]
        self._report.note(what_was_written(writes, 1))
        self._add("idle: processor", 100 * share, "%")
        self._add("idle: writes per minute", 60 * len(writes) / (after.at - before.at), "")

    async def _restart(self, operator: RunningOperator) -> None:
        """A new operator has to see everything once, and to write nothing."""
        assert operator.stop() == 0, "it did not end well"
        mark, start = len(self._writes()), time.monotonic()
        second = await self._start()
        reconciles = self._size.jobs * 2
        await _until(
            lambda: (
                sum(sample(second).reconciles.values()) >= reconciles
                and second.metric("shoal_operator_queue_depth") == 0
            )
        )
        after = sample(second)
        self._add("restart: everything reconciled again", time.monotonic() - start, "s")
        self._add("restart: processor time", after.processor_seconds, "s")
        writes = self._writes()[mark:]
        self._report.note(what_was_written(writes, 1))
        self._add("restart: writes", float(len(writes)), "")
        self._add("restart: memory", after.peak_bytes / MIB, "MiB")

    # ---- how ---------------------------------------------------------------------------------

    def _add(self, name: str, value: float, unit: str, **more: Any) -> None:
        peer = more.get("peer")
        ratio = value / peer if peer else None
        self._report.add(Measurement(name=name, value=value, unit=unit, ratio=ratio, **more))

    async def _apply(self, *manifests: dict[str, object]) -> None:
        await asyncio.to_thread(self._plane.access.apply, *manifests, namespace=NAMESPACE)

    async def _wait(self, what: str, condition: str, *more: str) -> None:
        await asyncio.to_thread(
            self._plane.kubectl,
            *("wait", f"--for=condition={condition}", what, f"--namespace={NAMESPACE}", *more),
            "--timeout=300s",
            seconds=310,
        )

    async def _until_complete(self, jobs: int) -> None:
        """Until all have ended; what failed is an error."""

        def conditions() -> Counter[str]:
            path = '{range .items[*]}{.status.conditions[?(@.status=="True")].type}{"\\n"}{end}'
            said = self._plane.kubectl(
                *("get", "inferencejobs", f"--namespace={NAMESPACE}"), f"--output=jsonpath={path}"
            )
            return Counter(word for line in said.splitlines() for word in line.split())

        while True:
            known = await asyncio.to_thread(conditions)
            assert not known["Failed"], f"{known['Failed']} jobs failed"
            if known["Complete"] == jobs:
                return
            await asyncio.sleep(1)

    def _all_writes(self) -> list[ApiWrite]:
        return self._plane.api_writes()

    def _writes(self) -> list[ApiWrite]:
        """Of the operator, but for the Lease."""
        return [
            each
            for each in self._all_writes()
            if each.user == ACCOUNT and each.resource != "leases"
        ]

    async def _size_of_objects(self) -> int:
        kinds = "inferencejobs,placements,partitions,models,devicepools,devices,jobs,deployments"
        listed = await asyncio.to_thread(
            self._plane.kubectl,
            *("get", f"{kinds},daemonsets", f"--namespace={NAMESPACE}", "--output=json"),
        )
        return len(json.dumps(json.loads(listed), separators=(",", ":")))


async def _until(true: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(true):
        await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What is simulated beside a real control plane. `account`: the operator's kubeconfig;
    `target`: where the coordinator of the pool is dialled.
    """

    account: Path
    target: str
    coordinator: SimulatedCoordinator
    model: Answers


@contextlib.asynccontextmanager
async def simulating(plane: ControlPlane, size: Size, folder: Path) -> AsyncIterator[Simulated]:
    """Nodes and a coordinator, and a namespace for everything else."""
    said = answers(folder)
    devices = tuple(f"node-{number:03}" for number in range(size.devices))
    coordinator = SimulatedCoordinator(
        devices=devices, fragments=said.fragments, budget_bytes=64 * MIB, work=size.work
    )
    account = prepare(plane)
    plane.kubectl("create", "namespace", NAMESPACE)
    plane.access.apply(volume())
    telemetry = Telemetry(asyncio.get_running_loop().time)
    api = Api(await log_in(plane.kubeconfig), telemetry, namespace=NAMESPACE)
    outputs = {"inspect": said.inspection, "cut": said.document}
    fleet = SimulatedFleet(api, devices, {"shoal.dev/pool": "shelf"}, outputs)
    async with (
        serving(coordinator, folder / "coordinator.sock") as target,
        serving_logs(fleet, folder),
        contextlib.AsyncExitStack() as stack,
        # Nodes that end by themselves end everything: nothing would move without them.
        asyncio.TaskGroup() as group,
    ):
        stack.push_async_callback(api.close)
        there = asyncio.Event()
        task = group.create_task(fleet.run(there))
        await there.wait()
        try:
            yield Simulated(account, target, coordinator, said)
        finally:
            task.cancel()


def shelf() -> tuple[dict[str, object], ...]:
    """The pool, the model, and the model cut: what every job refers to."""
    budget = {"memory": "64Mi"}
    return (
        manifest("DevicePool", "shelf", nodeSelector={"shoal.dev/pool": "shelf"}, budget=budget),
        manifest("Model", "m", source={"uri": "s3://models/m.onnx"}),
        manifest("Partition", "m-3", modelRef={"name": "m"}, fragments=FRAGMENTS),
    )


async def measure(report: Report, size: Size, folder: Path) -> None:
    """Start everything, and tell the story."""
    with ControlPlane(audit=True, node_grace_seconds=PATIENCE_SECONDS) as plane:
        async with simulating(plane, size, folder) as simulated:
            with operators(folder, simulated.account) as started:
                await Bench(plane, started, simulated.target, size, report).run()
