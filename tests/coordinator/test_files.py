"""Files on the coordinator's volume: whole or not there, resumed, checked, bounded."""

import asyncio
import contextlib
import hashlib
import os
import threading
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scripted import connected, put_model
from coordinator.world import World, refusal
from shoal_coordinator.storage.volume import Upload, Volume
from shoal_coordinator.storage.volume_paths import FragmentPath, JobPath, PathRefused, parse_path
from shoal_coordinator.storage.volume_values import NoRoom
from shoal_protocol import transfers
from shoal_protocol.digests import Digest, hexadecimal
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import files_pb2 as pb
from shoal_protocol.v1.files_pb2_grpc import FilesStub
from troubled_disk import no_descriptors, slow_disk

CONTENT = os.urandom(1_000_000)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def send(  # noqa: PLR0913 - what an upload can be
    world: World,
    path: str,
    content: bytes,
    *,
    break_at: int | None = None,
    announced: str | None = None,
    end: str = "",
    version: str = "",
) -> tuple[int | None, pb.FileDescription | None]:
    """Put a file, or break off; the offset that was answered, and what is stored."""
    checksum = sha256(content) if announced is None else announced
    call = FilesStub(world.channel).Put(timeout=60)
    header = pb.PutHeader(path=path, bytes=len(content), sha256=checksum, version=version)
    await call.write(pb.PutRequest(header=header))
    answer = await call.read()
    if isinstance(answer, pb.PutAnswer) and answer.WhichOneof("message") == "stored":
        return None, answer.stored
    if not isinstance(answer, pb.PutAnswer):
        await call  # type: ignore[misc] # raises what the server says; the stubs miss it
        raise AssertionError("neither an answer nor an error")
    offset = answer.offset
    stop = len(content) if break_at is None else break_at
    for start in range(offset, stop, 1 << 16):
        await call.write(pb.PutRequest(piece=content[start : min(start + (1 << 16), stop)]))
    if break_at is not None:
        await call.done_writing()
        code, _ = await refusal(call.read())
        assert code == grpc.StatusCode.DATA_LOSS
        return offset, None
    await call.write(pb.PutRequest(end=pb.PutEnd(sha256=end)))
    answer = await call.read()
    assert isinstance(answer, pb.PutAnswer)
    assert answer.WhichOneof("message") == "stored"
    return offset, answer.stored


async def fetch(world: World, path: str, offset: int = 0) -> bytes:
    request = pb.FetchFileRequest(path=path, offset=offset)
    pieces = [piece async for piece in FilesStub(world.channel).Fetch(request, timeout=60)]
    assert pieces[0].bytes
    return b"".join(piece.piece for piece in pieces)


async def listed(world: World, folder: str) -> list[tuple[str, int]]:
    request = pb.ListFilesRequest(folder=folder)
    call = FilesStub(world.channel).ListFiles(request, timeout=60)
    return [(each.name, each.bytes) async for each in call]


async def test_a_file_is_put_fetched_listed_and_described(world: World) -> None:
    offset, stored = await send(world, "jobs/ocr/in/a b.npz", CONTENT)
    expected = pb.FileDescription(name="a b.npz", bytes=len(CONTENT), sha256=sha256(CONTENT))
    assert (offset, stored) == (0, expected)
    assert await listed(world, "jobs/ocr/in") == [("a b.npz", len(CONTENT))]
    assert await listed(world, "jobs/ocr/out") == []
    assert await fetch(world, "jobs/ocr/in/a b.npz") == CONTENT
    assert await fetch(world, "jobs/ocr/in/a b.npz", 999_999) == CONTENT[-1:]
    request = pb.DescribeFileRequest(path="jobs/ocr/in/a b.npz")
    assert await FilesStub(world.channel).DescribeFile(request, timeout=60) == expected
    assert await send(world, "jobs/ocr/in/a b.npz", CONTENT) == (None, expected)
    # Another content takes its place, as long as no job reads it.
    await send(world, "jobs/ocr/in/a b.npz", b"another")
    assert await fetch(world, "jobs/ocr/in/a b.npz") == b"another"


async def test_an_empty_file_stands_too(world: World) -> None:
    _, stored = await send(world, "jobs/ocr/in/none", b"")
    assert stored is not None
    assert stored.bytes == 0


