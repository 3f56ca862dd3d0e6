"""Whether the kernel gives this process huge pages: for memory of no file, where it asks for them,
and only there.

In those that nobody asked for, memory comes in pieces of 2 MiB, whatever is touched of them: a
device of 15 MiB took 96 % of its budget where it takes 86.
"""

import ctypes
from pathlib import Path
from typing import Final

from shoal_agent.memory.swapping import HUGE_PAGE_BYTES

FOLDER: Final = Path("/sys/kernel/mm/transparent_hugepage")
_PR_SET_THP_DISABLE: Final = 41
_PR_GET_THP_DISABLE: Final = 42
_EXCEPT_ADVISED: Final = 1 << 1
_LIBC: Final = ctypes.CDLL(None)


def refuse_unasked(folder: Path = FOLDER) -> None:
    """Where the kernel gives huge pages to whoever touches memory (`always`, which some systems
    have), have it give this process, and those that it starts, only such as it asks for; before
    Linux 6.18, none."""
    if "[always]" in _read(folder / "enabled") and _prctl(_PR_SET_THP_DISABLE, 1, _EXCEPT_ADVISED):
        _prctl(_PR_SET_THP_DISABLE, 1, 0)


def may_ask(folder: Path = FOLDER) -> bool:
    """Whether this process gets those that it asks for, of the size that counts here."""
    refused = _prctl(_PR_GET_THP_DISABLE, 0, 0)
    return (
        (refused <= 0 or bool(refused & _EXCEPT_ADVISED))
        and "[never]" not in _read(folder / "enabled", "[never]")
        and _read(folder / "hpage_pmd_size") == str(HUGE_PAGE_BYTES)
    )


def _read(path: Path, otherwise: str = "") -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a kernel without them
        return otherwise


def _prctl(option: int, first: int, second: int) -> int:
    """What the kernel answers; below zero: it does not know that, or does not do it."""
    answer: int = _LIBC.prctl(option, *map(ctypes.c_ulong, (first, second, 0, 0)))
    return answer
