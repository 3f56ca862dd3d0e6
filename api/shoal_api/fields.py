"""Shapes that several kinds share: names, addresses, sizes, times, conditions."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NewType, TypeVar

from shoal_api.schema import Object, member, record
from shoal_api.shapes import (
    INT64_MAX,
    Choice,
    Flag,
    Items,
    Json,
    Number,
    Quantity,
    Table,
    Text,
    Whole,
)
from shoal_protocol.units import Bytes

R = TypeVar("R")

Millicpus = NewType("Millicpus", int)
"""Thousandths of a processor."""

BitsPerSecond = NewType("BitsPerSecond", int)

MAX_FRAGMENTS: Final = 256
MAX_DEVICES: Final = 1024

NAME: Final = Text(
    max_length=63,
    pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$",
    meant="a name of small letters, digits and dashes",
)
_SUBDOMAIN: Final = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"
SECRET: Final = Text(max_length=253, pattern=_SUBDOMAIN, meant="the name of a Secret")
STORAGE_CLASS: Final = Text(max_length=253, pattern=_SUBDOMAIN, meant="a storage class's name")
DEVICE: Final = Text(
    max_length=63,
    pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$",
    meant="a device's name, which in a cluster is its node's",
)
DIGEST: Final = Text(
    max_length=71,
    pattern=r"^sha256:[0-9a-f]{64}$",
    meant="a digest, sha256: and 64 hexadecimal digits",
)
TENSOR_NAME: Final = Text(max_length=512, meant="a tensor's name in the ONNX graph")
TIME: Final = Text(
    max_length=40,
    pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$",
    meant="a time such as 2026-01-31T12:00:00Z",
    format="date-time",
)
MESSAGE: Final = Text(max_length=32768, min_length=0)
REASON: Final = Text(
    max_length=1024,
    pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
    meant="a reason in CamelCase",
)
COUNT: Final = Whole(minimum=0, maximum=INT64_MAX)
COLUMN: Final = Text(max_length=512, min_length=0)

COLUMNS: Final = "What `kubectl get` prints. For people; programs read the fields beside it."
FRAGMENT: Final = Whole(minimum=0, maximum=MAX_FRAGMENTS - 1)


def uri(*schemes: str) -> Text:
    """An address with one of these schemes, or a local path (which has no colon)."""
    known = "|".join(schemes)
    *others, last = (f"{scheme}://" for scheme in schemes if scheme != "file")
    in_cluster = f"an address with {', '.join(others)} or {last}"
    return Text(
        max_length=2048,
        pattern=rf"^(({known})://[^ \t\r\n]+|[^:\r\n]+)$",
        meant=f"an address with {', '.join(f'{scheme}://' for scheme in schemes)}, or a local path",
        in_cluster=f"{in_cluster} (local paths and file:// are for shoal run)",
    )


def bytes_of(minimum: str, maximum: str, such_as: str) -> Quantity[Bytes]:
    """A size as a quantity, read as whole bytes."""
    return Quantity(of=Bytes, minimum=minimum, maximum=maximum, unit="bytes", such_as=such_as)


MEMORY: Final = bytes_of("1Mi", "16Ti", "64Mi")
DISK: Final = bytes_of("1Mi", "1Pi", "1Gi")
CPUS: Final = Quantity(
    of=Millicpus, minimum="10m", maximum="1024", unit="processors", such_as="0.5", per_unit=1000
)
RATE: Final = Quantity(
    of=BitsPerSecond, minimum="1k", maximum="1T", unit="bits per second", such_as="100M"
)


class ConditionStatus(StrEnum):
    """Whether a condition holds; Unknown when nobody can tell."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@record()
class Reference:
    """Another object of the same namespace, by name."""

    name: str = member(NAME, "The object's name.", example="ppocr-rec")


REFERENCE: Final = Object(Reference)


@record()
class SecretReference:
    """A Secret of the same namespace, by name."""

    name: str = member(SECRET, "The Secret's name.", example="line-store")


@record(
    ignored=(
        *("deletionGracePeriodSeconds", "finalizers", "ownerReferences"),
        *("managedFields", "generateName", "selfLink"),
    )
)
class Metadata:
    """Kubernetes' object metadata; Shoal reads the name, the labels and the annotations."""

    name: str = member(
        NAME, "The object's name, unique within its kind and namespace.", example="ppocr-rec"
    )
    namespace: str | None = member(NAME, "The object's namespace.", default=None, example="default")
    labels: Mapping[str, str] = member(
        Table(values=Text(max_length=63, min_length=0), max_items=None), "Labels.", default={}
    )
    annotations: Mapping[str, str] = member(
        Table(values=Text(max_length=262144, min_length=0), max_items=None),
        "Annotations.",
        default={},
    )
    uid: str | None = member(Text(max_length=64), "Set by Kubernetes.", default=None)
    resource_version: str | None = member(
        Text(max_length=64), "Set by Kubernetes; grows with each change.", default=None
    )
    generation: int | None = member(
        COUNT, "Set by Kubernetes; grows with each change of the spec.", default=None
    )
    creation_timestamp: str | None = member(TIME, "Set by Kubernetes.", default=None)
    deletion_timestamp: str | None = member(TIME, "Set by Kubernetes.", default=None)


