"""The code that agents run is charged to none of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cached_pages import cached_bytes, need_a_disk
from shoal_cli.local.agent_libraries import HeldFiles, hold_libraries
from shoal_cli.local.cgroups import Unavailable, open_groups, run_name
from shoal_protocol.page_cache import uncache

SIZE = 48 << 20
READS = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(library[at] for at in range(0, len(library), 4096))
print("idle", flush=True)
sys.stdin.readline()
"""
MAPS = """
import shoal_agent.agent
print(open("/proc/self/maps").read())
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """As after a start of the machine: it is in no page cache."""
    need_a_disk(tmp_path)
    path = tmp_path / "library.so"
    path.write_bytes(bytes(SIZE))
    drop(path)
    assert not cached_bytes(path)
    return path


def drop(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        uncache(file.fileno())


def test_what_is_held_stays_in_memory(library: Path, tmp_path: Path) -> None:
    held = HeldFiles([library, tmp_path / "none", tmp_path])
    assert cached_bytes(library) == SIZE
    drop(library)
    assert cached_bytes(library) == SIZE
    del held
    drop(library)
    assert not cached_bytes(library)


@pytest.mark.real
@pytest.mark.parametrize("is_held", [False, True])
def test_the_group_of_who_reads_first_is_charged(library: Path, *, is_held: bool) -> None:
    groups = open_groups(f"{run_name()}1")
    if isinstance(groups, Unavailable):
        pytest.skip(groups.reason)
    held = HeldFiles([library] if is_held else [])
    try:
        group = groups.create("device")
        command = group.enter([sys.executable, "-c", READS, str(library)])
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "idle\n"
            charged = group.charged_bytes()
            process.communicate("go\n")
    finally:
        groups.remove()
        del held
    assert (charged < SIZE) == is_held


def test_all_large_libraries_that_an_agent_loads_are_held() -> None:
    """But for the linear algebra of numpy, which nobody calls."""
    maps = subprocess.check_output([sys.executable, "-c", MAPS], text=True)
    mapped = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if ".so" in line}
    large = {
        each
        for each in mapped
        if "site-packages" in each.parts
        and each.stat().st_size > 2 << 20
        and "numpy.libs" not in each.parts
    }
    assert len(large) >= 3
    assert large <= set(hold_libraries().paths)
