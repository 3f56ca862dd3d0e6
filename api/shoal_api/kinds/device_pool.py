"""DevicePool: which devices, with what budget."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from shoal_api.fields import (
    COLUMNS,
    COUNT,
    CPUS,
    DISK,
    MAX_DEVICES,
    MEMORY,
    NAME,
    RATE,
    STORAGE_CLASS,
    BitsPerSecond,
    Condition,
    Millicpus,
    Resource,
    Status,
    aspects,
    optional,
    printed,
    size,
)
from shoal_api.rules import Rule, exactly_one, immutable_from_the_start
from shoal_api.schema import Object, member, record
from shoal_api.shapes import Choice, Items, Table, Text, Whole
from shoal_protocol.choices import Residency
from shoal_protocol.units import Bytes

MAX_LOCAL_DEVICES: Final = 64
"""That one machine pretends to be."""

_LABEL: Final = Text(
    max_length=63,
    min_length=0,
    pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$",
    meant="a label's value, of letters, digits, dashes, dots and underscores",
)
_LABEL_NAME: Final = Text(
    max_length=317,
    pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?([.][a-z0-9]([a-z0-9-]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
    meant="a label's or taint's name, such as shoal.dev/pool",
)


class TolerationOperator(StrEnum):
    """How a toleration's key matches a taint."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """What a taint does."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


def _exists_of_all(toleration: "Toleration") -> bool:
    return toleration.key is not None or toleration.operator is TolerationOperator.EXISTS


def _exists_whatever_the_value(toleration: "Toleration") -> bool:
    return not toleration.value or toleration.operator is TolerationOperator.EQUAL


def _ends_before_eviction(toleration: "Toleration") -> bool:
    evicts = toleration.effect is TaintEffect.NO_EXECUTE
    return toleration.toleration_seconds is None or evicts


@record(
    Rule(
        "has(self.key) || self.operator == 'Exists'",
        "operator must be Exists where there is no key",
        field="operator",
        check=_exists_of_all,
    ),
    Rule(
        "!has(self.value) || self.value == '' || self.operator == 'Equal'",
        "value must be left out with operator Exists, which matches all values",
        field="value",
        check=_exists_whatever_the_value,
    ),
    Rule(
        "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        "effect must be NoExecute where tolerationSeconds is given",
        field="effect",
        check=_ends_before_eviction,
    ),
)
class Toleration:
    """As in core/v1."""

    key: str | None = member(
        _LABEL_NAME, "The taint's key; absent matches all.", default=None, example="shoal.dev/pool"
    )
    operator: TolerationOperator = member(
        Choice(TolerationOperator), "How key and value match.", default="Equal", example="Exists"
    )
    value: str | None = member(
        _LABEL, "The taint's value, for Equal.", default=None, example="shelf"
    )
    effect: TaintEffect | None = member(
        Choice(TaintEffect),
        "The taint's effect; absent matches all.",
        default=None,
        example="NoSchedule",
    )
    toleration_seconds: int | None = member(
        COUNT,
        "How long a NoExecute taint is tolerated; absent: for ever.",
        unit="seconds",
        default=None,
        example=300,
    )


@record()
class Link:
    """How a pretended device is connected."""

    rate: BitsPerSecond | None = member(
        RATE, "What the link carries at most.", unit="bits per second", default=None, example="100M"
    )
    latency_milliseconds: int = member(
        Whole(minimum=0, maximum=60_000),
        "How long a message is on its way.",
        unit="milliseconds",
        default=0,
        example=5,
    )


@record()
class LocalDevice:
    """A device that this machine pretends to be."""

    name: str = member(NAME, "The device's name.", example="pi-4")
    memory: Bytes = member(
        MEMORY,
        "Its residency budget: memory for weights, activations and workspace, above the floor of "
        "an idle agent.",
        unit="bytes",
        example="24Mi",
    )
    cpus: Millicpus | None = member(
        CPUS, "Its share of processors; absent: unlimited.", default=None, example="0.5"
    )
    link: Link | None = optional(Link, "Its connection; absent: as fast as the machine is.")


@record()
class Local:
    """For `shoal run`, ignored in a cluster."""

    devices: tuple[LocalDevice, ...] = member(
        Items(of=Object(LocalDevice), max_items=MAX_LOCAL_DEVICES, min_items=1, key="name"),
        "The devices that one machine pretends to be.",
    )


