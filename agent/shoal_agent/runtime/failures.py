"""What can go wrong with ONNX Runtime, and how a run is stopped."""

import re
from typing import Final

import onnxruntime

from shoal_agent.memory.residency import NoRoom

_ERROR_CHARACTERS: Final = 400
_OUT_OF_MEMORY: Final = (
    "Failed to allocate memory",
    "bad_alloc",
    "exceed memory limit",
    "smaller than requested",
)
_NODE: Final = re.compile(r"while running (\w+) node\. Name:'([^']*)'")
"""How the runtime names the node that it was in."""


class RuntimeFailed(Exception):
    """ONNX Runtime could not open or run a fragment; the text is its first line."""


class OverBudget(NoRoom):
    """A fragment does not fit in memory."""


class NotResident(Exception):
    """A fragment is to be used that is not resident."""


class OutOfBudget(RuntimeFailed):
    """A run would have taken more memory than the budget allows."""


class NotOpen(RuntimeFailed):
    """The fragment was closed before the run began."""


class Terminated(RuntimeFailed):
    """A run was stopped because it was asked to."""


class Stopper:
    """Ends one run early, from any thread; one that has not begun ends as it begins."""

    def __init__(self) -> None:
        self.options = onnxruntime.RunOptions()
        self.options.log_severity_level = 4

    def stop(self) -> None:
        self.options.terminate = True

    @property
    def stopped(self) -> bool:
        return bool(self.options.terminate)


def failure_of(error: Exception, *, stopped: bool = False) -> RuntimeFailed:
    """What an exception of the runtime is: its exceptions have no common base but `Exception`."""
    text = str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    line = line[:_ERROR_CHARACTERS]
    if stopped:
        node = _NODE.search(text)
        where = f"in its {node[1]} node {node[2]!r}" if node else f"while it ran: {line}"
        return Terminated(f"stopped {where}")
    if any(sign in text for sign in _OUT_OF_MEMORY):
        return OutOfBudget(line)
    return RuntimeFailed(line)
