"""Where a run keeps its files.

The work folder outlives the run, so that the second run is warm: the fragment store, the agents'
disk caches, and the logs. Its default place is `$XDG_CACHE_HOME/shoal/runs/KEY`, KEY being made of
what is run, so the same command finds the same folder; of those in the default place, the ten that
were used last are kept. One run at a time uses a folder (`flock`, which ends with the process).

Sockets live in a folder of their own with mode 0700 (the file system is the identity in local
mode), at a short path: a Unix socket's address holds 108 bytes. It is named after the run, and a
later run removes those of dead ones. Its link `work` leads to the work folder, so that whoever
finds a run by its sockets finds its logs too.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_cli.local.cgroups import run_is_alive, run_name
from shoal_cli.transfer.cache_folder import default_cache
from shoal_protocol.memory_folders import is_in_memory
from shoal_protocol.state_folders import HomeMissing

KEPT_RUNS: Final = 10
_SOCKETS_PREFIX: Final = "shoal-"
_COORDINATOR: Final = ".c"
_WORK: Final = "work"
OF_OTHER_SESSIONS = (Path(f"/run/user/{os.getuid()}"), Path("/tmp"))  # noqa: S108 - only read
"""Where runs of this user may have their sockets besides: a service has no `XDG_RUNTIME_DIR`, and a
login has one."""


class WorkspaceBusy(Exception):
    """Another run uses the work folder."""

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(
            f"{folder} is used by another run (process {holder or 'unknown'}); "
            "wait for it, or give this one a folder of its own with --work DIR"
        )


class WorkFolderUnusable(OSError):
    """Nothing can be kept in the work folder, for a `reason` that `path` has."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}; name another one with --work DIR")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folders of one run."""

    root: Path
    run: str
    sockets: Path

    @property
    def store(self) -> Path:
        """The fragment store of the coordinator."""
        return self.root / "store"

    @property
    def state(self) -> Path:
        """What the coordinator keeps of jobs."""
        return self.root / "state"

    @property
    def logs(self) -> Path:
        """The folder of all logs."""
        return self.root / "logs"

    def cache(self, device: str) -> Path:
        """The disk cache of an agent."""
        return self.root / "cache" / device

    def log(self, name: str) -> Path:
        """The log of a process: an agent by its device's name."""
        return self.logs / f"{name}.log"

    def socket(self, name: str) -> str:
        """A gRPC target of this run."""
        return f"unix:{self.sockets / name}"

    def coordinator(self, pool: str) -> str:
        """The gRPC target of a pool's coordinator."""
        return self.socket(f"{pool[:20]}{_COORDINATOR}")

    def in_memory_note(self, remedy: str = "--work DIR") -> str | None:
        """What to tell a user where the files of devices are memory, which no budget counts;
        `remedy` names another folder."""
        if not is_in_memory(self.root):
            return None
        return (
            f"the work folder {self.root} is on a tmpfs: what devices store there is memory too, "
            f"beside their budgets; name a folder on a disk with {remedy}"
        )


@dataclass(frozen=True, slots=True, order=True)
class RunningPool:
    """A pool of an active run of this user: its name (or the first 20 letters), the work
    folder, the target of its coordinator."""

    name: str
    work: Path
    target: str


