"""One pool on this machine: a coordinator and an agent per device, as supervised processes."""

import asyncio
import contextlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc.aio
from google.protobuf.message import Message

from shoal_api.kinds import DevicePool
from shoal_api.kinds.device_pool import LocalDevice
from shoal_cli.local.cgroups import DeviceGroup, Enforce, Pressure, RunGroups
from shoal_cli.local.orders import JobOrder
from shoal_cli.local.preparation import Prepared
from shoal_cli.local.report import (
    DeviceReport,
    FailedItem,
    FragmentHeld,
    JobReport,
    Latency,
    StageReport,
    TaskTime,
    TierHits,
)
from shoal_cli.local.speeds import speed_path
from shoal_cli.local.supervisor import ProcessSpec, Supervisor, tail
from shoal_cli.local.verification import DEFAULT_TOLERANCE
from shoal_cli.local.watch import DeviceTally, Watch
from shoal_cli.local.workspace import Workspace
from shoal_planner.outcome import Plan
from shoal_protocol.channels import open_channel
from shoal_protocol.partition import document_to_json
from shoal_protocol.units import format_bytes, seconds
from shoal_protocol.v1 import coordinator_pb2 as pb

SESSIONS_SECONDS: Final = 60.0
TELEMETRY_SECONDS: Final = 0.5

