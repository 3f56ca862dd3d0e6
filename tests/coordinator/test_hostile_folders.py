"""Folders of inputs that hold more than sound files of good names."""

import io
import json
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from coordinator.scripted import connected
from coordinator.test_following import check_frames, drop, frame
from coordinator.test_retries import listed
from coordinator.world import World
from shoal_coordinator.server import followed_runs
from shoal_coordinator.storage.array_limits import Limits, UnreadableArrays
from shoal_coordinator.storage.arrays import ArrayFile
from shoal_coordinator.storage.inputs import passed_over, scan_inputs
from shoal_coordinator.storage.item_list import stored_items
from shoal_protocol.v1 import coordinator_pb2 as api


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_runs, "SCAN_SECONDS", 0.05)


async def followed(world: World, count: int) -> api.JobStatus:
    """A job that follows the folder has taken so many files, and ended."""
    async with connected(world.device("a")):
        await world.submit(follow=True)
        await world.until(lambda status: status.succeeded + status.failed >= count)
        await world.submit(follow=True, end=True)
        return await world.ended()


def test_an_archive_of_hundreds_of_thousands_of_names_is_refused_before_they_are_read(
    tmp_path: Path,
) -> None:
    """When it has been read, each name takes half a KiB: ten times what it takes in the file."""
    count, name = 1 << 18, b"a.npy"
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", *([0] * 11), len(name), *([0] * 6)) + name
    end = (0, 0, 0xFFFF, 0xFFFF, count * len(entry), 0, 0)
    file = tmp_path / "a.npz"
    file.write_bytes(entry * count + struct.pack("<4s4H2LH", b"PK\5\6", *end))
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableArrays) as refused:
            ArrayFile(file, limits=Limits())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 << 20, f"{most} bytes"
    assert str(refused.value).endswith("its directory takes more than 1 MiB")


def test_an_archive_of_as_many_names_as_it_may_have_is_read(tmp_path: Path) -> None:
    names, array = [f"{'row' * 30}.{number}" for number in range(8000)], io.BytesIO()
    np.save(array, np.zeros(1, np.float32))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in names:
            archive.writestr(f"{name}.npy", array.getvalue())
    with ArrayFile(tmp_path / "a.npz", limits=Limits(members=len(names))) as file:
        assert list(file.headers) == names


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_what_follows_an_array_in_an_archive_is_not_inflated_but_refused(
    tmp_path: Path, method: int
) -> None:
    """A few KiB of it would fill the disk, which was found to have room for the array."""
    array, tail = io.BytesIO(), bytes(16 << 20)
    np.save(array, np.zeros(2, np.float32))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("x.npy", array.getvalue() + tail)
    with pytest.raises(UnreadableArrays, match=f"has {len(tail)} bytes after 'x'"):
        ArrayFile(tmp_path / "a.npz", limits=Limits())


async def test_a_link_to_itself_is_no_file(world: World) -> None:
    drop(world.folder / "in", 0)
    (world.folder / "in" / "loop.npy").symlink_to("loop.npy")
    async with connected(world.device("a")):
        await world.submit()
        assert (await world.ended()).state == api.JobStatus.COMPLETE
    check_frames(world.folder / "out", 0)


async def test_a_link_to_itself_stops_no_following(world: World) -> None:
    drop(world.folder / "in", 0)
    (world.folder / "in" / "loop.npy").symlink_to("loop.npy")
    assert (await followed(world, 1)).state == api.JobStatus.COMPLETE
    check_frames(world.folder / "out", 0)


async def test_a_pipe_in_the_place_of_a_file_fails_its_items_alone(world: World) -> None:
    drop(world.folder / "in", 0, 1, 2)
    await world.submit()
    await world.until(lambda status: status.items == 3)
    (world.folder / "in" / "0001.npy").unlink()
    os.mkfifo(world.folder / "in" / "0001.npy")
    async with connected(world.device("a")):
        last = await world.ended()
    assert (last.succeeded, last.failed) == (2, 1), last.message
    assert "is no file any more" in last.failures[0].reason


