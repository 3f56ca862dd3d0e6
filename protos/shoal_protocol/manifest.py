"""`fragment.json`, the manifest of a fragment: written when a model is cut, read by whoever stores,
sends or runs fragments.

Its digest is the fragment's name, and it holds the digests and sizes of the fragment's other files.
So a manifest is verified before a word of it is believed, and the files by what it says.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_protocol.blocks import Block, blocks_from_json
from shoal_protocol.digests import Digest, digest_of, from_hexadecimal, hexadecimal

MANIFEST: Final = "fragment.json"
MODEL: Final = "model.onnx"
WEIGHTS: Final = "weights.bin"
BLOCKS: Final = "blocks.bin"
FILES: Final = (MANIFEST, MODEL, WEIGHTS, BLOCKS)
MOST_SHARED_FILES: Final = 64
"""Files of weights that a fragment has together with others: `shared.0.bin` to `shared.63.bin`."""
IN_ORDER: Final = "in_order"
"""The key that says whether the runtime is to run the nodes in the order of the file."""
DEQUANTISES: Final = "dequantises"
"""The key that says that the runtime would copy quantised weights, unless it is told to make floats
of them at each run."""
LARGEST: Final = "largest"
"""The key of the largest shapes that are planned for, of inputs whose sizes the graph leaves
open."""
BATCHED: Final = "batched"
"""The key of a fragment that may run several items at once, joined along the first axis of their
tensors: the positions of integers that grow with the number of items, by the name of each input and
output that consists of such instead of items."""
JOINS: Final = "joins"
"""The key of the outputs that blocks give in parts."""
VALUES: Final = "values"
"""The key of what inputs hold that are a few integers, where it follows from the planned shapes."""
UNKNOWN_SIZES: Final = "unknown_sizes"
"""The key that says that sizes of activations do not follow from the planned shapes, but from what
inputs hold, or from nothing that is known."""
CHOOSES: Final = "chooses"
"""The key that says that the fragment itself works out which branches run: a trial shows one of
several, and nothing of what the others take."""
BESIDE: Final = "beside_bytes"
"""The key of the most that a node takes for itself with inputs of the largest shapes, outside of
the runtime's arena: a limit of the arena holds nothing of it back."""
SEEN: Final = "seen"
"""The key of the sizes of inputs that do not follow from the planned shapes, but from those that
items were seen to have: the fragment was cut for these."""
MAXIMUM_MANIFEST_BYTES: Final = 16 << 20
"""Wherever a manifest is made, stored or fetched: about a hundred thousand weights. A device reads
it whole."""
_VERSION: Final = 1


_SHARED_NAMES: Final = frozenset(f"shared.{number}.bin" for number in range(MOST_SHARED_FILES))


def shared_name(number: int) -> str:
    """What a fragment calls the file that it shares with others, of so many."""
    assert 0 <= number < MOST_SHARED_FILES, number
    return f"shared.{number}.bin"


def is_shared(name: str) -> bool:
    """Whether a file of a fragment may be one of other fragments too."""
    return name in _SHARED_NAMES


def is_file_name(name: str) -> bool:
    """Whether a fragment can have a file of that name."""
    return name in FILES or is_shared(name)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a fragment's folder, those that it shares last."""
    names = (WEIGHTS, *sorted(_SHARED_NAMES))
    return [path for name in names if (path := folder / name).is_file()]


class FragmentDamaged(Exception):
    """A fragment, or a file of it, is not what its digest says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a fragment."""

    digest: Digest
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What storing, sending and swapping need of a manifest: the files beside it, by name, and the
    fragment's blocks; a fragment that gains nothing by them has none."""

    digest: Digest
    files: Mapping[str, FileEntry]
    manifest_bytes: int
    blocks: tuple[Block, ...] = ()

    @property
    def files_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size_bytes for file in self.files.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, the manifest's own included."""
        return self.manifest_bytes + self.files_bytes


def format_manifest(files: Mapping[str, FileEntry], description: Mapping[str, object]) -> bytes:
    """A manifest as canonical JSON; `description` is what else it says of the fragment."""
    listed = {
        name: {"sha256": hexadecimal(file.digest), "bytes": file.size_bytes}
        for name, file in files.items()
    }
    value = {**description, "version": _VERSION, "files": listed}
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def parse_manifest(content: bytes, digest: Digest) -> Manifest:
    """Read the manifest of the fragment `digest`. Raises `FragmentDamaged`."""
    if len(content) > MAXIMUM_MANIFEST_BYTES:
        raise FragmentDamaged(
            f"{MANIFEST} of {digest} has more than {MAXIMUM_MANIFEST_BYTES >> 20} MiB"
        )
    if digest_of(content) != digest:
        raise FragmentDamaged(f"{MANIFEST} of {digest} does not match its digest")
    try:
        document: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FragmentDamaged(f"{MANIFEST} of {digest} is no JSON: {error}") from error
    match document:
        case {"version": 1, "files": dict(listed), **others}:
            files = {str(name): _entry(digest, name, value) for name, value in listed.items()}
        case _:
            raise FragmentDamaged(f"{MANIFEST} of {digest} is not of version {_VERSION}")
    if MODEL not in files:
        raise FragmentDamaged(f"{MANIFEST} of {digest} names no {MODEL}")
    blocks = _blocks(digest, others.get("blocks"), files.get(BLOCKS))
    return Manifest(digest=digest, files=files, manifest_bytes=len(content), blocks=blocks)


def _blocks(digest: Digest, value: object, file: FileEntry | None) -> tuple[Block, ...]:
    if value is None and file is None:
        return ()
    if value is None or file is None:
        raise FragmentDamaged(f"{MANIFEST} of {digest} has only one of blocks and {BLOCKS}")
    try:
        return blocks_from_json(value, file.size_bytes)
    except ValueError as error:
        raise FragmentDamaged(f"{MANIFEST} of {digest}: {error}") from error


def _entry(digest: Digest, name: object, value: object) -> FileEntry:
    match value:
        case {"sha256": str(sha256), "bytes": int(size)} if (
            isinstance(name, str) and is_file_name(name) and name != MANIFEST and size >= 0
        ):
            try:
                return FileEntry(digest=from_hexadecimal(sha256), size_bytes=size)
            except ValueError:
                pass  # refused below
    raise FragmentDamaged(f"{MANIFEST} of {digest} lists the file {name!r} as {value!r}")