@pytest.mark.parametrize("version", ["", "etag-1"])
async def test_a_broken_upload_goes_on_where_it_was_and_shows_nothing_before(
    world: World, version: str
) -> None:
    announced = "" if version else None
    path = "jobs/ocr/in/a.npz"
    await send(world, path, CONTENT, break_at=700_000, announced=announced, version=version)
    assert await listed(world, "jobs/ocr/in") == []
    code, _ = await refusal(fetch(world, path))
    assert code == grpc.StatusCode.NOT_FOUND
    offset, _ = await send(world, path, CONTENT, announced=announced, version=version)
    assert offset == 700_000
    assert await fetch(world, path) == CONTENT


async def test_what_came_of_another_content_is_not_gone_on_with(world: World) -> None:
    path = "jobs/ocr/in/a.npz"
    await send(world, path, CONTENT, break_at=700_000, announced="", version="etag-1")
    offset, _ = await send(world, path, CONTENT[::-1], announced="", version="etag-2")
    assert offset == 0
    await send(world, "jobs/ocr/in/b.npz", CONTENT, break_at=700_000, announced="")
    offset, _ = await send(world, "jobs/ocr/in/b.npz", CONTENT, announced="")
    assert offset == 0
    assert await fetch(world, path) == CONTENT[::-1]


async def test_wrong_bytes_are_thrown_away(world: World) -> None:
    path = "jobs/ocr/in/a.npz"
    for options in ({"announced": sha256(b"x")}, {"announced": "", "end": sha256(b"x")}):
        code, text = await refusal(send(world, path, CONTENT, **options))  # type: ignore[arg-type]
        assert code == grpc.StatusCode.DATA_LOSS
        assert "arrived with checksum" in text
    assert await listed(world, "jobs/ocr/in") == []
    assert await send(world, path, CONTENT) != (None, None)


async def test_a_fragment_is_seen_when_all_of_it_is_there(world: World, tmp_path: Path) -> None:
    document = put_model(tmp_path / "elsewhere")
    hexadecimal = document.fragments[1].digest.removeprefix("sha256:")
    source = tmp_path / "elsewhere/fragments" / hexadecimal
    standing = world.folder / "store/fragments" / hexadecimal
    os.rename(standing, tmp_path / "away")
    path = f"fragments/{hexadecimal}"

    code, text = await refusal(
        send(world, f"{path}/model.onnx", (source / "model.onnx").read_bytes())
    )
    assert (code, text) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"put fragment.json of {hexadecimal[:12]} first",
    )
    await send(world, f"{path}/fragment.json", (source / "fragment.json").read_bytes())
    assert not standing.exists()
    code, text = await refusal(send(world, f"{path}/model.onnx", b"something else"))
    assert code == grpc.StatusCode.ALREADY_EXISTS
    code, text = await refusal(send(world, f"{path}/weights.bin", b"something else"))
    assert (code, text.split(" has ")[1]) == (grpc.StatusCode.INVALID_ARGUMENT, "no weights.bin")
    content = (source / "model.onnx").read_bytes()
    await send(world, f"{path}/model.onnx", content, break_at=10, announced="")
    assert hexadecimal not in dict(await listed(world, "fragments"))
    offset, _ = await send(world, f"{path}/model.onnx", content, announced="")
    assert offset == 10
    assert hexadecimal in dict(await listed(world, "fragments"))
    answer = await world.stub.ListFragments(api.ListFragmentsRequest(), timeout=60)
    assert f"sha256:{hexadecimal}" in answer.digests
    offset, stored = await send(world, f"{path}/model.onnx", content)
    assert (offset, stored is not None) == (None, True)
    assert not list((world.folder / "store/incoming/fragments").iterdir())


async def test_a_damaged_fragment_is_replaced(world: World) -> None:
    hexadecimal = world.document.fragments[0].digest.removeprefix("sha256:")
    folder = world.folder / "store/fragments" / hexadecimal
    manifest, content = ((folder / name).read_bytes() for name in ("fragment.json", "model.onnx"))
    (folder / "model.onnx").write_bytes(content[:-1])
    await send(world, f"fragments/{hexadecimal}/fragment.json", manifest)
    await send(world, f"fragments/{hexadecimal}/model.onnx", content)
    assert (folder / "model.onnx").read_bytes() == content


