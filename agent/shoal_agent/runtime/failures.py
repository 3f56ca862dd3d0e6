"""What can go wrong with ONNX Runtime, and how a run is stopped."""

import re
from math import inf
from time import perf_counter
from typing import Final

import onnxruntime

from shoal_agent.memory.demands import NoRoom
from shoal_protocol.units import format_bytes

_ERROR_CHARACTERS: Final = 500
"""Of a longer text, half from its beginning, which says what failed, and half from its end: why. In
between is a place in the runtime's source."""
_OUT_OF_MEMORY: Final = (
    "Failed to allocate memory",
    "bad_alloc",
    "exceed memory limit",
    "smaller than requested",
)
MORE_OR_SMALLER: Final = "give the device more memory, or the model a smaller input"
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


class NoRoomForOutputs(OutOfBudget):
    """All nodes have run, and their outputs would not have fitted beside what that has taken."""


class Exceeded(OutOfBudget):
    """A run that was watched took, or asked for, more than its limit: `peak_bytes`, at least.
    `computed`: all nodes had run."""

    def __init__(self, reason: str, peak_bytes: int, *, computed: bool = False) -> None:
        super().__init__(reason)
        self.peak_bytes = peak_bytes
        self.computed = computed


class NotOpen(RuntimeFailed):
    """The fragment was closed before the run began."""


class Terminated(RuntimeFailed):
    """A run was stopped because it was asked to."""


class Stopper:
    """Ends one run early, from any thread; one that has not begun ends as it begins. A guard ends
    one that takes more than so many seconds."""

    def __init__(self, seconds: float = inf) -> None:
        self.seconds = seconds
        self.until = perf_counter() + seconds
        self.options = onnxruntime.RunOptions()
        self.options.log_severity_level = 4

    def stop(self) -> None:
        self.options.terminate = True

    @property
    def stopped(self) -> bool:
        return bool(self.options.terminate)


def node_in(text: str) -> str:
    """The node that a text of the runtime names: ` in its Softmax node 'p'`; empty: none."""
    node = _NODE.search(text)
    if not node:
        return ""
    return f" in its {node[1]} node" + (f" {node[2]!r}" if node[2] else "")


def exceeded(error: RuntimeFailed, peak_bytes: int, limit_bytes: int) -> Exceeded:
    """A run that was stopped: what it took, and where that was."""
    if isinstance(error, OutOfBudget):
        what = f"it would take more than {format_bytes(limit_bytes)}{node_in(str(error))}"
    else:
        what = f"it took {format_bytes(peak_bytes)} of {format_bytes(limit_bytes)}, and was {error}"
    computed = isinstance(error, NoRoomForOutputs)
    return Exceeded(f"{what}; {MORE_OR_SMALLER}", peak_bytes, computed=computed)


def failure_of(error: Exception, *, stopped: bool = False) -> RuntimeFailed:
    """What an exception of the runtime is: its exceptions have no common base but `Exception`."""
    text = str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if len(line) > _ERROR_CHARACTERS:
        half = _ERROR_CHARACTERS // 2
        line = f"{line[:half]} ... {line[-half:]}"
    if stopped:
        return Terminated(f"stopped{node_in(text) or ' while it ran'}")
    if any(sign in text for sign in _OUT_OF_MEMORY):
        return OutOfBudget(line)
    return RuntimeFailed(line)


def without_frames(error: RuntimeFailed) -> RuntimeFailed:
    """The same, for its text: frames of a run hold what it has worked with for as long as somebody
    has the exception."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
