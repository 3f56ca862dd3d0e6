"""One process at a time has a cache folder: two would delete each other's files, and write into the
activations that the other has mapped."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shoal_protocol.durable_files import NO_LOCKS


class CacheInUse(Exception):
    """Another agent has the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} is used by another agent, of this name most likely; stop that one, or give "
            "this one another --name or --cache"
        )


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Have the folder, which is made, until the end or the process's. Raises `CacheInUse`,
    `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            lock = stack.enter_context((folder / "lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheInUse(folder) from None
        except OSError as error:
            # Where there are no locks nobody is kept away, and none is needed where nobody writes.
            if error.errno not in (*NO_LOCKS, errno.EROFS):
                raise
        yield
