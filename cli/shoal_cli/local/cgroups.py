"""One memory and CPU cgroup per agent, where the machine allows it; v1 and v2.

Theory. A device's group is `PARENT/shoal-RUN/agent-DEVICE`, in one hierarchy under v2 and in one
per controller under v1. PARENT is this process's own group, so that every limit which surrounds
`shoal run` surrounds its agents too. Under v2 a group with processes in it cannot hand controllers
down (the kernel's "no internal process" rule; its root is exempt). So PARENT is the first of:

- the own group, if this process is alone in it and memory can be controlled there: a service or
  scope of its own, as `systemd-run --user --scope -p Delegate=yes shoal run ...` makes, or a
  container. This process then moves into a leaf, `shoal-RUN/runner`, and back at the end;
- the kernel's root group, if this process is there: a machine without systemd;
- the nearest group above that delegates memory.

Who is not root may make groups, and move processes between them, only below a group that was
delegated to him: the directory, `cgroup.procs` and `cgroup.subtree_control` of the nearest group
above both ends must be his. Whether it is, is found by trying (`open_groups`).

A process enters its group before it becomes the agent: a shell writes its own number into
`cgroup.procs` and then `exec`s (`DeviceGroup.enter`), so no page that it is the first to touch is
charged elsewhere. The limit comes when the agent is idle: limit = what is charged to the group
then + what the agent's own heap may grow by + budget. So the memory charged to a group cannot grow
by more than that, whatever the agent does or measures.

What is charged. The kernel charges a page of a file to the group that first brought it into
memory. This process brings the libraries of agents there (`agent_libraries`), so they are charged
to it: they are resident in the agent, but neither in its charge when idle nor in its growth.
The pages of its fragments are charged to the agent: it writes and reads them itself, into a
cache that it shares with nobody, and at its start it has the kernel drop what an earlier process
has left of them in the page cache. The kernel counts page cache against the limit as well, but
gives it back before it kills: fragments are mapped from files, so a group may be at its limit
(`failures` grows) without harm. Kills are counted separately (`out_of_memory_kills`). Memory of the
kernel's own (page tables, sockets) is charged too, and part of the growth.

RUN names the runner (its process number and start time), so a later run can tell the groups of a
dead one, and removes them if they are empty (`sweep`).
"""

import contextlib
import errno
import mmap
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Final

PERIOD_MICROSECONDS: Final = 100_000
_PREFIX: Final = "shoal-"
_RUNNER: Final = "runner"
_ENTER: Final = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 126; shift; done; shift; exec "$@"'
_PROBE_TIMEOUT_SECONDS: Final = 5.0
_REMOVE_TIMEOUT_SECONDS: Final = 2.0


