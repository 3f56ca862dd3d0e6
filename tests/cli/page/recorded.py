"""Reports as runs write them: random ones for properties, and one of each trouble."""

import random

from hypothesis import strategies as st

from shoal_cli.local.report import (
    DeviceReport,
    Enforcement,
    FailedItem,
    JobReport,
    Latency,
    RunReport,
    StageReport,
    TaskTime,
    TierHits,
)
from shoal_cli.local.run_record import (
    CutEdge,
    CutReport,
    Death,
    DeviceTimeline,
    PlannedFragment,
    SessionChange,
    Timeline,
)

MIB = 1 << 20
HOSTILE = '</script><b a="\'">&'
"""A name or message that is markup."""


@st.composite
def device_timelines(draw: st.DrawFn, name: str, columns: int, width: float) -> DeviceTimeline:
    """Any device's: what it did, and when it was lost and came back."""
    chance = random.Random(draw(st.integers(0, 1 << 32)))  # noqa: S311 - no secret
    idle = draw(st.sampled_from((0.0, 0.3, 0.9, 1.0)))

    def values(most: float) -> tuple[float, ...]:
        return tuple(
            0.0 if chance.random() < idle else most * chance.random() for _ in range(columns)
        )

    moments = sorted(chance.uniform(0, columns * width) for _ in range(draw(st.integers(0, 4))))
    return DeviceTimeline(
        name=name,
        busy_seconds=values(width),
        computing_seconds=values(1.2 * width),
        loading_seconds=values(width),
        sending_seconds=values(width),
        memory_bytes=tuple(map(int, values(1 << 40))),
        sent_bytes=values(1 << 30),
        received_bytes=values(1 << 30),
        fetched_bytes=values(1 << 30),
        changes=tuple(
            SessionChange(seconds=moment, joined=bool(number % 2), reason="the stream ended")
            for number, moment in enumerate(moments)
        ),
    )


@st.composite
def timelines(draw: st.DrawFn) -> tuple[Timeline, ...]:
    """Those of a run with a few lives of a coordinator."""
    found, begun = [], draw(st.floats(0, 100))
    for _ in range(draw(st.integers(0, 3))):
        width, columns = draw(st.sampled_from((0.01, 0.02, 5.12))), draw(st.integers(1, 30))
        names = draw(st.sets(st.sampled_from(("jetson", "pi-4", "pi-zero")), min_size=1))
        found.append(
            Timeline(
                begun_seconds=begun,
                column_seconds=width,
                devices=tuple(
                    draw(device_timelines(name, columns, width)) for name in sorted(names)
                ),
            )
        )
        begun += columns * width + draw(st.floats(0, 5))
    return tuple(found)


def long_timeline(devices: int, columns: int = 512) -> Timeline:
    """As full as a timeline can be: every column differs from those beside it."""

    def values(seed: int, most: float) -> tuple[float, ...]:
        return tuple(most * ((seed * 7919 + n * 104729) % 1009) / 1009 for n in range(columns))

    return Timeline(
        begun_seconds=4.5,
        column_seconds=20.48,
        devices=tuple(
            DeviceTimeline(
                name=f"device-with-a-long-name-{number:03}",
                busy_seconds=values(number, 20.48),
                computing_seconds=values(number + 1, 8.0),
                loading_seconds=values(number + 2, 5.0),
                sending_seconds=values(number + 3, 4.0),
                memory_bytes=tuple(map(int, values(number + 4, 26 * MIB))),
                sent_bytes=values(number + 5, 1e9),
                received_bytes=values(number + 6, 1e9),
                fetched_bytes=values(number + 7, 1e9),
                changes=tuple(
                    SessionChange(seconds=n * 90.0, joined=bool(n % 2), reason="the stream ended")
                    for n in range(64)
                ),
            )
            for number in range(devices)
        ),
    )


