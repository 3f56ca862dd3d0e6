"""One fragment as files: model.onnx, weights.bin, blocks.bin and fragment.json, named by what they
hold.

`fragment.json` is a pure function of the sub-graph: it holds the digests of the other files, and
its own digest is the fragment's name. So the weights are read twice: once for their digest, which
shows whether the fragment exists already, and once to copy them, by the kernel where it can
(`copy_file_range`), or to verify what exists. They never pass through more memory than one buffer.
Blocks refer to the same weights.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import onnx

from shoal_compiler.blocks import Blocks
from shoal_compiler.errors import ModelRefused
from shoal_compiler.graph import Weight
from shoal_compiler.profile import dtype_name
from shoal_compiler.safety import Range
from shoal_compiler.wire import LARGE
from shoal_protocol.blocks import blocks_as_json, least_bytes
from shoal_protocol.digests import Digest, digest_of, digest_of_pieces
from shoal_protocol.durable_files import sync_folder
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.manifest import (
    BLOCKS,
    IN_ORDER,
    LARGEST,
    MANIFEST,
    MAXIMUM_MANIFEST_BYTES,
    MODEL,
    WEIGHTS,
    FileEntry,
    format_manifest,
)
from shoal_protocol.partition import TensorSpec
from shoal_protocol.units import format_bytes

ALIGNMENT: Final = 4096
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """One initializer in weights.bin. `shared` says that another one has the same bytes among its
    own: they are stored once."""

    weight: Weight
    offset: int
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentFiles:
    """A fragment, ready to be written.

    `inputs` and `outputs` are what it is sent and gives, `resident_bytes` its estimated memory.
    `largest` are the largest shapes of those inputs that can have several; a device that runs it
    with these before any work measures what it takes. `in_order`: a device runs the nodes in the
    order of the file.
    """

    model: onnx.ModelProto
    stored: tuple[Stored, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    largest: Mapping[str, tuple[int, ...]]
    weight_bytes: int
    resident_bytes: int
    in_order: bool
    blocks: Blocks
    sources: "Sources"

    @property
    def least_bytes(self) -> int:
        """The smallest budget of a device that swaps."""
        return least_bytes(self.blocks.blocks) if self.blocks.blocks else self.resident_bytes

    @property
    def _written(self) -> list[Stored]:
        return [each for each in self.stored if not each.shared]

    def write(self, store: Path | None) -> Digest:
        """Write to `store/fragments/DIGEST/`, or find it there, whole; what is there and is not
        right, byte by byte, is replaced. Without a store only the name is found out. Raises
        `ModelRefused`."""
        content = self.model.SerializeToString(deterministic=True)
        contents = {MODEL: content}
        if self.blocks.blocks:
            contents[BLOCKS] = self.blocks.content
        files = {
            name: FileEntry(digest=digest_of(each), size_bytes=len(each))
            for name, each in contents.items()
        }
        if self._written:
            size = self._written[-1].offset + self._written[-1].weight.bytes
            files[WEIGHTS] = FileEntry(digest=self._weights_digest(), size_bytes=size)
        manifest = self._manifest(files)
        digest = digest_of(manifest)
        if store is not None and not FragmentStore(store).is_sound(digest):
            target = FragmentStore(store).folder(digest)
            self._write(target, {**contents, MANIFEST: manifest})
        return digest

    def _manifest(self, files: Mapping[str, FileEntry]) -> bytes:
        description: dict[str, object] = {
            "inputs": [asdict(each) for each in self.inputs],
            "outputs": [asdict(each) for each in self.outputs],
            "weight_bytes": self.weight_bytes,
            "resident_bytes": self.resident_bytes,
            IN_ORDER: self.in_order,
            "initializers": {
                each.weight.tensor.name: {
                    "dtype": dtype_name(each.weight.tensor.data_type),
                    "shape": list(each.weight.tensor.dims),
                    "offset": each.offset,
                    "bytes": each.weight.bytes,
                }
                for each in self.stored
            },
        }
        if self.largest:
            description[LARGEST] = {name: list(shape) for name, shape in self.largest.items()}
        if self.blocks.blocks:
            description["blocks"] = blocks_as_json(self.blocks.blocks)
        manifest = format_manifest(files, description)
        if len(manifest) > MAXIMUM_MANIFEST_BYTES:
            raise ModelRefused(
                f"makes a fragment with {len(self.stored)} weights, whose {MANIFEST} would "
                f"have {format_bytes(len(manifest))}; at most "
                f"{format_bytes(MAXIMUM_MANIFEST_BYTES)} are taken: cut it into more fragments"
            )
        return manifest

    def _weights_digest(self) -> Digest:
        def pieces() -> Iterator[bytes | memoryview]:
            at = 0
            for each in self._written:
                yield bytes(each.offset - at)
                yield from self.sources.read(each.weight)
                at = each.offset + each.weight.bytes

        return digest_of_pieces(pieces())

    def _write(self, target: Path, contents: Mapping[str, bytes]) -> None:
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        if self._written:
            with (part / WEIGHTS).open("wb", buffering=0) as file:
                for each in self._written:
                    os.lseek(file.fileno(), each.offset, os.SEEK_SET)
                    self.sources.copy(each.weight, file.fileno())
                os.fsync(file.fileno())
        for name, content in contents.items():
            with (part / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(part)
        self.sources.check_unchanged()
        if target.exists():  # damaged; out of the way as a whole, as a killed cut would leave it
            damaged = target.with_name(f"{target.name}.damaged.part")
            shutil.rmtree(damaged, ignore_errors=True)
            target.rename(damaged)
            part.rename(target)
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            part.rename(target)
        sync_folder(target.parent)


def layout_weights(weights: list[Weight]) -> tuple[Stored, ...]:
    """Where each of the large weights goes in weights.bin."""
    stored, end = [], 0
    names = {each.tensor.name for each in weights}
    wholes: dict[str, Stored] = {}
    for weight in weights:
        if weight.whole in names:
            continue
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        stored.append(Stored(weight, offset))
        wholes[weight.tensor.name] = stored[-1]
        end = offset + weight.bytes
    for weight in weights:
        if weight.whole in names:
            whole = wholes[weight.whole]
            assert weight.contents is not None
            assert whole.weight.contents is not None
            inside = weight.contents.offset - whole.weight.contents.offset
            stored.append(Stored(weight, whole.offset + inside, shared=True))
    return tuple(stored)


def is_stored(weight: Weight) -> bool:
    """Whether a weight goes to weights.bin: small ones, and strings, stay in the model."""
    return weight.bytes >= LARGE and weight.tensor.data_type != onnx.TensorProto.STRING


@dataclass(slots=True)
class Sources:
    """The files that weights come from, opened once, and watched for changes."""

    _open: dict[Path, tuple[int, tuple[int, int]]] = field(default_factory=dict)

    def read(self, weight: Weight) -> Iterator[bytes | memoryview]:
        """A weight's bytes, in pieces that are good until the next."""
        place = weight.contents
        if place is None:
            yield weight.loaded().raw_data
            return
        descriptor, buffer = self._descriptor(place.path), bytearray(min(_CHUNK, place.length))
        for start, end in place.strips():
            at = start
            while at < end:
                piece = memoryview(buffer)[: min(_CHUNK, end - at)]
                count = os.preadv(descriptor, [piece], at)
                if count == 0:
                    raise _changed(place)
                yield piece[:count]
                at += count

    def copy(self, weight: Weight, target: int) -> None:
        """Copy a weight's bytes to the current offset of `target`."""
        place = weight.contents
        if place is None or not self._copy_in_kernel(place, target):
            for piece in self.read(weight):
                _write_all(target, piece)

    def _copy_in_kernel(self, place: Range, target: int) -> bool:
        """False: the kernel cannot, between these files, and nothing was copied."""
        source = self._descriptor(place.path)
        for start, end in place.strips():
            at = start
            while at < end:
                try:
                    count = os.copy_file_range(source, target, end - at, offset_src=at)
                except OSError:
                    if at > place.offset:
                        raise
                    return False
                if count == 0:
                    raise _changed(place)
                at += count
        return True

    def check_unchanged(self) -> None:
        """Raise `ModelRefused` if a file is not the same as when it was opened."""
        for path, (descriptor, before) in self._open.items():
            if _state(descriptor) != before:
                raise ModelRefused("has changed while it was cut", path=path)

    def close(self) -> None:
        """Close all files."""
        for descriptor, _ in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open[path] = (descriptor, _state(descriptor))
        return self._open[path][0]


def _state(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _changed(place: Range) -> ModelRefused:
    return ModelRefused("has become shorter while it was cut", path=place.path)


def _write_all(target: int, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(target, view) :]
