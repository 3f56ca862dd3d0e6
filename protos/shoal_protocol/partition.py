"""A model cut into fragments: the value that cutting makes, planning reads and dispatch runs.

The fragments form a DAG. Stage and fragment share one index; `MODEL` stands for the model itself:
as the producer of an edge it means the model's inputs, as the consumer the model's outputs.
Fragments are in topological order: every edge goes from a smaller to a larger index.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from shoal_protocol.digests import Digest, is_digest
from shoal_protocol.units import Bytes

if TYPE_CHECKING:
    from shoal_protocol.v1.coordinator_pb2 import JobStatus

MODEL: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor's name, type and shape.

    `dtype` is ONNX's name in lower case (`float`, `int64`, `float16`, ...); in `shape` an int is a
    fixed size, a str a symbolic one (`batch`), and None one that nobody knows. A `shape` of None
    says that not even the number of axes is known.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a device has to do, by the rates that bound it: FLOPs of convolutions, FLOPs of matrix
    products, bytes moved. Corrected, so that amounts divided by rates add up to a time."""

    convolution: int = 0
    matrix: int = 0
    memory: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            convolution=self.convolution + other.convolution,
            matrix=self.matrix + other.matrix,
            memory=self.memory + other.memory,
        )

    def times(self, factor: float) -> "Work":
        """The amounts times a factor, rounded to the nearest."""
        return Work(
            convolution=round(self.convolution * factor),
            matrix=round(self.matrix * factor),
            memory=round(self.memory * factor),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A self-contained sub-graph with its weights, named by the digest of its manifest.

    `weight_bytes` are the initializers' bytes. `resident_bytes` is what a device is to reckon with
    above its idle floor while the fragment is loaded and runs one item: weights, the most
    activations alive at once, and workspace. `least_bytes` is the same for a device that swaps: the
    fragment in blocks, the weights of one in memory (`blocks`); without blocks the two are equal.
    `flops`, `work` and `activation_bytes` are None where a shape is unknown: unknown stays unknown,
    never zero. `batches` says that it may run several items at once. `gathered_bytes` of the
    weights are tables of which a device that swaps reads nothing but the rows that an item asks
    for, `row_bytes` of the file with what lies around them.
    """

    index: int
    digest: Digest
    nodes: int
    weight_bytes: int
    resident_bytes: int
    least_bytes: int
    activation_bytes: int | None
    flops: int | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    work: Work | None = None
    batches: bool = False
    gathered_bytes: int = 0
    row_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Tensors that `consumer` needs from `producer`: fragment indices, or `MODEL`."""

    producer: int
    consumer: int
    tensors: tuple[str, ...]
    bytes_per_item: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgrown:
    """A fragment, by its number, that fits on no device: as measured it takes at least so much."""

    fragment: int
    need_bytes: int


def outgrown_of(status: "JobStatus") -> tuple[Outgrown, ...]:
    """Why a job failed, where that was memory, as its coordinator reports it."""
    return tuple(
        Outgrown(fragment=each.fragment, need_bytes=each.need_bytes) for each in status.outgrown
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDocument:
    """What `partition.json` in the fragment store says. `fixed` are inputs of the model that it has
    a value for: a caller of ONNX may give another, a fragment has that one."""

    model_digest: Digest
    fragments: tuple[Fragment, ...]
    edges: tuple[Edge, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    fixed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        indices = [fragment.index for fragment in self.fragments]
        assert indices == list(range(len(indices))), f"fragments are numbered {indices}"
        for edge in self.edges:
            assert edge.producer < edge.consumer or edge.consumer == MODEL, f"{edge} goes back"

    def batch_item_bytes(self, index: int) -> int | None:
        """What each item more takes on a device that runs several of a fragment at once: as much as
        a run takes beside weights, and its inputs and outputs once more; None: it runs items one by
        one."""
        fragment = self.fragments[index]
        if not fragment.batches:
            return None
        moved = (each.bytes_per_item or 0 for each in (*self.into(index), *self.out_of(index)))
        return fragment.resident_bytes - fragment.weight_bytes + sum(moved)

    def into(self, consumer: int) -> tuple[Edge, ...]:
        """The edges that end in a stage, by producer."""
        return tuple(edge for edge in self.edges if edge.consumer == consumer)

    def out_of(self, producer: int) -> tuple[Edge, ...]:
        """The edges that start in a stage, by consumer."""
        return tuple(edge for edge in self.edges if edge.producer == producer)

    def output_bytes(self, producer: int) -> Bytes | None:
        """What a stage makes of an item, if that is known."""
        known = [edge.bytes_per_item for edge in self.out_of(producer)]
        sizes = [size for size in known if size is not None]
        return Bytes(sum(sizes)) if len(sizes) == len(known) else None


def items_within(free_bytes: int, item_bytes: int, most: int) -> int:
    """How many items may run at once: one, and as many more as there is memory for; `most` in
    all."""
    return min(most, 1 + max(0, free_bytes) // max(1, item_bytes))


# ---- partition.json ------------------------------------------------------------------------------

VERSION: Final = 1
MAX_FRAGMENTS: Final = 4096
MAX_TENSORS: Final = 65_536
MAX_RANK: Final = 64
MAX_NAME: Final = 4096
MAX_COUNT: Final = 2**63 - 1
_OF_TABLES: Final = ("gathered_bytes", "row_bytes")
"""Written of fragments that have some."""


class DocumentRefused(ValueError):
    """A document is not what it should be: `where` is the path of the field, `problem` says why."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"partition document, {where or 'top'}: {problem}")


def document_to_json(document: PartitionDocument) -> str:
    """Canonical JSON: sorted keys, no spaces."""
    value = {"version": VERSION, **asdict(document)}
    if not document.fixed:
        del value["fixed"]
    for fragment in value["fragments"]:
        for key in _OF_TABLES:
            if not fragment[key]:
                del fragment[key]
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def document_from_json(text: str | bytes) -> PartitionDocument:
    """Read what `document_to_json` wrote, or raise `DocumentRefused` that names the field.

    Checked: types, bounds, digests, numbering, that edges go forward and name tensors that their
    producer gives, and that every tensor that a fragment takes or the model gives has one source.
    """
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentRefused("", f"not JSON ({error})") from error
    top = _Reader("", parsed)
    version = top.count("version")
    if version != VERSION:
        raise DocumentRefused("version", f"is {version}; this program reads version {VERSION}")
    fragments = tuple(_read_fragment(each) for each in top.items("fragments", MAX_FRAGMENTS))
    for position, fragment in enumerate(fragments):
        if fragment.index != position:
            raise DocumentRefused(f"fragments[{position}].index", f"is {fragment.index}")
    document_edges = tuple(
        _read_edge(each, len(fragments)) for each in top.items("edges", MAX_TENSORS)
    )
    document = PartitionDocument(
        model_digest=top.digest("model_digest"),
        fragments=fragments,
        edges=document_edges,
        inputs=_read_specs(top, "inputs"),
        outputs=_read_specs(top, "outputs"),
        fixed=tuple(each.name() for each in top.items("fixed", MAX_TENSORS))
        if top.has("fixed")
        else (),
    )
    _check_sources(document)
    return document


def _read_fragment(reader: "_Reader") -> Fragment:
    resident_bytes = reader.count("resident_bytes")
    # Documents that were written before there were blocks do not have it.
    least_bytes = reader.count("least_bytes") if reader.has("least_bytes") else resident_bytes
    if least_bytes > resident_bytes:
        raise DocumentRefused(reader.at("least_bytes"), f"is over {resident_bytes}, the resident")
    return Fragment(
        index=reader.count("index"),
        digest=reader.digest("digest"),
        nodes=reader.count("nodes"),
        weight_bytes=reader.count("weight_bytes"),
        resident_bytes=resident_bytes,
        least_bytes=least_bytes,
        activation_bytes=reader.optional_count("activation_bytes"),
        flops=reader.optional_count("flops"),
        inputs=_read_specs(reader, "inputs"),
        outputs=_read_specs(reader, "outputs"),
        work=_read_work(reader),
        # Documents that were written before there were batches do not have it.
        batches=reader.has("batches") and reader.under("batches").value is True,
        **{key: reader.count(key) for key in _OF_TABLES if reader.has(key)},
    )


def _read_work(reader: "_Reader") -> Work | None:
    """Documents that were written before work was estimated do not have it."""
    if not reader.has("work") or (work := reader.under("work")).value is None:
        return None
    return Work(
        convolution=work.count("convolution"),
        matrix=work.count("matrix"),
        memory=work.count("memory"),
    )


def _read_edge(reader: "_Reader", fragments: int) -> Edge:
    producer = reader.count("producer", least=MODEL)
    consumer = reader.count("consumer", least=MODEL)
    if max(producer, consumer) >= fragments:
        raise DocumentRefused(reader.where, f"there are {fragments} fragments only")
    if consumer != MODEL and producer >= consumer:
        raise DocumentRefused(reader.where, f"goes back, from {producer} to {consumer}")
    return Edge(
        producer=producer,
        consumer=consumer,
        tensors=tuple(each.name() for each in reader.items("tensors", MAX_TENSORS)),
        bytes_per_item=reader.optional_count("bytes_per_item"),
    )


def _read_specs(reader: "_Reader", key: str) -> tuple[TensorSpec, ...]:
    specs = tuple(each.spec() for each in reader.items(key, MAX_TENSORS))
    if len({spec.name for spec in specs}) != len(specs):
        raise DocumentRefused(reader.at(key), "a name appears twice")
    return specs


def _check_sources(document: PartitionDocument) -> None:
    """Each tensor that a fragment takes, or that the model gives, comes over exactly one edge."""
    given = {each.index: {spec.name for spec in each.outputs} for each in document.fragments}
    taken = {each.index: [spec.name for spec in each.inputs] for each in document.fragments}
    given[MODEL] = {spec.name for spec in document.inputs}
    taken[MODEL] = [spec.name for spec in document.outputs]
    arriving: dict[int, list[str]] = {index: [] for index in taken}
    for position, edge in enumerate(document.edges):
        missing = sorted(set(edge.tensors) - given[edge.producer])
        if missing:
            raise DocumentRefused(
                f"edges[{position}].tensors", f"{edge.producer} does not give {missing[0]}"
            )
        arriving[edge.consumer].extend(edge.tensors)
    for index, names in taken.items():
        if sorted(names) != sorted(arriving[index]):
            odd = sorted(set(names) ^ set(arriving[index])) or sorted(arriving[index])
            who = "the model's outputs" if index == MODEL else f"fragment {index}"
            raise DocumentRefused("edges", f"{odd[0]} does not reach {who} exactly once")


@dataclass(frozen=True, slots=True)
class _Reader:
    """A parsed value and its path, so that every complaint names its field."""

    where: str
    value: object

    def at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def _field(self, key: str) -> object:
        if not isinstance(self.value, Mapping):
            raise DocumentRefused(self.where, "is not an object")
        if key not in self.value:
            raise DocumentRefused(self.at(key), "is missing")
        return self.value[key]

    def has(self, key: str) -> bool:
        return isinstance(self.value, Mapping) and key in self.value

    def under(self, key: str) -> "_Reader":
        return _Reader(self.at(key), self._field(key))

    def count(self, key: str, least: int = 0) -> int:
        value = self._field(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise DocumentRefused(self.at(key), "is not an integer")
        if not least <= value <= MAX_COUNT:
            raise DocumentRefused(self.at(key), f"is {value}, not in {least}..{MAX_COUNT}")
        return value

    def optional_count(self, key: str) -> int | None:
        return None if self._field(key) is None else self.count(key)

    def digest(self, key: str) -> Digest:
        value = self._field(key)
        if not isinstance(value, str) or not is_digest(value):
            raise DocumentRefused(self.at(key), "is not sha256: and 64 hexadecimal digits")
        return Digest(value)

    def items(self, key: str, most: int) -> list["_Reader"]:
        value = self._field(key)
        if not isinstance(value, list):
            raise DocumentRefused(self.at(key), "is not a list")
        if len(value) > most:
            raise DocumentRefused(self.at(key), f"has {len(value)} entries, at most {most}")
        return [_Reader(f"{self.at(key)}[{index}]", each) for index, each in enumerate(value)]

    def name(self) -> str:
        if not isinstance(self.value, str) or not 0 < len(self.value) <= MAX_NAME:
            raise DocumentRefused(self.where, f"is not a name of 1 to {MAX_NAME} characters")
        return self.value

    def axis(self) -> int | str | None:
        match self.value:
            case None:
                return None
            case int(size) if 0 <= size <= MAX_COUNT and not isinstance(size, bool):
                return size
            case str(symbol) if 0 < len(symbol) <= MAX_NAME:
                return symbol
        raise DocumentRefused(self.where, "is not a size, a name or null")

    def spec(self) -> TensorSpec:
        shape = None
        if self._field("shape") is not None:
            shape = tuple(each.axis() for each in self.items("shape", MAX_RANK))
        name, dtype = (_Reader(self.at(key), self._field(key)).name() for key in ("name", "dtype"))
        return TensorSpec(name=name, dtype=dtype, shape=shape)
