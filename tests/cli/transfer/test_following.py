"""Files that come while a copy goes on are carried once, when they are whole."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cli.transfer.carrying import Shaky, fill, read
from cli.transfer.conftest import volume_settings
from shoal_cli.standalone.sent_jobs import carrier
from shoal_cli.transfer.addresses import Access
from shoal_cli.transfer.copying import copy
from shoal_cli.transfer.folders import Folder
from shoal_cli.transfer.following import copy_new
from shoal_cli.transfer.joined import Reachable
from shoal_cli.transfer.places import (
    TRIES,
    Entry,
    OnBytes,
    Read,
    TransferBroken,
    TransferRefused,
)
from shoal_coordinator.server import serving

QUICK = 0.05


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_cli.transfer.following.SCAN_SECONDS", QUICK)


async def until_there(folder: Path, *names: str) -> None:
    async with asyncio.timeout(60):
        while not all((folder / name).exists() for name in names):
            await asyncio.sleep(0.02)


async def test_files_are_carried_as_they_come_each_once(
    coordinator: str, access: Access, tmp_path: Path
) -> None:
    there = tmp_path / "volume/jobs/camera/in"
    files = fill(tmp_path / "in", 1, 1000)
    source = Folder("in", tmp_path / "in")
    async with access.target(f"{coordinator}/jobs/camera/in") as target:
        following = asyncio.create_task(copy_new(source, target, follow=True))
        await until_there(there, "000.npz", "001.npz")
        (tmp_path / "in/000.npz").write_bytes(b"changed afterwards")
        (tmp_path / "in/002.npz").write_bytes(b"new")
        await until_there(there, "002.npz")
        following.cancel()
        await asyncio.wait([following])
    assert read(there) == {**files, "002.npz": b"new"}


async def test_what_is_new_is_carried_when_it_is_whole_and_then_the_copy_ends(
    tmp_path: Path,
) -> None:
    files = fill(tmp_path / "in", 10, 20)
    fill(tmp_path / "out", 5)  # the first is there already, whatever it holds
    growing = tmp_path / "in/growing.npz"

    async def grow() -> None:
        with growing.open("ab", buffering=0) as file:
            for _ in range(20):
                file.write(b"x" * 100)
                await asyncio.sleep(QUICK / 2)

    writing = asyncio.create_task(grow())
    await asyncio.sleep(QUICK)
    copied = await copy_new(
        Folder("in", tmp_path / "in"),
        Folder("out", tmp_path / "out"),
        follow=False,
    )
    await writing
    assert (copied.files, copied.skipped) == (2, 1)
    found = read(tmp_path / "out")
    assert len(found.pop("growing.npz")) == 2000
    assert found["001.npz"] == files["001.npz"]
    assert len(found["000.npz"]) == 5


@pytest.mark.parametrize("name", ["two\nlines.npz", "no\udcfftext.npz"])
async def test_a_file_that_cannot_be_called_so_is_named_once_and_keeps_no_other_back(
    tmp_path: Path, name: str
) -> None:
    files = fill(tmp_path / "in", 10)
    (tmp_path / "in" / name).write_bytes(b"1234")
    notes: list[str] = []
    source, target = Folder("in", tmp_path / "in"), Folder("there", tmp_path / "there")
    following = asyncio.create_task(copy_new(source, target, notes.append, follow=True))
    await until_there(tmp_path / "there", "000.npz")
    (tmp_path / "in/001.npz").write_bytes(b"new")
    await until_there(tmp_path / "there", "001.npz")
    following.cancel()
    await asyncio.wait([following])
    assert read(tmp_path / "there") == {**files, "001.npz": b"new"}
    assert notes == [f"in: no file can be called {name!r}; it is left there"]
    with pytest.raises(TransferRefused, match="no file can be called"):
        await copy(source, target)


async def test_results_that_a_retry_made_again_are_carried_again(tmp_path: Path) -> None:
    files = fill(tmp_path / "out", 10, 20)
    source, target = Folder("out", tmp_path / "out"), Folder("there", tmp_path / "there")
    following = asyncio.create_task(copy_new(source, target, follow=True, changed=True))
    await until_there(tmp_path / "there", *files)
    whole = fill(tmp_path / "out", 15)
    while read(tmp_path / "there") != files | whole:
        await asyncio.sleep(QUICK)
    following.cancel()
    await asyncio.wait([following])
    assert fill(tmp_path / "out", 25).keys() == whole.keys()
    copied = await copy_new(source, target, follow=False, changed=True)
    assert (copied.files, copied.skipped) == (1, 2)


async def test_a_copy_that_follows_goes_on_after_the_network_broke(tmp_path: Path) -> None:
    source = Shaky("in", tmp_path / "in")
    source.breaks, source.limit_bytes = TRIES + 1, 0  # more than the tries of one file
    files = fill(tmp_path / "in", 1000)
    notes: list[str] = []
    target = Folder("out", tmp_path / "out")
    following = asyncio.create_task(copy_new(source, target, notes.append, follow=True))
    await until_there(tmp_path / "out", "000.npz")
    following.cancel()
    await asyncio.wait([following])
    assert (tmp_path / "out/000.npz").read_bytes() == files["000.npz"]
    assert any("the line went dead; it is tried again" in each for each in notes)


async def test_a_job_elsewhere_gets_inputs_as_they_come_and_gives_results_back(
    tmp_path: Path,
) -> None:
    notes: list[str] = []
    target = f"unix:{tmp_path}/s"
    inputs, outputs = (Folder(name, tmp_path / name) for name in ("in", "out"))
    feeds = carrier(Reachable(target), "camera-1", inputs, outputs, notes.append)
    there = tmp_path / "volume/jobs/camera-1"
    first = fill(tmp_path / "in", 10)
    settings = replace(volume_settings(tmp_path), listen=target)
    async with serving(settings), feeds.active():
        await until_there(there / "in", "000.npz")
        results = fill(there / "out", 30, 40)
        await until_there(tmp_path / "out", *results)
        (tmp_path / "in/late.npz").write_bytes(b"late")
        await feeds.last_inputs()
    assert read(there / "in") == {**first, "late.npz": b"late"}
    assert read(tmp_path / "out") == results
    assert notes == []


class Counting(Folder):
    """A folder that counts what it is given; one file of it as a source stays broken, and one goes
    as soon as it was listed."""

    broken = vanishing = ""
    given: tuple[str, ...] = ()

    async def entries(self) -> Sequence[Entry]:
        found = await Folder.entries(self)
        (self.path / self.vanishing).unlink(missing_ok=True) if self.vanishing else None
        return found

    async def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        if entry.name == self.broken:
            raise TransferBroken("the line went dead")
        async for piece in Folder.read(self, entry, offset):
            yield piece

    async def put(self, entry: Entry, read: Read, on_bytes: OnBytes) -> None:
        await Folder.put(self, entry, read, on_bytes)
        self.given = (*self.given, entry.name)


async def test_a_file_that_cannot_be_read_keeps_no_other_from_being_carried_once(
    tmp_path: Path,
) -> None:
    source, target = Counting("in", tmp_path / "in"), Counting("out", tmp_path / "out")
    files = fill(tmp_path / "in", *[100] * 20)
    source.broken = "000.npz"
    following = asyncio.create_task(copy_new(source, target, follow=True))
    await until_there(tmp_path / "out", *[name for name in files if name != source.broken])
    (tmp_path / "in/late.npz").write_bytes(b"late")
    await until_there(tmp_path / "out", "late.npz")
    source.broken = ""
    async with asyncio.timeout(60):
        while "000.npz" not in target.given:
            await asyncio.sleep(QUICK)
    following.cancel()
    await asyncio.wait([following])
    assert sorted(target.given) == [*files, "late.npz"]


@pytest.mark.parametrize("follow", [True, False])
async def test_a_file_that_goes_before_it_is_read_is_not_waited_for(
    tmp_path: Path, follow: bool
) -> None:
    source, target = Counting("in", tmp_path / "in"), Counting("out", tmp_path / "out")
    files = fill(tmp_path / "in", *[100] * 9)
    copying = asyncio.create_task(copy_new(source, target, follow=follow))
    await asyncio.sleep(QUICK / 2)
    source.vanishing = "003.npz"
    await until_there(tmp_path / "out", *[name for name in files if name != "003.npz"])
    async with asyncio.timeout(60):
        while len(target.given) < 8:
            await asyncio.sleep(QUICK)
    if follow:
        copying.cancel()
    await asyncio.wait([copying])
    assert sorted(target.given) == [name for name in files if name != "003.npz"]


class Renamed(Folder):
    """A folder whose first file is renamed when its name was read, before anything else was."""

    def _entry(self, file: Path) -> Entry:
        if file.name == "000.npz":
            file.rename(file.with_name("renamed.npz"))
        return Folder._entry(self, file)


async def test_a_file_that_is_renamed_while_its_folder_is_listed_is_passed_over(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 1, 1)
    assert [entry.name for entry in await Renamed("in", tmp_path).entries()] == ["001.npz"]
