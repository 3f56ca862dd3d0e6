"""Huge pages are for what asks for them, whatever the machine's default is."""

import ctypes
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_agent.memory.swapping import HUGE_PAGE_BYTES
from shoal_agent.runtime import huge_pages

POLICIES = {
    "always": "[always] madvise never",
    "madvise": "always [madvise] never",
    "never": "always madvise [never]",
}


def folder_of(root: Path, policy: str) -> Path:
    (root / "enabled").write_text(f"{POLICIES[policy]}\n")
    (root / "hpage_pmd_size").write_text(f"{HUGE_PAGE_BYTES}\n")
    return root


def after(folder: Path, expression: str) -> str:
    """What an expression gives in a process that refuses what it did not ask for."""
    code = f"""
import sys
from pathlib import Path
sys.path[:] = {sys.path!r}
from shoal_agent.runtime import huge_pages
folder = Path({str(folder)!r})
huge_pages.refuse_unasked(folder)
print({expression})
"""
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


REFUSED = "huge_pages._prctl(huge_pages._PR_GET_THP_DISABLE, 0, 0)"


def test_what_nobody_asked_for_is_refused_where_it_is_given_to_all(tmp_path: Path) -> None:
    assert int(after(folder_of(tmp_path, "always"), REFUSED)) & 1


@pytest.mark.parametrize("policy", ["madvise", "never"])
def test_nothing_is_refused_where_nothing_is_given_unasked(tmp_path: Path, policy: str) -> None:
    assert int(after(folder_of(tmp_path, policy), REFUSED)) == 0


@pytest.mark.parametrize(("policy", "may"), [("madvise", True), ("never", False)])
def test_a_process_may_ask_where_the_machine_has_them(
    tmp_path: Path, policy: str, may: bool
) -> None:
    assert huge_pages.may_ask(folder_of(tmp_path, policy)) == may


def test_a_process_asks_for_none_of_another_size(tmp_path: Path) -> None:
    (folder_of(tmp_path, "madvise") / "hpage_pmd_size").write_text(f"{32 << 20}\n")
    assert not huge_pages.may_ask(tmp_path)


def test_a_process_asks_for_none_where_the_kernel_knows_of_none(tmp_path: Path) -> None:
    assert not huge_pages.may_ask(tmp_path)


def test_what_is_said_of_asking_is_so(tmp_path: Path) -> None:
    """Where the kernel cannot tell what was asked for, all of them are refused."""
    folder = folder_of(tmp_path, "always")
    came = '__import__("agent.test_unasked_huge_pages").test_unasked_huge_pages.came()'
    said, got = after(folder, f"huge_pages.may_ask(folder), {came}").split()
    assert said == got


def came() -> bool:
    """Whether memory comes in a huge page for who asks."""
    with mmap.mmap(-1, 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        first = -start % HUGE_PAGE_BYTES
        memory[first] = 1
        mappings = Path("/proc/self/smaps").read_text()
        found = re.search(rf"^{start:x}-.*?^AnonHugePages: +(\d+) kB", mappings, re.M | re.S)
        assert found is not None
        return int(found[1]) > 0