R = TypeVar("R")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job that is ready to be submitted, with the plan that it runs by."""

    order: JobOrder
    prepared: Prepared
    plan: Plan

    def request(self) -> pb.SubmitJobRequest:
        """As the coordinator takes it."""
        spec = self.order.job.spec
        return pb.SubmitJobRequest(
            name=self.order.name,
            partition=document_to_json(self.prepared.document).encode(),
            stages=[
                pb.StagePlacement(
                    devices=devices,
                    granted_bytes=granted,
                    predicted_seconds=map(seconds, predicted),
                )
                for devices, granted, predicted in zip(
                    self.plan.homes(), self.plan.grants(), self.plan.predictions(), strict=True
                )
            ],
            epoch=1,
            inputs_uri=str(self.order.inputs),
            outputs_uri=str(self.order.outputs),
            mode=spec.mode.name,
            policy=spec.policy.name,
            priority=spec.priority,
            backoff_limit=spec.backoff_limit,
            active_deadline_seconds=float(spec.active_deadline_seconds or 0),
            parallelism=spec.parallelism or 0,
            lossy=self.order.lossy,
        )

    def fragments_on(self, device: str) -> dict[str, FragmentHeld]:
        """The fragments by digest, as the device holds them if it does."""
        held: dict[str, FragmentHeld] = {}
        for fragment, homes, grants in zip(
            self.prepared.document.fragments, self.plan.homes(), self.plan.grants(), strict=True
        ):
            granted = dict(zip(homes, grants, strict=True)).get(device, fragment.resident_bytes)
            held[fragment.digest] = FragmentHeld(
                partition=self.order.plan.cut.name,
                index=fragment.index,
                digest=fragment.digest,
                granted_bytes=granted if granted < fragment.resident_bytes else None,
            )
        return held


@dataclass(slots=True, kw_only=True)
class PoolRun:
    """A pool's processes, from start to stop. `prefix` is part of all names that the user sees
    where there are several pools. `limits` are the bytes that devices were limited to; a device
    whose limit could not be set has none."""

    pool: DevicePool
    jobs: Sequence[PlannedJob] = ()
    workspace: Workspace
    supervisor: Supervisor
    groups: RunGroups | None = None
    options: RunOptions = field(default_factory=RunOptions)
    prefix: str = ""
    limits: dict[str, int] = field(default_factory=dict, init=False)
    target: str = field(init=False)
    watch: Watch = field(init=False)
    _channel: grpc.aio.Channel = field(init=False)
    _device_groups: dict[str, DeviceGroup] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.target = self._socket("c")
        self._channel = open_channel(self.target)
        self.watch = Watch(self._channel, [job.request() for job in self.jobs])

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
        await self.supervisor.start(self._coordinator_spec())
        for number, device in enumerate(self.devices):
            if self.groups is not None:
                group = self.groups.create(self.label(device.name))
                self._device_groups[device.name] = group
                if device.cpus is not None and group.cpu is not None:
                    group.limit_processors(Decimal(device.cpus) / 1000)
            await self.supervisor.start(self._agent_spec(device, number))

    async def wait_for_sessions(self, on_note: Callable[[str], None]) -> None:
        """Until every agent has its session. It is idle then, and what is charged to its cgroup
        may grow by its budget from now on, and no further.

        `on_note` receives a text for each limit that could not be set. Raises `AgentsMissing`.
        """
        budgets = {device.name: device.memory for device in self.devices}

        def limit(name: str) -> None:
            if (group := self._device_groups.get(name)) is None:
                return
            size = group.charged_bytes() + budgets[name]
            try:
                group.limit_memory(size)
            except OSError as error:
                shown = format_bytes(size)
                on_note(f"{self.label(name)}: no limit of {shown}: {error.strerror}")
            else:
                self.limits[name] = size

        try:
            async with asyncio.timeout(SESSIONS_SECONDS):
                await self.watch.wait_for_devices(list(budgets), limit)
        except TimeoutError:
            missing = [name for name in budgets if name not in self.watch.devices]
            missing = missing or list(budgets)
            raise AgentsMissing(missing, self.workspace.log(self.label(missing[0]))) from None

    async def close(self) -> None:
        """Close the channel to the coordinator."""
        with contextlib.suppress(Exception):
            await self._channel.close()

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
        return self._spec(self.coordinator, self.coordinator, "shoal_coordinator", command)

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
        return self._spec(label, f"device {label}", "shoal_agent", command, group)

    def _spec(
        self,
        name: str,
        title: str,
        package: str,
        command: Sequence[str],
        group: DeviceGroup | None = None,
    ) -> ProcessSpec:
        whole = [sys.executable, "-m", package, *command]
        whole += ["--log-level", self.options.log_level, "--exit-with-parent"]
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

    def _threads(self, device: LocalDevice) -> int:
        """The processors of the device's share, else a fair part of this machine's."""
        if device.cpus is not None:
            return max(1, math.ceil(device.cpus / 1000))
        return max(1, (os.cpu_count() or 1) // len(self.devices))

    # ---- the report ------------------------------------------------------------------------------

    def job_report(self, job: PlannedJob) -> JobReport:
        """A job as it was reported last, Pending if never."""
        status = self.watch.jobs.get(job.order.name, pb.JobStatus(name=job.order.name))
        return _copied(
            JobReport,
            status,
            state=pb.JobStatus.State.Name(status.state).capitalize(),
            model=job.order.plan.cut.model,
            model_digest=job.prepared.document.model_digest,
            partition=job.order.plan.cut.name,
            latency=_copied(Latency, status.latency),
            tier_hits=_copied(TierHits, status.tier_hits),
            stages=tuple(
                _copied(
                    StageReport,
                    stage,
                    devices=tuple(map(self.label, stage.devices)),
                    times=tuple(map(self._task_time, stage.times)),
                )
                for stage in status.stages
            ),
            failures=tuple(_copied(FailedItem, each) for each in status.failures),
            outputs=str(job.order.outputs),
            verification=None,
            verification_error="",
        )

    def _task_time(self, time: pb.TaskTime) -> TaskTime:
        known = time.HasField("predicted_seconds")
        return TaskTime(
            device=self.label(time.device),
            measured_seconds=time.measured_seconds,
            predicted_seconds=time.predicted_seconds if known else None,
        )

    def device_reports(self) -> list[DeviceReport]:
        """The devices, in the manifest's order. Their processes have ended, their cgroups exist."""
        restarts = self.restarts()
        return [self._device_report(each, restarts) for each in self.devices]

    def _device_report(self, device: LocalDevice, restarts: dict[str, int]) -> DeviceReport:
        fragments: dict[str, FragmentHeld] = {}
        for job in self.jobs:
            fragments = {**job.fragments_on(device.name), **fragments}
        tally = self.watch.devices.get(device.name, DeviceTally())
        group, label = self._device_groups.get(device.name), self.label(device.name)
        pressure = Pressure() if group is None else group.pressure()
        held = [fragments[digest] for digest in tally.held if digest in fragments]
        return DeviceReport(
            name=label,
            budget_bytes=device.memory,
            floor_bytes=tally.floor_bytes,
            peak_bytes_above_floor=tally.peak_bytes,
            fragments=tuple(sorted(held, key=lambda each: (each.partition, each.index))),
            tier_hits=tally.tier_hits,
            restarts=restarts[label],
            limit_bytes=self.limits.get(device.name),
            limit_failures=pressure.failures,
            out_of_memory_kills=pressure.out_of_memory_kills,
            **tally.counts,
        )


def _copied(kind: type[R], message: Message, **given: object) -> R:
    """A value whose other fields are those of the message that have the same names."""
    names = [each.name for each in fields(kind) if each.name not in given]  # type: ignore[arg-type]
    values: dict[str, Any] = {name: getattr(message, name) for name in names}
    return kind(**values, **given)
