"""A process that ends with the one that started it, however that ends (Linux).

The kernel tells only a process that has asked for it, which takes a moment after its start. One
whose parent has ended before has another by then: it can see that only where it was told which
process its parent is.
"""

import ctypes
import os
import signal
from collections.abc import Mapping
from typing import Final

PARENT: Final = "SHOAL_PARENT"
"""In the environment: the process id of who starts a process."""
_PR_SET_PDEATHSIG: Final = 1
_INIT: Final = 1


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel signal this process when its parent ends. Raises `SystemExit` where that has
    happened already.

    `parent` is its process id, where this process was told; else that is what it is now.
    """
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != expected or (parent is None and expected == _INIT):
        raise SystemExit("the process that started this one has ended already")


def told_parent(environment: Mapping[str, str] = os.environ) -> int | None:
    """The process id of the parent, where the environment says it."""
    text = environment.get(PARENT, "")
    return int(text) if text.isdecimal() else None
