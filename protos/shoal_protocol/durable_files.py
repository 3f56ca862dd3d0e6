"""Files and names that survive a crash: written whole, renamed into place, synced."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system without locks says."""
_NO_SYNC: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system says that syncs no folders."""
_UNWRITABLE: Final = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN),
)
_OUTPUT: Final = 1
_MISSING: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that at any moment either the old or the new one is there, whole. Raises
    `OSError`; what was written of the new one is removed then."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb", opener=_open_no_link) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_named(path: Path, data: bytes) -> None:
    """Write a file that a user has named, as `replace_file` does where a file can take its place.
    A link stays one: the file that it leads to is replaced. Raises `OSError`, which says what file
    could not be written: a full disk says that of none."""
    try:
        _write_named(path, data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_named(path: Path, data: bytes) -> None:
    if not is_stream(path):
        replace_file(Path(os.path.realpath(path)), data)
        return
    # What standard output goes to has its place in there, which a file opened anew has not.
    opened = os.dup(_OUTPUT) if _is_output(path.stat()) else os.open(path, os.O_WRONLY)
    with suppress(BrokenPipeError), open(opened, "wb") as file:  # who read it has enough of it
        file.write(data)


def is_stream(path: Path) -> bool:
    """Whether a name leads to what is written into, for no file can take its place: a device, a
    pipe, or whatever standard output goes to. Raises `OSError`."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not stat.S_ISREG(found.st_mode) or _is_output(found)


def _is_output(found: os.stat_result) -> bool:
    try:
        return os.path.samestat(found, os.fstat(_OUTPUT))
    except OSError:  # it is closed
        return False


def _open_no_link(path: str, flags: int) -> int:
    """Whoever may write to the folder could have made the name a link to any file."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, on file systems that can do that: on others (some shared
    folders) they are as durable as they get."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def is_disk_full(error: OSError) -> bool:
    """Whether an error says that there is no room for a file."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_unwritable(error: OSError) -> bool:
    """Whether an error says that a file system takes no more of any file: it is full, a quota is
    spent, it has become read-only, or its disk is gone."""
    return error.errno in _UNWRITABLE


def remedy(error: OSError) -> str:
    """What a user can do about such an error."""
    if is_disk_full(error):
        return "make room there"
    return "see that it stays there" if error.errno == errno.ESTALE else "make it writable"


def is_transient(error: OSError) -> bool:
    """Whether an error says that this process or machine lacks something now (open files, memory):
    it says nothing of the file, and may be gone at the next try."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, never through a symbolic link. Raises `FileNotFoundError` where
    there is no regular file of this name, `OSError` where it cannot be opened now."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in _MISSING:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
