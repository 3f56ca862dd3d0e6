"""Checks on an untrusted ONNX file, before any other code uses it.

First the bytes (`wire`), then, on the parsed skeleton: operator domains are on a list, functions
do not recurse or explode, graphs nest to a limit, counts are bounded, every tensor has exactly the
bytes that its shape and type call for (computed without overflow), and external data lies inside
files that lie inside the model's folder and are no links. Nothing that follows paths is called.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Final

import onnx
from google.protobuf.message import DecodeError

from shoal_compiler.errors import ModelRefused
from shoal_compiler.nodes import all_nodes, node_label, subgraphs, tensors_of
from shoal_compiler.tensor_types import BITS, bits_of
from shoal_compiler.trees import check_trees
from shoal_compiler.wire import INLINE, MAX_INITIALIZERS, MAX_NODES, read_skeleton

DOMAINS: Final = ("ai.onnx", "ai.onnx.ml", "com.microsoft")
OLDEST_OPSET: Final = 7
NEWEST_OPSET: Final = 26
NEWEST_IR_VERSION: Final = 13
"""What ONNX Runtime opens: it promises no older operator sets, and refuses newer ones, which onnx
has, and gives a model whose maker names none."""
MAX_ARITY: Final = 4096
MAX_RANK: Final = 64
MAX_GRAPH_DEPTH: Final = 16
MAX_ELEMENTS: Final = 2**58  # of 16 bytes at most

FunctionName = tuple[str, str, str]
"""Domain, name and overload."""

_TYPE = onnx.TensorProto
_NOT_TAKEN: Final = "\0\\:"
"""In paths of external data: on some system or other they lead elsewhere."""
_DECIMAL = re.compile(r"[0-9]{1,18}")


SHORT_STRIP_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file: `length` from `offset`, or, with a `strip`, as many in strips of that many
    bytes, `stride` bytes from the beginning of one to that of the next."""

    path: Path
    offset: int
    length: int
    strip: int = 0
    stride: int = 0

    @property
    def has_short_strips(self) -> bool:
        """Whether whole rows are read faster than strip by strip."""
        return 0 < self.strip < SHORT_STRIP_BYTES

    def strips(self) -> Iterator[tuple[int, int]]:
        """Where each strip begins and ends."""
        strip, stride = self.strip or self.length, self.stride
        for number in range(self.length // strip if strip else 0):
            start = self.offset + number * stride
            yield start, start + strip


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """A model that passed: its skeleton, and the files that hold its large tensors.

    `external` are the files of external data by location, besides the ONNX file itself; one file
    may have several.
    """

    path: Path
    proto: onnx.ModelProto
    external: dict[str, Path]

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them, each once; the ONNX file is the first."""
        return tuple(dict.fromkeys((self.path, *self.external.values())))

    def contents(self, tensor: onnx.TensorProto) -> Range | None:
        """Where the bytes of a tensor are; None: in the tensor itself."""
        if tensor.data_location != _TYPE.EXTERNAL:
            return None
        place = {each.key: each.value for each in tensor.external_data}
        location = place["location"]
        return Range(
            self.path if location == INLINE else self.external[location],
            int(place.get("offset", "0")),
            int(place.get("length", "0")) or byte_size(tensor),
        )


def open_model(path: Path) -> CheckedModel:
    """Read a model without its weights, after all checks. Raises `ModelRefused`."""
    path = Path(path)
    skeleton = read_skeleton(path)
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(skeleton)
    except DecodeError as error:
        raise ModelRefused("is not an ONNX model", path=path) from error
    if not proto.HasField("graph") or not proto.graph.output:
        raise ModelRefused("is not an ONNX model: it has no graph with outputs", path=path)
    _check_versions(proto)
    _check_functions(proto)
    check = _Check(folder=path.parent, inline_bytes=path.stat().st_size, external={})
    functions = set(map(function_of, proto.functions))
    check.graph(proto.graph, functions, 0)
    for function in proto.functions:
        check.nodes(function.node, functions, 1)
    return CheckedModel(path=path, proto=proto, external=check.external)


def element_count(tensor: onnx.TensorProto) -> int:
    """The product of the dimensions. Raises `ModelRefused` for a shape that no tensor can have."""
    if len(tensor.dims) > MAX_RANK:
        raise ModelRefused(f"has {len(tensor.dims)} axes, at most {MAX_RANK}", tensor=tensor.name)
    count = extent = 1
    for size in tensor.dims:
        if size < 0:
            raise ModelRefused(f"has an axis of size {size}", tensor=tensor.name)
        count *= size
        extent *= max(1, size)  # as NumPy multiplies them: an empty axis hides no large one
        if extent > MAX_ELEMENTS:
            raise ModelRefused(
                f"has more elements than can be ({list(tensor.dims)})", tensor=tensor.name
            )
    return count


def byte_size(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor's contents, from shape and type; a string counts its own length."""
    if tensor.data_type == _TYPE.STRING:
        return sum(len(each) for each in tensor.string_data)
    bits = bits_of(tensor.data_type)
    if bits is None:
        raise ModelRefused(f"has unknown data type {tensor.data_type}", tensor=tensor.name)
    return (element_count(tensor) * bits + 7) // 8


def _check_versions(proto: onnx.ModelProto) -> None:
    if proto.ir_version > NEWEST_IR_VERSION:
        raise ModelRefused(
            f"has IR version {proto.ir_version}; ONNX Runtime takes up to {NEWEST_IR_VERSION} "
            f"(set ir_version = {NEWEST_IR_VERSION} in the model and save it)"
        )
    versions: dict[str, int] = {}
    for each in proto.opset_import:
        domain = each.domain or "ai.onnx"
        if (known := versions.setdefault(domain, each.version)) != each.version:
            text = f"imports two operator sets of {domain}: {known} and {each.version}"
            raise ModelRefused(text)
    opset = versions.get("ai.onnx", 1)
    if "ai.onnx" not in versions and versions:
        return  # a graph of other domains only
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise ModelRefused(
            f"uses opset {opset}; ONNX Runtime takes {OLDEST_OPSET} to {NEWEST_OPSET} "
            f"(onnx.version_converter can {'raise' if opset < OLDEST_OPSET else 'lower'} it)"
        )


def _check_functions(proto: onnx.ModelProto) -> None:
    """Functions do not call themselves, and all of them written out are not too many nodes."""
    bodies = {function_of(each): each for each in proto.functions}
    _check_defined_once(map(function_of, proto.functions))
    sizes: dict[FunctionName, int] = {}
    open_calls: set[FunctionName] = set()

    def written_out(nodes: Iterable[onnx.NodeProto], where: str) -> int:
        total = 0
        for node in nodes:
            key = called_by(node)
            total += size_of(key) if key in bodies else 1
            if total > MAX_NODES:
                raise ModelRefused(
                    f"has more than {MAX_NODES} nodes with functions written out in {where}"
                )
        return total

    def size_of(key: FunctionName) -> int:
        if key in open_calls:
            raise ModelRefused(f"function {_shown(key)} calls itself")
        if len(open_calls) >= MAX_GRAPH_DEPTH:
            raise ModelRefused(f"functions call one another more than {MAX_GRAPH_DEPTH} deep")
        if key not in sizes:
            open_calls.add(key)
            sizes[key] = written_out(all_nodes(bodies[key].node), f"function {_shown(key)}")
            open_calls.discard(key)
        return sizes[key]

    for key in bodies:
        size_of(key)
    written_out(all_nodes(proto.graph.node), "the graph")


def _check_defined_once(keys: Iterable[FunctionName]) -> None:
    for key, times in Counter(keys).items():
        if times > 1:
            raise ModelRefused(f"defines function {_shown(key)} twice")


def function_of(function: onnx.FunctionProto) -> FunctionName:
    """What a function is called by."""
    return function.domain, function.name, function.overload


def called_by(node: onnx.NodeProto) -> FunctionName:
    """The function that a node calls, if the model has one of that name."""
    return node.domain, node.op_type, node.overload


def _shown(key: FunctionName) -> str:
    domain, name, overload = key
    return f"{domain}.{name}" + (f":{overload}" if overload else "")


@dataclass(slots=True, kw_only=True)
class _Check:
    folder: Path
    inline_bytes: int
    external: dict[str, Path]

    def graph(self, graph: onnx.GraphProto, functions: set[FunctionName], depth: int) -> None:
        if depth > MAX_GRAPH_DEPTH:
            raise ModelRefused(f"graphs are nested more than {MAX_GRAPH_DEPTH} deep")
        if len(graph.initializer) + len(graph.sparse_initializer) > MAX_INITIALIZERS:
            raise ModelRefused(f"has more than {MAX_INITIALIZERS} initializers")
        if max(len(graph.input) - len(graph.initializer), len(graph.output)) > MAX_ARITY:
            raise ModelRefused(f"has more than {MAX_ARITY} inputs or outputs")
        for tensor in graph.initializer:
            self.tensor(tensor)
        for sparse in graph.sparse_initializer:
            self.sparse(sparse)
        self.nodes(graph.node, functions, depth)

    def nodes(
        self, nodes: Iterable[onnx.NodeProto], functions: set[FunctionName], depth: int
    ) -> None:
        for index, node in enumerate(nodes):
            label = node_label(node, index)
            if called_by(node) not in functions and ((node.domain or "ai.onnx") not in DOMAINS):
                raise ModelRefused(
                    f"uses operator {node.op_type} of domain {node.domain!r}; known are "
                    f"{', '.join(DOMAINS)} and functions that the model itself defines",
                    node=label,
                )
            if max(len(node.input), len(node.output), len(node.attribute)) > MAX_ARITY:
                raise ModelRefused(f"has more than {MAX_ARITY} inputs or outputs", node=label)
            if not node.output:
                raise ModelRefused("has no output", node=label)
            check_trees(node, label)
            for attribute in node.attribute:
                for tensor in tensors_of(attribute):
                    self.tensor(tensor)
                for sparse in attribute.sparse_tensors:
                    self.sparse(sparse)
                if attribute.HasField("sparse_tensor"):
                    self.sparse(attribute.sparse_tensor)
            for graph in subgraphs(node):
                self.graph(graph, functions, depth + 1)

    def sparse(self, sparse: onnx.SparseTensorProto) -> None:
        for tensor in (sparse.values, sparse.indices):
            if tensor.data_location == _TYPE.EXTERNAL:
                raise ModelRefused("is sparse with external data", tensor=sparse.values.name)
            self.tensor(tensor)
        dense = onnx.TensorProto(data_type=sparse.values.data_type, dims=sparse.dims)
        dense.name = sparse.values.name
        if sparse.values.data_type != _TYPE.STRING and byte_size(dense) > 1 << 31:
            raise ModelRefused("is sparse and would be over 2 GiB dense", tensor=dense.name)

    def tensor(self, tensor: onnx.TensorProto) -> None:
        count = element_count(tensor)
        if tensor.HasField("segment"):
            raise ModelRefused("is in segments, which nothing supports", tensor=tensor.name)
        if tensor.data_type == _TYPE.STRING:
            if tensor.data_location == _TYPE.EXTERNAL or len(tensor.string_data) != count:
                raise ModelRefused(
                    f"has {len(tensor.string_data)} strings for {count} elements",
                    tensor=tensor.name,
                )
            return
        wanted = byte_size(tensor)
        if tensor.data_location == _TYPE.EXTERNAL:
            self.external_data(tensor, wanted)
            return
        have = _own_bytes(tensor)
        if have != wanted:
            raise ModelRefused(
                f"has {have} bytes, its shape {list(tensor.dims)} calls for {wanted}",
                tensor=tensor.name,
            )

    def external_data(self, tensor: onnx.TensorProto, wanted: int) -> None:
        place = {each.key: each.value for each in tensor.external_data}
        if len(place) != len(tensor.external_data):
            raise ModelRefused("has contradictory external data", tensor=tensor.name)
        location = place.get("location", "")
        if location == INLINE:
            size = self.inline_bytes
        else:
            if location not in self.external:
                self.external[location] = _inside(self.folder, location, tensor.name)
            size = self.external[location].stat().st_size
        for key in ("offset", "length"):
            if not _DECIMAL.fullmatch(place.get(key, "0")):
                raise ModelRefused(f"has {key} {place[key]!r}", tensor=tensor.name)
        # A length of 0 says nothing, as for the runtime.
        offset, length = int(place.get("offset", "0")), int(place.get("length", "0")) or wanted
        if length != wanted:
            raise ModelRefused(
                f"has {length} bytes of data, its shape {list(tensor.dims)} calls for {wanted}",
                tensor=tensor.name,
            )
        if offset + length > size:
            raise ModelRefused(
                f"has its data at {offset} to {offset + length} of {location}, "
                f"which has {size} bytes",
                tensor=tensor.name,
            )


def _own_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes that a tensor's own fields hold, once packed as its type says."""
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data)
    bits = BITS[tensor.data_type]
    match tensor.data_type:
        case _TYPE.FLOAT | _TYPE.COMPLEX64:
            return len(tensor.float_data) * 4
        case _TYPE.DOUBLE | _TYPE.COMPLEX128:
            return len(tensor.double_data) * 8
        case _TYPE.INT64:
            return len(tensor.int64_data) * 8
        case _TYPE.UINT64 | _TYPE.UINT32:
            return len(tensor.uint64_data) * bits // 8
    # Smaller types are in int32_data, those below a byte packed into bytes.
    return len(tensor.int32_data) * max(bits, 8) // 8


