"""Files that several fragments of a store have: on the disk once, and once in the page cache.

```
STORE/shared/HEX                       HEX = sha256 of the file
STORE/fragments/DIGEST/shared.N.bin    a hard link to it, in the folder of each fragment that has it
```

So a fragment's folder has all its files, whoever else has them; what no fragment has any more is
the one with a single link, and goes when somebody collects. On a file system without hard links
nothing is shared, and each fragment has a copy of its own.

A file was verified when it was kept, and may have been damaged since: `link` reads it.
"""

import os
from contextlib import suppress
from pathlib import Path

from shoal_protocol.digests import Digest, digest_of_mapped, hexadecimal
from shoal_protocol.durable_files import open_regular, sync_folder
from shoal_protocol.manifest import FileEntry


class SharedFiles:
    """The shared files of one store. Methods block."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "shared"

    def link(self, entry: FileEntry, target: Path) -> bool:
        """Give a fragment a file of another one; False: there is none that is right. `target` is
        replaced; it is never written to where it is the file of another fragment. Raises `OSError`
        if the file cannot be read now."""
        with suppress(FileNotFoundError):
            if target.lstat().st_nlink > 1:
                target.unlink()
        own = target.with_name(f"{target.name}.link")
        own.unlink(missing_ok=True)
        try:
            os.link(self._path(entry.digest), own, follow_symlinks=False)
        except OSError:
            return False
        if _is_right(own, entry):
            own.rename(target)
            return True
        own.unlink()
        self._path(entry.digest).unlink(missing_ok=True)
        return False

    def keep(self, digest: Digest, file: Path) -> None:
        """Have a verified file for the next fragment; nothing where there are no hard links."""
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            os.link(file, self._path(digest), follow_symlinks=False)
            sync_folder(self._folder)

    def collect(self) -> None:
        """Remove the files that no fragment has any more."""
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_nlink <= 1:
                        os.unlink(entry.path)

    def _path(self, digest: Digest) -> Path:
        return self._folder / hexadecimal(digest)


def _is_right(path: Path, entry: FileEntry) -> bool:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return size == entry.size_bytes and digest_of_mapped(file) == entry.digest
    except FileNotFoundError:
        return False
