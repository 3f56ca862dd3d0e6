"""Starts processes, restarts them when they die, and stops them.

Each child leads a session of its own, so Ctrl-C at the terminal reaches the runner alone, and the
runner decides. A child that dies is restarted with exponential backoff from `FIRST_DELAY_SECONDS`
to `LONGEST_DELAY_SECONDS`, which resets once it has lived `STABLE_SECONDS`. A child that dies
`HOPELESS_DEATHS` times in a row, without ever having been stable and with nothing done meanwhile,
ends the run: `ProcessHopeless`, with the end of its log. (A wrong setting, a model that crashes the
runtime or a limit of the kernel would end it again. Results remain, and the next run resumes.)

Stopping is TERM, then KILL after a grace period, for the child's whole session. Children also ask
the kernel to end them when the runner dies (`--exit-with-parent`), also by `kill -9`; they are told
which process that is, as it may have died before they asked.

A child opens files and sockets of the run only, so it inherits what finds its programs, temporary
files and language, and what tunes its runtimes. All else stays here: credentials of clouds and
registries, and proxies, whose addresses may hold passwords.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_protocol.memory_folders import is_in_memory
from shoal_protocol.parents import PARENT

FIRST_DELAY_SECONDS: Final = 0.2
LONGEST_DELAY_SECONDS: Final = 5.0
STABLE_SECONDS: Final = 10.0
HOPELESS_DEATHS: Final = 6
_LOG_TAIL_BYTES: Final = 2_000
_INHERITED: Final = ("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LD_LIBRARY_PATH")
_INHERITED_PREFIXES: Final = ("LC_", "PYTHON", "OMP_", "ORT_", "OPENBLAS_", "MALLOC_", "GRPC_")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to run under a name, what to call it before people, and where its output goes."""

    name: str
    title: str
    command: tuple[str, ...]
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A child that ended by itself."""

    title: str
    status: int
    restarts: int

    @property
    def cause(self) -> str:
        """`killed by SIGKILL`, `exited with status 1`."""
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return f"exited with status {self.status}"


class ProcessHopeless(Exception):
    """A child died again and again, never having worked."""

    def __init__(self, death: Death, deaths: int, log: Path) -> None:
        kernel = ""
        if death.status == -signal.SIGKILL:
            kernel = (
                "\nSIGKILL is what the kernel sends a process that passes its memory limit: raise "
                "the budget, or cut the model into more fragments."
            )
            if is_in_memory(log):
                kernel += (
                    " Files on a tmpfs count towards that limit, and the work folder is there."
                )
        super().__init__(
            f"{death.title} ended {deaths} times in a row within {STABLE_SECONDS:g} s of "
            f"its start, last: {death.cause}; see {log}, which ends so:\n{tail(log)}{kernel}\n"
            "Results that were written are kept; the next run continues with what is missing."
        )


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    process: asyncio.subprocess.Process
    restarter: asyncio.Task[None] | None = None


class Supervisor:
    """Runs children until `stop`. `on_death` receives each death until then."""

    def __init__(self, on_death: Callable[[Death], None]) -> None:
        self._on_death = on_death
        self._children: dict[str, _Child] = {}
        self._restarts: dict[str, int] = {}
        self._deaths = Counter[str]()
        self._borne = 0
        self._stopping = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, spec: ProcessSpec) -> None:
        """Start a child, and restart it whenever it dies."""
        assert spec.name not in self._children, f"{spec.name} runs already"
        child = self._children[spec.name] = _Child(spec, await _spawn(spec))
        child.restarter = asyncio.create_task(
            self._restart_forever(child), name=f"restart {spec.name}"
        )

    async def wait_for_failure(self) -> None:
        """Never returns; raises `ProcessHopeless` when a child is given up."""
        await asyncio.shield(self._failure)

    def bear(self, deaths: int) -> None:
        """Give nobody up before so many more deaths: work may be what ends a child, and those who
        give it out leave that work out after so many."""
        self._borne = deaths

    def progressed(self) -> None:
        """Something was done since the last death: nobody is hopeless yet."""
        self._deaths.clear()

    def restarts(self, name: str) -> int:
        """How often a child was restarted; known after its end too."""
        return self._restarts.get(name, 0)

    def process_id(self, name: str) -> int | None:
        """The child's process now, if it runs."""
        child = self._children.get(name)
        if child is None or child.process.returncode is not None:
            return None
        return child.process.pid

    async def stop(self, names: Sequence[str] | None = None, *, grace_seconds: float = 5.0) -> None:
        """End children (all of them by default): TERM, then KILL after the grace. Idempotent."""
        self._stopping = self._stopping or names is None
        wanted = [name for name in self._children if names is None or name in names]
        children = [self._children[name] for name in wanted]
        for child in children:
            if child.restarter is not None:
                child.restarter.cancel()
                await asyncio.gather(child.restarter, return_exceptions=True)
            session_signal(child.process, signal.SIGTERM)
        if children:
            waits = [asyncio.create_task(child.process.wait()) for child in children]
            _, late = await asyncio.wait(waits, timeout=grace_seconds)
            if late:
                for child in children:
                    session_signal(child.process, signal.SIGKILL)
                await asyncio.wait(late)
        for name in wanted:
            del self._children[name]
        if self._stopping and not self._failure.done():
            self._failure.cancel()

    def kill(self) -> None:
        """End everything at once, without waiting: the second Ctrl-C."""
        self._stopping = True
        for child in self._children.values():
            session_signal(child.process, signal.SIGKILL)

    async def _restart_forever(self, child: _Child) -> None:
        delay, name = FIRST_DELAY_SECONDS, child.spec.name
        while True:
            born = time.monotonic()
            status = await child.process.wait()
            if self._stopping:
                return
            if time.monotonic() - born >= STABLE_SECONDS:
                delay, self._deaths[name] = FIRST_DELAY_SECONDS, 0
            self._deaths[name] += 1
            death = Death(title=child.spec.title, status=status, restarts=self.restarts(name))
            if (deaths := self._deaths[name]) >= HOPELESS_DEATHS + self._borne:
                if not self._failure.done():
                    self._failure.set_exception(ProcessHopeless(death, deaths, child.spec.log))
                return
            self._on_death(death)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)
            child.process = await _spawn(child.spec)
            self._restarts[name] = self.restarts(name) + 1


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a child inherits of the environment: nothing that may be a secret. Numpy's linear
    algebra starts no threads there, unless the environment says how many.
    """
    inherited = {
        name: value
        for name, value in environment.items()
        if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }
    return {"OPENBLAS_NUM_THREADS": "1"} | inherited


async def _spawn(spec: ProcessSpec) -> asyncio.subprocess.Process:
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    with spec.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment() | {PARENT: str(os.getpid())},
            start_new_session=True,
        )


def session_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a process that leads a session, and all in it, if it still runs."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def tail(log: Path, lines: int = 8) -> str:
    """The end of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:])
