"""A file that is replaced is the old one or the new one, also where the disk has no room."""

import os
import resource
from pathlib import Path

import pytest

from shoal_protocol.durable_files import is_disk_full, open_regular, replace_file


def test_a_file_that_finds_no_room_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_file(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            replace_file(path, b"x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert is_disk_full(caught.value)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("a", b"old")]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing", "real/below", "."):
        with pytest.raises(FileNotFoundError):
            open_regular(tmp_path / name)
    with open_regular(tmp_path / "real") as file:
        assert file.read() == b"content"


def test_a_link_in_the_way_of_a_new_file_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"of somebody else")
    (tmp_path / "note.tmp").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "note", b"content")
    assert other.read_bytes() == b"of somebody else"
    replace_file(tmp_path / "note", b"content")
    assert (tmp_path / "note").read_bytes() == b"content"
