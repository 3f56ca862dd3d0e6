"""Placement: which devices serve which stages, and why."""

from enum import StrEnum
from typing import Final

from shoal_api.fields import (
    COLUMNS,
    COUNT,
    DEVICE,
    FRAGMENT,
    MAX_DEVICES,
    MAX_FRAGMENTS,
    MESSAGE,
    REFERENCE,
    TENSOR_NAME,
    Condition,
    Reference,
    Resource,
    Status,
    TimeAtBudget,
    aspects,
    budgets_of_a_fragment,
    digest_of,
    least_budget,
    measured,
    moment,
    optional,
    printed,
    records,
)
from shoal_api.rules import immutable
from shoal_api.schema import Object, member, record
from shoal_api.shapes import Choice, Flag, Items, Number, Text
from shoal_protocol.choices import Objective, PinPolicy

MAX_GRANTS: Final = 4096
MAX_BUDGETS: Final = 512
"""Each has several numbers: the API server keeps objects of 1.5 MiB at most."""


@record()
class Pin:
    """A fragment tied to a device."""

    fragment: int = member(FRAGMENT, "The fragment's index.", example=0)
    device: str = member(DEVICE, "The device's name.", example="jetson")
    policy: PinPolicy = member(
        Choice(PinPolicy),
        "Required: no other plan will do; Preferred: where it costs nothing.",
        default="Required",
        example="Preferred",
    )


@record(immutable("partitionRef"), immutable("poolRef"))
class PlacementSpec:
    """What is placed where, and what for."""

    partition_ref: Reference = member(
        REFERENCE, "The Partition to place. Cannot be changed.", example={"name": "ppocr-rec-3"}
    )
    pool_ref: Reference = member(
        REFERENCE, "The devices. Cannot be changed.", example={"name": "shelf"}
    )
    objective: Objective = member(
        Choice(Objective), "What the plan makes best.", default="Throughput", example="Latency"
    )
    pins: tuple[Pin, ...] = member(
        Items(of=Object(Pin), max_items=MAX_FRAGMENTS, key="fragment"),
        "Fragments tied to devices.",
        default=[],
        example=[{"fragment": 0, "device": "jetson"}],
    )
    prefetch: bool = member(
        Flag(),
        "true: the devices of the plan fetch their fragments before there is a job, and load them "
        "where there is room that no job needs.",
        default=False,
        example=True,
    )


class NearState(StrEnum):
    """How near a fragment is to a device."""

    ABSENT = "Absent"
    CACHED = "Cached"
    RESIDENT = "Resident"


@record()
class Prefetched:
    """A fragment on a device of the plan, before there is a job."""

    fragment: int = member(FRAGMENT, "The fragment's index.", example=0)
    # Without a name's pattern, as in StageStatus.
    device: str = member(Text(max_length=253, meant="a device's name"), "The device.", example="pi")
    state: NearState = member(
        Choice(NearState),
        "Absent: not there yet; Cached: on its disk; Resident: in its memory.",
        example="Resident",
    )


@record()
class Grant:
    """Memory for a fragment on a device that does not hold all of it."""

    fragment: int = member(FRAGMENT, "The fragment's index.", example=0)
    # Without a name's pattern, as in StageStatus.
    device: str = member(Text(max_length=253, meant="a device's name"), "The device.", example="pi")
    granted_bytes: int = member(
        COUNT, "What the fragment may take there.", unit="bytes", example=8388608
    )


@record()
class FragmentMemory:
    """What a fragment needs, and what it gets."""

    fragment: int = member(FRAGMENT, "The fragment's index.", example=0)
    digest: str | None = digest_of(
        "Its name in the fragment store; absent in plans of versions before this field."
    )
    resident_bytes: int = member(
        COUNT,
        "What it needs above a device's floor to be resident as a whole.",
        unit="bytes",
        example=20971520,
    )
    least_bytes: int = member(
        COUNT,
        "The least that it can run in, in blocks where that is less; a device needs room beside "
        "it for what items take on their way.",
        unit="bytes",
        example=6291456,
    )
    granted_bytes: int = member(
        COUNT,
        "The least that a device of its stage grants it; less than residentBytes: it runs in "
        "blocks there.",
        unit="bytes",
        example=8388608,
    )
    resident_seconds: float | None = measured(
        "A task of it on the slowest device of its stage, granted residentBytes, by the planner; "
        "absent where that cannot be predicted.",
        "seconds",
        0.031,
    )
    least_seconds: float | None = measured(
        "The same granted leastBytes. What is granted between the two takes a time between these, "
        "in proportion.",
        "seconds",
        0.038,
    )


@record()
class FragmentBudgets:
    """What a fragment takes on devices of its stage, had they other budgets."""

    fragment: int = member(FRAGMENT, "The fragment's index.", example=0)
    devices: tuple[str, ...] = member(
        # Without a name's pattern, as in StageStatus.
        Items(of=Text(max_length=253, meant="a device's name"), max_items=MAX_DEVICES),
        "The devices of its stage of which this is true.",
        example=["jetson"],
    )
    least_budget_bytes: int = least_budget()
    times: tuple[TimeAtBudget, ...] = budgets_of_a_fragment()


