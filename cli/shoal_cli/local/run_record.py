"""Parts of a report: how a job was cut, and what the devices did over time, as the coordinator
recorded it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal_protocol.copying import copied
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from shoal_planner.outcome import Plan

# ---- the cut -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFragment:
    """A fragment and the devices that the plan gives it, best first."""

    index: int
    nodes: int
    weight_bytes: int
    resident_bytes: int
    flops: int | None
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutEdge:
    """What one fragment gives another for an item; -1 stands for the model: its inputs as producer,
    its outputs as consumer."""

    producer: int
    consumer: int
    tensors: int
    bytes_per_item: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutReport:
    """How a job was cut."""

    fragments: tuple[PlannedFragment, ...]
    edges: tuple[CutEdge, ...]


def cut_report(plan: "Plan", document: PartitionDocument, label: Callable[[str], str]) -> CutReport:
    """The cut that a plan placed; `label` gives a device's name within the run."""
    return CutReport(
        fragments=tuple(
            copied(PlannedFragment, each, devices=tuple(map(label, homes)))
            for each, homes in zip(document.fragments, plan.homes(), strict=True)
        ),
        edges=tuple(copied(CutEdge, edge, tensors=len(edge.tensors)) for edge in document.edges),
    )


# ---- over time -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A process ended and was started again: when, since the run began, and why."""

    seconds: float
    process: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionChange:
    """A device's session began while jobs ran, or was lost. `seconds` since the timeline began."""

    seconds: float
    joined: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimeline:
    """What a device did in each column of time.

    Within `busy_seconds` it had something to answer; the other times lie in it, and may overlap.
    `memory_bytes` is the most that was measured above the floor, 0 where nothing was.
    """

    name: str
    busy_seconds: tuple[float, ...]
    computing_seconds: tuple[float, ...]
    loading_seconds: tuple[float, ...]
    sending_seconds: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]
    fetched_bytes: tuple[float, ...]
    changes: tuple[SessionChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What the devices of one coordinator did, in columns of equal length, from `begun_seconds`
    after the run's start: from a first job's submission to a last job's end."""

    begun_seconds: float
    column_seconds: float
    devices: tuple[DeviceTimeline, ...]


_TIMES = ("busy_seconds", "computing_seconds", "loading_seconds", "sending_seconds")
_BYTES = ("sent_bytes", "received_bytes", "fetched_bytes")


def timeline_of(
    message: pb.Timeline, run_started_seconds: float, label: Callable[[str], str]
) -> Timeline:
    """A coordinator's message as part of a report of a run that began at that time, since 1970."""
    return Timeline(
        begun_seconds=round(max(0.0, message.began_seconds - run_started_seconds), 3),
        column_seconds=message.column_seconds,
        devices=tuple(
            DeviceTimeline(
                name=label(device.name),
                memory_bytes=tuple(device.memory_bytes),
                changes=tuple(
                    copied(SessionChange, each, seconds=round(each.seconds, 3))
                    for each in device.changes
                ),
                **{
                    name: tuple(round(value, digits) for value in getattr(device, name))
                    for names, digits in ((_TIMES, 6), (_BYTES, 0))
                    for name in names
                },
            )
            for device in message.devices
        ),
    )