class Enforce(StrEnum):
    """How budgets are held: `auto` by cgroups where the machine allows it."""

    AUTO = "auto"
    CGROUP = "cgroup"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Where groups are made: PARENT of each controller. Under v2 both are the same folder.

    v2: `controllers` are those of a run's groups; `delegates`: PARENT delegates them already;
    `occupied`: this process is in PARENT, and must leave first.
    """

    version: int
    memory: Path
    cpu: Path | None
    controllers: tuple[str, ...] = ()
    delegates: bool = True
    occupied: bool = False

    @property
    def parents(self) -> tuple[Path, ...]:
        return _once(self.memory, self.cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Why this machine gives us no groups, in words for the summary."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What the kernel counted: times at the limit, and processes that it killed there."""

    failures: int = 0
    out_of_memory_kills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """The group of one device: one folder per controller (the same folder under v2)."""

    version: int
    memory: Path
    cpu: Path | None

    @property
    def folders(self) -> tuple[Path, ...]:
        return _once(self.memory, self.cpu)

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command, started inside the group: its first page is charged here already."""
        entrances = [str(folder / "cgroup.procs") for folder in self.folders]
        return ["/bin/sh", "-c", _ENTER, "shoal-enter", *entrances, "--", *command]

    def charged_bytes(self) -> int:
        """Memory charged to the group now, without the page cache that no process has mapped: the
        kernel takes that back first."""
        stat = _counters(self.memory / "memory.stat")
        if self.version == 2:
            usage = _integer(self.memory / "memory.current")
            cache, mapped = stat.get("file", 0), stat.get("file_mapped", 0)
        else:
            usage = _integer(self.memory / "memory.usage_in_bytes")
            cache, mapped = stat.get("total_cache", 0), stat.get("total_mapped_file", 0)
        return max(0, usage - max(0, cache - mapped))

    def limit_memory(self, limit_bytes: int) -> None:
        """Set the hard limit. For a group that needs more already: `OSError` EBUSY under v1, killed
        processes under v2."""
        # No swap for the group, else the limit would bound nothing. These files are absent where
        # swap is not counted.
        if self.version == 2:
            with contextlib.suppress(FileNotFoundError):
                (self.memory / "memory.swap.max").write_text("0")
            (self.memory / "memory.max").write_text(str(limit_bytes))
        else:
            # The limit of memory and swap together must never be the lower one; a page above it,
            # since the kernel counts failures at the other one alone.
            together = self.memory / "memory.memsw.limit_in_bytes"
            counted = together.exists()
            if counted:
                together.write_text("-1")
            (self.memory / "memory.limit_in_bytes").write_text(str(limit_bytes))
            if counted:
                together.write_text(str(limit_bytes + mmap.PAGESIZE))

    def limit_processors(self, cpus: Decimal) -> None:
        """At most `cpus` processors' worth of time in every tenth of a second."""
        assert self.cpu is not None, "asked for a CPU quota without a CPU controller"
        quota = max(1_000, int(cpus * PERIOD_MICROSECONDS))
        if self.version == 2:
            (self.cpu / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        else:
            (self.cpu / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (self.cpu / "cpu.cfs_quota_us").write_text(str(quota))

    def pressure(self) -> Pressure:
        """The kernel's counters so far; zeros once the group is gone."""
        if self.version == 2:
            events = _counters(self.memory / "memory.events")
            failures = events.get("max", 0)
        else:
            events = _counters(self.memory / "memory.oom_control")
            failures = _integer(self.memory / "memory.failcnt")
        return Pressure(failures=failures, out_of_memory_kills=events.get("oom_kill", 0))

    def processes(self) -> tuple[int, ...]:
        """Processes in the group now."""
        return tuple(map(int, _words(self.memory / "cgroup.procs")))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroups:
    """All groups of one run."""

    hierarchy: Hierarchy
    run: str

    @property
    def roots(self) -> tuple[Path, ...]:
        """The run's folder in each hierarchy of controllers."""
        return tuple(parent / f"{_PREFIX}{self.run}" for parent in self.hierarchy.parents)

    def create(self, device: str) -> DeviceGroup:
        """Make the group of a device, and the run's own above it."""
        for root in self.roots:
            root.mkdir(exist_ok=True)
            if self.hierarchy.version == 2:
                self._prepare(root)
        # A prefix, since the kernel's own files are called memory.max and the like.
        path, cpu = f"{_PREFIX}{self.run}/agent-{device}", self.hierarchy.cpu
        group = DeviceGroup(
            version=self.hierarchy.version,
            memory=self.hierarchy.memory / path,
            cpu=None if cpu is None else cpu / path,
        )
        for folder in group.folders:
            folder.mkdir(exist_ok=True)
        return group

    def remove(self) -> None:
        """Remove every group of the run, whose processes are gone; the kernel may lag."""
        for root in self.roots:
            deadline = time.monotonic() + _REMOVE_TIMEOUT_SECONDS
            for group in root.glob("agent-*"):
                _remove_group(group, deadline)
            if self.hierarchy.version == 2 and root.is_dir():
                self._undo(root)
            _remove_tree(root, deadline)

    def _prepare(self, root: Path) -> None:
        """v2: have the run's group, and PARENT above it, hand the controllers down."""
        enable = " ".join(f"+{each}" for each in self.hierarchy.controllers)
        if not self.hierarchy.delegates and not (root / _RUNNER).exists():
            if self.hierarchy.occupied:
                (root / _RUNNER).mkdir()
                (root / _RUNNER / "cgroup.procs").write_text("0")  # whoever writes this moves
            (root.parent / "cgroup.subtree_control").write_text(enable)
        (root / "cgroup.subtree_control").write_text(enable)

    def _undo(self, root: Path) -> None:
        """v2: move back, so that nothing is left of the run. What fails leaves a group behind."""
        disable = " ".join(f"-{each}" for each in self.hierarchy.controllers)
        if self.hierarchy.occupied and (root / _RUNNER).is_dir():
            with contextlib.suppress(OSError):
                (root / "cgroup.subtree_control").write_text(disable)
                (root.parent / "cgroup.subtree_control").write_text(disable)
                (root.parent / "cgroup.procs").write_text("0")


class EnforcementImpossible(Exception):
    """`--enforce cgroup` on a machine that does not allow it."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"budgets cannot be enforced here: {reason}; "
            "run as a user who may make cgroups, or with --enforce auto to measure only"
        )


def groups_as_wanted(enforce: Enforce, run: str) -> RunGroups | Unavailable:
    """What the machine allows and the user wants; `EnforcementImpossible` if these disagree."""
    if enforce is Enforce.NONE:
        return Unavailable(reason="asked for with --enforce none")
    groups = open_groups(run)
    if isinstance(groups, Unavailable) and enforce is Enforce.CGROUP:
        raise EnforcementImpossible(groups.reason)
    return groups


def open_groups(run: str) -> RunGroups | Unavailable:
    """Find out what this machine allows: make a group, limit it, enter it, remove it."""
    try:
        hierarchy = find_hierarchy(
            _named(Path("/proc/self/mountinfo")), _named(Path("/proc/self/cgroup"))
        )
    except OSError as error:
        return Unavailable(reason=f"no cgroups here: {error.strerror}")
    if isinstance(hierarchy, Unavailable):
        return hierarchy
    sweep(hierarchy)
    groups = RunGroups(hierarchy=hierarchy, run=run)
    try:
        probe = groups.create("probe")
        probe.limit_memory(64 << 20)
        subprocess.run(  # noqa: S603 - the command is ours
            probe.enter(["/bin/true"]),
            check=True,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_SECONDS,
            env={},  # it needs nothing, and what the user's holds may be secret
        )
    except (OSError, subprocess.SubprocessError) as error:
        groups.remove()
        reason = f"no process may be put into a cgroup below {hierarchy.memory}"
        if isinstance(error, OSError):
            reason = f"cgroup {hierarchy.memory} not writable: {error.strerror}"
        return Unavailable(reason=reason + _way_out(hierarchy))
    for folder in probe.folders:
        folder.rmdir()
    return groups


def _way_out(hierarchy: Hierarchy) -> str:
    """What a user without the rights can do, where systemd can give them."""
    if hierarchy.version == 1 or os.geteuid() == 0 or not Path("/run/systemd/system").is_dir():
        return ""
    return "; try: systemd-run --user --scope -p Delegate=yes shoal run ..."


def find_hierarchy(mounts: str, membership: str) -> Hierarchy | Unavailable:
    """Read `/proc/self/mountinfo` and `/proc/self/cgroup`: where may this process make groups?

    v1 is taken where a `memory` controller of its own is mounted (hybrid machines keep the
    controllers there), else v2.
    """
    own = _membership(membership)
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        if not separator:
            continue
        # A space is written as `\040` there.
        root, point = (field.replace("\\040", " ") for field in before.split()[3:5])
        kind, _, options = [*after.split(), "", ""][:3]
        if kind == "cgroup":
            for controller in {"memory", "cpu"} & set(options.split(",")):
                v1[controller] = _inside(Path(point), root, own.get(controller, "/"))
        elif kind == "cgroup2":
            v2 = _inside(Path(point), root, own.get("", "/"))
    if "memory" in v1:
        return Hierarchy(version=1, memory=v1["memory"], cpu=v1.get("cpu"))
    if v2 is None:
        return Unavailable(reason="no cgroup file system is mounted")
    return _v2_hierarchy(v2)


def sweep(hierarchy: Hierarchy) -> None:
    """Remove the empty groups of runs that are dead."""
    for parent in hierarchy.parents:
        for root in parent.glob(f"{_PREFIX}*-*"):
            if not run_is_alive(root.name.removeprefix(_PREFIX)):
                _remove_tree(root, time.monotonic())


def run_name(number: int | None = None) -> str:
    """This process's number and start time: no later process has both. `number` tells apart several
    runs of one process."""
    name = f"{os.getpid()}-{_start_ticks(os.getpid())}"
    return name if number is None else f"{name}-{number}"


def run_is_alive(run: str) -> bool:
    """Is the process alive that `run_name` named so?"""
    number, _, rest = run.partition("-")
    ticks = rest.partition("-")[0]
    if not (number.isdigit() and ticks.isdigit()):
        return True  # not a name of ours: hands off
    return _start_ticks(int(number)) == int(ticks)


def _start_ticks(process: int) -> int | None:
    try:
        stat = _named(Path(f"/proc/{process}/stat"))
    except OSError:
        return None
    # The command's name may hold spaces and parentheses; the fields after it do not.
    return int(stat.rpartition(")")[2].split()[19])


def _v2_hierarchy(own: Path) -> Hierarchy | Unavailable:
    controllers = _words(own / "cgroup.controllers")
    # The kernel's root group has no type.
    is_root = (own / "cgroup.controllers").exists() and not (own / "cgroup.type").exists()
    alone = _words(own / "cgroup.procs") == [str(os.getpid())]
    here = "memory" in controllers and (alone or is_root)
    parent = own
    if not here:
        for parent in own.parents:
            controllers = _words(parent / "cgroup.subtree_control")
            if "memory" in controllers:
                break
        else:
            reason = f"the memory controller is not handed down to {own}"
            if is_root:
                reason = "the kernel has no memory controller (on a Raspberry Pi: "
                reason += "cgroup_enable=memory on its command line)"
            return Unavailable(reason=reason)
    wanted = tuple(each for each in ("memory", "cpu") if each in controllers)
    return Hierarchy(
        version=2,
        memory=parent,
        cpu=parent if "cpu" in wanted else None,
        controllers=wanted,
        delegates=not here,
        occupied=here and not is_root,
    )


def _once(memory: Path, cpu: Path | None) -> tuple[Path, ...]:
    return (memory,) if cpu in (None, memory) else (memory, cpu)


def _words(file: Path) -> list[str]:
    """The words of one of the kernel's files; none if it is not there or not ours to read."""
    try:
        return file.read_text().split()
    except OSError:
        return []


def _named(file: Path) -> str:
    """The text of a file with names of folders or programs, which may be any bytes."""
    return os.fsdecode(file.read_bytes())


def _integer(file: Path) -> int:
    """Its number; 0 if it is not there or not ours to read."""
    return int("".join(_words(file)) or 0)


def _membership(text: str) -> Mapping[str, str]:
    """`/proc/self/cgroup` as controller -> path; v2's entry has the empty name."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _inside(point: Path, root: str, path: str) -> Path:
    """The folder of group `path` in a mount that shows the hierarchy from `root` on."""
    inside = Path(path).is_relative_to(root)  # else, in a container, start at the mount's top
    return point / Path(path).relative_to(root) if inside else point


def _counters(file: Path) -> dict[str, int]:
    """Names and numbers, in turn."""
    words = _words(file)
    return dict(zip(words[::2], map(int, words[1::2]), strict=False))


def _remove_tree(root: Path, deadline: float) -> None:
    """Remove a group and those in it, trying until the deadline while processes are leaving."""
    if not root.is_dir():
        return
    for child in [*(path for path in root.iterdir() if path.is_dir()), root]:
        _remove_group(child, deadline)


def _remove_group(group: Path, deadline: float) -> None:
    while True:
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                return None
            time.sleep(0.01)
