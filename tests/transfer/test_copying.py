"""Files are carried whole, once, and on from where it broke off."""

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from shoal_operator.shell.addresses import AddressRefused
from shoal_operator.shell.transfer.addresses import Access
from shoal_operator.shell.transfer.copying import Copied, Progress, copy
from shoal_operator.shell.transfer.folders import FolderSource
from shoal_operator.shell.transfer.places import Entry, TransferBroken, TransferRefused
from shoal_operator.shell.transfer.web import WebSource, open_session
from transfer.servers import S3, Web

LARGE = 20 << 20


class Shaky(FolderSource):
    """A folder whose reader breaks off after so many bytes, so many times."""

    breaks = 2
    limit_bytes = 3 << 20
    offsets: tuple[int, ...] = ()

    async def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        self.offsets = (*self.offsets, offset)
        passed = 0
        async for piece in FolderSource.read(self, entry, offset):
            if self.breaks and passed + len(piece) > self.limit_bytes:
                self.breaks -= 1
                raise TransferBroken("the line went dead")
            passed += len(piece)
            yield piece


def fill(folder: Path, *sizes: int) -> dict[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{number:03}.npz": os.urandom(size) for number, size in enumerate(sizes)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def carry(source: str, target: str, access: Access) -> Copied:
    opened = access.source(source)
    try:
        into = access.target(target)
        try:
            return await copy(opened, into, pause_seconds=0)
        finally:
            await into.close()
    finally:
        await opened.close()


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(base=tmp_path, insecure=True, volumes={"lines": tmp_path / "claim"})


async def test_inputs_go_to_a_coordinator_and_results_come_back(
    coordinator: str, access: Access, tmp_path: Path
) -> None:
    files = fill(tmp_path / "claim/in", 0, 1, 5_000_000, 300)
    (tmp_path / "claim/in/.hidden").write_text("not for others")
    (tmp_path / "claim/in/folder").mkdir()
    total = sum(map(len, files.values()))
    target = f"coordinator://{coordinator}/jobs/ocr-1/in"
    first = await carry("pvc://lines/in", target, access)
    assert first == Copied(files=4, bytes=total, skipped=0)
    assert read(tmp_path / "volume/jobs/ocr-1/in") == files
    # The second time, with the scheme left away, all of it stands.
    again = await carry("pvc://lines/in", f"{coordinator}/jobs/ocr-1/in", access)
    assert again == Copied(files=4, bytes=total, skipped=4)

    results = fill(tmp_path / "volume/jobs/ocr-1/out", 10, 2_000_000)
    source = f"{coordinator}/jobs/ocr-1/out"
    assert (await carry(source, "pvc://lines/out", access)).skipped == 0
    assert read(tmp_path / "claim/out") == results
    assert (await carry(source, "pvc://lines/out", access)).skipped == 2
    (tmp_path / "claim/out/000.npz").write_bytes(b"0123456789")  # the same size, other bytes
    assert (await carry(source, "pvc://lines/out", access)).skipped == 1
    assert read(tmp_path / "claim/out") == results


@pytest.mark.parametrize("place", ["folder", "coordinator"])
async def test_what_broke_off_is_gone_on_with(
    coordinator: str, access: Access, tmp_path: Path, place: str
) -> None:
    files = fill(tmp_path / "in", LARGE)
    uri = str(tmp_path / "out") if place == "folder" else f"{coordinator}/jobs/ocr/in"
    target = access.target(uri)
    source = Shaky("in", tmp_path / "in")
    seen: list[int] = []

    def note(progress: Progress) -> None:
        seen.append(progress.done_bytes)

    copied = await copy(source, target, note, pause_seconds=0)
    await target.close()
    assert copied == Copied(files=1, bytes=LARGE, skipped=0)
    if place == "folder":
        assert source.offsets == (0, 3 << 20, 6 << 20)
    else:  # what was still on the wire when it broke is sent again
        assert 0 == source.offsets[0] < source.offsets[1] <= 3 << 20
        assert source.offsets[1] < source.offsets[2] <= 6 << 20
    assert max(seen) == seen[-1] == LARGE
    folder = tmp_path / ("out" if place == "folder" else "volume/jobs/ocr/in")
    assert read(folder) == files


async def test_a_later_process_goes_on_as_well(access: Access, tmp_path: Path) -> None:
    files = fill(tmp_path / "in", LARGE)
    source = Shaky("in", tmp_path / "in")
    source.breaks = 100
    source.limit_bytes = 2 << 20
    with pytest.raises(TransferBroken, match="the line went dead"):
        await copy(source, access.target(str(tmp_path / "out")), pause_seconds=0)
    assert source.offsets == (0, 2 << 20, 4 << 20, 6 << 20)
    assert [path.name[0] for path in (tmp_path / "out").iterdir()] == ["."]
    another = Shaky("in", tmp_path / "in")
    another.breaks = 0
    await copy(another, access.target(str(tmp_path / "out")), pause_seconds=0)
    assert another.offsets == (8 << 20,)
    assert read(tmp_path / "out") == files


async def test_a_file_that_grew_meanwhile_is_not_taken(access: Access, tmp_path: Path) -> None:
    fill(tmp_path / "in", 1000)

    class Growing(FolderSource):
        async def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
            yield b"x" * 2000

    target = access.target(str(tmp_path / "out"))
    with pytest.raises(TransferBroken, match="ends at 2000 of the announced 1000 bytes"):
        await copy(Growing("in", tmp_path / "in"), target, pause_seconds=0)
    assert not [path for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")]


async def test_objects_go_both_ways(s3: S3, coordinator: str, access: Access) -> None:
    folder = s3.folder / "ocr/in"
    files = fill(folder, 0, 10, LARGE)
    fill(folder / "deeper", 10)
    total = sum(map(len, files.values()))
    job = f"{coordinator}/jobs/ocr/in"
    assert await carry("s3://lines/ocr/in", job, access) == Copied(files=3, bytes=total, skipped=0)
    assert read(access.base / "volume/jobs/ocr/in") == files
    assert (await carry("s3://lines/ocr/in/", job, access)).skipped == 3
    # And out again: results lie where results lie.
    (access.base / "volume/jobs/ocr/in").rename(access.base / "volume/jobs/ocr/out")
    out = f"{coordinator}/jobs/ocr/out"
    assert (await carry(out, "s3://lines/ocr/results", access)).skipped == 0
    assert read(s3.folder / "ocr/results") == files
    assert (await carry(out, "s3://lines/ocr/results", access)).skipped == 3
    # One object alone; and its checksum came with it.
    assert (await carry("s3://lines/ocr/results/001.npz", "one", access)).files == 1
    assert read(access.base / "one") == {"001.npz": files["001.npz"]}


async def test_an_object_that_breaks_off_does_not_appear(
    s3: S3, access: Access, tmp_path: Path
) -> None:
    fill(tmp_path / "in", LARGE)
    source = Shaky("in", tmp_path / "in")
    source.breaks = 100
    target = access.target("s3://lines/broken")
    with pytest.raises(TransferBroken, match="the line went dead"):
        await copy(source, target, pause_seconds=0)
    assert await target.standing() == {}


async def test_what_is_not_in_the_bucket_is_refused(
    s3: S3, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TransferRefused, match="s3://lines/nothing: there are no files"):
        await carry("s3://lines/nothing", "out", access)
    with pytest.raises(TransferRefused, match="there is no such object or bucket"):
        await carry("s3://no-such-bucket/in", "out", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(TransferRefused, match="the credentials do not open it"):
        await carry("s3://lines/in", "out", access)


async def test_a_file_of_the_web_is_read_on_after_a_break(web: Web, access: Access) -> None:
    content = web.files["/lines/a b.npz"] = os.urandom(5 << 20)
    web.break_after, web.breaks = 2 << 20, 2
    copied = await carry(f"{web.url}/lines/a%20b.npz?signature=1", "out", access)
    assert copied == Copied(files=1, bytes=len(content), skipped=0)
    assert read(access.base / "out") == {"a b.npz": content}
    asked, *wanted = (each for path, each in web.asked if path == "/lines/a%20b.npz?signature=1")
    assert (asked, wanted[0], len(wanted)) == ("bytes=0-0", None, 3)
    starts = [int(str(each).removeprefix("bytes=")[:-1]) for each in wanted[1:]]
    # What was on the wire when it broke may be lost; what came is not asked for again.
    assert 0 < starts[0] <= 2 << 20
    assert starts[0] < starts[1] <= 4 << 20
    assert (await carry(f"{web.url}/lines/a%20b.npz?signature=1", "out", access)).skipped == 1


async def test_a_server_without_ranges_is_read_from_its_start(web: Web, access: Access) -> None:
    content = web.files["/a.npz"] = os.urandom(3 << 20)
    web.ranges, web.break_after, web.breaks = False, 1 << 20, 2
    # The first break cuts the request that asks for the size: nothing of it is read anyway.
    await carry(f"{web.url}/a.npz", "out", access)
    assert read(access.base / "out") == {"a.npz": content}


@pytest.mark.parametrize(
    ("statuses", "error"),
    [
        ([404], TransferRefused),
        ([403], TransferRefused),
        ([503], TransferBroken),
        ([206, 410], TransferRefused),
        ([206, *[500] * 4], TransferBroken),
    ],
)
async def test_statuses_say_whether_to_try_again(
    web: Web, access: Access, statuses: list[int], error: type[Exception]
) -> None:
    web.files["/a.npz"] = b"content"
    known: list[Entry] = []

    class Known(WebSource):
        async def entries(self) -> Sequence[Entry]:
            return known or await WebSource.entries(self)

    source = Known("a.npz", f"{web.url}/a.npz", open_session())
    try:
        if statuses[0] == 206:  # the first answer is good, it is the second that is not
            known.extend(await source.entries())
        web.statuses = [status for status in statuses if status != 206]
        with pytest.raises(error, match=f"the server answers {statuses[-1]}"):
            await copy(source, access.target("out"), pause_seconds=0)
    finally:
        await source.close()


async def test_credentials_do_not_follow_to_another_host(
    web: Web, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_BEARER_TOKEN", "secret")
    web.files["/real.npz"] = b"content"
    web.redirects["/a.npz"] = web.url.replace("127.0.0.1", "localhost") + "/real.npz"
    await carry(f"{web.url}/a.npz", "out", access)
    sent = {
        (headers["Host"].partition(":")[0], headers.get("Authorization")) for headers in web.headers
    }
    assert sent == {("127.0.0.1", "Bearer secret"), ("localhost", None)}


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("empty", "out", "empty: there are no files"),
        ("missing", "out", "there is no"),
        ("in", "https://example.com/x", "nothing can be written to https://"),
        ("http://example.com/x", "out", "is not encrypted"),
        ("https://me:secret@example.com/x", "out", "credentials are no part of an address"),
        ("s3:///x", "out", "write s3://BUCKET/PREFIX"),
        ("in", "coordinator://host/jobs/a/in", "write coordinator://HOST:PORT/jobs/JOB/in"),
        ("oci://nothing", "out", "write oci://HOST/NAME:TAG"),
    ],
)
async def test_what_cannot_be_is_refused(
    access: Access, tmp_path: Path, source: str, target: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "in", 1)
    with pytest.raises((TransferRefused, AddressRefused)) as caught:
        await carry(source, target, access)
    assert said in str(caught.value)


async def test_a_claim_is_not_left_by_a_link(access: Access, tmp_path: Path) -> None:
    fill(tmp_path / "claim/in", 1)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "claim/in/b.npz").symlink_to(tmp_path / "secret")
    with pytest.raises(TransferRefused, match=r"a link of b.npz leads out of the claim"):
        await carry("pvc://lines/in", "out", access)
    with pytest.raises(AddressRefused, match="say --volume other=DIR"):
        await carry("pvc://other/in", "out", access)


async def test_a_coordinator_that_is_away_may_come_back(access: Access, tmp_path: Path) -> None:
    fill(tmp_path / "in", 1)
    with pytest.raises(TransferBroken):
        await carry("in", "127.0.0.1:1/jobs/ocr/in", access)
