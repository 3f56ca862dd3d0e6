"""How many files and sockets a process may have open."""

import resource
from typing import Final

OPEN_FILES: Final = 1 << 16


def allow_open_files() -> None:
    """As many as this process may allow itself; mostly it begins with 1024."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if 0 <= allowed < wanted:  # no limit at all is less than none
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