async def test_a_file_that_was_changed_in_another_century_is_taken(world: World) -> None:
    drop(world.folder / "in", 0, 1)
    os.utime(world.folder / "in" / "0000.npy", ns=(13 * 10**18, 13 * 10**18))
    os.utime(world.folder / "in" / "0001.npy", ns=(-(10**18), -(10**18)))
    last = await followed(world, 2)
    assert (last.state, last.items) == (api.JobStatus.COMPLETE, 2), last.message


def put_names_that_are_no_text(folder: Path) -> None:
    """Two files that suit the model, and one that does not."""
    folder.mkdir()
    names = {b"a\xff.npy": (1, 3), b"b\xff.npy": (3, 3, 3, 3), b"c\nd.npy": (1, 3)}
    for name, shape in names.items():
        with open(folder / os.fsdecode(name), "wb") as file:
            np.save(file, np.ones(shape, np.float32))


async def test_names_that_are_no_text_are_listed_with_their_bytes(world: World) -> None:
    put_names_that_are_no_text(world.folder / "in")
    async with connected(world.device("a")):
        await world.submit()
        last = await world.ended()
    assert (last.succeeded, last.failed) == (2, 1), last.message
    assert [each.input for each in last.failures] == [r"b\udcff.npy"]
    found = await listed(world.stub)
    assert [each.input for each in found] == [r"a\udcff.npy", r"b\udcff.npy", "c\nd.npy"]
    assert (world.folder / "out" / os.fsdecode(b"a\xff.npz")).exists()


async def test_names_that_are_no_text_are_followed(world: World) -> None:
    put_names_that_are_no_text(world.folder / "in")
    with open(world.folder / "in" / os.fsdecode(b"a\xff.npz"), "wb") as rival:
        np.savez(rival, x=frame(1))
    last = await followed(world, 4)
    assert (last.succeeded, last.failed) == (2, 2), last.message
    assert {each.input[:6] for each in last.failures} >= {r"b\udcf"}
    assert any(r"would give a\udcff.npz" in each.reason for each in last.failures)


@pytest.mark.parametrize(
    "change",
    [
        {"stored": [[-(10**12), 5]]},
        {"files": []},
        {"files": [["b.npz", 3, True]]},
        {"files": [["b.npz", 0, True], ["a.npz", -4, True]]},
        {"total": 1 << 60},
        {"failed": [[1, 2]]},
        {"tries": {"1": 2}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_list_of_items_that_was_damaged_is_none(
    tmp_path: Path, change: dict[str, object]
) -> None:
    sound = {
        "version": 1,
        "total": 5,
        "files": [["a.npz", 0, True]],
        "stored": [[0, 5]],
        "failed": [],
        "tries": [],
    }
    folder = tmp_path / ".shoal" / "job"
    folder.mkdir(parents=True)
    (folder / "items.json").write_text(json.dumps(sound))
    assert (listed := stored_items(tmp_path, "job")) is not None
    assert listed.place(4) == "a.npz[4]"
    (folder / "items.json").write_text(json.dumps(sound | change))
    found = stored_items(tmp_path, "job")
    assert found is None or len(found.stored) == found.total == 5
    assert found is None or found.place(4)


def test_what_looks_like_inputs_and_is_not_taken_can_be_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", x=np.zeros(2))
    (tmp_path / "link.npz").symlink_to("good.npz")
    (tmp_path / "dangling.npz").symlink_to("nowhere")
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    for name in ("UP.NPZ", "notes.txt", ".hidden.npz"):
        (tmp_path / name).touch()
    skipped = ["UP.NPZ", "dangling.npz", "folder.npy", "pipe.npz"]
    assert passed_over(tmp_path) == skipped
    assert set(skipped).isdisjoint(file.name for file in scan_inputs(tmp_path, ()).files)
