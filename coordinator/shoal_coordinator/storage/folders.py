"""A folder that is held open: names are looked up in it alone, and no link is followed.

Others can write to the folder of a job's results. Whoever puts a link there, in the place of a file
or of a folder, must not make the coordinator write somewhere else.
"""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE: Final = getattr(_LIBC, "sync_file_range", None)
_WRITE: Final = 2
"""Its flag to begin to write, and not to wait for it."""
_FEW: Final = 64
"""So many files are synced one by one, in 10 to 40 ms on a disk of a server. The sync of a file
system takes as long for a thousand, but waits for all that others write to it: on the card of a
small board, a minute for an image that is pulled."""


class Folder:
    """An open folder. All names are names directly in it. Every method raises `OSError`."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """Open `path`, which may itself be a link; or take over an open `descriptor` of it."""
        self.path = path
        self._descriptor = (
            os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if descriptor is None
            else descriptor
        )

    def enter(self, name: str) -> "Folder":
        """A folder in this one; made if it does not exist."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=self._descriptor)
        descriptor = self._open(name, os.O_RDONLY | os.O_DIRECTORY)
        return Folder(self.path / name, descriptor)

    def names(self) -> list[str]:
        return os.listdir(self._descriptor)

    def open(self, name: str, flags: int) -> int:
        """The descriptor of a regular file."""
        descriptor = self._open(name, flags | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, f"{self.path / name} is not a file; remove it")
        return descriptor

    def create(self, name: str) -> int:
        """The descriptor of a new, empty file; what had this name is removed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return self._open(name, flags)
        except FileExistsError:
            self.remove(name)
            return self._open(name, flags)

    def size(self, name: str) -> int | None:
        """Bytes of a regular file; None if there is none of this name."""
        try:
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def replace(self, name: str, data: bytes) -> None:
        """Write a file so that at any moment either the old or the new one exists, whole."""
        with os.fdopen(self.create(f"{name}.tmp"), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.move(f"{name}.tmp", self, name)
        self.sync()

    def move(self, name: str, target: "Folder", new_name: str) -> None:
        os.replace(name, new_name, src_dir_fd=self._descriptor, dst_dir_fd=target._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file or a link, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def remove_empty(self, name: str) -> None:
        """Remove a folder, if nothing is in it."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self._descriptor)

    def sync(self) -> None:
        """Make names in this folder durable."""
        os.fsync(self._descriptor)

    def sync_files(self, names: Collection[str]) -> None:
        """Make the contents of files durable; those that are not there are passed over."""
        if len(names) > _FEW:
            self.sync_file_system()
            return
        with contextlib.ExitStack() as opened:
            descriptors: list[int] = []
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    descriptors.append(self.open(name, os.O_RDONLY))
                    opened.callback(os.close, descriptors[-1])
            # The kernel writes all of them now, and the first sync finds little left to do for the
            # others. Where it cannot be told, each sync does it for itself.
            if _SYNC_FILE_RANGE is not None:
                for each in descriptors:
                    _SYNC_FILE_RANGE(each, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)
            for each in descriptors:
                os.fsync(each)

    def sync_file_system(self) -> None:
        """Make all files of this folder's file system durable."""
        if _LIBC.syncfs(self._descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(self.path))

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(
                name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=self._descriptor
            )
        except FileNotFoundError as error:
            if not flags & os.O_CREAT:
                raise
            raise OSError(errno.ESTALE, f"{self.path} was deleted") from error
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            reason = f"{self.path / name} is a link or of the wrong kind; remove it"
            raise OSError(error.errno, reason) from error
