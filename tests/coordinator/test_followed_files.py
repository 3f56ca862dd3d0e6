"""Files of a followed folder on a real disk, with copies of it as a crash would leave it."""

import contextlib
import errno
import random
import shutil
import sqlite3
import subprocess
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from shoal_coordinator.storage import followed, followed_items, following, results
from shoal_coordinator.storage.catalogues import CatalogueFailed
from shoal_coordinator.storage.contents import FileContents
from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.followed import FollowedFiles
from shoal_coordinator.storage.followed_items import FollowedItems
from shoal_coordinator.storage.following import FollowedFolder, FollowedInputs
from shoal_coordinator.storage.inputs import InputFile
from shoal_coordinator.storage.item_list import FailedItem
from shoal_coordinator.storage.job_files import result_file
from shoal_coordinator.storage.parts import Part
from shoal_coordinator.storage.results import OutputsRefused, ResultStore
from shoal_protocol.durable_files import is_transient
from shoal_protocol.partition import TensorSpec
from small_disk import small_disk

INPUTS = (TensorSpec(name="x", dtype="float", shape=(1, "n")),)
STEPS = 150
PLACES = ("a.npz[1]", "a.npz[2]", "a.npz[3]")


class Camera:
    """A folder, and the coordinator's storage that follows it; `crash` goes on with a copy of the
    disk as it is at that moment."""

    def __init__(self, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311 (not for secrets)
        self.folder, self.root = root / "in", root
        self.folder.mkdir()
        self.dropped: dict[str, int] = {}
        self.stored: set[tuple[str, int]] = set()
        self.failed: set[tuple[str, int]] = set()
        self.lives = 0
        self.outputs = root / "out.0"
        self.open()

    def open(self) -> None:
        self.files = FollowedFiles()
        self.store = ResultStore(
            self.outputs, job="job", identity="i", catalogue=self.files, names=("y",)
        )
        self.watch = FollowedFolder(self.folder, self.files, INPUTS)
        self.inputs = FollowedInputs(self.folder, self.files, INPUTS)
        completed = self.store.completed()
        self.left = {
            item
            for file in self.inputs.files
            for item in range(file.first, file.first + file.items)
            if item not in completed
        }
        again = {self.at(item) for item in self.left}
        assert not again & self.stored, "what was stored would be computed again"
        assert completed.isdisjoint(self.files.ended_items())

    def at(self, item: int) -> tuple[str, int]:
        number, row = self.inputs.locate(item)
        return {n: file.name for n, file in self.files_by_number().items()}[number], row

    def files_by_number(self) -> dict[int, InputFile]:
        table = self.inputs._table
        return {number: table[number] for number in table}

    # ---- what happens ----------------------------------------------------------------------------

    def drop(self) -> None:
        """A file of one item, or of a few, or of none, or one that does not suit."""
        name = f"{self.chance.randrange(10**6):06}.npz"
        if name in self.dropped:
            return
        rows = self.chance.choice([1, 1, 1, 3, 0, -1])
        shape = (1, 4) if rows == 1 else (2, 2, 2, 2) if rows < 0 else (rows, 1, 4)
        np.savez(self.folder / f".{name}", x=np.ones(shape, np.float32))
        (self.folder / f".{name}").rename(self.folder / name)
        self.dropped[name] = abs(rows)

    def scan(self, *, last: bool = False) -> None:
        taken = self.watch.scan(last=last)
        self.inputs.retain()
        self.inputs.extend(taken, self.files.items)
        self.store.extend([(number, result_file(file)) for number, file in taken])
        for _, file in taken:
            self.left |= set(range(file.first, file.first + file.items))

    def compute(self) -> None:
        """Items end in any order."""
        batch = self.chance.sample(sorted(self.left), min(len(self.left), 4))
        for item in batch:
            number, _ = self.inputs.locate(item)
            where = self.at(item)
            unsuitable = self.files_by_number()[number].contents.problem is not None
            if unsuitable or self.chance.random() < 0.1:
                self.store.fail([FailedItem(item, self.inputs.place(item), "no")])
                self.failed.add(where)
            else:
                self.store.add(item, {"y": np.full((1, 4), item, np.float32)})
                assert self.store.finish([item]) == {}
                self.stored.add(where)
                self.failed.discard(where)
            self.left.discard(item)

    def crash(self) -> None:
        self.lives += 1
        copy = self.root / f"out.{self.lives}"
        shutil.copytree(self.outputs, copy, ignore=shutil.ignore_patterns("*.tmp"))
        self.store.close()
        shutil.rmtree(self.outputs)
        self.outputs = copy
        self.open()

    def end(self) -> None:
        """Small files are made by a thread, and until then others wait."""
        until = monotonic() + 60
        while self.left or not self.watch.settled:
            assert monotonic() < until, f"{self.watch.waiting} files wait for ever"
            self.scan(last=True)
            while self.left:
                self.compute()
            self.store.publish()
        assert self.store.complete() is None


@pytest.mark.parametrize("seed", range(12))
def test_each_file_is_processed_once_whenever_the_coordinator_dies(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LIVE_FILES", 8)
    camera = Camera(tmp_path, seed)
    for _ in range(STEPS):
        what = camera.chance.random()
        if what < 0.3:
            camera.drop()
        elif what < 0.6:
            camera.scan()
        elif what < 0.9:
            camera.compute()
        elif what < 0.95:
            camera.store.publish()
        else:
            camera.crash()
    camera.end()
    items = sum(camera.dropped.values())
    assert camera.files.items == items
    assert camera.files.succeeded + camera.files.failed == items
    assert len(camera.stored) == camera.files.succeeded
    made = {path.name for path in camera.outputs.glob("*.npz")}
    assert made == {name for name, _ in camera.stored}
    assert len(camera.files.files) == 0, "nothing is held of what has ended"
    folder = camera.outputs / ".shoal/job"
    camera.store.close()
    left = {path.name for path in folder.iterdir()}
    assert left == {"job.json", "lock", followed.NAME}


def with_results_of_three_items(folder: Path) -> Camera:
    """One that has a file of three items, of which no result is made yet."""
    camera = Camera(folder, 0)
    np.savez(camera.folder / "a.npz", x=np.ones((3, 1, 4), np.float32))
    camera.scan()
    camera.scan()
    for item in range(3):
        camera.store.add(item, {"y": np.full((1, 4), item, np.float32)})
    return camera


@pytest.mark.parametrize("ending", ["crash", "full disk"])
def test_a_file_whose_making_was_interrupted_is_made_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    camera = with_results_of_three_items(tmp_path)

    def stop(part: Part, outputs: Folder) -> int:
        del part, outputs
        if ending == "crash":
            raise KeyboardInterrupt
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(results, "make_file", stop)
        with contextlib.suppress(KeyboardInterrupt):
            assert camera.store.finish(range(3)) == {}
        if ending == "full disk":
            assert "No space left" in camera.store.unwritable
            camera.store.publish()
            assert camera.store.unpublished
    camera.crash()
    assert not camera.left
    assert camera.store.unpublished
    camera.store.publish()
    assert not camera.store.unpublished
    assert (camera.outputs / "a.npz").exists()
    assert list(camera.files.files) == []
    camera.store.close()


def test_a_file_that_is_damaged_before_it_is_made_ends_the_run_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    camera = with_results_of_three_items(tmp_path)

    def damaged(part: Part, outputs: Folder) -> int:
        raise OSError(f"{outputs.path / part.name} is damaged at 0; run the job again")

    monkeypatch.setattr(results, "make_file", damaged)
    assert camera.store.finish(range(3)) == {}
    camera.store.publish()
    assert "is damaged at 0; run the job again" in camera.store.unwritable
    camera.store.close()


def test_failed_items_are_listed_and_tried_again_also_beyond_those_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "LISTED_FAILURES", 1)
    monkeypatch.setattr(followed_items, "_CHUNK", 2)
    camera = Camera(tmp_path, 0)
    for name, rows in (("a.npz", 4), ("b.npz", 1), ("c.npz", 1)):
        np.savez(camera.folder / name, x=np.ones((rows, 1, 4), np.float32))
    for _ in range(4):
        camera.scan()
    for item in (0, 5):
        camera.store.add(item, {"y": np.ones((1, 4), np.float32)})
    assert camera.store.finish([0, 5]) == {}
    failures = [FailedItem(item, f"a.npz[{item}]", "no", 2, "pi-4") for item in (1, 2, 3)]
    camera.store.fail([*failures, FailedItem(4, "b.npz", "no")])
    items = FollowedItems(camera.files.query, camera.store.completed())
    listed = list(items)
    assert [each.stored for each in listed] == [True, False, False, False, False, True]
    reasons = [each.failure.reason for each in listed if each.failure is not None]
    assert reasons[0] == "no"
    assert len(set(reasons[1:])) == 1
    assert "the reason is not stored" in reasons[1]
    assert [each.input for each in listed if not each.stored] == [*PLACES, "b.npz[0]"]
    assert items.counts() == (6, 4)
    assert items.not_failed([0, 2, 4]) == [0]
    assert [each.item for each in camera.files.failures(9)] == [1]
    retaken = camera.watch.retry(1, [4])
    assert (list(retaken.items), retaken.failed) == ([4], 1)
    camera.store.close()


def test_a_folder_of_many_files_is_listed_once_and_held_on_disk(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3000):
        (tmp_path / "in" / f"{number:05}.npy").touch()
    files = FollowedFiles()
    store = ResultStore(tmp_path / "out", job="job", identity="i", catalogue=files, names=("y",))
    watch = FollowedFolder(tmp_path / "in", files, INPUTS)
    watch.scan(last=False)
    assert watch.waiting == 3000
    for number in range(2000):
        np.save(tmp_path / "in" / f"{number:05}.npy", np.ones((1, 4), np.float32))
    assert watch.scan(last=False) == [], "they have changed since they were listed"
    assert len(watch.scan(last=False)) == following.LIVE_FILES
    assert watch.waiting == 3000 - following.LIVE_FILES
    store.close()


def test_a_damaged_list_of_files_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ".shoal" / "job"
    folder.mkdir(parents=True)
    (folder / followed.NAME).write_bytes(b"no database" * 100)
    with pytest.raises(OutputsRefused, match=r"followed\.sqlite is damaged; delete it"):
        ResultStore(tmp_path, job="job", identity="i", catalogue=FollowedFiles(), names=("y",))


def test_a_link_in_the_place_of_the_list_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "out" / ".shoal" / "job"
    folder.mkdir(parents=True)
    other = tmp_path / "other.sqlite"
    sqlite3.connect(other).execute("CREATE TABLE precious (x)")
    before = other.read_bytes()
    (folder / followed.NAME).symlink_to(other)
    with pytest.raises(OutputsRefused, match="is a link or of the wrong kind; remove it"):
        ResultStore(
            tmp_path / "out", job="job", identity="i", catalogue=FollowedFiles(), names=("y",)
        )
    assert other.read_bytes() == before


@pytest.mark.parametrize("log", ["-wal", "-journal"])
def test_a_link_in_the_place_of_its_log_is_named_and_not_called_damage(
    tmp_path: Path, log: str
) -> None:
    camera = Camera(tmp_path, seed=0)
    camera.store.close()
    (camera.outputs / ".shoal" / "job" / f"{followed.NAME}{log}").symlink_to(tmp_path / "nowhere")
    said = f"{log} is a link or of the wrong kind; remove it"
    with pytest.raises(OutputsRefused, match=said):
        ResultStore(
            camera.outputs, job="job", identity="i", catalogue=FollowedFiles(), names=("y",)
        )
    with pytest.raises(OSError, match=said):
        followed_items.stored_followed_items(camera.outputs, "job")


def test_a_log_that_cannot_be_written_is_not_called_an_error_of_the_disk(tmp_path: Path) -> None:
    camera = Camera(tmp_path, seed=0)
    camera.files.take([("a.npz", FileContents(2))])
    killed = tmp_path / "killed"
    with small_disk(killed, "4m"):
        shutil.copytree(camera.outputs, killed, dirs_exist_ok=True)
        camera.store.close()
        subprocess.run(["mount", "-o", "remount,ro", str(killed)], check=True)
        with pytest.raises(OSError, match=r"Read-only file system: 'followed\.sqlite-wal'"):
            followed_items.stored_followed_items(killed, "job")


def test_the_files_that_a_killed_run_has_taken_are_listed(tmp_path: Path) -> None:
    camera = Camera(tmp_path, seed=0)
    taken = camera.files.take([("a.npz", FileContents(2)), ("b.npz", FileContents(1))])
    killed = tmp_path / "killed"
    shutil.copytree(camera.outputs, killed)
    camera.store.close()
    assert len(taken) == 2
    for outputs in (killed, killed, camera.outputs):
        items = followed_items.stored_followed_items(outputs, "job")
        assert items is not None
        assert [each.input for each in items] == ["a.npz", "a.npz", "b.npz"]


def test_a_list_that_another_process_holds_is_not_called_damaged(tmp_path: Path) -> None:
    camera = Camera(tmp_path, seed=0)
    camera.files.take([("a.npz", FileContents(1))])
    path = camera.outputs / ".shoal" / "job" / followed.NAME
    with (
        contextlib.closing(sqlite3.connect(path, timeout=0)) as other,
        pytest.raises(CatalogueFailed) as caught,
        followed.translated(path),
    ):
        other.execute("SELECT * FROM taken")
    camera.store.close()
    assert is_transient(caught.value)
