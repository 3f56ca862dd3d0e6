"""`fragment.json` as a value: the files of a fragment, and what is believed about them."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MANIFEST: Final = "fragment.json"
MODEL: Final = "model.onnx"
WEIGHTS: Final = "weights.bin"
FILES: Final = (MANIFEST, MODEL, WEIGHTS)

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HEX: Final = re.compile(r"[0-9a-f]{64}")


class ManifestError(ValueError):
    """A manifest that does not follow docs/ARCHITECTURE.md, or is not the one that was named."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a fragment: sha256 in hexadecimal, and size."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What of a manifest the agent needs; `total_bytes` counts the manifest itself too."""

    digest: str
    files: Mapping[str, FileEntry]
    total_bytes: int


def is_digest(text: str) -> bool:
    """Whether a text names a fragment; only such text may become part of a path."""
    return _DIGEST.fullmatch(text) is not None


def parse_manifest(digest: str, data: bytes) -> Manifest:
    """Read a manifest whose digest is known; raises `ManifestError`."""
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise ManifestError(f"{MANIFEST} of {digest} does not match its digest")
    try:
        document = json.loads(data)
    except ValueError as error:
        raise ManifestError(f"{MANIFEST} of {digest} is no JSON: {error}") from error
    match document:
        case {"version": 1, "files": dict(listed)}:
            files = {name: _entry(digest, name, value) for name, value in listed.items()}
        case _:
            raise ManifestError(f"{MANIFEST} of {digest} is not of version 1")
    if MODEL not in files:
        raise ManifestError(f"{MANIFEST} of {digest} names no {MODEL}")
    total_bytes = len(data) + sum(entry.bytes for entry in files.values())
    return Manifest(digest, files, total_bytes)


def _entry(digest: str, name: object, value: object) -> FileEntry:
    match name, value:
        case (str(), {"sha256": str(sha256), "bytes": int(size)}) if (
            name in (MODEL, WEIGHTS) and _HEX.fullmatch(sha256) and size >= 0
        ):
            return FileEntry(sha256, size)
    raise ManifestError(f"{MANIFEST} of {digest} lists the file {name!r} as {value!r}")