@record()
class Condition:
    """One aspect of an object's state, as in `metav1.Condition`."""

    type: str = member(REASON, "What the condition is about.", example="Ready")
    status: ConditionStatus = member(Choice(ConditionStatus), "Whether it holds.", example="True")
    reason: str = member(REASON, "Why, as one word for programs.", example="AllDevicesReady")
    message: str = member(
        MESSAGE, "Why, for people.", default="", example="3 of 3 devices are ready"
    )
    observed_generation: int | None = member(
        COUNT, "The generation of the spec that this was seen of.", default=None, example=1
    )
    last_transition_time: str = member(
        TIME, "When the status last became what it is.", example="2026-01-31T12:00:00Z"
    )


# ---- fields that may be absent -------------------------------------------------------------------


def optional(of: type[R], meaning: str) -> R | None:
    """A record that may be absent."""
    return member(Object(of), meaning, default=None)


def reference(meaning: str, name: str) -> Reference | None:
    """Another object, where one is named; such as the one of that name."""
    return member(REFERENCE, meaning, default=None, example={"name": name})


def secret(meaning: str, name: str) -> SecretReference | None:
    """A Secret, where one is named; such as the one of that name."""
    return member(Object(SecretReference), meaning, default=None, example={"name": name})


def digest_of(meaning: str) -> str | None:
    """A digest, where it is known."""
    return member(DIGEST, meaning, default=None, example="sha256:" + "0c1f" * 16)


def moment(meaning: str, example: str) -> str | None:
    """A time, where it has come."""
    return member(TIME, meaning, default=None, example=example)


def size(meaning: str, example: int) -> int | None:
    """Bytes, where they are known."""
    return member(COUNT, meaning, unit="bytes", default=None, example=example)


def measured(meaning: str, unit: str, example: float) -> float | None:
    """A number of a status, where it is known."""
    return member(Number(), meaning, unit=unit, default=None, example=example)


def printed(meaning: str, example: str) -> str | None:
    """A column of `kubectl get`, which prints what it finds, and makes nothing."""
    return member(COLUMN, meaning, default=None, example=example)


def records(of: type[R], most: int, meaning: str) -> tuple[R, ...]:
    """Records of a status, none where nothing is known."""
    return member(Items(of=Object(of), max_items=most), meaning, default=[])


@record()
class TimeAtBudget:
    """What a task of a fragment takes on a device with this budget and nothing else in it."""

    budget_bytes: int = member(COUNT, "The device's budget.", unit="bytes", example=22020096)
    seconds: float | None = measured(
        "With all that the fragment needs, or in blocks, transfers apart; absent where that cannot "
        "be predicted.",
        "seconds",
        0.031,
    )
    measured: bool = member(
        Flag(),
        "true: tasks have run so on the device. Else it is predicted, also from what was measured.",
        default=False,
        example=True,
    )


def budgets_of_a_fragment() -> tuple[TimeAtBudget, ...]:
    """Of a fragment on a device."""
    return records(
        TimeAtBudget,
        8,
        "From the budget that holds all of the fragment down to leastBudgetBytes.",
    )


def least_budget() -> int:
    """Of a fragment on a device."""
    return member(
        COUNT,
        "The smallest budget of a device that the fragment runs in, in blocks where that is less; "
        "other items wait meanwhile.",
        unit="bytes",
        example=7340032,
    )


def aspects(meaning: str) -> tuple[Condition, ...]:
    """The conditions of a kind: one for each aspect of an object."""
    conditions = Items(of=Object(Condition), max_items=16, key="type")
    return member(conditions, meaning, default=[])


@record()
class Status:
    """What the status of every kind has."""

    observed_generation: int | None = member(
        COUNT,
        "The metadata.generation of the spec that this status is about.",
        default=None,
        example=1,
    )
    conditions: tuple[Condition, ...] = aspects("Conditions.")

    def condition(self, type_: str) -> Condition | None:
        """The condition of a type; None if it was never set."""
        return next((each for each in self.conditions if each.type == type_), None)


@record()
class Resource:
    """What every kind has; each says for itself what its spec and its status hold."""

    metadata: Metadata = member(Object(Metadata), "Name and labels.")
    spec: object = member(Json(), "What is wanted.")
    status: Status | None = member(Object(Status), "What is.", default=None)

    @property
    def generation(self) -> int:
        """Grows with each change of the spec."""
        return self.metadata.generation or 0

    def condition(self, type_: str) -> Condition | None:
        """The condition of a type that was written last; None if it was never set."""
        return None if self.status is None else self.status.condition(type_)

    def holds(self, type_: str) -> bool:
        """Whether a condition is True of the newest spec."""
        known = self.condition(type_)
        is_new = known is not None and known.observed_generation == self.generation
        return is_new and known is not None and known.status is ConditionStatus.TRUE

    def message(self, type_: str) -> str:
        """What a condition says; empty if it was never set."""
        known = self.condition(type_)
        return "" if known is None else known.message
