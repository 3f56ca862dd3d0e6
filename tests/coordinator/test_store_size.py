"""A store keeps itself within its own size, whatever its disk has: a storage class may enforce
none."""

import asyncio
import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from coordinator.scripted import connected
from coordinator.world import World, running_world
from shoal_coordinator.server import server
from shoal_coordinator.storage import volume_space
from shoal_coordinator.storage.fragment_uses import UNUSED_SECONDS
from shoal_coordinator.storage.store_size import ToldSize, read_size
from shoal_coordinator.storage.usage import Usage, taken_bytes
from shoal_coordinator.storage.volume import FORGOTTEN_SECONDS, Volume
from shoal_coordinator.storage.volume_paths import FragmentPath, JobPath
from shoal_coordinator.storage.volume_values import NoRoom, StoredFile
from shoal_protocol.digests import Digest, digest_of
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.manifest import FileEntry, format_manifest
from shoal_protocol.v1 import coordinator_pb2 as api

MIB = 1 << 20
MODEL_BYTES = 4 * MIB
SIZE = 32 * MIB
"""An eighth of it is kept free, so seven models fit in beside what is small."""


class Store(Volume):
    """A volume whose size may change, with whole files put into it at once."""

    def __init__(self, root: Path, size: int = SIZE) -> None:
        super().__init__(root, lambda: self.most)
        self.root, self.most = root, size
        self.sweep()

    def put(self, path: FragmentPath | JobPath, content: bytes, sent: float = 1.0) -> None:
        """Send a file that is not there, or so much of it."""
        upload = self.begin(path, len(content), hashlib.sha256(content).hexdigest(), "")
        if isinstance(upload, StoredFile):
            return
        try:
            upload.open()
            upload.part.append(content[upload.part.offset : round(sent * len(content))])
            if sent == 1.0:
                upload.finish()
        finally:
            upload.close()

    def put_fragment(self, seed: int, shared: bytes = b"", sent: float = 1.0) -> Digest:
        contents = {"model.onnx": bytes([seed]) * MODEL_BYTES}
        if shared:
            contents["shared.0.bin"] = shared
        files = {
            name: FileEntry(digest=digest_of(each), size_bytes=len(each))
            for name, each in contents.items()
        }
        manifest = format_manifest(files, {})
        digest = digest_of(manifest)
        self.put(FragmentPath(digest, "fragment.json"), manifest)
        self.put(FragmentPath(digest, "model.onnx"), contents["model.onnx"], sent)
        if shared:
            self.put(FragmentPath(digest, "shared.0.bin"), shared)
        return digest

    def age(self, *digests: Digest) -> None:
        """Let nobody have used them for two hours."""
        for digest in digests:
            folder = FragmentStore(self.root).folder(digest)
            then = folder.stat().st_mtime - 2 * UNUSED_SECONDS
            os.utime(folder, (then, then))
            self.uses._used.pop(digest, None)

    def fragments(self) -> set[Digest]:
        return {Digest(f"sha256:{each.name}") for each in self.list("fragments")}

    def counts_right(self) -> bool:
        """Whether what is counted is what a look at everything finds."""
        fresh = Usage(self.root)
        fresh.look_at_all()
        return self.space.used_bytes() == fresh.total_bytes


