"""The work folder: one run at a time, nothing left, the same place for the same files."""

import fcntl
import os
import stat
from pathlib import Path

import pytest

from shoal_cli.local.workspace import (
    KEPT_RUNS,
    WorkspaceBusy,
    default_work_folder,
    kept_bytes,
    open_workspace,
)


def test_sockets_have_short_paths_in_a_private_folder_that_goes(tmp_path: Path) -> None:
    with open_workspace(tmp_path / "work") as workspace:
        assert stat.S_IMODE(workspace.sockets.stat().st_mode) == 0o700
        assert len(workspace.socket("x" * 30).removeprefix("unix:")) < 108
    assert not workspace.sockets.exists()


def test_a_second_run_in_the_same_folder_is_refused_by_name(tmp_path: Path) -> None:
    with (
        open_workspace(tmp_path) as first,
        pytest.raises(WorkspaceBusy, match="--work DIR"),
        open_workspace(tmp_path),
    ):
        pytest.fail("both got in")
    with open_workspace(tmp_path) as again:
        assert again.root == first.root


def test_socket_folders_of_dead_runs_are_removed_and_those_of_living_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr("tempfile.tempdir", str(Path("/tmp")))  # noqa: S108 - short enough
    with open_workspace(tmp_path) as workspace:
        prefix = workspace.sockets.name.removesuffix(workspace.run)
        dead = workspace.sockets.with_name(f"{prefix}1-99999999999")
        dead.mkdir()
    with open_workspace(tmp_path):
        assert not dead.exists()


def test_the_same_files_have_the_same_folder_and_others_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = Path("examples/ocr"), Path("examples/embeddings")
    assert default_work_folder("ocr", [one]) == default_work_folder("ocr", [one.resolve()])
    assert default_work_folder("ocr", [one]) != default_work_folder("ocr", [one, two])
    assert default_work_folder("ocr", [one]).is_relative_to(tmp_path)


def test_a_path_that_is_not_utf_8_has_a_folder_whose_own_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = (Path(os.fsdecode(name)) for name in (b"lat\xe9", b"lat\xe8"))
    assert default_work_folder(one.name, [one]) == default_work_folder(one.name, [one])
    assert default_work_folder(one.name, [one]) != default_work_folder(one.name, [two])
    assert str(default_work_folder(one.name, [one])).encode()
    with pytest.raises(OSError, match="must be UTF-8"), open_workspace(tmp_path / one):
        pytest.fail("it opened")


def test_of_the_default_folders_those_used_last_are_kept_and_those_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    oldest, *others = [default_work_folder(f"run{n}", []) for n in range(KEPT_RUNS + 3)]
    oldest.mkdir(parents=True)
    with (oldest / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it still runs
        os.utime(oldest / "lock", (0, 0))
        for when, folder in enumerate(others[:-1], start=1):
            (folder / "store").mkdir(parents=True)
            (folder / "lock").touch()
            os.utime(folder / "lock", (when, when))
        with open_workspace(others[-1]):
            there = [folder for folder in others if folder.exists()]
        assert there == others[-KEPT_RUNS:]
        assert oldest.exists()


def test_what_a_work_folder_keeps_is_counted_by_blocks_and_once_for_each_file(
    tmp_path: Path,
) -> None:
    before = kept_bytes(tmp_path)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "weights").write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "again").hardlink_to(tmp_path / "store" / "weights")
    with (tmp_path / "hole").open("wb") as sparse:
        sparse.truncate(1 << 30)
    assert before == 0
    assert 1 << 20 <= kept_bytes(tmp_path) < 2 << 20
