"""Device: one agent as the coordinator reports it; written by the operator only."""

from shoal_operator.api.fields import (
    CONDITIONS,
    COUNT,
    METADATA,
    REFERENCE,
    TIME,
    Condition,
    Metadata,
    Reference,
)
from shoal_operator.api.schema import Object, member, record
from shoal_operator.api.shapes import Text


@record()
class DeviceSpec:
    """To which pool the device belongs."""

    pool_ref: Reference = member(REFERENCE, "The device's pool.", example={"name": "shelf"})


@record()
class CachedFragments:
    """What lies on the device's disk."""

    count: int = member(COUNT, "Verified fragments.")
    bytes: int = member(COUNT, "Their size.", unit="bytes")


@record()
class DeviceStatus:
    """What the coordinator last reported; telemetry is in Prometheus, not here."""

    observed_generation: int | None = member(COUNT, "Of the spec that was seen.", default=None)
    conditions: tuple[Condition, ...] = member(
        CONDITIONS, "Ready, which is Unknown while the device is silent.", default=[]
    )
    node: str | None = member(Text(max_length=253), "The node it runs on.", default=None)
    architecture: str | None = member(
        Text(max_length=32), "The node's processor.", default=None, example="arm64"
    )
    budget_bytes: int | None = member(
        COUNT, "What it may use above its floor.", unit="bytes", default=None
    )
    floor_bytes: int | None = member(
        COUNT, "What the idle agent uses itself.", unit="bytes", default=None
    )
    cached_fragments: CachedFragments | None = member(
        Object(CachedFragments), "What lies on its disk.", default=None
    )
    last_seen_time: str | None = member(
        TIME, "When it was last heard of; moves at most once a minute.", default=None
    )


@record()
class Device:
    """One agent on one node, as the coordinator reports it; written by the operator only."""

    metadata: Metadata = member(METADATA, "Name and labels.")
    spec: DeviceSpec = member(Object(DeviceSpec), "Where it belongs.")
    status: DeviceStatus | None = member(Object(DeviceStatus), "What is.", default=None)