def test_what_has_no_room_in_the_size_is_refused_with_need_and_have(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(6):
        store.put_fragment(seed)
    assert store.counts_right()
    with pytest.raises(NoRoom) as refused:
        store.put(JobPath("a", "in", "0.npz"), b"x" * (8 * MIB))
    assert "would need 8 MiB, 3.9 MiB of 28 MiB are free" in str(refused.value)
    assert "coordinator.storage.size" in str(refused.value)
    assert len(store.fragments()) == 6, "each waits for its job"


def test_unused_fragments_leave_before_the_size_is_passed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = [store.put_fragment(seed) for seed in range(6)]
    store.age(*made[:2])
    store.put(JobPath("a", "in", "0.npz"), b"x" * (8 * MIB))
    assert made[2:] == [each for each in made if each in store.fragments()]
    assert store.space.used_bytes() <= SIZE
    assert store.counts_right()


def test_a_file_that_fragments_share_counts_once(tmp_path: Path) -> None:
    store, shared = Store(tmp_path), os.urandom(4 * MIB)
    first, second = (store.put_fragment(seed, shared) for seed in (1, 2))
    assert 12 * MIB <= store.space.used_bytes() < 13 * MIB
    store.in_use = lambda: {second}
    store.age(first, second)
    assert store.room().removable_bytes < 5 * MIB, "what they share stays for the second"
    store.in_use = frozenset
    assert store.room().removable_bytes > 12 * MIB
    assert store.room().unused == {first, second}
    store.put(JobPath("a", "in", "0.npz"), b"x" * (27 * MIB))
    assert store.fragments() == set()
    assert store.counts_right()


def test_what_is_there_counts_after_a_restart_and_after_a_crash_in_a_write(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_fragment(1)
    store.put(JobPath("a", "in", "0.npz"), b"x" * MIB)
    store.put_fragment(2, sent=0.5)
    store.put(JobPath("a", "in", "1.npz"), b"y" * (4 * MIB), sent=0.5)
    removed = tmp_path / "incoming" / "removed-0000"
    removed.mkdir()
    (removed / "weights.bin").write_bytes(b"z" * MIB)
    (tmp_path / "jobs/a/out").mkdir()
    (tmp_path / "jobs/a/out/0.npz").write_bytes(b"r" * MIB)
    again = Store(tmp_path)
    assert 10 * MIB <= again.space.used_bytes() < 10.5 * MIB
    assert not removed.exists(), "nobody would remove it for a day"
    assert again.counts_right()
    again.put(JobPath("a", "in", "1.npz"), b"y" * (4 * MIB))
    again.put_fragment(2)
    assert 14 * MIB <= again.space.used_bytes() < 14.5 * MIB
    assert again.counts_right()
    again.remove_job("a")
    assert 8 * MIB <= again.space.used_bytes() < 8.5 * MIB
    assert again.counts_right()


def test_an_open_upload_counts_as_a_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    upload = store.begin(JobPath("a", "in", "0.npz"), 20 * MIB, "", "1")
    assert not isinstance(upload, StoredFile)
    upload.open()
    upload.part.append(b"x" * MIB)
    store.space.look_at_all()
    assert 20 * MIB <= store.space.used_bytes() < 20.5 * MIB
    with pytest.raises(NoRoom):
        store.put(JobPath("a", "in", "1.npz"), b"x" * (10 * MIB))
    upload.close()
    assert store.space.used_bytes() < 2 * MIB
    store.put(JobPath("a", "in", "1.npz"), b"x" * (10 * MIB))


def test_a_grown_size_is_adopted_and_a_smaller_one_too(tmp_path: Path) -> None:
    file = tmp_path / "size"
    file.write_text("32Mi\n")
    told = ToldSize(file, seconds=0.0)
    store = Volume(tmp_path / "store", told)
    assert store.space.sizes()[0] == 28 * MIB
    file.write_text(str(64 * MIB))
    assert store.space.sizes()[0] == 56 * MIB
    for nonsense in ("", "7", "plenty"):
        file.write_text(nonsense)
        assert told() == 64 * MIB, "as it was"
    file.unlink()
    assert told() == 64 * MIB
    with pytest.raises(ValueError, match="less than 1 MiB"):
        read_size("5")


def test_a_store_that_is_larger_than_it_may_be_makes_room_by_itself(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = [store.put_fragment(seed) for seed in range(6)]
    store.age(*made)
    store.in_use = lambda: set(made[4:])
    smaller = Store(tmp_path, 16 * MIB)
    smaller.in_use = store.in_use
    smaller.look_after([])
    assert len(smaller.fragments()) == 3
    assert smaller.fragments() > set(made[4:])
    assert smaller.space.used_bytes() <= 14 * MIB


def test_who_makes_room_by_hand_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_space, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(volume_space, "_LEAST_SHARE", 0)
    store = Store(tmp_path)
    store.put(JobPath("a", "in", "0.npz"), b"x" * (20 * MIB))
    (tmp_path / "jobs/a/in/0.npz").unlink()
    store.put(JobPath("b", "in", "0.npz"), b"x" * (20 * MIB))
    assert store.counts_right()


def test_no_write_looks_at_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    looks: list[str] = []
    monkeypatch.setattr(Usage, "look_at_all", lambda _: looks.append("all"))
    for number in range(20):
        store.put(JobPath("a", "in", f"{number}.npz"), b"x" * 1000)
    store.put_fragment(1)
    take = store.for_results(tmp_path / "jobs/a/out")
    assert take is not None
    take(MIB)
    assert looks == []
    assert store.space.used_bytes() >= 5 * MIB + 20 * 1000


def test_small_files_count_with_the_blocks_that_they_take(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / str(number)).write_bytes(b"x")
    one = taken_bytes(tmp_path / "0")
    assert taken_bytes(tmp_path) >= 100 * one
    if one == 0:
        pytest.skip("NO BLOCKS: this file system keeps small files beside their names")


def test_results_make_room_and_are_refused_as_by_a_full_disk(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = [store.put_fragment(seed) for seed in range(6)]
    store.age(made[0])
    take = store.for_results(tmp_path / "jobs/a/out")
    assert take is not None
    take(7 * MIB)
    assert store.fragments() == set(made[1:])
    with pytest.raises(OSError, match=r"would need 4 MiB, .* of 28 MiB are free") as refused:
        take(4 * MIB)
    assert refused.value.errno == errno.EDQUOT
    take(-7 * MIB)
    take(4 * MIB)
    assert store.for_results(tmp_path.parent / "elsewhere") is None


async def free_bytes(world: World) -> int:
    """As the coordinator says it, beside its fragments."""
    answer = await world.stub.ListFragments(api.ListFragmentsRequest(), timeout=60)
    assert answer.HasField("free_bytes")
    return answer.free_bytes


async def test_a_job_stops_where_its_results_would_pass_the_size_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.05)
    size = [8 * MIB]
    async with running_world(tmp_path, store_size=lambda: size[0]) as world:
        job = world.folder / "store" / "jobs" / "job"
        (job / "in").mkdir(parents=True)
        rows = np.random.default_rng(0).normal(size=(40, 1, 100)).astype(np.float32)
        np.savez(job / "in" / "0.npz", x=rows)
        gate = asyncio.Semaphore(0)
        async with connected(world.device("a", gate=gate)):
            await world.submit(inputs_uri="", outputs_uri="", parallelism=2)
            await world.until(lambda status: status.state == api.JobStatus.RUNNING)
            (job / "in" / "more").write_bytes(b"x" * (8 * MIB))
            async with asyncio.timeout(60):
                while await free_bytes(world) > 0:
                    await asyncio.sleep(0.05)
            for _ in range(200):
                gate.release()
            full = await world.ended()
            assert (full.state, full.reason) == (api.JobStatus.FAILED, "ResultsUnwritten")
            assert "of 7 MiB are free on the coordinator's volume" in full.message
            assert full.failed == 0, "the items are sound"
            size[0] = 64 * MIB
            await world.submit(inputs_uri="", outputs_uri="")
            last = await world.ended()
        assert (last.state, last.succeeded) == (api.JobStatus.COMPLETE, 40)


def forget(store: Store, path: JobPath | FragmentPath) -> Path:
    """Let nobody have gone on with what came of a file for more than a day."""
    kind, owner, _ = str(path).split("/", 2)
    folder = store.root / "incoming" / kind / owner
    for file in folder.iterdir():
        then = file.stat().st_mtime - FORGOTTEN_SECONDS - 1
        os.utime(file, (then, then))
    return folder


def test_uploads_that_were_abandoned_long_ago_give_way_to_what_needs_room(tmp_path: Path) -> None:
    store, content = Store(tmp_path), os.urandom(12 * MIB)
    old, new, other = (JobPath(name, "in", "a.npz") for name in ("old", "new", "other"))
    store.put(old, content, sent=0.9)
    store.put(new, content, sent=0.9)
    with pytest.raises(NoRoom):
        store.put(other, bytes(8 * MIB))
    left = forget(store, old)
    store.put(other, bytes(8 * MIB))
    assert not left.exists()
    store.put(new, content)
    assert store.counts_right(), "what went is not counted any more"


def test_an_upload_that_goes_on_after_a_long_time_is_not_abandoned(tmp_path: Path) -> None:
    store, path, content = Store(tmp_path), JobPath("job", "in", "a.npz"), os.urandom(14 * MIB)
    store.put(path, content, sent=0.9)
    forget(store, path)
    upload = store.begin(path, len(content), hashlib.sha256(content).hexdigest(), "")
    assert not isinstance(upload, StoredFile)
    upload.open()
    with pytest.raises(NoRoom):
        store.put(JobPath("other", "in", "a.npz"), bytes(20 * MIB))
    assert upload.part.offset == round(0.9 * len(content))
    upload.part.append(content[upload.part.offset :])
    upload.finish()
    upload.close()
    assert store.describe(path).size_bytes == len(content)
