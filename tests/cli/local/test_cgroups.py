"""Cgroups: reading what the machine mounts, v2 on a copy of its files, v1 on the real kernel."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from shoal_cli.local.cgroups import (
    DeviceGroup,
    Hierarchy,
    RunGroups,
    Unavailable,
    find_hierarchy,
    open_groups,
    run_is_alive,
    run_name,
    sweep,
)

V1_MOUNTS = """\
22 28 0:20 / /proc rw - proc proc rw
30 28 0:26 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
31 28 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 28 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V1_MEMBERSHIP = "4:memory:/user/me\n1:cpu,cpuacct:/\n0::/user.slice\n"


def test_v1_groups_are_made_below_the_own_one_of_each_controller() -> None:
    assert find_hierarchy(V1_MOUNTS, V1_MEMBERSHIP) == Hierarchy(
        version=1,
        memory=Path("/sys/fs/cgroup/memory/user/me"),
        cpu=Path("/sys/fs/cgroup/cpu,cpuacct"),
    )


def test_a_mount_that_shows_part_of_the_hierarchy_is_entered_at_that_part() -> None:
    mounts = "31 28 0:27 /docker/c0ffee /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    inside = find_hierarchy(mounts, "4:memory:/docker/c0ffee/job\n")
    outside = find_hierarchy(mounts, "4:memory:/elsewhere\n")
    assert isinstance(inside, Hierarchy)
    assert isinstance(outside, Hierarchy)
    assert inside.memory == Path("/sys/fs/cgroup/memory/job")
    assert outside.memory == Path("/sys/fs/cgroup/memory")


def test_a_mount_point_with_a_space_is_read() -> None:
    mounts = "31 28 0:27 / /mnt/control\\040groups rw - cgroup cgroup rw,memory\n"
    found = find_hierarchy(mounts, "4:memory:/\n")
    assert isinstance(found, Hierarchy)
    assert found.memory == Path("/mnt/control groups")


