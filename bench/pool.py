"""A real pool on this machine for benches and tests: the same processes that `shoal run` starts.

A coordinator and agents run as supervised processes; models are cut into the pool's store and jobs
are submitted by code, so that one pool serves many jobs.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from secured_pool import SecuredRun

from shoal_api.kinds import DevicePool
from shoal_api.schema import API_VERSION, parse
from shoal_cli.local.cgroups import Unavailable, open_groups
from shoal_cli.local.orders import planned_devices
from shoal_cli.local.pool import PoolRun, RunOptions
from shoal_cli.local.speeds import machine_speed
from shoal_cli.local.supervisor import Supervisor
from shoal_cli.local.workspace import Workspace, open_workspace
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts
from shoal_planner.devices import PoolDevice
from shoal_protocol.channels import open_channel
from shoal_protocol.coordinator_client import ENDED, CallFailed, CoordinatorClient
from shoal_protocol.partition import PartitionDocument, document_to_json
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import coordinator_pb2 as pb

CALL_SECONDS = 30.0
TASK_SECONDS = 540.0


def cut(
    path: Path,
    store: Path,
    how: int | tuple[str, ...],
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> PartitionDocument:
    """Cut a model into so many fragments, or after these tensors, in this process."""
    profile = profile_model(path, shapes)
    request = CutRequest(fragments=how) if isinstance(how, int) else CutRequest(tensors=how)
    cuts = choose_cuts(profile, request)
    if isinstance(cuts, Refusal):
        raise AssertionError(f"{path}: {cuts.reason}")
    return cut_model(path, profile, cuts, store)


def write_items(folder: Path, items: Sequence[Mapping[str, np.ndarray]]) -> Path:
    """One `.npz` per item, named so that name order is item order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, item in enumerate(items):
        plain = {n: v.astype(np.str_) if v.dtype.kind == "O" else v for n, v in item.items()}
        # NumPy's stubs take any keyword for the flag that allows pickles.
        np.savez(folder / f"{number:05}.npz", **dict[str, Any](plain))
    return folder


def read_results(folder: Path) -> list[dict[str, np.ndarray]]:
    """The results of `write_items`, in its order."""
    results = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as stored:
            results.append(dict(stored))
    return results


