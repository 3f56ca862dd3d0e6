"""Whether this process may start the threads that an agent takes.

Where it may not, nothing says so by itself: the transport loses its threads for good when one
cannot be started, and a load fails with a line of the runtime's source. So as many are started once
before the agent is, in a child process, of which nothing is left.
"""

import os
import threading
from typing import Final

_OWN: Final = 32
"""What an agent was seen to take at most, with its children: 26. Those of ONNX Runtime come on
top."""


class TooFewThreads(Exception):
    """A limit on processes leaves the agent too few threads."""

    def __init__(self, need: int, have: int) -> None:
        super().__init__(
            f"an agent takes up to {need} threads here, this process may start {have}: raise its "
            "limit of processes (pids.max of its control group, TasksMax, ulimit -u)"
        )
        self.need = need
        self.have = have


def check_threads(threads: int | None) -> None:
    """`threads` are those of ONNX Runtime; None: the processors. Raises `TooFewThreads`."""
    need = _OWN + (threads or len(os.sched_getaffinity(0)))
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except BlockingIOError:
        raise TooFewThreads(need, 0) from None
    if not child:
        os.write(writer, str(_started(need)).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        have = int(file.read() or need)
    os.waitpid(child, 0)
    if have < need:
        raise TooFewThreads(need, have)


def _started(most: int) -> int:
    """How many of so many threads could be started, one after the other."""
    gate = threading.Event()
    for number in range(most):
        try:
            threading.Thread(target=gate.wait, daemon=True).start()
        except RuntimeError:
            return number
    return most
