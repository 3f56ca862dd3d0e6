"""Which folders are memory, told from the kernel's list of mounts."""

import os
from pathlib import Path

import pytest

from shoal_protocol.memory_folders import is_in_memory
from small_disk import small_disk

MOUNTS = """\
22 1 254:77 / / rw,relatime - ext4 /dev/vda rw
24 22 0:2100 / /mnt/m\udcf6we rw,nosuid shared:3 - ext4 /dev/vdb rw
25 22 {number} / /here rw,nosuid shared:4 - {kind} source rw,size=1g
"""


@pytest.mark.parametrize(("kind", "told"), [("tmpfs", True), ("ramfs", True), ("xfs", False)])
def test_a_folder_is_in_memory_where_its_file_system_is(
    tmp_path: Path, kind: str, told: bool
) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(os.fsencode(MOUNTS.format(number=number, kind=kind)))
    assert is_in_memory(tmp_path, mounts) is told
    assert is_in_memory(tmp_path / "to be" / "made", mounts) is told


def test_nothing_is_said_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert not is_in_memory(tmp_path, tmp_path / "missing")
    listed = os.fsencode(MOUNTS.format(number="0:0", kind="tmpfs"))
    (tmp_path / "mountinfo").write_bytes(listed)
    assert not is_in_memory(tmp_path, tmp_path / "mountinfo")


def test_a_tmpfs_is_found_by_any_path_into_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "memory", "64k"):
        (tmp_path / "link").symlink_to(tmp_path / "memory")
        assert is_in_memory(tmp_path / "memory")
        assert is_in_memory(tmp_path / "link" / "cache")
