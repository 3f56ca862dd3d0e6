"""One pool on this machine: a coordinator and an agent per device, as supervised processes."""

import asyncio
import contextlib
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Final

import grpc.aio

from shoal_api.kinds import DevicePool
from shoal_api.kinds.device_pool import LocalDevice
from shoal_cli.local.agent_libraries import HeldFiles, agent_libraries, hold_libraries
from shoal_cli.local.cgroups import DeviceGroup, Enforce, Pressure, RunGroups
from shoal_cli.local.planned_jobs import PlannedJob, device_report
from shoal_cli.local.report import DeviceReport, JobReport
from shoal_cli.local.run_record import Timeline, timeline_of
from shoal_cli.local.speeds import speed_path
from shoal_cli.local.supervisor import ProcessSpec, Supervisor, tail
from shoal_cli.local.verification import DEFAULT_TOLERANCE
from shoal_cli.local.watch import DeviceTally, Watch
from shoal_cli.local.workspace import Workspace
from shoal_protocol.channels import open_channel
from shoal_protocol.heap_reserve import HEAP_RESERVE_BYTES
from shoal_protocol.interpreter import module_command
from shoal_protocol.page_cache import cache_libraries_in_small_pages
from shoal_protocol.threads import in_thread
from shoal_protocol.units import counted, format_bytes
from shoal_protocol.v1 import coordinator_pb2 as pb

SESSIONS_SECONDS: Final = 60.0
TELEMETRY_SECONDS: Final = 0.5


