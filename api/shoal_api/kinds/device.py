"""Device: one agent as the coordinator reports it; written by the operator only."""

from typing import Final

from shoal_api.fields import (
    COLUMNS,
    COUNT,
    FRAGMENT,
    NAME,
    REFERENCE,
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
    size,
)
from shoal_api.rules import immutable
from shoal_api.schema import Object, member, record
from shoal_api.shapes import Text

MAX_PLANNED: Final = 64
_MOST_PEERS: Final = 128


@record(immutable("poolRef"))
class DeviceSpec:
    """To which pool the device belongs."""

    pool_ref: Reference = member(REFERENCE, "The device's pool.", example={"name": "shelf"})


@record()
class CachedFragments:
    """What lies on the device's disk."""

    count: int = member(COUNT, "Verified fragments.", example=3)
    bytes: int = member(COUNT, "Their size.", unit="bytes", example=10905190)


@record()
class DeviceSpeed:
    """What the device was measured to do when its agent started; what is absent is not known. The
    rates are those of one thread that nothing disturbs.
    """

    processors: float | None = measured(
        "How much of such threads the device has: below 1 under a quota.", "threads", 3.8
    )
    convolution_flops_per_second: float | None = measured(
        "Operations of convolutions.", "operations per second", 9.1e9
    )
    product_flops_per_second: float | None = measured(
        "Operations of matrix products.", "operations per second", 1.05e10
    )
    memory_bytes_per_second: float | None = measured(
        "Weights that are read from memory.", "bytes per second", 4.2e9
    )
    page_bytes_per_second: float | None = measured(
        "Weights that are mapped again from the page cache.", "bytes per second", 1.9e9
    )
    disk_bytes_per_second: float | None = measured(
        "Weights that come from the disk.", "bytes per second", 4.4e7
    )


@record()
class DevicePeer:
    """What the link to another device did in the last ten minutes."""

    name: str = member(Text(max_length=253), "The other device.", example="pi-5")
    bytes_per_second: float | None = measured(
        "In the fastest of the large transfers and probes.", "bytes per second", 1.1e8
    )
    round_trip_seconds: float | None = measured(
        "The shortest way there and back.", "seconds", 0.0004
    )


@record()
class DeviceLink:
    """What the link did in the last ten minutes."""

    bytes_per_second: float | None = measured(
        "In the fastest of the large transfers and probes.", "bytes per second", 1.1e8
    )
    round_trip_seconds: float | None = measured(
        "The shortest way to the coordinator and back.", "seconds", 0.0004
    )
    transfer_seconds_per_byte: float | None = measured(
        "Processor time that a byte takes to be sent or received.", "seconds", 6e-9
    )
    handling_seconds: float | None = measured(
        "Processor time of a task or a transfer, besides computing and bytes.", "seconds", 8e-4
    )
    peers: tuple[DevicePeer, ...] = records(
        DevicePeer, _MOST_PEERS, "The same for each other device that it exchanged data with."
    )


@record()
class PlannedFragment:
    """A fragment that a Placement gives to the device, and what it would take in other budgets."""

    placement: str = member(NAME, "The Placement; the newest, of several.", example="ocr")
    fragment: int = member(FRAGMENT, "The fragment's index.", example=0)
    digest: str | None = digest_of("Its name in the fragment store.")
    least_budget_bytes: int = least_budget()
    times: tuple[TimeAtBudget, ...] = budgets_of_a_fragment()


@record()
class DeviceColumns:
    """A Device in one line."""

    budget: str | None = printed("Its budget.", "64Mi")
    cached: str | None = printed("What lies on its disk.", "3 (10.4 MiB)")


@record()
class DeviceStatus(Status):
    """What the coordinator last reported; telemetry is in Prometheus, not here."""

    conditions: tuple[Condition, ...] = aspects(
        "Ready, which is Unknown while the device is silent; WithinBudget, which is False until "
        "nothing was measured above the budget for ten minutes, or the agent has started again."
    )
    node: str | None = member(
        Text(max_length=253), "The node it runs on.", default=None, example="pi-4"
    )
    architecture: str | None = member(
        Text(max_length=32), "The node's processor.", default=None, example="arm64"
    )
    budget_bytes: int | None = size("What it may use above its floor.", 67108864)
    floor_bytes: int | None = size("What the idle agent uses itself.", 62914560)
    limit_bytes: int | None = size(
        "The memory limit of its agent's container. It starts with an allowance for the idle agent "
        "beside the budget, and follows floorBytes where the cluster resizes pods in place.",
        130023424,
    )
    cached_fragments: CachedFragments | None = optional(CachedFragments, "What lies on its disk.")
    speed: DeviceSpeed | None = optional(
        DeviceSpeed, "What it was measured to do; plans are made with it."
    )
    link: DeviceLink | None = optional(DeviceLink, "What its link was measured to do.")
    fragments: tuple[PlannedFragment, ...] = records(
        PlannedFragment,
        MAX_PLANNED,
        "What plans give to it: the smallest budget that each fragment runs in, and how long a "
        "task takes at several. Those of the newest Placements.",
    )
    last_seen_time: str | None = moment(
        "When it was last heard of; moves at most once a minute.", "2026-01-31T12:00:00Z"
    )
    columns: DeviceColumns | None = optional(DeviceColumns, COLUMNS)


@record()
class Device(Resource):
    """One agent on one node, as the coordinator reports it; written by the operator only."""

    spec: DeviceSpec = member(Object(DeviceSpec), "Where it belongs.")
    status: DeviceStatus | None = optional(DeviceStatus, "What is.")
