"""What the machine has and lacks for a cluster, and putting it there where that is possible."""

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

# Program that must be there: the Debian package that brings it.
NODE_PROGRAMS: Mapping[str, str] = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
}
TEST_PROGRAMS: Mapping[str, str] = {"docker-registry": "docker-registry"}
IMAGE_PROGRAMS: Mapping[str, str] = {"buildah": "buildah", "mmdebstrap": "mmdebstrap"}
_CAP_SYS_ADMIN = 21
# A control plane and its nodes watch some forty files and folders; the kernel's usual bound is 128
# for all processes of a user together.
_FILE_WATCHERS = 1024


class MachineLacks(Exception):
    """The machine cannot do what was asked; says at once everything that would have to change."""

    def __init__(self, purpose: str, lacks: tuple[str, ...]) -> None:
        super().__init__(f"{purpose} needs: " + "; ".join(lacks))
        self.purpose = purpose
        self.lacks = lacks


def lacks_for_nodes() -> tuple[str, ...]:
    """What this machine lacks for cluster nodes, besides what `install` could put there."""
    if platform.system() != "Linux":
        return (f"Linux (this is {platform.system()})",)
    found: list[str] = []
    if os.geteuid() != 0 or not _has_capability(_CAP_SYS_ADMIN):
        found.append("root with CAP_SYS_ADMIN, for namespaces, mounts and cgroups (try sudo)")
    if not Path("/sys/fs/cgroup").is_dir():
        found.append("cgroups, mounted at /sys/fs/cgroup")
    return tuple(found)


def missing_packages(programs: Mapping[str, str]) -> tuple[str, ...]:
    """The Debian packages of those `programs` that are not there."""
    return tuple(sorted({package for name, package in programs.items() if not _present(name)}))


def require_programs(purpose: str, programs: Mapping[str, str]) -> None:
    """Raise MachineLacks, with the command that helps, unless all `programs` are there."""
    packages = missing_packages(programs)
    if packages:
        raise MachineLacks(purpose, (f"apt-get install {' '.join(packages)}",))


def install(programs: Mapping[str, str]) -> tuple[str, ...]:
    """Install by apt what of `programs` is missing; returns the packages installed.

    Raises:
        MachineLacks: where they cannot be installed, with the command to run.
    """
    packages = missing_packages(programs)
    if not packages:
        return ()
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise MachineLacks("A cluster", (f"(as root) apt-get install {' '.join(packages)}",))
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages)
    # A fresh machine has no package lists, or old ones.
    _run(("apt-get", "update", "--quiet"), environment)
    _run(command, environment)
    return packages


def allow_file_watchers() -> None:
    """Let more processes of this machine watch files, for several clusters at once; it stays so.

    Where that may not be set nothing is changed: one cluster fits in what a kernel usually allows.
    """
    setting = Path("/proc/sys/fs/inotify/max_user_instances")
    with contextlib.suppress(OSError):
        if int(setting.read_text()) < _FILE_WATCHERS:
            setting.write_text(str(_FILE_WATCHERS))


def _run(command: Iterable[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        tuple(command), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise MachineLacks("A cluster", (f"`{' '.join(command)}` failed: {done.stderr.strip()}",))


def _present(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is not None


def _has_capability(number: int) -> bool:
    """Whether this process has the capability `number` in its effective set."""
    status = Path("/proc/self/status").read_text().splitlines()
    (effective,) = (line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)