@contextlib.contextmanager
def open_workspace(root: Path, run: str | None = None) -> Iterator[Workspace]:
    """Lock the work folder at `root` for this run, by default the only one of this process. Raises
    `WorkspaceBusy`, `WorkFolderUnusable`."""
    _check_name(root)
    run = run or run_name()
    sockets = _sockets_folder() / f"{_SOCKETS_PREFIX}{os.getuid()}-{run}"
    with _locked(root):
        _sweep_sockets(sockets.parent)
        with contextlib.suppress(HomeMissing):  # then nobody has a default folder
            if root.parent == _runs_folder():
                _sweep_runs(root.parent)
        sockets.mkdir(mode=0o700)
        (sockets / _WORK).symlink_to(root.resolve())
        try:
            shutil.rmtree(root / "logs", ignore_errors=True)
            (root / "logs").mkdir()
            yield Workspace(root, run, sockets)
        finally:
            shutil.rmtree(sockets, ignore_errors=True)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Make the folder, and hold its lock, with our number in it."""
    with contextlib.ExitStack() as held:
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((root / "lock").open("a+"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        except BlockingIOError:
            lock.seek(0)
            raise WorkspaceBusy(root, lock.read().strip()) from None
        except OSError as error:
            raise WorkFolderUnusable(
                error.filename or root, error.strerror or str(error)
            ) from error
        yield


def _check_name(root: Path) -> None:
    """ONNX Runtime opens files in there, by names that are UTF-8."""
    try:
        str(root.absolute()).encode()
    except UnicodeEncodeError:
        reason = "the path of a work folder must be UTF-8"
        raise WorkFolderUnusable(root.absolute(), reason) from None


def default_work_folder(name: str, sources: Iterable[Path]) -> Path:
    """The folder that belongs to these files: the same for the same command, another for others."""
    named = "\n".join(str(path.resolve()) for path in sources)
    key = hashlib.sha256(os.fsencode(named)).hexdigest()  # a path need not be UTF-8
    shown = os.fsencode(name).decode(errors="replace")
    return _runs_folder() / f"{shown}-{key[:12]}"


def kept_bytes(root: Path) -> int:
    """What a work folder takes of the disk; a file of several names counts once."""
    taken: dict[tuple[int, int], int] = {}
    for folder, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                found = Path(folder, name).lstat()
                taken[found.st_dev, found.st_ino] = 512 * found.st_blocks
    return sum(taken.values())


def running_pools() -> list[RunningPool]:
    """The pools of all runs of this user on this machine."""
    prefix = f"{_SOCKETS_PREFIX}{os.getuid()}-"
    pools = []
    folders = dict.fromkeys((_sockets_folder(), *OF_OTHER_SESSIONS))
    for folder in (found for each in folders for found in each.glob(f"{prefix}*-*")):
        with contextlib.suppress(FileNotFoundError):  # its run has ended
            if folder.stat().st_uid == os.getuid() and run_is_alive(
                folder.name.removeprefix(prefix)
            ):
                work = (folder / _WORK).resolve()
                for socket in folder.glob(f"*{_COORDINATOR}"):
                    pools.append(RunningPool(socket.stem, work, f"unix:{socket}"))
    return sorted(pools)


def _runs_folder() -> Path:
    return default_cache() / "runs"


def _sockets_folder() -> Path:
    """Short and writable: the user's runtime folder, else the one for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime) <= 40 and os.access(runtime, os.W_OK):
        return Path(runtime)
    temporary = Path(tempfile.gettempdir())
    # The folder made in it has mode 0700.
    return temporary if len(str(temporary)) <= 40 else Path("/tmp")  # noqa: S108


def _sweep_sockets(parent: Path) -> None:
    """Remove socket folders of our dead runs."""
    prefix = f"{_SOCKETS_PREFIX}{os.getuid()}-"
    for folder in parent.glob(f"{prefix}*-*"):
        if not run_is_alive(folder.name.removeprefix(prefix)):
            shutil.rmtree(folder, ignore_errors=True)


def _sweep_runs(parent: Path) -> None:
    """Keep the folders that were used last: their locks are written anew by each run."""
    written: dict[Path, float] = {}
    for path in parent.glob("*/lock"):
        with contextlib.suppress(FileNotFoundError):  # another run has swept it
            written[path] = path.stat().st_mtime
    for path in sorted(written, key=written.__getitem__, reverse=True)[KEPT_RUNS:]:
        with contextlib.suppress(OSError), path.open("a+") as lock:  # else it is in use, or gone
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
