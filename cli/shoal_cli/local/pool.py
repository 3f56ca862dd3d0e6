"""One pool on this machine: a coordinator and an agent per device, as supervised processes."""

import asyncio
import contextlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

from shoal_api.kinds import DevicePool
from shoal_api.kinds.device_pool import LocalDevice
from shoal_cli.local.cgroups import DeviceGroup, RunGroups
from shoal_cli.local.observer import Snapshot
from shoal_cli.local.orders import JobOrder
from shoal_cli.local.preparation import Prepared
from shoal_cli.local.supervisor import ProcessSpec, Supervisor, tail
from shoal_cli.local.watch import Watch
from shoal_cli.local.workspace import Workspace
from shoal_protocol.channels import open_channel
from shoal_protocol.choices import Mode, Policy, Precision
from shoal_protocol.partition import document_to_json
from shoal_protocol.units import format_bytes
from shoal_protocol.v1 import coordinator_pb2 as pb

SESSIONS_SECONDS: Final = 60.0
TELEMETRY_SECONDS: Final = 0.5
_MODES: Final = {Mode.STREAMING: pb.STREAMING, Mode.BARRIER: pb.BARRIER}
_POLICIES: Final = {
    Policy.FIFO: pb.FIFO,
    Policy.LEAST_LOADED: pb.LEAST_LOADED,
    Policy.EDAS: pb.EDAS,
    Policy.ARAS: pb.ARAS,
    Policy.MABAC: pb.MABAC,
}


