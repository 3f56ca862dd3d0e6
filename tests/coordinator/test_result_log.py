"""Small result files: one sync makes many durable, and a loss of power at any moment loses none."""

import contextlib
import fcntl
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lost_power import Disk, PowerLost
from shoal_coordinator.storage import parts, result_log
from shoal_coordinator.storage import results as results_module
from shoal_coordinator.storage.catalogues import FixedFiles
from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.item_list import FailedItem
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.results import OutputsRefused, ResultStore
from small_disk import small_disk

SINGLES = 6
FILES = (
    *(ResultFile(f"s{number}.npz", number, 1) for number in range(SINGLES)),
    ResultFile("t.npz", SINGLES, 2, stacked=True),
)
ITEMS = SINGLES + 2
Open = Callable[..., ResultStore]
MAX = (1 << 64) - 1
FIEMAP, DELAYED = 0xC020660B, 0x4
EXTENT_BYTES, FLAGS_AT = 56, 32 + 40
"""The kernel's `struct fiemap` with one extent, and where the flags of that are."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Open]:
    """Opens a store, the one before is closed."""
    opened: list[ResultStore] = []

    def opener(folder: Path = tmp_path / "out") -> ResultStore:
        if opened:
            opened.pop().close()
        opened.append(
            ResultStore(folder, job="job", identity="i", catalogue=FixedFiles(FILES), names=("y",))
        )
        return opened[-1]

    yield opener
    if opened:
        opened.pop().close()


def put(results: ResultStore, *items: int) -> None:
    for item in items:
        results.add(item, {"y": np.full((1, 3), item, np.float32)})
    assert results.finish(items) == {}


def assert_all_made(out: Path) -> None:
    for number in range(SINGLES):
        with np.load(out / f"s{number}.npz") as file:
            np.testing.assert_array_equal(file["y"], np.full((1, 3), number))
    with np.load(out / "t.npz") as file:
        assert file["y"][:, 0, 0].tolist() == [SINGLES, SINGLES + 1]
    assert sorted(os.listdir(out / ".shoal/job")) == ["job.json", "journal.jsonl", "lock"]


def logs(out: Path) -> list[Path]:
    return sorted((out / ".shoal/job").glob("*.log"))


def run_job(results: ResultStore, stored: set[int]) -> None:
    for batch in ((0, 6), (1, 2, 3), (7,), (4, 5)):
        put(results, *batch)
        stored |= set(batch)
        results.publish()
    assert results.complete() is None


@pytest.mark.parametrize("names_survive", [True, False])
def test_a_loss_of_power_at_any_moment_loses_nothing_and_leaves_no_half_file(
    store: Open, tmp_path: Path, names_survive: bool
) -> None:
    fails_at = 1
    while True:
        lived, found, stored = tmp_path / f"{fails_at}", tmp_path / f"{fails_at}-found", set[int]()
        results = store(lived)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, lived, fails_at)
            try:
                run_job(results, stored)
            except PowerLost:
                with contextlib.suppress(PowerLost):
                    results.close()
            else:
                break
        disk.copy_durable(found, names_survive=names_survive)
        for path in found.glob("*.npz"):
            with np.load(path) as file:
                assert file["y"].size, "half a file has its final name"
        again = store(found)
        assert again.completed() >= stored, f"lost at operation {fails_at}"
        put(again, *(set(range(ITEMS)) - again.completed()))
        assert again.complete() is None
        assert_all_made(found)
        fails_at += 1
    assert fails_at > 20
    assert_all_made(lived)


def test_one_sync_makes_all_small_files_of_a_batch_durable(
    store: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = store()
    put(results, 0)
    disk = Disk(monkeypatch, tmp_path / "out", fails_at=1_000_000)
    put(results, *range(1, SINGLES))
    assert [name for name in disk.operations if "sync" in name] == ["fdatasync"]
    assert store().completed() == set(range(SINGLES))


def waits_for_the_disk(path: Path) -> bool:
    """Whether the kernel has not given a written file a place on the disk yet."""
    request = bytearray(struct.pack("QQIIII", 0, MAX, 0, 0, 1, 0) + bytes(EXTENT_BYTES))
    with path.open("rb") as file:
        fcntl.ioctl(file, FIEMAP, request)
    (flags,) = struct.unpack_from("I", request, FLAGS_AT)
    return bool(flags & DELAYED)


def test_results_wait_for_nothing_else_that_is_written_to_their_file_system(
    store: Open, tmp_path_factory: pytest.TempPathFactory
) -> None:
    disk = tmp_path_factory.mktemp("disk")
    other = disk / "other"
    waited = []
    for attempt in range(20):  # the kernel may write it at any moment
        results = store(disk / f"out{attempt}")
        other.unlink(missing_ok=True)
        other.write_bytes(bytes(1 << 20))
        put(results, *range(ITEMS))
        results.close()
        waited.append(waits_for_the_disk(other))
        assert_all_made(disk / f"out{attempt}")
        if waited[-1]:
            break
    assert any(waited)


def test_what_a_crash_left_in_the_log_is_made_by_the_next_run(store: Open, tmp_path: Path) -> None:
    put(store(), 0, 1)
    shutil.copytree(tmp_path / "out", tmp_path / "crashed")
    assert not list((tmp_path / "crashed").glob("*.npz"))
    assert store(tmp_path / "crashed").completed() == {0, 1}
    made = sorted(path.name for path in (tmp_path / "crashed").glob("*.npz"))
    assert made == ["s0.npz", "s1.npz"]
    assert not logs(tmp_path / "crashed")


def test_an_item_is_stored_only_if_there_is_room_for_its_file_beside_the_log(
    store: Open, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with small_disk(out, "64k"):
        results = store(out)
        failures: dict[int, str] = {}
        for item in range(SINGLES):
            results.add(item, {"y": np.full((1, 1500), item, np.float32)})
            failures |= results.finish([item])
        assert 0 < len(failures) < SINGLES
        results.close()
        made = {int(path.stem[1:]) for path in out.glob("s*.npz")}
        assert made == set(range(SINGLES)) - failures.keys()


def test_a_log_that_took_nothing_is_not_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with small_disk(out, "64k"), contextlib.closing(Folder(out)) as folder:
        group = result_log.Group(folder, 7)
        with pytest.raises(OSError, match="No space left"):
            group.append({0: bytes(1 << 20)})
        assert folder.names() == []
        group.append({0: b"it fits"})
        with pytest.raises(OSError, match="No space left"):
            group.append({1: bytes(1 << 20)})
        assert list(result_log.read_log(folder, 7)) == [{0: b"it fits"}]


def test_files_are_made_while_others_are_logged(store: Open, tmp_path: Path) -> None:
    results = store()
    put(results, 0, 1)
    results.publish()
    put(results, 2)
    assert len(logs(tmp_path / "out")) <= 2
    results.publish()
    results.close()
    assert len(list((tmp_path / "out").glob("*.npz"))) == 3
    assert not logs(tmp_path / "out")


def test_a_full_log_is_made_into_files_before_more_is_logged(
    store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_log, "_GROUP_FILES", 2)
    results = store()
    for item in range(SINGLES):
        put(results, item)
        assert len(logs(tmp_path / "out")) <= 2
    assert len(list((tmp_path / "out").glob("*.npz"))) >= 2


def test_damage_in_a_log_costs_the_damaged_file_only(store: Open, tmp_path: Path) -> None:
    put(store(), 0, 1, 2)
    [log] = logs(tmp_path / "out")
    sound = log.read_bytes()
    middle = len(sound) // 2  # in the second file
    changed = sound[:middle] + bytes([sound[middle] ^ 1]) + sound[middle + 1 :]
    damages = {"changed": (changed, {0, 2}), "torn": (sound[:-1], {0, 1}), "empty": (b"", set())}
    for name in damages:
        shutil.copytree(tmp_path / "out", tmp_path / name)
    for name, (content, completed) in damages.items():
        logs(tmp_path / name)[0].write_bytes(content)
        assert store(tmp_path / name).completed() == completed


def test_a_file_that_cannot_be_made_stays_in_its_log(store: Open, tmp_path: Path) -> None:
    (tmp_path / "out" / "s1.npz").mkdir(parents=True)
    results = store()
    put(results, 0, 1)
    assert "Is a directory" in str(results.complete())
    assert (tmp_path / "out" / "s0.npz").is_file()
    with pytest.raises(OutputsRefused, match="Is a directory"):
        store()
    (tmp_path / "out" / "s1.npz").rmdir()
    assert store().completed() == {0, 1}


def single_results(out: Path) -> dict[str, bytes]:
    """The files of three single items, each of which gets its arrays one after the other."""
    files = (
        ResultFile("plain.npz", 0, 1),
        ResultFile("stacked.npz", 1, 1, stacked=True),
        ResultFile("joined.npz", 2, 1, stacked=True, joined=True),
    )
    results = ResultStore(
        out, job="job", identity="i", catalogue=FixedFiles(files), names=("y", "label")
    )
    with contextlib.closing(results):
        for item in range(len(files)):
            results.add(item, {"label": np.array(["öld"], dtype=object)})
            results.add(item, {"y": np.full((1, 3), item, ">f4")})
            results.add(item, {"label": np.array(["a new one"], dtype=object)})
        assert results.finish(range(len(files))) == {}
        assert results.complete() is None
    return {path.name: path.read_bytes() for path in out.glob("*.npz")}


@pytest.mark.parametrize("scarce", ["_UNWRITTEN_BYTES", "_TAIL_BYTES"])
def test_a_file_has_the_same_bytes_whether_or_not_its_arrays_stayed_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    held = single_results(tmp_path / "held")
    assert not list((tmp_path / "held/.shoal/job").glob("*.part"))
    flushed: list[str] = []
    write = parts.Part._write

    def noted(part: parts.Part, pieces: Any) -> None:
        flushed.append(part.name)
        write(part, pieces)

    monkeypatch.setattr(parts.Part, "_write", noted)
    where = results_module if scarce == "_UNWRITTEN_BYTES" else parts
    monkeypatch.setattr(where, scarce, 0)
    assert single_results(tmp_path / "written") == held
    assert set(flushed) == {"0.part", "1.part", "2.part"}
    with np.load(tmp_path / "held/stacked.npz") as file:
        assert (file["y"].tolist(), file["label"].tolist()) == ([[[1, 1, 1]]], [["a new one"]])
    with np.load(tmp_path / "held/joined.npz") as file:
        assert (file["y"].tolist(), file["label"].tolist()) == ([[2, 2, 2]], ["a new one"])


def test_what_had_arrived_of_an_item_that_fails_is_dropped(tmp_path: Path) -> None:
    with contextlib.closing(
        ResultStore(
            tmp_path / "out",
            job="job",
            identity="i",
            catalogue=FixedFiles([ResultFile("a.npz", 0, 1)]),
            names=("y", "z"),
        )
    ) as results:
        results.add(0, {"y": np.zeros((1, 3))})
        results.fail([FailedItem(0, "a.npz", "no luck")])
        assert results.complete() is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".shoal", "failures.json"]
