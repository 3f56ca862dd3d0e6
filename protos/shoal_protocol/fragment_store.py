"""A folder of fragments, read: which there are, and their bytes.

```
STORE/fragments/DIGEST/fragment.json, model.onnx, weights.bin, blocks.bin, shared.0.bin, ...
```

`DIGEST` has 64 hexadecimal digits. A fragment without large weights has no `weights.bin`, one
without blocks no `blocks.bin`. The coordinator's volume and the cache of an agent have this layout.
A file `shared.N.bin` may be one of several fragments (`shared_files`). Names come from the
network, so none reaches the file system before it is known to be a digest, or one of these files.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final

from shoal_protocol.digests import (
    Digest,
    digest_of_file,
    from_hexadecimal,
    hexadecimal,
    is_hexadecimal,
)
from shoal_protocol.durable_files import is_transient, open_regular
from shoal_protocol.manifest import (
    MANIFEST,
    MAXIMUM_MANIFEST_BYTES,
    FragmentDamaged,
    Manifest,
    is_file_name,
    is_shared,
    parse_manifest,
)
from shoal_protocol.units import format_bytes

MAXIMUM_LISTED: Final = 4096
"""Fragments of a device that one message names at most."""
_KNOWN_MANIFESTS: Final = 4096


class FragmentMissing(LookupError):
    """The store has no such fragment, or no such file of it."""


class FragmentStore:
    """Fragments by digest. Nothing here writes. Methods block, and raise `OSError` where a file
    cannot be read now, which says nothing of the fragment."""

    def __init__(self, root: Path) -> None:
        self._fragments = root / "fragments"
        # Those that were read once: of one digest it never changes.
        self._known = lru_cache(_KNOWN_MANIFESTS)(self.manifest)

    def folder(self, digest: str) -> Path:
        """The folder of a fragment, stored or not. Raises `FragmentMissing` for no digest."""
        try:
            return self._fragments / hexadecimal(digest)
        except ValueError as error:
            raise FragmentMissing(str(error)) from error

    def has(self, digest: Digest) -> bool:
        """Whether all files of a fragment are there, with the right sizes."""
        try:
            manifest = self._known(digest)
            sizes = {MANIFEST: manifest.manifest_bytes}
            sizes |= {name: file.size_bytes for name, file in manifest.files.items()}
            folder = self.folder(digest)
            return all((folder / name).lstat().st_size == size for name, size in sizes.items())
        except (FragmentMissing, FragmentDamaged):
            return False
        except OSError as error:
            if is_transient(error):
                raise
            return False

    def digests(self) -> list[Digest]:
        """The fragments that `has` finds, sorted."""
        try:
            names = sorted(os.listdir(self._fragments))
        except FileNotFoundError:
            return []
        digests = (from_hexadecimal(name) for name in names if is_hexadecimal(name))
        return [digest for digest in digests if self.has(digest)]

    def manifest(self, digest: Digest) -> Manifest:
        """A fragment's manifest. Raises `FragmentMissing`, `FragmentDamaged`."""
        return read_manifest(self.folder(digest), digest)

    def size_bytes(self, digest: Digest) -> int:
        """Bytes of the files beside the manifest; 0 for a fragment that is not here."""
        try:
            return self._known(digest).files_bytes
        except (OSError, FragmentMissing, FragmentDamaged):
            return 0

    def file_sizes(self, digest: Digest) -> tuple[int, dict[Digest, int]]:
        """Bytes of a fragment's own files, and of each that it may share, by its digest; none of a
        fragment that is not here."""
        try:
            manifest = self._known(digest)
        except (OSError, FragmentMissing, FragmentDamaged):
            return 0, {}
        shared = {
            file.digest: file.size_bytes for name, file in manifest.files.items() if is_shared(name)
        }
        return manifest.total_bytes - sum(shared.values()), shared

    def open(self, digest: str, name: str) -> tuple[BinaryIO, int]:
        """A file of a fragment, and its size. Raises `FragmentMissing`."""
        if not is_file_name(name):
            raise FragmentMissing(f"a fragment has no file {name[:80]!r}")
        try:
            file = open_regular(self.folder(digest) / name)
        except FileNotFoundError as error:
            raise FragmentMissing(f"{name} of {digest} is not in the store") from error
        return file, os.fstat(file.fileno()).st_size

    def verify(self, digest: Digest) -> None:
        """Read all of a fragment. Raises `FragmentMissing`, or `FragmentDamaged` with what
        differs."""
        for name, entry in self.manifest(digest).files.items():
            file, size = self.open(digest, name)
            path = self.folder(digest) / name
            with file:
                if size != entry.size_bytes:
                    raise FragmentDamaged(
                        f"{path} has {format_bytes(size)} instead of "
                        f"{format_bytes(entry.size_bytes)}"
                    )
                if digest_of_file(file) != entry.digest:
                    raise FragmentDamaged(f"{path} does not match its checksum")

    def is_sound(self, digest: Digest) -> bool:
        """Whether all of a fragment is there and is right: it is read."""
        try:
            self.verify(digest)
        except (OSError, FragmentMissing, FragmentDamaged):
            return False
        return True


def read_manifest(folder: Path, digest: Digest) -> Manifest:
    """The manifest in a fragment's folder. Raises `FragmentMissing`, or `FragmentDamaged` where it
    is not what the digest says."""
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            return parse_manifest(file.read(MAXIMUM_MANIFEST_BYTES + 1), digest)
    except FileNotFoundError as error:
        raise FragmentMissing(f"{digest} is not in the store") from error
    except FragmentDamaged as error:
        raise FragmentDamaged(f"{path}: {error}; put the fragment there again") from error
