"""Large weights as files: where each is in its file, the file's digest, and its writing.

Weights are read twice: once for the digest, and once to copy them, by the kernel where it can
(`copy_file_range`). They never pass through more memory than one buffer. A search cuts one model in
many ways, and often into the same file: its digest is remembered by the ranges that it is of.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import onnx

from shoal_compiler.errors import ModelRefused
from shoal_compiler.graph import Weight
from shoal_compiler.safety import Range
from shoal_compiler.wire import LARGE
from shoal_protocol.digests import Digest, digest_of_pieces
from shoal_protocol.manifest import FileEntry

ALIGNMENT: Final = 4096
_CHUNK: Final = 1 << 20
_State: TypeAlias = tuple[int, int]
"""The size of a file, and its time of change (nanoseconds)."""
Digests: TypeAlias = dict[tuple[tuple[Range, _State], ...], Digest]
"""Those of files of weights, by the ranges that are in each, and how these looked."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fragment has a weight: a file of its folder, and the offset in it."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Weights at offsets that are multiples of `ALIGNMENT`, and what the file will be."""

    weights: tuple[tuple[Weight, int], ...]
    entry: FileEntry

    @classmethod
    def of(cls, weights: Sequence[Weight], sources: "Sources") -> "WeightFile":
        """The file of some weights, one after the other. They are read, for the digest."""
        placed, end = [], 0
        for weight in weights:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            placed.append((weight, offset))
            end = offset + weight.bytes

        def pieces() -> Iterator[bytes | memoryview]:
            at = 0
            for weight, offset in placed:
                yield bytes(offset - at)
                yield from sources.read(weight)
                at = offset + weight.bytes

        return cls(
            tuple(placed), FileEntry(digest=sources.digest(weights, pieces()), size_bytes=end)
        )

    def offsets(self) -> Mapping[str, int]:
        """Where each weight is, by name."""
        return {weight.tensor.name: offset for weight, offset in self.weights}

    def write(self, path: Path, sources: "Sources") -> None:
        """Write the file, durably. Raises `ModelRefused`, `OSError`."""
        with path.open("wb", buffering=0) as file:
            for weight, offset in self.weights:
                os.lseek(file.fileno(), offset, os.SEEK_SET)
                sources.copy(weight, file.fileno())
            os.fsync(file.fileno())


def is_stored(weight: Weight) -> bool:
    """Whether a weight goes to a file of weights: small ones, and strings, stay in the model."""
    return weight.bytes >= LARGE and weight.tensor.data_type != onnx.TensorProto.STRING


def offset_inside(part: Weight, whole: Weight) -> int:
    """Where a part of a weight begins in it."""
    assert part.contents is not None
    assert whole.contents is not None
    return part.contents.offset - whole.contents.offset


@dataclass(slots=True)
class Sources:
    """The files that weights come from, opened once, and watched for changes; and the `digests` of
    what has been made of them."""

    digests: Digests = field(default_factory=dict)
    _open: dict[Path, tuple[int, _State]] = field(default_factory=dict)

    def digest(self, weights: Sequence[Weight], pieces: Iterator[bytes | memoryview]) -> Digest:
        """Of a file that has these weights, one after the other. Its `pieces` are read unless that
        is known."""
        places = [each.contents for each in weights]
        known = tuple((each, self._opened(each.path)[1]) for each in places if each is not None)
        if len(known) < len(places):  # one is not in a file
            return digest_of_pieces(pieces)
        if known not in self.digests:
            self.digests[known] = digest_of_pieces(pieces)
        return self.digests[known]

    def read(self, weight: Weight) -> Iterator[bytes | memoryview]:
        """A weight's bytes, in pieces that are good until the next."""
        place = weight.contents
        if place is None:
            yield weight.loaded().raw_data
            return
        if place.has_short_strips:
            yield from self._gathered(place)
            return
        buffer = bytearray(min(_CHUNK, place.length))
        for start, end in place.strips():
            for at in range(start, end, _CHUNK):
                piece = memoryview(buffer)[: min(_CHUNK, end - at)]
                self._fill(piece, place, at)
                yield piece

    def _gathered(self, place: Range) -> Iterator[bytes]:
        """Short strips, out of many rows at a time: a call for each of them would take longer."""
        buffer = bytearray(max(1, _CHUNK // place.stride) * place.stride)
        rows = np.frombuffer(buffer, np.uint8).reshape(-1, place.stride)
        begins = [start for start, _ in place.strips()]
        for first in range(0, len(begins), len(rows)):
            count = min(len(rows), len(begins) - first)
            # The last row may be the end of the file.
            length = (count - 1) * place.stride + place.strip
            self._fill(memoryview(buffer)[:length], place, begins[first])
            yield rows[:count, : place.strip].tobytes()

    def _fill(self, piece: memoryview, place: Range, at: int) -> None:
        while piece:
            count = os.preadv(self._descriptor(place.path), [piece], at)
            if count == 0:
                raise _changed(place)
            piece, at = piece[count:], at + count

    def copy(self, weight: Weight, target: int) -> None:
        """Copy a weight's bytes to the current offset of `target`."""
        place = weight.contents
        if place is None or place.has_short_strips or not self._copy_in_kernel(place, target):
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
        return self._opened(path)[0]

    def _opened(self, path: Path) -> tuple[int, _State]:
        """Its descriptor, and how it looked when it was opened."""
        if path not in self._open:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open[path] = (descriptor, _state(descriptor))
        return self._open[path]


def _state(descriptor: int) -> _State:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _changed(place: Range) -> ModelRefused:
    return ModelRefused("has become shorter while it was cut", path=place.path)


def _write_all(target: int, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(target, view) :]