@record()
class StageStatus:
    """Fragments that run together, on each of these devices."""

    fragments: tuple[int, ...] = member(
        Items(of=FRAGMENT, max_items=MAX_FRAGMENTS), "The fragments' indices.", example=[0]
    )
    devices: tuple[str, ...] = member(
        # Without a name's pattern: a rule for each of so many costs the API server too much.
        Items(of=Text(max_length=253, meant="a device's name"), max_items=MAX_DEVICES),
        "The devices that serve them, best first.",
        example=["jetson"],
    )
    compute_seconds: float | None = measured(
        "Per item on its slowest device, with all weights in memory.", "seconds", 0.021
    )
    read_seconds: float | None = measured(
        "Per item, for weights that are read again.", "seconds", 0.006
    )
    device_seconds: tuple[float, ...] = member(
        Items(of=Number(), max_items=MAX_DEVICES),
        "Per item, computing and reading, on each of the devices, in their order; empty where that "
        "cannot be predicted.",
        unit="seconds",
        default=[],
        example=[0.021],
    )
    transfer_seconds: float | None = measured(
        "Per item, into the stage and out of it.", "seconds", 0.004
    )
    link_seconds: float | None = measured(
        "Per item, what it takes the link of its slowest device, in the direction that is taken "
        "longer.",
        "seconds",
        0.002,
    )
    period_seconds: float | None = measured(
        "An item every so often, by all of its devices together.", "seconds", 0.027
    )
    predicted_seconds: float | None = measured(
        "Per item in ONNX Runtime on one of its devices, as was predicted.", "seconds", 0.024
    )
    measured_seconds: float | None = measured(
        "The same as the last job by this plan measured it.", "seconds", 0.026
    )
    resident_bytes: int = member(
        COUNT, "What one of the devices holds at once, at most.", unit="bytes", example=14680064
    )
    in_blocks: tuple[Grant, ...] = records(
        Grant,
        MAX_GRANTS,
        "Fragments that run in blocks, because a device cannot hold all of them: part of their "
        "weights is read again for each item. The others get all that they need.",
    )


@record()
class Cost:
    """What a plan gives."""

    latency_seconds: float | None = measured("Of one item through all stages.", "seconds", 0.075)
    items_per_second: float | None = measured("Of the whole pipeline.", "items per second", 38.2)


@record()
class Makespan:
    """What a job takes on devices that have nothing in memory yet."""

    items: int = member(COUNT, "How many items were planned for.", example=16)
    assumed: bool = member(
        Flag(),
        "true: nobody knows yet how many items there are. They are those of the newest job by this "
        "plan, as soon as its inputs are counted; not of one that follows its inputs.",
        default=False,
        example=True,
    )
    seconds: float | None = measured(
        "Until all have ended; absent where that cannot be predicted.", "seconds", 8.1
    )


@record()
class Rejected:
    """A plan that lost."""

    alternative: str = member(Text(max_length=512), "The plan, in words.", example="even split")
    items_per_second: float | None = measured("What it would give.", "items per second", 21.3)
    latency_seconds: float | None = measured("What one item would take.", "seconds", 0.091)
    reason: str = member(MESSAGE, "Why it lost.", example="stage 1 would take twice as long")


@record()
class ChosenCut:
    """Where a Placement has its Partition cut."""

    cuts: tuple[str, ...] = member(
        Items(of=TENSOR_NAME, max_items=MAX_FRAGMENTS - 1),
        "Cut where these tensors are made; none leaves the model whole.",
        default=[],
        example=["layer2_out"],
    )
    items_per_second: float | None = measured(
        "What was predicted of it, before it was cut.", "items per second", 38.2
    )
    latency_seconds: float | None = measured("The same of one item.", "seconds", 0.075)
    reason: str = member(
        MESSAGE, "Why it was chosen.", example="2 fragments, on jetson and pi-4: 38.2 items/s"
    )


@record()
class PlacementColumns:
    """A Placement in one line."""

    stages: str | None = printed("How many stages.", "3")
    devices: str | None = printed("The devices in the order of stages.", "jetson, pi-4, pi-zero")
    rate: str | None = printed("What the plan gives.", "38/s")


@record()
class PlacementStatus(Status):
    """The plan."""

    conditions: tuple[Condition, ...] = aspects(
        "Planned, Ready; WithinBudget, which is False while a device of the plan is over its "
        "budget; with prefetch, Prefetched, which is True when every fragment is on the disk or in "
        "the memory of its devices."
    )
    epoch: int | None = member(COUNT, "Grows with every new plan.", default=None, example=1)
    stages: tuple[StageStatus, ...] = records(StageStatus, MAX_FRAGMENTS, "The stages.")
    fragments: tuple[FragmentMemory, ...] = records(
        FragmentMemory, MAX_FRAGMENTS, "The memory of each fragment, in their order."
    )
    budgets: tuple[FragmentBudgets, ...] = records(
        FragmentBudgets,
        MAX_BUDGETS,
        "The smallest budget that each fragment runs in, and how long a task takes at several.",
    )
    prefetched: tuple[Prefetched, ...] = records(
        Prefetched, MAX_GRANTS, "With prefetch: where the fragments are."
    )
    cut: ChosenCut | None = optional(
        ChosenCut, "Of a Partition with cutting Planned: the cut that this Placement has chosen."
    )
    predicted: Cost | None = optional(Cost, "By the planner.")
    predicted_time: str | None = moment(
        "When all that is predicted here was. While a plan stays, its predictions follow what "
        "devices measure once a minute.",
        "2026-01-31T12:00:00Z",
    )
    measured: Cost | None = optional(Cost, "By the last job.")
    makespan: Makespan | None = optional(Makespan, "Of the objective Makespan, by the planner.")
    rejected: tuple[Rejected, ...] = records(Rejected, 8, "The best plans that lost.")
    columns: PlacementColumns | None = optional(PlacementColumns, COLUMNS)


@record()
class Placement(Resource):
    """A plan: which devices serve which stages. Alone it is a preview; nothing runs. With prefetch,
    its devices have the fragments before a job needs them."""

    spec: PlacementSpec = member(Object(PlacementSpec), "What is wanted.")
    status: PlacementStatus | None = optional(PlacementStatus, "What is.")
