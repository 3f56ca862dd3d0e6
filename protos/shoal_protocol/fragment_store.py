"""The fragment store, read: what fragments and files there are, and their bytes.

```
STORE/fragments/DIGEST/fragment.json, model.onnx, weights.bin     DIGEST: 64 hexadecimal digits
```

Names come from the network, so none of them ever reaches the file system: a digest must be one, a
file one of three. `fragment.json` is checked against the digest that it is named by before its
sizes are believed.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from shoal_protocol.files import MAXIMUM_MANIFEST_BYTES
from shoal_protocol.partition import Digest
from shoal_protocol.units import format_bytes

MANIFEST: Final = "fragment.json"
FILES: Final = (MANIFEST, "model.onnx", "weights.bin")
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_READ_BYTES: Final = 1024 * 1024


class FragmentMissing(LookupError):
    """The store has no such fragment, or no such file of it."""


class FragmentDamaged(Exception):
    """What the store has is not what the digest says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a fragment as the manifest describes it."""

    sha256: str
    size_bytes: int


class FragmentStore:
    """Fragments by digest. Nothing here writes (`volume` does)."""

    def __init__(self, root: Path) -> None:
        self._fragments = root / "fragments"
        self._sizes: dict[Digest, int] = {}

    def has(self, digest: Digest) -> bool:
        """Whether all of a fragment is there, by name and size."""
        try:
            files = self.files(digest)
            return all(
                (self._folder(digest) / name).stat().st_size == file.size_bytes
                for name, file in files.items()
            )
        except (OSError, FragmentMissing, FragmentDamaged):
            return False

    def digests(self) -> list[Digest]:
        """The fragments that are whole, by name and size; sorted."""
        try:
            names = sorted(os.listdir(self._fragments))
        except FileNotFoundError:
            return []
        digests = (Digest(f"sha256:{name}") for name in names)
        return [each for each in digests if _DIGEST.fullmatch(each) and self.has(each)]

    def files(self, digest: Digest) -> dict[str, StoredFile]:
        """The files beside the manifest. Raises `FragmentMissing`, `FragmentDamaged`."""
        return described_files(self._folder(digest) / MANIFEST, digest)

    def size_bytes(self, digest: Digest) -> int:
        """Bytes of a fragment's files; 0 for one that is not here."""
        if digest not in self._sizes:
            try:
                files = self.files(digest)
            except (FragmentMissing, FragmentDamaged):
                return 0
            self._sizes[digest] = sum(file.size_bytes for file in files.values())
        return self._sizes[digest]

    def open(self, digest: str, name: str) -> tuple[BinaryIO, int]:
        """A file of a fragment, and its size. Raises `FragmentMissing`."""
        if name not in FILES:
            raise FragmentMissing(f"a fragment has no file {name[:80]!r}")
        try:
            file = (self._folder(digest) / name).open("rb")
        except OSError as e:
            raise FragmentMissing(f"{name} of {digest} is not in the store") from e
        return file, os.fstat(file.fileno()).st_size

    def verify(self, digest: Digest) -> None:
        """Read all of a fragment. Raises `FragmentMissing`, or `FragmentDamaged` with what
        differs."""
        for name, described in self.files(digest).items():
            file, size = self.open(digest, name)
            path = self._folder(digest) / name
            with file:
                if size != described.size_bytes:
                    raise FragmentDamaged(
                        f"{path} has {format_bytes(size)} "
                        f"instead of {format_bytes(described.size_bytes)}"
                    )
                found = hashlib.sha256()
                while piece := file.read(_READ_BYTES):
                    found.update(piece)
            if found.hexdigest() != described.sha256:
                raise FragmentDamaged(f"{path} does not match its checksum")

    def is_sound(self, digest: Digest) -> bool:
        """Whether all of a fragment is there and is right: it is read."""
        try:
            self.verify(digest)
        except (OSError, FragmentMissing, FragmentDamaged):
            return False
        return True

    def _folder(self, digest: str) -> Path:
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise FragmentMissing(f"{digest[:80]!r} is no digest")
        return self._fragments / match[1]


def described_files(path: Path, digest: Digest) -> dict[str, StoredFile]:
    """What a fragment's manifest says of the files beside it, by name. Raises `FragmentMissing`,
    or `FragmentDamaged` where the manifest is not what the digest says."""
    try:
        with path.open("rb") as file:
            content = file.read(MAXIMUM_MANIFEST_BYTES + 1)
    except OSError as e:
        raise FragmentMissing(f"{digest} is not in the store") from e
    if len(content) > MAXIMUM_MANIFEST_BYTES:
        raise FragmentDamaged(f"{path} has more than {format_bytes(MAXIMUM_MANIFEST_BYTES)}")
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise FragmentDamaged(f"{path} is not what its name says; put the fragment there again")
    files: dict[str, StoredFile] = {}
    match _json(content, path):
        case {"files": {**described}}:
            for name, value in described.items():
                match value:
                    case {"sha256": str(sha256), "bytes": int(size)} if name in FILES[1:]:
                        files[name] = StoredFile(sha256=sha256, size_bytes=size)
                    case _:
                        raise FragmentDamaged(f"{path} describes {name!r} wrongly")
        case _:
            raise FragmentDamaged(f"{path} describes no files")
    return files


def _json(content: bytes, path: Path) -> object:
    try:
        value: object = json.loads(content)
    except ValueError as error:
        raise FragmentDamaged(f"{path} is no JSON") from error
    return value
