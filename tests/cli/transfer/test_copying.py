"""Files are carried whole, once, and on from where it broke off."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli.transfer.carrying import LARGE, Shaky, carry, fill, read
from cli.transfer.conftest import volume_settings
from cli.transfer.servers import S3
from shoal_cli.transfer.addresses import Access, AddressRefused
from shoal_cli.transfer.copying import Copied, Progress, copy
from shoal_cli.transfer.folders import Folder
from shoal_cli.transfer.places import Entry, TransferBroken, TransferRefused
from shoal_cluster.ports import lasting_port
from shoal_coordinator.server import serving
from shoal_protocol import coordinator_client


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
    # The second time, with the scheme left away, all of it exists.
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

    copied = await copy(source, target, note)
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
        await copy(source, access.target(str(tmp_path / "out")))
    assert source.offsets == (0, 2 << 20, 4 << 20, 6 << 20)
    assert [path.name[0] for path in (tmp_path / "out").iterdir()] == ["."]
    another = Shaky("in", tmp_path / "in")
    another.breaks = 0
    await copy(another, access.target(str(tmp_path / "out")))
    assert another.offsets == (8 << 20,)
    assert read(tmp_path / "out") == files


async def test_a_file_that_grew_meanwhile_is_not_taken(access: Access, tmp_path: Path) -> None:
    fill(tmp_path / "in", 1000)

    class Growing(Folder):
        async def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
            yield b"x" * 2000

    target = access.target(str(tmp_path / "out"))
    with pytest.raises(TransferBroken, match="ends at 2000 of the announced 1000 bytes"):
        await copy(Growing("in", tmp_path / "in"), target)
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
        await copy(source, target)
    assert await target.existing() == {}


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


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("empty", "out", "empty: there are no files"),
        ("missing", "out", "there is no"),
        ("in", "oci://example.com/x", "nothing can be written to oci://"),
        ("in", "http://example.com/x", "is not encrypted"),
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


async def test_a_coordinator_that_cannot_be_reached_yet_is_waited_for(
    access: Access, tmp_path: Path
) -> None:
    """A new pod may be let through only when the network knows of it."""
    files = fill(tmp_path / "claim/in", 5000)
    port = lasting_port()
    carrying = asyncio.create_task(
        carry("pvc://lines/in", f"127.0.0.1:{port}/jobs/late/in", access)
    )
    await asyncio.sleep(0.5)  # it has been refused by now
    assert not carrying.done()
    async with serving(volume_settings(tmp_path, port)):
        assert (await carrying).files == 1
    assert read(tmp_path / "volume/jobs/late/in") == files


async def test_a_coordinator_that_is_away_may_come_back(
    access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "REACH_SECONDS", 0.1)
    fill(tmp_path / "in", 1)
    with pytest.raises(TransferBroken):
        await carry("in", "127.0.0.1:1/jobs/ocr/in", access)
