"""Placement: which devices serve which stages, and why."""

from shoal_operator.api.choices import Objective, PinPolicy
from shoal_operator.api.fields import (
    CONDITIONS,
    COUNT,
    FRAGMENT,
    MAX_FRAGMENTS,
    MESSAGE,
    METADATA,
    NAME,
    REFERENCE,
    Condition,
    Metadata,
    Reference,
)
from shoal_operator.api.schema import Object, member, record
from shoal_operator.api.shapes import Choice, Items, Number, Text


@record()
class Pin:
    """A fragment tied to a device."""

    fragment: int = member(FRAGMENT, "The fragment's index.", example=0)
    device: str = member(NAME, "The device's name.", example="jetson")
    policy: PinPolicy = member(
        Choice(PinPolicy),
        "Required: no other plan will do; Preferred: where it costs nothing.",
        default="Required",
    )


@record()
class PlacementSpec:
    """What is placed where, and what for."""

    partition_ref: Reference = member(
        REFERENCE, "The Partition to place.", example={"name": "ppocr-rec-3"}
    )
    pool_ref: Reference = member(REFERENCE, "The devices.", example={"name": "shelf"})
    objective: Objective = member(
        Choice(Objective), "What the plan makes best.", default="Throughput"
    )
    pins: tuple[Pin, ...] = member(
        Items(of=Object(Pin), max_items=MAX_FRAGMENTS, key="fragment"),
        "Fragments tied to devices.",
        default=[],
        example=[{"fragment": 0, "device": "jetson"}],
    )


@record()
class StageStatus:
    """Fragments that run together, on each of these devices."""

    fragments: tuple[int, ...] = member(
        Items(of=FRAGMENT, max_items=MAX_FRAGMENTS), "The fragments' indices."
    )
    devices: tuple[str, ...] = member(
        Items(of=NAME, max_items=64), "The devices that serve them, best first."
    )
    compute_seconds: float | None = member(Number(), "Per item.", unit="seconds", default=None)
    transfer_seconds: float | None = member(
        Number(), "Per item, into the stage and out of it.", unit="seconds", default=None
    )
    resident_bytes: int = member(COUNT, "On each of the devices.", unit="bytes")


@record()
class Cost:
    """What a plan gives."""

    latency_seconds: float | None = member(
        Number(), "Of one item through all stages.", unit="seconds", default=None
    )
    items_per_second: float | None = member(
        Number(), "Of the whole pipeline.", unit="items per second", default=None
    )


@record()
class Rejected:
    """A plan that lost."""

    alternative: str = member(Text(max_length=512), "The plan, in words.")
    items_per_second: float | None = member(
        Number(), "What it would give.", unit="items per second", default=None
    )
    reason: str = member(MESSAGE, "Why it lost.")


@record()
class PlacementStatus:
    """The plan."""

    observed_generation: int | None = member(COUNT, "Of the spec that was seen.", default=None)
    conditions: tuple[Condition, ...] = member(CONDITIONS, "Planned, Ready.", default=[])
    epoch: int | None = member(COUNT, "Grows with every new plan.", default=None)
    stages: tuple[StageStatus, ...] = member(
        Items(of=Object(StageStatus), max_items=MAX_FRAGMENTS), "The stages.", default=[]
    )
    predicted: Cost | None = member(Object(Cost), "By the planner.", default=None)
    measured: Cost | None = member(Object(Cost), "By the last job.", default=None)
    rejected: tuple[Rejected, ...] = member(
        Items(of=Object(Rejected), max_items=8), "The best plans that lost.", default=[]
    )


@record()
class Placement:
    """A plan: which devices serve which stages. Alone it is a preview; nothing runs."""

    metadata: Metadata = member(METADATA, "Name and labels.")
    spec: PlacementSpec = member(Object(PlacementSpec), "What is wanted.")
    status: PlacementStatus | None = member(Object(PlacementStatus), "What is.", default=None)
