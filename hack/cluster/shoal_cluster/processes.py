"""Long-running programs of a cluster: started, paused, killed, started again, and swept up.

Every process of a cluster carries the cluster's folder in its environment, children included. So
whoever finds the folder can end them all, by process id, whether or not their starter still lives.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_MARK = "SHOAL_CLUSTER"
_POLL_SECONDS = 0.02


class ProgramFailed(Exception):
    """A program ended, or did not become ready in time; carries the end of its log."""


@dataclass(slots=True)
class Process:
    """One program with its log; `home` is the folder of its cluster.

    `wraps` says that the command starts the program as its one child, as unshare and nsenter do;
    `within` that it is to run in the network, mount and process namespaces of that process.
    `environment` is set besides the environment of this process.
    """

    name: str
    command: Sequence[str | Path]
    log: Path
    home: Path
    wraps: bool = False
    within: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def pid(self) -> int:
        """The program's process id; it must have been started."""
        assert self._child is not None, f"{self.name} was not started"
        if not (self.wraps or self.within):
            return self._child.pid
        wrapper = self._child.pid
        self.wait_until(lambda: bool(_children(wrapper)), "entering its namespaces")
        return _children(wrapper)[0]

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start it; its log goes on where it was."""
        assert not self.running, f"{self.name} runs already"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        namespaces = (f"--target={self.within}", "--net", "--mount", "--pid", "--")
        enter = ("nsenter", *namespaces) if self.within else ()
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [*enter, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.environment | {_MARK: str(self.home)},
                start_new_session=True,
            )

    def stop(self, grace_seconds: float = 5.0) -> None:
        """End it politely, and by force after `grace_seconds`."""
        if self._child is None or not self.running:
            return
        self._signal(signal.SIGCONT)
        os.kill(self.pid, signal.SIGTERM)
        try:
            self._child.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it as a crash would (SIGKILL), and return when it has ended."""
        if self._child is None or not self.running:
            return
        pids = [self._child.pid, *_children(self._child.pid)]
        self._signal(signal.SIGKILL)
        self._child.wait()
        while any(map(_runs, pids)):
            time.sleep(_POLL_SECONDS)

    def pause(self) -> None:
        """Freeze it: its connections stay open and nothing answers (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """End a `pause`."""
        self._signal(signal.SIGCONT)

    def resident_bytes(self) -> int:
        """Its resident memory now, in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def wait_until(self, ready: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Return once `ready()`.

        Raises:
            ProgramFailed: when it ends before, or is not ready within `seconds`.
        """
        until = time.monotonic() + seconds
        while not ready():
            if not self.running:
                raise ProgramFailed(f"{self.name} ended before {what}:\n{self.last_words()}")
            if time.monotonic() > until:
                raise ProgramFailed(
                    f"{self.name}: not {what} within {seconds:.0f} s:\n{self.last_words()}"
                )
            time.sleep(_POLL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the program and what wraps it: nsenter stops together with its child."""
        assert self._child is not None, f"{self.name} was not started"
        inner = _children(self._child.pid) if self.wraps or self.within else []
        for pid in (*inner, self._child.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def end_all(home: Path, seconds: float = 20.0) -> None:
    """Kill every process that carries `home`, and return when none is left."""
    until = time.monotonic() + seconds
    while left := _marked(home):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # reap it if it is ours
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > until:
            raise ProgramFailed(f"processes {left} of {home} do not end")
        time.sleep(_POLL_SECONDS)


def _marked(home: Path) -> list[int]:
    mark = f"{_MARK}={home}".encode()
    return [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdecimal() and mark in _environment(process)
    ]


def _environment(process: Path) -> list[bytes]:
    try:
        # That of a zombie is empty: it has ended.
        return (process / "environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def _runs(pid: int) -> bool:
    """Whether there is such a process, and it is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