class AgentsMissing(Exception):
    """Agents that opened no session in time."""

    def __init__(self, names: Sequence[str], log: Path) -> None:
        """`log` is the first one's."""
        super().__init__(
            f"no session from {', '.join(names)} within {SESSIONS_SECONDS:g} s; "
            f"the end of {log}:\n{tail(log)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run. `relay`: activations go through the coordinator, never from agent to agent.
    `verify`: how many results are compared, 0: all; None: none. `metrics`: host and port at which
    those of all processes are served; `otlp`: the URL of an OpenTelemetry collector."""

    enforce: Enforce = Enforce.AUTO
    relay: bool = False
    verify: int | None = None
    tolerance: float = DEFAULT_TOLERANCE
    threads: int | None = None
    task_seconds: float = 540.0
    log_level: str = "info"
    metrics: tuple[str, int] | None = None
    otlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process: where it serves metrics (`unix:/path`), and the labels that they get."""

    address: str
    labels: dict[str, str]


@dataclass(slots=True)
class DeviceLimits:
    """The memory limit of each device's group: what is charged to its idle agent, what its heap may
    grow by, and its budget.

    It is set once, when the agent is idle and before it receives work. An agent that is started
    again receives work at once, and may take more for itself than the one before it, or less: the
    limit follows the floors that agents measure. `sizes` are the limits that are set, by device.
    `on_note` receives a device and a text for each that cannot be."""

    on_note: Callable[[str, str], None]
    sizes: dict[str, int] = field(default_factory=dict)
    _groups: dict[str, DeviceGroup] = field(default_factory=dict)
    _floors: dict[str, int] = field(default_factory=dict)

    def set(self, name: str, group: DeviceGroup, budget_bytes: int, floor_bytes: int) -> None:
        """The agent is idle now."""
        self._groups[name], self._floors[name] = group, floor_bytes
        self._limit(name, group.charged_bytes() + HEAP_RESERVE_BYTES + budget_bytes)

    def follow(self, name: str, floor_bytes: int) -> None:
        """The agent's floor is this now; 0: it has not measured any."""
        if name not in self.sizes or not floor_bytes:
            return
        if change := floor_bytes - self._floors[name]:
            self._floors[name] = floor_bytes
            self._limit(name, self.sizes[name] + change)

    def _limit(self, name: str, size: int) -> None:
        try:
            self._groups[name].limit_memory(size)
        except OSError as error:
            self.on_note(name, f"no limit of {format_bytes(size)}: {error.strerror}")
        else:
            self.sizes[name] = size


@dataclass(slots=True, kw_only=True)
class PoolRun:
    """A pool's processes, from start to stop, and the `jobs` that they are given. `prefix` is part
    of all names that the user sees where there are several pools."""

    pool: DevicePool
    workspace: Workspace
    supervisor: Supervisor
    groups: RunGroups | None = None
    options: RunOptions = field(default_factory=RunOptions)
    prefix: str = ""
    jobs: Sequence[PlannedJob] = field(default=(), init=False)
    target: str = field(init=False)
    watch: Watch = field(init=False)
    _channel: grpc.aio.Channel = field(init=False)
    _device_groups: dict[str, DeviceGroup] = field(default_factory=dict, init=False)
    _limits: DeviceLimits = field(default_factory=lambda: DeviceLimits(_no_note), init=False)
    _libraries: HeldFiles | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.target = self.workspace.coordinator(self.pool.metadata.name)
        self._channel = open_channel(self.target)
        self.watch = Watch(self._channel)

    def take(self, jobs: Sequence[PlannedJob]) -> None:
        """Jobs for `watch` to submit. The processes may be starting meanwhile."""
        self.jobs = jobs
        self.watch.take([job.request() for job in jobs])

    @property
    def devices(self) -> tuple[LocalDevice, ...]:
        """What the pool pretends to be."""
        assert self.pool.spec.local is not None, "orders refuse a pool without"
        return self.pool.spec.local.devices

    @property
    def coordinator(self) -> str:
        """The name of the coordinator's process."""
        return f"{self.prefix}coordinator"

    def label(self, device: str) -> str:
        """A device's name within the whole run; also the name of its process."""
        return f"{self.prefix}{device}"

    def restarts(self) -> dict[str, int]:
        """How often each device's agent was started again, by label."""
        labels = [self.label(device.name) for device in self.devices]
        return {label: self.supervisor.restarts(label) for label in labels}

    async def start(self) -> None:
        """Start the coordinator and the agents."""
        await in_thread(cache_libraries_in_small_pages, agent_libraries())
        if self.groups is not None:
            self._libraries = await in_thread(hold_libraries)
        await self.supervisor.start(self._coordinator_spec())
        for number, device in enumerate(self.devices):
            if self.groups is not None:
                group = self.groups.create(self.label(device.name))
                self._device_groups[device.name] = group
                if device.cpus is not None and group.cpu is not None:
                    group.limit_processors(Decimal(device.cpus) / 1000)
            await self.start_agent(device, number)

    async def start_agent(self, device: LocalDevice, number: int) -> None:
        """Start the agent of one device."""
        await self.supervisor.start(self._agent_spec(device, number))

    async def wait_for_sessions(self, on_note: Callable[[str], None]) -> None:
        """Until every agent has its session. It is idle then, and what is charged to its cgroup
        may grow by its budget from now on, and no further.

        `on_note` receives a text for each limit that could not be set. Raises `AgentsMissing`.
        """
        budgets = {device.name: device.memory for device in self.devices}
        self._limits.on_note = lambda name, text: on_note(f"{self.label(name)}: {text}")

        def limit(name: str) -> None:
            if (group := self._device_groups.get(name)) is not None:
                self._limits.set(name, group, budgets[name], self.watch.devices[name].floor_bytes)

        try:
            async with asyncio.timeout(SESSIONS_SECONDS):
                await self.watch.wait_for_devices(list(budgets), limit)
        except TimeoutError:
            missing = [name for name in budgets if name not in self.watch.devices]
            missing = missing or list(budgets)
            raise AgentsMissing(missing, self.workspace.log(self.label(missing[0]))) from None

    @property
    def limits(self) -> Mapping[str, int]:
        """The bytes that devices are limited to; one whose limit could not be set has none."""
        return self._limits.sizes

    def follow_floors(self) -> None:
        """Agents that were started again have floors of their own."""
        for name, tally in self.watch.devices.items():
            self._limits.follow(name, tally.floor_bytes)

    async def close(self) -> None:
        """Close the channel to the coordinator."""
        with contextlib.suppress(Exception):
            await self._channel.close()

    async def failed_loads(self) -> list[str]:
        """Which devices have run nothing of jobs that are complete, and why. A job that has failed
        says why itself."""
        complete = [
            job
            for job in self.jobs
            if self.watch.jobs[job.order.name].state == pb.JobStatus.COMPLETE
        ]
        names: dict[str, str] = {
            fragment.digest: f"fragment {fragment.index} of {job.order.name}"
            for job in complete
            for fragment in job.prepared.document.fragments
        }
        return [
            f"{self.label(device)} ran nothing: it could not load {names[held.digest]} "
            f"({counted(held.failures, 'time')}): {held.failure}"
            for device, held in (await self.watch.failed_loads()).items()
            if held.digest in names
        ]

    def job_statuses(self) -> list[pb.JobStatus]:
        """The jobs as they were reported last."""
        names = [job.order.name for job in self.jobs]
        return [self.watch.jobs[name] for name in names if name in self.watch.jobs]

    def device_statuses(self) -> list[pb.DeviceStatus]:
        """The devices as they were reported last, by name, under their labels."""
        shown = []
        for name, tally in sorted(self.watch.devices.items()):
            status = pb.DeviceStatus()
            status.CopyFrom(tally.last)
            status.name = self.label(name)
            shown.append(status)
        return shown

    def _coordinator_spec(self) -> ProcessSpec:
        state = self.workspace.state / self.pool.metadata.name
        # The results' own journals say what earlier runs have done.
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
        command = ["--listen", self.target, "--store", str(self.workspace.store)]
        command += ["--state", str(state), "--telemetry-seconds", str(TELEMETRY_SECONDS)]
        command += ["--task-seconds", str(self.options.task_seconds)]
        if self.options.relay:
            command += ["--relay", "Always"]
        if self.options.otlp is not None:
            command += ["--otlp", self.options.otlp]
        command += self._metrics_option("c")
        python = module_command("shoal_coordinator")
        return self._spec(self.coordinator, self.coordinator, [*python, *command])

    def _agent_spec(self, device: LocalDevice, number: int) -> ProcessSpec:
        label, spec = self.label(device.name), self.pool.spec
        command = ["--name", device.name, "--coordinator", self.target]
        command += ["--cache", str(self.workspace.cache(label))]
        command += ["--cache-size", str(spec.cache.size)]
        command += ["--budget", str(device.memory), "--residency", spec.residency.value]
        command += ["--speed", str(speed_path())]
        command += ["--threads", str(self.options.threads or self._threads(device))]
        if not self.options.relay:
            command += ["--listen", self._socket(str(number))]
        if device.link is not None and device.link.rate is not None:
            command += ["--link-rate", str(device.link.rate)]
        if device.link is not None and device.link.latency_milliseconds:
            command += ["--link-latency-milliseconds", str(device.link.latency_milliseconds)]
        command += self._metrics_option(str(number))
        group = self._device_groups.get(device.name)
        python = module_command("shoal_agent", "-OO")
        return self._spec(label, f"device {label}", [*python, *command], group)

    def _spec(
        self,
        name: str,
        title: str,
        command: Sequence[str],
        group: DeviceGroup | None = None,
    ) -> ProcessSpec:
        whole = [*command, "--log-level", self.options.log_level, "--exit-with-parent"]
        return ProcessSpec(
            name=name,
            title=title,
            command=tuple(whole if group is None else group.enter(whole)),
            log=self.workspace.log(name),
        )

    def _socket(self, name: str) -> str:
        """Of this pool; short, as the addresses of sockets are."""
        return self.workspace.socket(f"{self.pool.metadata.name[:20]}.{name}")

    def _metrics_option(self, process: str) -> list[str]:
        """For the coordinator, `c`, or the agent of a number."""
        asked = self.options.metrics is not None
        return ["--metrics-address", self._socket(f"{process}.m")] if asked else []

    def metrics_targets(self) -> list[Target]:
        """Where the processes serve their metrics."""
        pool = {"pool": self.pool.metadata.name}
        agents = [
            Target(
                address=self._socket(f"{number}.m"),
                labels=pool | {"component": "agent", "device": device.name},
            )
            for number, device in enumerate(self.devices)
        ]
        labels = pool | {"component": "coordinator"}
        coordinator = Target(address=self._socket("c.m"), labels=labels)
        return [coordinator, *agents]

    @property
    def fewest_threads(self) -> int:
        """Of an agent's runtime."""
        return self.options.threads or min(map(self._threads, self.devices))

    def _threads(self, device: LocalDevice) -> int:
        """The processors of the device's share, else a fair part of this machine's."""
        if device.cpus is not None:
            return max(1, math.ceil(device.cpus / 1000))
        return max(1, (os.cpu_count() or 1) // len(self.devices))

    # ---- the report ------------------------------------------------------------------------------

    def job_report(self, job: PlannedJob) -> JobReport:
        """A job as it was reported last, Pending if never."""
        status = self.watch.jobs.get(job.order.name, pb.JobStatus(name=job.order.name))
        return job.report(status, self.label)

    def timelines(self, run_started_seconds: float) -> list[Timeline]:
        """What the devices did, in each life of the coordinator."""
        found = self.watch.timelines.values()
        return [timeline_of(each, run_started_seconds, self.label) for each in found]

    def device_reports(self) -> list[DeviceReport]:
        """The devices, in the manifest's order. Their processes have ended, their cgroups exist."""
        restarts = self.restarts()
        return [self._device_report(each, restarts) for each in self.devices]

    def _device_report(self, device: LocalDevice, restarts: dict[str, int]) -> DeviceReport:
        group, label = self._device_groups.get(device.name), self.label(device.name)
        pressure = Pressure() if group is None else group.pressure()
        report = device_report(
            self.jobs,
            name=device.name,
            budget_bytes=device.memory,
            tally=self.watch.devices.get(device.name, DeviceTally()),
        )
        return replace(
            report,
            name=label,
            restarts=restarts[label],
            limit_bytes=self.limits.get(device.name),
            limit_failures=pressure.failures,
            out_of_memory_kills=pressure.out_of_memory_kills,
        )


def _no_note(_name: str, _text: str) -> None:
    """Nobody listens yet."""
