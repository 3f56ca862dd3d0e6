"""Objects, settings and documents that the tests of the reconcilers are about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from shoal_api.fields import Condition, Status
from shoal_api.kinds import (
    AnyKind,
    DevicePool,
    InferenceJob,
    Model,
    Partition,
    Placement,
)
from shoal_api.schema import API_VERSION, parse
from shoal_api.writing import write
from shoal_operator.reconcile.settings import Images, OperatorSettings
from shoal_protocol.cut_table import CutTable
from shoal_protocol.digests import Digest
from shoal_protocol.partition import MODEL, Edge, Fragment, PartitionDocument, TensorSpec
from shoal_protocol.units import Bytes

MIB = 1 << 20
NOW = "2026-03-01T12:00:00Z"
NAMESPACE = "lab"
UID = "0f5f3c9e-7a5f-4a55-9a4c-000000000001"
DIGEST = "sha256:" + "0c1f" * 16
OTHER_DIGEST = "sha256:" + "beef" * 16
SETTINGS = OperatorSettings(
    images=Images(
        coordinator="shoal/coordinator:1", worker="shoal/worker:1", agent="shoal/agent:1"
    ),
    enrolment="shoal-enrolment.shoal-system.svc:8443",
    agent_floor=Bytes(64 * MIB),
    worker_memory=Bytes(1024 * MIB),
)

K = TypeVar("K", Model, DevicePool, Partition, Placement, InferenceJob)


def make(
    kind: type[K],
    name: str,
    spec: Mapping[str, object],
    *,
    uid: str = UID,
    generation: int = 1,
    labels: Mapping[str, str] | None = None,
) -> K:
    """An object as the API server would give it."""
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": uid,
        "generation": generation,
        "creationTimestamp": NOW,
        "labels": dict(labels or {}),
    }
    document = {
        "apiVersion": API_VERSION,
        "kind": kind.__name__,
        "metadata": metadata,
        "spec": dict(spec),
    }
    value = parse(kind, document)
    assert isinstance(value, kind), value
    return value


def model(uri: str = "pvc://models/rec.onnx", **more: object) -> Model:
    """A Model; `digest` and `shapes` may be given."""
    source: dict[str, object] = {"uri": uri}
    if "digest" in more:
        source["digest"] = more.pop("digest")
    generation = more.pop("generation", 1)
    assert isinstance(generation, int)
    return make(Model, "rec", {"source": source, **more}, generation=generation)


def pool(name: str = "shelf", **spec: object) -> DevicePool:
    """A DevicePool of nodes with 64 MiB each."""
    given = {"nodeSelector": {"shoal.dev/pool": name}, "budget": {"memory": "64Mi"}, **spec}
    return make(DevicePool, name, given)


def document(fragments: int = 3, resident: int = 20 * MIB) -> PartitionDocument:
    """A chain of fragments."""

    def spec(name: str) -> TensorSpec:
        return TensorSpec(name=name, dtype="float", shape=(1, 8))

    names = ["x", *(f"t{index}" for index in range(1, fragments)), "y"]
    made = tuple(
        Fragment(
            index=index,
            digest=Digest(f"sha256:{index:064x}"),
            nodes=4,
            weight_bytes=resident // 2,
            resident_bytes=resident,
            least_bytes=resident,
            activation_bytes=1024,
            flops=1_000_000,
            inputs=(spec(names[index]),),
            outputs=(spec(names[index + 1]),),
        )
        for index in range(fragments)
    )
    ends = [MODEL, *range(fragments), MODEL]
    edges = tuple(
        Edge(
            producer=ends[place],
            consumer=ends[place + 1],
            tensors=(names[place],),
            bytes_per_item=32,
        )
        for place in range(fragments + 1)
    )
    return PartitionDocument(
        model_digest=Digest(DIGEST),
        fragments=made,
        edges=edges,
        inputs=(spec("x"),),
        outputs=(spec("y"),),
    )


def cuts_in(command: Sequence[str]) -> tuple[str, ...]:
    """Where a worker's command cuts."""
    return tuple(name for word, name in pairwise(command) if word == "--cut")


def cut_at(table: CutTable, cuts: Sequence[str]) -> PartitionDocument:
    """The fragments of a cut as a table has them, with digests of their own."""
    ends = [0, *(1 + table.tensors.index(name) for name in cuts), table.end]
    made = document(len(cuts) + 1)
    fragments = []
    for each in made.fragments:
        known = table.candidate(ends[each.index], ends[each.index + 1])
        place = 1000 * ends[each.index] + ends[each.index + 1]
        fragments.append(
            replace(
                each,
                digest=Digest(f"sha256:{place:064x}"),
                weight_bytes=known.weight_bytes,
                resident_bytes=known.resident_bytes,
                least_bytes=known.least_bytes,
                flops=known.flops,
            )
        )
    return replace(made, fragments=tuple(fragments))


def condition(status: Status, type_: str) -> Condition:
    """A status's condition."""
    return next(each for each in status.conditions if each.type == type_)


def word(status: Status, type_: str) -> str:
    """`True Ready`: a condition's status and reason."""
    found = condition(status, type_)
    return f"{found.status.value} {found.reason}"


def passes_its_schema(value: AnyKind) -> bool:
    """Whether an object would be read back as it is: what the API server would accept."""
    written = {
        "apiVersion": API_VERSION,
        "kind": type(value).__name__,
        **write(value),
    }
    return parse(type(value), written) == value