@record(exactly_one("memory", "percent"))
class Budget:
    """How much memory an agent may use, above its idle floor."""

    memory: Bytes | None = member(
        MEMORY, "So much on every device.", unit="bytes", default=None, example="64Mi"
    )
    percent: int | None = member(
        Whole(minimum=1, maximum=95),
        "So much of what the node can allocate.",
        unit="percent",
        default=None,
        example=50,
    )


@record()
class Cache:
    """Fragments on a device's disk."""

    size: Bytes = member(DISK, "At most so much.", unit="bytes", default="1Gi", example="4Gi")
    storage_class_name: str | None = member(
        STORAGE_CLASS,
        "Of a volume per device; absent: an emptyDir.",
        default=None,
        example="local-path",
    )


@record(immutable_from_the_start("storageClassName"))
class Storage:
    """A volume."""

    size: Bytes = member(
        DISK,
        "Its size, which the coordinator keeps to whatever the storage class enforces. It can be "
        "made larger where the class allows that; no volume is made smaller, so less than it has "
        "changes nothing.",
        unit="bytes",
        default="5Gi",
        example="20Gi",
    )
    storage_class_name: str | None = member(
        STORAGE_CLASS,
        "Its storage class; absent: the cluster's default.",
        default=None,
        example="local-path",
    )


@record()
class CoordinatorSettings:
    """The pool's coordinator."""

    storage: Storage = member(Object(Storage), "Where it keeps fragments and journals.", default={})


@record()
class DevicePoolSpec:
    """Which devices, and what they may use."""

    node_selector: Mapping[str, str] = member(
        Table(values=_LABEL, max_items=32, names=_LABEL_NAME),
        "The nodes that carry these labels get an agent; none: all nodes. Ignored in local mode.",
        default={},
        example={"shoal.dev/pool": "shelf"},
    )
    tolerations: tuple[Toleration, ...] = member(
        Items(of=Object(Toleration), max_items=32),
        "Taints that the agents tolerate. Ignored in local mode.",
        default=[],
        example=[{"key": "shoal.dev/pool", "operator": "Exists"}],
    )
    local: Local | None = member(
        Object(Local),
        "The devices of `shoal run`. Ignored in a cluster.",
        default=None,
        example={
            "devices": [
                {"name": "jetson", "memory": "32Mi"},
                {"name": "pi-4", "memory": "24Mi", "cpus": "0.5", "link": {"rate": "100M"}},
            ]
        },
    )
    budget: Budget = member(
        Object(Budget),
        "The residency budget of each device; in local mode a device's own memory is its budget.",
        example={"memory": "64Mi"},
    )
    residency: Residency = member(
        Choice(Residency),
        "Adaptive: as many fragments as the budget takes; Single: one fragment at a time.",
        default="Adaptive",
        example="Single",
    )
    cache: Cache = member(Object(Cache), "Fragments on each device's disk.", default={})
    coordinator: CoordinatorSettings = member(
        Object(CoordinatorSettings), "The pool's coordinator.", default={}
    )


@record()
class DeviceCounts:
    """How many devices there are."""

    total: int = member(COUNT, "Selected nodes, those too small for an agent included.", example=3)
    ready: int = member(COUNT, "Devices with a live session.", example=3)


@record()
class DevicePoolColumns:
    """A DevicePool in one line."""

    devices: str | None = printed("Ready of all.", "3/3")
    budget: str | None = printed("The budgets of all devices together.", "192Mi")


@record()
class DevicePoolStatus(Status):
    """What the pool has become."""

    conditions: tuple[Condition, ...] = aspects(
        "CoordinatorReady, AgentsReady, VolumeHasRoom, Ready."
    )
    devices: DeviceCounts | None = optional(
        DeviceCounts, f"How many there are; at most {MAX_DEVICES} are planned with."
    )
    budget_bytes: int | None = size("The budgets of all devices together.", 201326592)
    smallest_budget_bytes: int | None = size("The least that one of the devices may use.", 67108864)
    coordinator_endpoint: str | None = member(
        Text(max_length=256),
        "Where the coordinator listens.",
        default=None,
        example="shelf-coordinator.default.svc:7400",
    )
    columns: DevicePoolColumns | None = optional(DevicePoolColumns, COLUMNS)


@record()
class DevicePool(Resource):
    """A set of devices with a budget: one coordinator, and one agent per selected node."""

    spec: DevicePoolSpec = member(Object(DevicePoolSpec), "What is wanted.")
    status: DevicePoolStatus | None = optional(DevicePoolStatus, "What is.")