async def test_a_manifest_that_is_none_is_thrown_away(world: World) -> None:
    content = b"this is no manifest"
    code, _ = await refusal(send(world, f"fragments/{sha256(content)}/fragment.json", content))
    assert code == grpc.StatusCode.DATA_LOSS
    assert sha256(content) not in dict(await listed(world, "fragments"))


async def test_more_than_the_disk_has_is_refused_before_a_byte_is_sent(world: World) -> None:
    call = FilesStub(world.channel).Put(timeout=60)
    await call.write(
        pb.PutRequest(header=pb.PutHeader(path="jobs/ocr/in/a.npz", bytes=3 << 40, version="1"))
    )
    code, text = await refusal(call.read())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert text.startswith("would need 3 TiB, ")
    assert " are free on the coordinator's volume; make room there" in text


async def test_the_inputs_of_a_job_that_runs_stay_as_they_are(world: World) -> None:
    world.inputs(2)
    for path in sorted((world.folder / "in").iterdir()):
        await send(world, f"jobs/job/in/{path.name}", path.read_bytes())
    content = (world.folder / "in/000.npz").read_bytes()
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(inputs_uri="", outputs_uri="")
        for name in ("000.npz", "new.npz"):
            code, text = await refusal(send(world, f"jobs/job/in/{name}", b"other"))
            assert (code, text) == (
                grpc.StatusCode.ALREADY_EXISTS,
                "job job runs; its inputs stay as they are",
            )
        offset, stored = await send(world, "jobs/job/in/000.npz", content)
        assert (offset, stored is not None) == (None, True)
        for _ in range(6):
            gate.release()
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    assert [name for name, _ in await listed(world, "jobs/job/out")] == ["000.npz"]
    assert len(await fetch(world, "jobs/job/out/000.npz")) > 0
    code, text = await refusal(send(world, "jobs/job/out/000.npz", b"forged"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT


async def test_two_that_put_one_file_do_not_mix(world: World) -> None:
    path = "jobs/ocr/in/a.npz"
    answers = await asyncio.gather(*(send(world, path, CONTENT) for _ in range(4)))
    assert sum(offset == 0 for offset, _ in answers) == 1
    assert await fetch(world, path) == CONTENT


@pytest.mark.parametrize(
    "path",
    [
        "jobs/ocr/in/../../../state/lock",
        "jobs/../in/a.npz",
        "jobs/ocr/in/.hidden",
        "jobs/ocr/in/a\nb",
        "jobs/ocr/in/" + "a" * 256,
        "jobs/ocr/.shoal/a",
        "jobs/ocr/in/a/b",
        "/jobs/ocr/in/a",
        "state/jobs/ocr.json",
        "fragments/" + "0" * 64 + "/other.bin",
        "fragments/" + "G" * 64 + "/model.onnx",
        "",
    ],
)
async def test_what_is_no_path_is_refused(world: World, path: str) -> None:
    for call in (send(world, path, b"x"), fetch(world, path)):
        code, _ = await refusal(call)
        assert code == grpc.StatusCode.INVALID_ARGUMENT


@given(st.text() | st.from_regex(r"\A(jobs|fragments)/[^/]*/(in|out|\.\.)/[^/]*\Z"))
def test_no_path_leads_out_of_the_volume(text: str) -> None:
    try:
        path = parse_path(text)
    except PathRefused:
        return
    parts: tuple[str, ...]
    match path:
        case JobPath():
            parts = ("jobs", path.job, path.folder, path.name)
        case FragmentPath():
            parts = ("fragments", path.digest, path.name)
    place = Path("/volume").joinpath(*parts)
    assert "\0" not in str(place)
    assert Path(os.path.normpath(place)) == place
    assert len(place.parts) == 2 + len(parts)


def test_a_disk_that_fills_up_on_the_way_keeps_nothing(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    upload = volume.begin(JobPath("a", "in", "b"), 1000, "", "1")
    assert isinstance(upload, Upload)
    upload.open()
    assert volume.space.promised_bytes == 1000
    upload.part.append(b"x" * 10)
    assert upload.part._descriptor is not None
    full = os.open("/dev/full", os.O_WRONLY | os.O_APPEND)
    os.dup2(full, upload.part._descriptor)
    os.close(full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        upload.part.append(b"x" * 10)
    assert isinstance(upload.failed(caught.value), NoRoom)
    upload.close()
    assert volume.space.promised_bytes == 0
    assert not upload.part.path.exists()


async def test_the_event_loop_notes_uses_while_the_disk_is_slow(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are submitted while uploads are synced: also those of another fragment, and of files."""
    digest = world.document.fragments[0].digest
    folder = world.folder / "store/fragments" / hexadecimal(digest)
    manifest = (folder / "fragment.json").read_bytes()
    (folder / "model.onnx").unlink()
    world.inputs(1)
    with slow_disk(monkeypatch) as disk:
        sending = asyncio.create_task(
            send(world, f"fragments/{hexadecimal(digest)}/fragment.json", manifest)
        )
        await asyncio.to_thread(disk.entered.wait)
        code, text = await refusal(world.submit())
        assert (code, "lacks fragment 0" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        assert not disk.released.is_set(), "the event loop waited for the disk"
    await sending


async def test_the_event_loop_notes_uses_while_a_fragment_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, released, left = threading.Event(), threading.Event(), threading.Event()
    volume = Volume(world.folder / "store")

    def slow(store: FragmentStore, digest: Digest) -> None:
        entered.set()
        released.wait(20)
        left.set()

    monkeypatch.setattr(FragmentStore, "verify", slow)
    digest = world.document.fragments[0].digest
    reading = asyncio.create_task(asyncio.to_thread(volume.discard_damaged, digest))
    await asyncio.to_thread(entered.wait)
    volume.serve([digest])
    assert not left.is_set(), "the event loop waited for the disk"
    released.set()
    assert await reading is None


async def test_silent_uploads_give_way_to_those_that_send(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "STALL_SECONDS", 1.0)
    calls = [FilesStub(world.channel).Put(timeout=60) for _ in range(40)]
    for number, call in enumerate(calls):
        header = pb.PutHeader(path=f"jobs/silent/in/{number}", bytes=1 << 20, version="1")
        await call.write(pb.PutRequest(header=header))
    _, stored = await send(world, "jobs/ocr/in/a.npz", CONTENT)
    assert stored is not None
    for call in calls:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert "fewer than" in (await call.details())


async def test_an_upload_that_drips_is_given_up_and_resumed_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "STALL_SECONDS", 1.0)
    call = FilesStub(world.channel).Put(timeout=60)
    header = pb.PutHeader(path="jobs/ocr/in/a.npz", bytes=len(CONTENT), sha256=sha256(CONTENT))
    await call.write(pb.PutRequest(header=header))
    await call.read()
    sent = 0
    while not call.done():
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(pb.PutRequest(piece=CONTENT[sent : sent + 1]))
        sent += 1
        await asyncio.sleep(0.05)
    assert "fewer than" in (await call.details())
    offset, stored = await send(world, "jobs/ocr/in/a.npz", CONTENT)
    assert offset is not None
    assert 0 < offset <= sent
    assert stored is not None


async def test_a_coordinator_out_of_file_descriptors_says_so_and_not_that_a_file_is_missing(
    world: World,
) -> None:
    volume = Volume(world.folder / "store")
    digest = world.document.fragments[0].digest
    with no_descriptors():
        for act in (
            lambda: volume.open(FragmentPath(digest, "model.onnx")),
            lambda: FragmentStore(world.folder / "store").has(digest),
            lambda: FragmentStore(world.folder / "store").open(digest, "model.onnx"),
            lambda: volume.begin(FragmentPath(digest, "model.onnx"), 1, "", ""),
        ):
            with pytest.raises(OSError, match="Too many open files"):
                act()


def test_what_was_left_long_ago_is_swept(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    for name in ("old", "new"):
        upload = volume.begin(JobPath(name, "in", "a.npz"), 10, "", "1")
        assert isinstance(upload, Upload)
        upload.open()
        upload.part.append(b"x")
        upload.close()
        if name == "old":
            os.utime(upload.part.path, (1, 1))
    volume.sweep()
    assert sorted(path.name for path in (tmp_path / "incoming/jobs").iterdir()) == ["new"]