class AgentsMissing(Exception):
    """Agents that opened no session in time."""

    def __init__(self, names: Sequence[str], log: Path) -> None:
        """`log` is the first one's."""
        self.names = tuple(names)
        super().__init__(
            f"no session from {', '.join(names)} within {SESSIONS_SECONDS:g} s; "
            f"the end of {log}:\n{tail(log)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job that is ready to be submitted. `homes` are the plan's devices per stage, best first."""

    order: JobOrder
    prepared: Prepared
    homes: tuple[tuple[str, ...], ...]

    def request(self) -> pb.SubmitJobRequest:
        """As the coordinator takes it."""
        spec = self.order.job.spec
        return pb.SubmitJobRequest(
            name=self.order.name,
            partition=document_to_json(self.prepared.document).encode(),
            stages=[pb.StagePlacement(devices=devices) for devices in self.homes],
            epoch=1,
            inputs_uri=str(self.order.inputs),
            outputs_uri=str(self.order.outputs),
            mode=_MODES[spec.mode],
            policy=_POLICIES[spec.policy],
            priority=spec.priority,
            backoff_limit=spec.backoff_limit,
            active_deadline_seconds=float(spec.active_deadline_seconds or 0),
            parallelism=spec.parallelism or 0,
            lossy=spec.transfer_precision is Precision.HALF,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """What holds for all pools of a run. `prefix` tells pools apart where there are several."""

    workspace: Workspace
    groups: RunGroups | None
    relay: bool
    threads: int | None
    task_seconds: float
    log_level: str
    prefix: str = ""


class PoolRun:
    """A pool while it runs."""

    def __init__(
        self,
        pool: DevicePool,
        devices: Sequence[LocalDevice],
        jobs: Sequence[PlannedJob],
        settings: PoolSettings,
        supervisor: Supervisor,
    ) -> None:
        self.jobs = tuple(jobs)
        self.devices = tuple(devices)
        self.groups: dict[str, DeviceGroup] = {}
        self.limits: dict[str, int] = {}
        self._pool = pool
        self._settings = settings
        self._supervisor = supervisor
        self.target = settings.workspace.socket(f"{pool.metadata.name[:20]}.c")
        self._channel = open_channel(self.target)
        self.watch = Watch(self._channel, [job.request() for job in jobs])

    @property
    def coordinator(self) -> str:
        """The name of the coordinator's process."""
        return f"{self._settings.prefix}coordinator"

    def label(self, device: str) -> str:
        """A device's name within the whole run; also the name of its process."""
        return f"{self._settings.prefix}{device}"

    async def start(self) -> None:
        """Start the coordinator and the agents."""
        await self._supervisor.start(self._coordinator_spec())
        for number, device in enumerate(self.devices):
            if self._settings.groups is not None:
                group = self._settings.groups.create(self.label(device.name))
                self.groups[device.name] = group
                if device.cpus is not None and group.cpu is not None:
                    group.limit_processors(Decimal(device.cpus) / 1000)
            await self._supervisor.start(self._agent_spec(device, number))

    async def wait_for_sessions(self, on_note: Callable[[str], None]) -> None:
        """Until every agent has its session; its memory limit is then set: floor + budget.

        `on_note` hears of a limit that could not be set. Raises `AgentsMissing`.
        """
        budgets = {device.name: device.memory for device in self.devices}

        def limit(name: str, floor_bytes: int) -> None:
            group = self.groups.get(name)
            if group is None:
                return
            try:
                group.limit_memory(floor_bytes + budgets[name])
            except OSError as error:
                size = format_bytes(floor_bytes + budgets[name])
                on_note(f"{self.label(name)}: no limit of {size}: {error.strerror}")
            else:
                self.limits[name] = floor_bytes + budgets[name]

        try:
            async with asyncio.timeout(SESSIONS_SECONDS):
                await self.watch.wait_for_devices(list(budgets), limit)
        except TimeoutError:
            missing = [name for name in budgets if name not in self.watch.devices]
            log = self._settings.workspace.log(self.label((missing or list(budgets))[0]))
            raise AgentsMissing(missing or list(budgets), log) from None

    async def close(self) -> None:
        """Close the channel to the coordinator."""
        with contextlib.suppress(Exception):
            await self._channel.close()

    def snapshot(self) -> Snapshot:
        """The watch's snapshot, with limits and restarts; devices are called by their labels."""
        seen = self.watch.snapshot()
        labels = [self.label(device.name) for device in self.devices]
        return Snapshot(
            seconds=seen.seconds,
            jobs=seen.jobs,
            devices=tuple(self._labelled(device) for device in seen.devices),
            limits={self.label(name): size for name, size in self.limits.items()},
            restarts={label: self._supervisor.restarts(label) for label in labels},
        )

    def _labelled(self, status: pb.DeviceStatus) -> pb.DeviceStatus:
        labelled = pb.DeviceStatus()
        labelled.CopyFrom(status)
        labelled.name = self.label(status.name)
        return labelled

    def _coordinator_spec(self) -> ProcessSpec:
        workspace = self._settings.workspace
        state = workspace.state / self._pool.metadata.name
        # What an earlier run left undone is in the results' own journals, and comes with their
        # jobs.
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
        command = [sys.executable, "-m", "shoal_coordinator"]
        command += ["--listen", self.target, "--store", str(workspace.store)]
        command += ["--state", str(state), "--log-level", self._settings.log_level]
        command += ["--telemetry-seconds", str(TELEMETRY_SECONDS), "--exit-with-parent"]
        command += ["--task-seconds", str(self._settings.task_seconds)]
        if self._settings.relay:
            command += ["--relay", "Always"]
        log = workspace.log(self.coordinator)
        return ProcessSpec(
            name=self.coordinator, title=self.coordinator, command=tuple(command), log=log
        )

    def _agent_spec(self, device: LocalDevice, number: int) -> ProcessSpec:
        workspace, label = self._settings.workspace, self.label(device.name)
        spec = self._pool.spec
        command = [sys.executable, "-m", "shoal_agent", "--name", device.name]
        command += ["--coordinator", self.target]
        command += ["--cache", str(workspace.cache(label)), "--cache-size", str(spec.cache.size)]
        command += ["--budget", str(device.memory), "--residency", spec.residency.value]
        command += ["--threads", str(self._settings.threads or self._threads(device))]
        command += ["--log-level", self._settings.log_level, "--exit-with-parent"]
        if not self._settings.relay:
            name = f"{self._pool.metadata.name[:20]}.{number}"
            command += ["--listen", workspace.socket(name)]
        if device.link is not None and device.link.rate is not None:
            command += ["--link-rate", str(device.link.rate)]
        if device.link is not None and device.link.latency_milliseconds:
            command += ["--link-latency-milliseconds", str(device.link.latency_milliseconds)]
        group = self.groups.get(device.name)
        if group is not None:
            command = group.enter(command)
        return ProcessSpec(
            name=label,
            title=f"device {label}",
            command=tuple(command),
            log=workspace.log(label),
        )

    def _threads(self, device: LocalDevice) -> int:
        """The processors of the device's share, else a fair part of this machine's."""
        if device.cpus is not None:
            return max(1, math.ceil(device.cpus / 1000))
        return max(1, (os.cpu_count() or 1) // len(self.devices))
