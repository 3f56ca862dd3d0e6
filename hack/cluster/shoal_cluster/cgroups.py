"""The cgroups of a node: one root for all its pods, below which its kubelet makes the rest.

Under cgroups v1 each controller is a mount of its own and the root is made in each, in the hybrid
form also in the tree without controllers; under v2 there is one tree.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")


def root(number: int, node: str) -> str:
    """The path, below each controller's mount, for a node of cluster `number`."""
    return f"shoal{number}-{node}"


def make(name: str) -> None:
    """Make the root `name` in every controller's tree."""
    if _is_v2():
        available = (_MOUNT / "cgroup.controllers").read_text().split()
        wanted = " ".join(f"+{controller}" for controller in available)
        (_MOUNT / "cgroup.subtree_control").write_text(wanted)
    for tree in _trees():
        folder = tree / name
        folder.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # v1: empty in a new one, and then useless
            if not _is_v2() and (tree / setting).exists():
                (folder / setting).write_text((tree / setting).read_text())


def remove(number: int, node: str = "*", seconds: float = 20.0) -> None:
    """Kill what runs in the roots of cluster `number` and remove them, with all below."""
    until = time.monotonic() + seconds
    for tree in _trees():
        for folder in tree.glob(root(number, node)):
            while folder.exists():
                _remove_tree(folder)
                if time.monotonic() > until:
                    raise OSError(f"{folder} cannot be removed: something in it does not end")


def _remove_tree(top: Path) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        with suppress(FileNotFoundError):
            for pid in Path(folder, "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):  # not empty yet: a process in it has not quite ended
            Path(folder).rmdir()


def _trees() -> Iterator[Path]:
    """Each controller's mount (v1), or the one tree (v2)."""
    if _is_v2():
        yield _MOUNT
        return
    if not _MOUNT.is_dir():
        return
    seen: set[Path] = set()
    for entry in sorted(_MOUNT.iterdir()):
        mount = entry.resolve()  # `cpu,cpuacct` has links from `cpu` and from `cpuacct`
        if mount not in seen and entry.is_dir():
            seen.add(mount)
            yield mount


def _is_v2() -> bool:
    return (_MOUNT / "cgroup.controllers").exists()