def misplaced(location: str) -> str | None:
    """Why a location of external data is not taken; None: it is a plain path below the model's
    folder."""
    parts, shown = PurePosixPath(location).parts, repr(location[:80])
    depths = accumulate(-1 if part == ".." else 1 for part in parts)
    if location.startswith("/") or min(depths, default=-1) < 0:
        return f"has external data outside of the folder ({shown})"
    marks = [repr(mark) for mark in _NOT_TAKEN if mark in location]
    if ".." in parts:
        marks.append("'..'")
    if marks:
        return f"has external data in {shown}: no path with {marks[0]} is taken, rename it"
    return None


def _inside(folder: Path, location: str, tensor: str) -> Path:
    """The file of external data, if it lies in the model's folder and is no link."""
    if (reason := misplaced(location)) is not None:
        raise ModelRefused(reason, tensor=tensor)
    path = folder
    for part in PurePosixPath(location).parts:
        path = path / part
        try:
            status = os.lstat(path)
        except OSError as error:
            raise ModelRefused(
                f"has external data in {location}: {error.strerror}", tensor=tensor, path=path
            ) from error
        if stat.S_ISLNK(status.st_mode):
            raise ModelRefused("is a symbolic link; external data must not be", path=path)
    if not stat.S_ISREG(status.st_mode):
        raise ModelRefused("is not a file", path=path)
    if status.st_nlink != 1:
        raise ModelRefused(
            "has several names (hard links); external data must have one: copy it", path=path
        )
    return path