def test_a_disk_anywhere_whose_name_is_not_utf_8_prevents_nothing(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xf6we")
    folder.mkdir()
    program = "from shoal_cli.local.cgroups import open_groups, run_name; open_groups(run_name())"
    # In a list of mounts of its own: other programs of this machine need not take such names.
    within = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3"'
    command = ["unshare", "--mount", "sh", "-c", within, "sh", str(folder), sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"NO MOUNTS: this user may not make any ({done.stderr.strip()})")
    assert done.returncode == 0, done.stderr


def test_without_any_cgroup_file_system_the_reason_is_given() -> None:
    found = find_hierarchy("22 28 0:20 / /proc rw - proc proc rw\n", "0::/\n")
    assert found == Unavailable(reason="no cgroup file system is mounted")


def v2_tree(root: Path, handed_down: dict[str, str], *, members: str = "1\n2\n") -> str:
    """A copy of v2's files; the mount table that shows it. The first is the kernel's root."""
    available = "cpu io memory pids"
    for path, controllers in handed_down.items():
        folder = root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.controllers").write_text(available)
        (folder / "cgroup.subtree_control").write_text(controllers)
        (folder / "cgroup.procs").write_text(members)
        if folder != root:
            (folder / "cgroup.type").write_text("domain\n")
        available = controllers
    return f"30 28 0:26 / {root} rw - cgroup2 cgroup2 rw\n"


def test_v2_groups_are_made_in_the_nearest_group_that_hands_memory_down(tmp_path: Path) -> None:
    mounts = v2_tree(
        tmp_path,
        {".": "cpu memory pids", "user": "memory pids", "user/app": "", "user/app/term": ""},
    )
    assert find_hierarchy(mounts, "0::/user/app/term\n") == Hierarchy(
        version=2, memory=tmp_path / "user", cpu=None, controllers=("memory",)
    )


def test_v2_groups_are_made_in_the_own_one_where_nobody_else_is_in_it(tmp_path: Path) -> None:
    tree = {".": "cpu memory", "scope": ""}
    mounts = v2_tree(tmp_path, tree, members=f"{os.getpid()}\n")
    assert find_hierarchy(mounts, "0::/scope\n") == Hierarchy(
        version=2,
        memory=tmp_path / "scope",
        cpu=tmp_path / "scope",
        controllers=("memory", "cpu"),
        delegates=False,
        occupied=True,
    )


def test_v2_in_the_kernels_root_needs_nobody_to_leave(tmp_path: Path) -> None:
    found = find_hierarchy(v2_tree(tmp_path, {".": ""}), "0::/\n")
    assert isinstance(found, Hierarchy)
    assert (found.memory, found.delegates, found.occupied) == (tmp_path, False, False)


def test_v2_without_a_memory_controller_is_unavailable(tmp_path: Path) -> None:
    found = find_hierarchy(v2_tree(tmp_path, {".": "pids", "app": ""}), "0::/app\n")
    assert isinstance(found, Unavailable)
    assert "memory controller is not handed down" in found.reason
    (tmp_path / "cgroup.controllers").write_text("cpu pids")
    switched_off = find_hierarchy(f"30 28 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n", "0::/\n")
    assert isinstance(switched_off, Unavailable)
    assert "cgroup_enable=memory" in switched_off.reason


def test_v2_limits_memory_processors_and_swap(tmp_path: Path) -> None:
    group = DeviceGroup(version=2, memory=tmp_path, cpu=tmp_path)
    (tmp_path / "memory.swap.max").write_text("max")
    group.limit_memory(96 << 20)
    group.limit_processors(Decimal("0.25"))
    assert (tmp_path / "memory.max").read_text() == str(96 << 20)
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    assert (tmp_path / "cpu.max").read_text() == "25000 100000"
    assert group.folders == (tmp_path,)


def test_v2_charges_without_the_page_cache_that_nobody_maps(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text(f"{100 << 20}\n")
    stat = f"anon {30 << 20}\nfile {60 << 20}\nkernel {10 << 20}\nfile_mapped {15 << 20}\n"
    (tmp_path / "memory.stat").write_text(stat)
    group = DeviceGroup(version=2, memory=tmp_path, cpu=None)
    assert group.charged_bytes() == 55 << 20


def test_v1_limits_swap_with_memory_where_it_is_counted(tmp_path: Path) -> None:
    group = DeviceGroup(version=1, memory=tmp_path, cpu=None)
    group.limit_memory(96 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["memory.limit_in_bytes"]
    (tmp_path / "memory.memsw.limit_in_bytes").write_text("-1")
    group.limit_memory(64 << 20)
    assert (tmp_path / "memory.limit_in_bytes").read_text() == str(64 << 20)
    assert (tmp_path / "memory.memsw.limit_in_bytes").read_text() == str((64 << 20) + mmap.PAGESIZE)


def test_v2_counts_times_at_the_limit_and_kills(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 17\noom 2\noom_kill 1\n")
    pressure = DeviceGroup(version=2, memory=tmp_path, cpu=None).pressure()
    assert (pressure.failures, pressure.out_of_memory_kills) == (17, 1)


def test_a_run_that_lives_is_told_from_a_dead_one() -> None:
    number, _, ticks = run_name().partition("-")
    assert run_is_alive(run_name())
    assert not run_is_alive(f"{number}-{int(ticks) + 1}")
    assert run_is_alive(run_name(3))
    assert not run_is_alive(f"{number}-{int(ticks) + 1}-3")
    assert run_is_alive("somebody-elses")


def test_sweeping_removes_empty_groups_of_dead_runs_only(tmp_path: Path) -> None:
    dead, alive, foreign = (
        tmp_path / "shoal-1-99999999999",
        tmp_path / f"shoal-{run_name()}",
        tmp_path / "shoal-x-y",
    )
    for folder in (dead / "pi-4", alive / "pi-4", foreign):
        folder.mkdir(parents=True)
    sweep(Hierarchy(version=2, memory=tmp_path, cpu=tmp_path))
    assert not dead.exists()
    assert alive.exists()
    assert foreign.exists()


@pytest.fixture
def groups() -> RunGroups:
    found = open_groups(f"{run_name()}")
    if isinstance(found, Unavailable):
        pytest.skip(found.reason)
    return found


@pytest.mark.real
def test_a_process_starts_inside_its_group_and_the_kernel_kills_it_at_the_limit(
    groups: RunGroups,
) -> None:
    try:
        group = groups.create("device")
        group.limit_memory(32 << 20)
        group.limit_processors(Decimal("0.5"))
        assert group.processes() == ()
        inside = subprocess.run(
            group.enter(["cat", "/proc/self/cgroup"]), capture_output=True, text=True, check=True
        )
        assert f"shoal-{groups.run}/agent-device" in inside.stdout
        greedy = "held = bytearray(128 << 20)\nfor at in range(0, len(held), 4096): held[at] = 1"
        killed = subprocess.run(group.enter(["python3", "-c", greedy]), check=False)
        assert killed.returncode == -9
        assert group.pressure().out_of_memory_kills == 1
        assert group.pressure().failures > 0
    finally:
        groups.remove()
    assert not any(root.exists() for root in groups.roots)


HOARDS = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(shared[at] for at in range(0, len(shared), 4096))
print("idle", flush=True)
for line in sys.stdin:
    held = bytearray(int(line) << 20)
    for at in range(0, len(held), 4096): held[at] = 1
    print("held", flush=True)
    del held
"""


@pytest.mark.real
def test_what_is_charged_to_a_group_cannot_grow_by_more_than_the_budget_whatever_others_share(
    groups: RunGroups, tmp_path: Path
) -> None:
    shared = tmp_path / "library"
    shared.write_bytes(bytes(48 << 20))  # this process brings its pages into memory
    try:
        group = groups.create("device")
        with subprocess.Popen(
            group.enter([sys.executable, "-c", HOARDS, str(shared)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "idle\n"
            status = Path(f"/proc/{process.pid}/status").read_text()
            resident = int(status.partition("VmRSS:")[2].split()[0]) << 10
            charged = group.charged_bytes()
            assert resident > 48 << 20 > charged > 2 << 20
            group.limit_memory(charged + (24 << 20))
            process.stdin.write("20\n")
            process.stdin.flush()
            assert process.stdout.readline() == "held\n"
            # More than the budget and the files that may be charged to it and given back; a limit
            # that counted from resident memory would let it have this.
            process.stdin.write("44\n")
            process.stdin.flush()
            assert process.stdout.readline() == ""
        assert process.returncode == -9
        assert group.pressure().out_of_memory_kills == 1
    finally:
        groups.remove()


# ---- v2 on the real kernel: any controller that v1 has not taken shows the rules of moving -------

OCCUPIED = """
import os, subprocess, sys
from pathlib import Path
from shoal_cli.local.cgroups import Hierarchy, RunGroups

own, controller = Path(sys.argv[1]), sys.argv[2]
(own / "cgroup.procs").write_text("0")
try:
    (own / "cgroup.subtree_control").write_text(f"+{controller}")
except OSError as error:
    print(error.strerror)
groups = RunGroups(
    hierarchy=Hierarchy(
        version=2, memory=own, cpu=None, controllers=(controller,), delegates=False, occupied=True
    ),
    run="1-2",
)
def here():
    return Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(own.name)[2]
for device in ("a", "memory.max"):
    group = groups.create(device)
    print(here(), (group.memory / "cgroup.controllers").read_text().strip())
    inside = subprocess.run(group.enter(["cat", "/proc/self/cgroup"]), stdout=-1, text=True)
    print(inside.stdout.splitlines()[-1].rpartition(own.name)[2])
groups.remove()
print(here() or "back", [path.name for path in own.iterdir() if path.is_dir()])
"""


@pytest.fixture
def v2_group() -> Iterator[tuple[Path, str]]:
    """A group of the kernel's that has a controller, and the controller's name."""
    points = [
        Path(line.split()[1])
        for line in Path("/proc/mounts").read_text().splitlines()
        if line.split()[2] == "cgroup2"
    ]
    if not points or not os.access(points[0] / "cgroup.subtree_control", os.W_OK):
        pytest.skip("no cgroup v2 that is ours to write")
    (point,) = points[:1]
    # The processor's is left out: the rule does not hold for it.
    able = {"memory", "io", "hugetlb", "misc", "rdma"}
    controllers = [c for c in (point / "cgroup.controllers").read_text().split() if c in able]
    if not controllers:
        pytest.skip("no controller of cgroup v2 is free")
    control = point / "cgroup.subtree_control"
    enabled = controllers[0] in control.read_text().split()
    control.write_text(f"+{controllers[0]}")
    group = point / f"test-{os.getpid()}"
    group.mkdir()
    yield group, controllers[0]
    group.rmdir()
    if not enabled:
        control.write_text(f"-{controllers[0]}")


@pytest.mark.real
def test_v2_the_runner_leaves_its_group_so_that_it_may_hand_down_and_returns(
    v2_group: tuple[Path, str],
) -> None:
    group, controller = v2_group
    ran = subprocess.run(
        [sys.executable, "-c", OCCUPIED, group, controller],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == [
        "Device or resource busy",
        f"/shoal-1-2/runner {controller}",
        "/shoal-1-2/agent-a",
        f"/shoal-1-2/runner {controller}",
        "/shoal-1-2/agent-memory.max",
        "back []",
    ]
