"""Names in a folder that others write to: they may be no text, and lead to no file."""

import errno
import os
from typing import Final

_UNREACHABLE: Final = (
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP),
    *(errno.EACCES, errno.ENAMETOOLONG),
)


def is_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a file, or a link to one. Raises `OSError` that says nothing of it."""
    try:
        return entry.is_file()
    except OSError as error:
        if is_unreachable(error):
            return False
        raise


def is_unreachable(error: OSError) -> bool:
    """Whether an error says that a name leads to no file that may be read: it is gone, or it is a
    link to itself, or to a place that is closed."""
    return error.errno in _UNREACHABLE


def result_name(name: str) -> str:
    """What the result of an input file of this name is called."""
    return f"{name.rpartition('.')[0]}.npz"


def encodable(text: str) -> str:
    """A text about a file as UTF-8 can carry it: bytes of its name that are none are shown."""
    return text.encode(errors="backslashreplace").decode()