class Pool:
    """A running pool. `run` puts one job through it."""

    def __init__(self, workspace: Workspace, processes: PoolRun, supervisor: Supervisor) -> None:
        self.workspace = workspace
        self.store = workspace.store
        self._processes = processes
        self._supervisor = supervisor
        self.target = processes.target
        self.client = CoordinatorClient(self.open_channel(), seconds=CALL_SECONDS, wait=True)

    def open_channel(self) -> grpc.aio.Channel:
        """To the coordinator."""
        run = self._processes
        return open_channel(self.target, run.credentials if isinstance(run, SecuredRun) else None)

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self._processes.devices)

    async def end_devices(self) -> None:
        """End all agents; nothing starts them again."""
        run = self._processes
        await self._supervisor.stop([run.label(name) for name in self.device_names])

    async def start_device(self, name: str, budget_bytes: int) -> None:
        """Start an agent that was ended, with another budget."""
        number = self.device_names.index(name)
        device = replace(self._processes.devices[number], memory=Bytes(budget_bytes))
        await self._processes.start_agent(device, number)

    async def submit(  # noqa: PLR0913 - the parts of one job
        self,
        name: str,
        document: PartitionDocument,
        inputs: Path,
        outputs: Path,
        *,
        homes: Sequence[Sequence[str]] = (),
        grants: Sequence[Sequence[int]] = (),
        mode: "pb.Mode" = pb.STREAMING,
        policy: "pb.Policy" = pb.FIFO,
        priority: int = 0,
        parallelism: int = 0,
    ) -> None:
        """Give the coordinator a job; the call is repeated until the coordinator is there.
        `homes` and `grants`: per fragment its devices, and what each of them grants it."""
        request = pb.SubmitJobRequest(
            name=name,
            partition=document_to_json(document).encode(),
            stages=[
                pb.StagePlacement(devices=devices, granted_bytes=granted)
                for devices, granted in zip_longest(homes, grants, fillvalue=())
            ],
            epoch=1,
            inputs_uri=str(inputs),
            outputs_uri=str(outputs),
            mode=mode,
            policy=policy,
            priority=priority,
            backoff_limit=3,
            parallelism=parallelism,
        )
        await self.client.submit(request)

    async def status(self, name: str) -> pb.JobStatus:
        """The job's status now."""
        async for status in self.client.watch(name, 0.05, seconds=CALL_SECONDS):
            return status
        raise AssertionError(f"no status of {name}")

    async def finish(self, name: str, seconds: float = 120.0) -> pb.JobStatus:
        """Wait for the end of a job, over restarts of the coordinator."""
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(CallFailed):
                    async for status in self.client.watch(name, 0.05, seconds=seconds):
                        if status.state in ENDED:
                            return status
                await asyncio.sleep(0.05)

    async def run(
        self, name: str, document: PartitionDocument, inputs: Path, outputs: Path, **how: Any
    ) -> pb.JobStatus:
        """Submit a job and wait for its end."""
        await self.submit(name, document, inputs, outputs, **how)
        return await self.finish(name)

    async def devices(self) -> dict[str, pb.DeviceStatus]:
        """What the coordinator reports of each device."""
        return {device.name: device for device in await self.client.devices()}

    def planned_devices(self) -> tuple[PoolDevice, ...]:
        """The devices as planning sees them, on this machine as it was measured."""
        return planned_devices(self._processes.pool, machine_speed())

    def process_id(self, name: str) -> int:
        """Of a device's agent, or of `coordinator`."""
        number = self._supervisor.process_id(name)
        assert number is not None, f"{name} does not run"
        return number

    def restarts(self, name: str) -> int:
        """How often the supervisor started a process again."""
        return self._supervisor.restarts(name)

    def kill(self, name: str) -> None:
        """`kill -9` an agent or `coordinator`; the supervisor starts it again."""
        os.kill(self.process_id(name), signal.SIGKILL)

    async def restart(self, name: str) -> None:
        """`kill -9` an agent, and wait until its successor has a session."""
        self.kill(name)
        async with asyncio.timeout(60):
            while (await self.devices())[name].state == pb.DeviceStatus.READY:
                await asyncio.sleep(0.02)
        await self.ready()

    async def ready(self) -> None:
        """Until every device has a session."""
        async with asyncio.timeout(60):
            while True:
                known = await self.devices()
                if all(
                    name in known and known[name].state == pb.DeviceStatus.READY
                    for name in self.device_names
                ):
                    return
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self.client.close()


@contextlib.asynccontextmanager
async def running_pool(  # noqa: PLR0913 - what a pool has
    folder: Path,
    devices: Sequence[Mapping[str, object]],
    *,
    residency: str = "Adaptive",
    relay: bool = False,
    cgroups: bool = True,
    cache_size: str = "16Gi",
    log_level: str = "warning",
    secured: bool = False,
) -> AsyncIterator[Pool]:
    """Start a pool in `folder`; it is gone afterwards, its files are not.

    `devices` are those of a DevicePool's `spec.local`. With `cgroups`, memory limits and processor
    shares are held by the kernel where the machine allows it. `secured`: the processes talk over
    ports with mutual TLS.
    """
    spec = {
        "local": {"devices": list(devices)},
        "budget": {"memory": devices[0]["memory"]},
        "cache": {"size": cache_size},
        "residency": residency,
    }
    metadata = {"name": "bench"}
    kind = parse(
        DevicePool,
        {"apiVersion": API_VERSION, "kind": "DevicePool", "metadata": metadata, "spec": spec},
    )
    assert isinstance(kind, DevicePool), f"{kind}"
    with open_workspace(folder) as workspace:
        opened = open_groups(workspace.run) if cgroups else None
        groups = None if isinstance(opened, Unavailable) else opened
        supervisor = Supervisor(lambda death: None)
        processes = (SecuredRun if secured else PoolRun)(
            pool=kind,
            workspace=workspace,
            supervisor=supervisor,
            groups=groups,
            options=RunOptions(relay=relay, log_level=log_level, task_seconds=TASK_SECONDS),
        )
        pool = Pool(workspace, processes, supervisor)
        try:
            await processes.start()
            await processes.wait_for_sessions(lambda note: None)
            yield pool
        finally:
            await pool.close()
            await supervisor.stop()
            await processes.close()
            if groups is not None:
                groups.remove()
