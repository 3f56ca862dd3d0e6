"""A file that is replaced is the old one or the new one, also where the disk has no room."""

import errno
import os
import resource
import stat
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from shoal_protocol.durable_files import is_disk_full, open_regular, replace_file, write_named


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


def test_a_link_that_is_written_stays_one_and_the_file_that_it_leads_to_is_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "far").mkdir()
    for name in ("link", "link-to-nothing"):
        (tmp_path / name).symlink_to(tmp_path / "far" / name)
    (tmp_path / "far/link").write_bytes(b"old")
    for name in ("link", "link-to-nothing"):
        write_named(tmp_path / name, b"new")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "far" / name).read_bytes() == b"new"
    assert len(list(tmp_path.rglob("*"))) == 5


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=write_named, args=(pipe, b"x" * 200_000), daemon=True)
    writing.start()
    assert pipe.read_bytes() == b"x" * 200_000
    writing.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_what_a_shell_opens_for_a_process_is_written_into_while_somebody_reads_it() -> None:
    reader, writer = os.pipe()
    try:
        write_named(Path(f"/dev/fd/{writer}"), b"content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    write_named(Path(f"/dev/fd/{writer}"), b"more")
    os.close(writer)


def test_a_file_that_is_standard_output_takes_it_where_its_turn_is(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from shoal_protocol.durable_files import write_named;"
        "print('before', flush=True); write_named(Path('/dev/stdout'), b'content\\n');"
        "print('after')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_text().split() == ["before", "content", "after"]


def test_a_full_disk_is_said_with_the_file_that_it_has_no_room_for() -> None:
    """Writing to what is open says no name."""
    with pytest.raises(OSError, match="No space left on device: '/dev/full'") as full:
        write_named(Path("/dev/full"), b"x" * 100)
    assert full.value.filename == "/dev/full"
    assert is_disk_full(full.value)


@pytest.mark.parametrize(("code", "is_written"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_is_written_also_where_the_file_system_syncs_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, is_written: bool
) -> None:
    """As on some shared folders of virtual machines, and of networks."""
    sync = os.fsync

    def of_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    raises = nullcontext() if is_written else pytest.raises(OSError, match=os.strerror(code))
    with raises:
        replace_file(tmp_path / "speed.json", b"{}")
    assert (tmp_path / "speed.json").read_bytes() == b"{}"
