"""The kinds as CustomResourceDefinitions, written from their declarations.

`crds/` and the chart's templates are both made from `definition` by `make crds`, so there is one
source of what the API server checks and of what the parser reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal_api.kinds import Device, DevicePool, InferenceJob, KindNames, Model, Partition, Placement
from shoal_api.schema import GROUP, VERSION, openapi_schema

CATEGORY: Final = "shoal"
"""`kubectl get shoal` lists the objects of all kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of `kubectl get`: where its text stands, and what it means; `wide`: with -o wide."""

    name: str
    path: str
    meaning: str
    type: str = "string"
    wide: bool = False


def _printed(name: str, meaning: str, *, wide: bool = False) -> Column:
    """A column out of `status.columns`, where the operator writes what is to be printed."""
    path = f".status.columns.{name.lower()}"
    return Column(name=name, path=path, meaning=meaning, wide=wide)


def _condition(type_: str, field: str, name: str, meaning: str, *, wide: bool = False) -> Column:
    path = f'.status.conditions[?(@.type=="{type_}")].{field}'
    return Column(name=name, path=path, meaning=meaning, wide=wide)


_READY: Final = _condition("Ready", "status", "Ready", "Whether it can be used.")
_REASON: Final = _condition("Ready", "reason", "Reason", "Why it is Ready or not.", wide=True)
_AGE: Final = Column(
    name="Age", path=".metadata.creationTimestamp", meaning="Since when it is there.", type="date"
)

COLUMNS: Final[Mapping[type, tuple[Column, ...]]] = {
    Model: (
        _printed("Size", "The model with its weights."),
        _printed("Fragments", "How many fragments its Partitions have."),
        _READY,
        _AGE,
        Column(name="Source", path=".spec.source.uri", meaning="Where it comes from.", wide=True),
        _REASON,
    ),
    DevicePool: (
        _printed("Devices", "Ready of all."),
        _printed("Budget", "The budgets of all devices together."),
        _READY,
        _AGE,
        Column(
            name="Endpoint",
            path=".status.coordinatorEndpoint",
            meaning="Where its coordinator listens.",
            wide=True,
        ),
        _REASON,
    ),
    Partition: (
        Column(name="Model", path=".spec.modelRef.name", meaning="What is cut."),
        _printed("Fragments", "How many."),
        _printed("Largest", "What the largest fragment needs on a device."),
        _READY,
        _AGE,
        _REASON,
    ),
    Placement: (
        Column(name="Partition", path=".spec.partitionRef.name", meaning="What is placed."),
        Column(name="Pool", path=".spec.poolRef.name", meaning="Where."),
        _printed("Stages", "How many."),
        _printed("Rate", "What the plan gives."),
        _READY,
        _AGE,
        _printed("Devices", "In the order of stages.", wide=True),
        _REASON,
    ),
    InferenceJob: (
        _printed("Model", "What runs."),
        _printed("Pool", "Where it runs."),
        _printed("Items", "Succeeded of all."),
        _printed("Rate", "Items per second since the start."),
        _printed("Status", "The conditions in one word."),
        _AGE,
        Column(
            name="Priority",
            path=".spec.priority",
            meaning="More goes first.",
            type="integer",
            wide=True,
        ),
        Column(
            name="Failed",
            path=".status.items.failed",
            meaning="Items given up.",
            type="integer",
            wide=True,
        ),
    ),
    Device: (
        Column(name="Pool", path=".spec.poolRef.name", meaning="Its pool."),
        Column(name="Node", path=".status.node", meaning="Where its agent runs."),
        _printed("Budget", "What it may use above its floor."),
        _printed("Cached", "Fragments on its disk."),
        _READY,
        _AGE,
        Column(
            name="Architecture",
            path=".status.architecture",
            meaning="The node's processor.",
            wide=True,
        ),
        _REASON,
    ),
}


def definition(names: KindNames) -> dict[str, object]:
    """A kind's CustomResourceDefinition as JSON."""
    kind = names.cls.__name__
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names.plural}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "shoal"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": names.plural,
                "singular": names.singular,
                "shortNames": [names.short],
                "categories": [CATEGORY],
            },
            "versions": [_version(names)],
        },
    }


def _version(names: KindNames) -> dict[str, object]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(each) for each in COLUMNS[names.cls]],
        "schema": {"openAPIV3Schema": openapi_schema(names.cls)},
    }


def _column(column: Column) -> dict[str, object]:
    return {
        "name": column.name,
        "type": column.type,
        "description": column.meaning,
        "jsonPath": column.path,
        **({"priority": 1} if column.wide else {}),
    }
