"""The kinds as CustomResourceDefinitions, written from their declarations.

`crds/` and the chart's templates are both made from `definition` by `make generate`, so there is
one source of what the API server checks and of what the parser reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal_api.kinds import Device, DevicePool, InferenceJob, KindNames, Model, Partition, Placement
from shoal_api.schema import GROUP, VERSION, openapi_schema

CATEGORY: Final = "shoal"
"""`kubectl get shoal` lists the objects of all kinds."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `kubectl get`: where its text is, and what it means; `wide`: with -o wide."""

    name: str
    path: str
    meaning: str
    type: str = "string"
    wide: bool = False


def _printed(name: str, meaning: str, *, wide: bool = False) -> Column:
    """A column out of `status.columns`, where the operator writes what is to be printed."""
    return Column(name, f".status.columns.{name.lower()}", meaning, wide=wide)


_CONDITION: Final = '.status.conditions[?(@.type=="Ready")]'
_READY: Final = Column("Ready", f"{_CONDITION}.status", "Whether it can be used.")
_REASON: Final = Column("Reason", f"{_CONDITION}.reason", "Why it is Ready or not.", wide=True)
_AGE: Final = Column("Age", ".metadata.creationTimestamp", "Since when it is there.", type="date")

COLUMNS: Final[Mapping[type, tuple[Column, ...]]] = {
    Model: (
        _printed("Size", "The model with its weights."),
        _printed("Fragments", "How many fragments its Partitions have."),
        _READY,
        _AGE,
        Column("Source", ".spec.source.uri", "Where it comes from.", wide=True),
        _REASON,
    ),
    DevicePool: (
        _printed("Devices", "Ready of all."),
        _printed("Budget", "The budgets of all devices together."),
        _READY,
        _AGE,
        Column(
            "Endpoint", ".status.coordinatorEndpoint", "Where its coordinator listens.", wide=True
        ),
        _REASON,
    ),
    Partition: (
        Column("Model", ".spec.modelRef.name", "What is cut."),
        _printed("Fragments", "How many."),
        _printed("Largest", "What the largest fragment needs on a device."),
        _READY,
        _AGE,
        _REASON,
    ),
    Placement: (
        Column("Partition", ".spec.partitionRef.name", "What is placed."),
        Column("Pool", ".spec.poolRef.name", "Where."),
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
        Column("Priority", ".spec.priority", "More goes first.", type="integer", wide=True),
        Column("Failed", ".status.items.failed", "Items given up.", type="integer", wide=True),
    ),
    Device: (
        Column("Pool", ".spec.poolRef.name", "Its pool."),
        Column("Node", ".status.node", "Where its agent runs."),
        _printed("Budget", "What it may use above its floor."),
        _printed("Cached", "Fragments on its disk."),
        _READY,
        _AGE,
        Column("Architecture", ".status.architecture", "The node's processor.", wide=True),
        _REASON,
    ),
}


def definition(names: KindNames) -> dict[str, object]:
    """A kind's CustomResourceDefinition as JSON."""
    kind = names.cls.__name__
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(each) for each in COLUMNS[names.cls]],
        "schema": {"openAPIV3Schema": openapi_schema(names.cls)},
    }
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
            "versions": [version],
        },
    }


def _column(column: Column) -> dict[str, object]:
    return {
        "name": column.name,
        "type": column.type,
        "description": column.meaning,
        "jsonPath": column.path,
        **({"priority": 1} if column.wide else {}),
    }