def homes(fragments: int, devices: tuple[str, ...]) -> list[str]:
    return [devices[number * len(devices) // fragments] for number in range(fragments)]


def cut_of(fragments: int, devices: tuple[str, ...]) -> CutReport:
    """A chain with a line around each pair of fragments."""
    edges = [(number - 1, number) for number in range(fragments)] + [(fragments - 1, -1)]
    edges += [(number, number + 2) for number in range(fragments - 2)]
    return CutReport(
        fragments=tuple(
            PlannedFragment(
                index=number,
                nodes=10,
                weight_bytes=3 * MIB,
                resident_bytes=5 * MIB,
                flops=None,
                devices=(name,),
            )
            for number, name in enumerate(homes(fragments, devices))
        ),
        edges=tuple(
            CutEdge(producer=producer, consumer=consumer, tensors=1, bytes_per_item=400_000)
            for producer, consumer in edges
        ),
    )


def device(name: str, **fields: object) -> DeviceReport:
    known: dict[str, object] = {
        "name": name,
        "budget_bytes": 24 * MIB,
        "floor_bytes": 63 * MIB,
        "peak_bytes_above_floor": 20 * MIB,
        "fragments": (),
        "loads": 2,
        "evictions": 0,
        "tier_hits": TierHits(resident=20, cached=3, idle=1),
        "tasks": 24,
        "sent_bytes": 11 * MIB,
        "received_bytes": 4 * MIB,
        "fetched_bytes": 2 * MIB,
        "restarts": 0,
        "limit_bytes": 90 * MIB,
        "limit_failures": 0,
        "out_of_memory_kills": 0,
    }
    return DeviceReport(**{**known, **fields})  # type: ignore[arg-type]


def job(fragments: int, devices: tuple[str, ...], **fields: object) -> JobReport:
    known: dict[str, object] = {
        "name": "ocr",
        "state": "Complete",
        "reason": "",
        "message": "",
        "model": "rec",
        "model_digest": "sha256:" + "0" * 64,
        "partition": "rec-3",
        "items": 24,
        "succeeded": 24,
        "failed": 0,
        "resumed": 0,
        "retries": 2,
        "seconds": 2.0,
        "items_per_second": 12.0,
        "latency": Latency(p50_seconds=0.1, p90_seconds=0.2, p99_seconds=0.3),
        "tier_hits": TierHits(resident=20),
        "stages": tuple(
            StageReport(
                index=number,
                devices=(name,),
                finished=24,
                compute_seconds=0.01,
                times=(TaskTime(device=name, measured_seconds=0.01, predicted_seconds=0.02),),
            )
            for number, name in enumerate(homes(fragments, devices))
        ),
        "failures": (),
        "outputs": "/out",
        "verification": None,
        "cut": cut_of(fragments, devices) if fragments else None,
    }
    return JobReport(**{**known, **fields})  # type: ignore[arg-type]


def run(
    jobs: tuple[JobReport, ...], devices: tuple[DeviceReport, ...], **fields: object
) -> RunReport:
    known: dict[str, object] = {
        "shoal_version": "0.1.0",
        "started": "2026-01-31T12:00:00+00:00",
        "seconds": 30.0,
        "work": "/work",
        "enforcement": Enforcement(mode="cgroup v2", reason=""),
        "coordinator_restarts": 0,
        "interrupted": False,
        "jobs": jobs,
        "devices": devices,
    }
    return RunReport(**{**known, **fields})  # type: ignore[arg-type]


NAMES = ("pi-4", "pi-zero", "jetson")


def troubled() -> RunReport:
    """A device was killed and did not return, another was over its budget, items failed, and names
    are markup."""
    timeline = long_timeline(3, columns=60)
    devices = tuple(
        DeviceTimeline(
            **{
                **{name: getattr(each, name) for name in each.__dataclass_fields__},
                "name": name,
                "changes": (SessionChange(seconds=300.0, joined=False, reason="killed"),)
                if name == "pi-zero"
                else (),
            }
        )
        for name, each in zip(NAMES, timeline.devices, strict=True)
    )
    failed = tuple(
        FailedItem(item=number, input=f"{HOSTILE}{number}.npz", reason=f"wrong {HOSTILE}")
        for number in range(3)
    )
    whole = job(
        6,
        NAMES,
        name=HOSTILE,
        state="Failed",
        reason="ItemsFailed",
        message=f"3 of 24 items failed; first: {HOSTILE}",
        succeeded=21,
        failed=3,
        failures=failed,
    )
    return run(
        (whole,),
        (
            device("pi-4", peak_bytes_above_floor=25 * MIB),
            device("pi-zero", restarts=1),
            device("jetson"),
        ),
        deaths=(Death(seconds=9.0, process="device pi-zero", cause="killed by SIGKILL"),),
        notes=("rec was cut finer: a fragment took more than planned",),
        timelines=(Timeline(begun_seconds=4.5, column_seconds=20.48, devices=devices),),
    )
