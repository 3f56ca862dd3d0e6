"""Where things are kept: the cache that outlives clusters, and one folder for each cluster.

A cluster's folder is `/var/tmp/shoal-clusters-UID/NUMBER`. Its number, which no other cluster has
or has had lately, also names the cluster's bridge and cgroups and chooses its subnet, so that
clusters live side by side.
Who made the folder holds a lock on it: when the maker dies, the kernel lets go, and whoever makes
a cluster next takes down what is left, unless the cluster was made to be kept.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MODULES = Path(__file__).resolve().parents[1] / "modules"
# Not /tmp, which is often memory; and short, because sockets below it may have 108 bytes.
_CLUSTERS = Path(f"/var/tmp/shoal-clusters-{os.getuid()}")  # noqa: S108 - of mode 0700, see below
_MOST_CLUSTERS = 48


def cache() -> Path:
    """Where what took long to make is kept: `~/.cache/shoal/cluster`."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "shoal" / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on `file`; the kernel lets go of it when this process ends."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@dataclass(slots=True)
class Home:
    """One cluster's folder and number, held by a lock until `release`."""

    number: int
    folder: Path
    _lock: IO[str]

    def keep(self) -> None:
        """Let the cluster outlive this process."""
        (self.folder / "kept").touch()

    def release(self) -> None:
        """Let go of the lock."""
        self._lock.close()

    def remove(self) -> None:
        """Give the number back and remove the folder.

        The lock goes last, and with it at once the folder's name: whoever comes upon a folder
        without a lock takes it for one that was left.
        """
        until = time.monotonic() + 10
        while True:
            try:
                _remove_all(path for path in self.folder.iterdir() if path.name != "lock")
                break
            except OSError:  # the kernel has not quite let go of a node's mounts
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        gone = self.folder.with_name(f"gone-{self.number}")
        shutil.rmtree(gone, ignore_errors=True)
        self.folder.rename(gone)
        shutil.rmtree(gone)
        self.release()


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def claim(take_down: Callable[[Home], None]) -> Home:
    """Take the next free number, after `take_down` of every cluster whose maker has died."""
    _CLUSTERS.mkdir(mode=0o700, exist_ok=True)
    last = _CLUSTERS / "last"
    with locked(_CLUSTERS / "lock"):
        for left in _unowned(kept=False):
            take_down(left)
        after = int(last.read_text()) + 1 if last.exists() else 0
        for number in (*range(after, _MOST_CLUSTERS), *range(after)):
            folder = _CLUSTERS / str(number)
            if not folder.exists():
                folder.mkdir()
                last.write_text(str(number))
                lock = (folder / "lock").open("w")
                fcntl.flock(lock, fcntl.LOCK_EX)
                return Home(number, folder, lock)
    raise RuntimeError(
        f"{_MOST_CLUSTERS} clusters run already, in {_CLUSTERS}: take some down first"
    )


def kept() -> list[Home]:
    """The clusters that were made to be kept, with their locks held."""
    return _unowned(kept=True)


def take_down_abandoned(take_down: Callable[[Home], None]) -> int:
    """Take down every cluster whose maker has died; returns how many there were."""
    if not _CLUSTERS.exists():
        return 0
    with locked(_CLUSTERS / "lock"):
        left = _unowned(kept=False)
        for home in left:
            take_down(home)
    return len(left)


def _unowned(*, kept: bool) -> list[Home]:
    """The clusters that no living process holds, and that were or were not made to be kept."""
    homes: list[Home] = []
    folders = _CLUSTERS.iterdir() if _CLUSTERS.exists() else []
    for folder in sorted(entry for entry in folders if entry.name.isdecimal()):
        try:
            lock = (folder / "lock").open("w")
        except FileNotFoundError:  # it goes at this moment
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        home = Home(int(folder.name), folder, lock)
        if (folder / "kept").exists() == kept:
            homes.append(home)
        else:
            home.release()
    return homes
