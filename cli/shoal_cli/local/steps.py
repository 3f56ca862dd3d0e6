"""A step in a process of its own: its memory comes back, and a crash there is an error here.

Cutting a model and running the whole one take much memory, so the runner does neither itself. A
step is a module with a `main` that calls `serve`, and is started by `step`: it reads one line of
JSON from standard input, `{"parent": PID, "request": {...}}`, and writes lines of JSON to standard
output: any number of `{"progress": [done, total]}`, then `{"result": ...}` or `{"refused": {...}}`.
What it writes to standard error is kept for the message if it crashes.
"""

import asyncio
import contextlib
import ctypes
import errno
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from shoal_cli.local.supervisor import child_environment, session_signal
from shoal_protocol.interpreter import module_command

Json = Mapping[str, Any]
"""What passes between a step and the process that started it."""
Progress = Callable[[int, int], None]

CANNOT_WRITE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a disk says that takes no more."""
_PR_SET_PDEATHSIG: Final = 1
_LINE_BYTES: Final = 64 << 20
_STOP_SECONDS: Final = 2.0


class StepRefused(Exception):
    """The step says that what it was given cannot be done. `kind` is the class of its exception,
    `need_bytes` the memory that would do, where it is about that."""

    def __init__(self, kind: str, message: str, need_bytes: int | None = None) -> None:
        self.kind = kind
        self.need_bytes = need_bytes
        super().__init__(message)


class StepCrashed(Exception):
    """The step's process ended without an answer."""

    def __init__(self, step: str, status: int, errors: str) -> None:
        cause = f"exited with {status}"
        if status < 0:
            cause = f"was killed by {signal.Signals(-status).name}"
        super().__init__(f"{step} {cause}\n{errors}".rstrip())


async def run_step(name: str, module: str, request: Json, on_progress: Progress) -> Json:
    """A step's result. Raises `StepRefused`, `StepCrashed`. Cancellation ends the process."""
    process = await start_step(module, request, asyncio.subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        process.stdin.close()
        answer = await _read_answer(process.stdout, on_progress)
        status = await process.wait()
        complaint = (await errors).decode(errors="replace")
    finally:
        await _end(process)
        errors.cancel()
    match answer:
        case {"result": dict(result)}:
            return result
        case {"refused": {"kind": str(kind), "message": str(message), "need_bytes": need}}:
            raise StepRefused(kind, message, need)
        case _:
            raise StepCrashed(name, status, "\n".join(complaint.splitlines()[-8:]))


async def start_step(module: str, request: Json, errors: int) -> asyncio.subprocess.Process:
    """A process that is given its request; `errors` are as those of `subprocess`."""
    process = await asyncio.create_subprocess_exec(
        *module_command("shoal_cli.local.step"),
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        env=child_environment(),
        limit=_LINE_BYTES,
        start_new_session=True,
    )
    assert process.stdin is not None
    order = {"parent": os.getpid(), "request": request}
    process.stdin.write(json.dumps(order, default=str).encode() + b"\n")  # paths as text
    return process


def serve(work: Callable[[Json, Progress], Json], refusals: tuple[type[Exception], ...]) -> None:
    """The process's side: do the work on the request, write progress and the result. Exceptions of
    `refusals` become `StepRefused` on the other side; any other is a crash, with a traceback unless
    it is due to a disk."""
    request, say = begin_step()
    try:
        result = work(request, lambda done, total: say({"progress": [done, total]}))
        say({"result": result})
    except refusals as error:
        refused = {"kind": type(error).__name__, "message": str(error)}
        say({"refused": refused | {"need_bytes": getattr(error, "need_bytes", None)}})
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        place = "" if error.filename is None else f" to {error.filename}"
        raise SystemExit(f"nothing more can be written{place}: {error.strerror}") from error


def begin_step() -> tuple[Json, Callable[[Json], None]]:
    """In the process: what it is asked, and how it says something."""
    end_with_parent()
    gc.freeze()  # what was imported stays: neither the work nor the end need look through it
    gc.enable()
    # Nothing but answers may go to standard output, whatever libraries print.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: Json) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    order = json.loads(sys.stdin.readline())
    if os.getppid() != order["parent"]:
        raise SystemExit("the process that started this one is gone")
    return order["request"], say


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


async def _read_answer(stream: asyncio.StreamReader, on_progress: Progress) -> Json:
    async for line in stream:
        match json.loads(line):
            case {"progress": [int(done), int(total)]}:
                on_progress(done, total)
            case dict(answer):
                return answer
    return {}


async def _end(process: asyncio.subprocess.Process) -> None:
    """TERM, then KILL; nothing to do for one that has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        session_signal(process, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
