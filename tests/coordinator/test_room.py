"""Fragments give way to what needs their room, unless somebody uses them."""

import hashlib
import os
from pathlib import Path

import pytest

from coordinator.world import World
from shoal_coordinator.storage.fragment_uses import SETTLED_SECONDS, UNUSED_SECONDS
from shoal_coordinator.storage.volume import Volume
from shoal_coordinator.storage.volume_paths import FragmentPath, JobPath
from shoal_coordinator.storage.volume_values import NoRoom, StoredFile
from shoal_protocol.digests import Digest, digest_of
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.manifest import FileEntry, format_manifest
from shoal_protocol.v1 import coordinator_pb2 as api

MODEL_BYTES = 100_000


class Disk(Volume):
    """A volume on a disk with room for so much, whatever the machine's is."""

    def __init__(self, root: Path, size_bytes: int) -> None:
        super().__init__(root)
        self.root = root
        self.size_bytes = size_bytes

    def spare_bytes(self) -> int:
        files = (path.stat() for path in self.root.rglob("*") if path.is_file())
        used = sum({each.st_ino: each.st_size for each in files}.values())
        return self.size_bytes - used - self.space.promised_bytes

    def put(
        self, path: FragmentPath | JobPath, content: bytes, *, broken_off: bool = False
    ) -> bool:
        """Whether the file had to be sent."""
        upload = self.begin(path, len(content), hashlib.sha256(content).hexdigest(), "")
        if isinstance(upload, StoredFile):
            return False
        try:
            upload.open()
            if broken_off:
                upload.part.append(content[:-1])
                raise RuntimeError("broken off")
            upload.part.append(content)
            upload.finish()
        finally:
            upload.close()
        return True

    def put_fragment(self, seed: int) -> Digest:
        model = bytes([seed]) * MODEL_BYTES
        files = {"model.onnx": FileEntry(digest=digest_of(model), size_bytes=len(model))}
        manifest = format_manifest(files, {})
        digest = digest_of(manifest)
        self.put(FragmentPath(digest, "fragment.json"), manifest)
        self.put(FragmentPath(digest, "model.onnx"), model)
        return digest

    def put_sharing(
        self, seed: int, shared: bytes, *, broken_off: bool = False
    ) -> tuple[Digest, bool]:
        """A fragment with a file that others have too; and whether that had to be sent."""
        contents = {"model.onnx": bytes([seed]) * 1000, "shared.0.bin": shared}
        files = {
            name: FileEntry(digest=digest_of(each), size_bytes=len(each))
            for name, each in contents.items()
        }
        manifest = format_manifest(files, {})
        digest = digest_of(manifest)
        self.put(FragmentPath(digest, "fragment.json"), manifest)
        self.put(FragmentPath(digest, "model.onnx"), contents["model.onnx"])
        path = FragmentPath(digest, "shared.0.bin")
        return digest, self.put(path, shared, broken_off=broken_off)

    def fragments(self) -> set[Digest]:
        return {Digest(f"sha256:{each.name}") for each in self.list("fragments")}

    def age(self, digest: Digest, hours: int) -> None:
        """Let it have been used so long ago."""
        self.age_seconds(digest, hours * UNUSED_SECONDS)

    def age_seconds(self, digest: Digest, seconds: float) -> None:
        """Let it have been used so long ago."""
        folder = self.root / "fragments" / digest.removeprefix("sha256:")
        then = folder.stat().st_mtime - seconds
        os.utime(folder, (then, then))
        self.uses._used.pop(digest, None)


def test_those_that_are_unused_for_longest_go_and_no_more_than_must(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 350_000)
    first, second, third = (disk.put_fragment(seed) for seed in range(3))
    disk.age(first, 2)
    disk.age(second, 4)
    disk.age(third, 3)
    disk.put(JobPath("a", "in", "small.npz"), b"x" * 10_000)
    assert disk.fragments() == {first, second, third}, "there was room"
    disk.put(JobPath("a", "in", "large.npz"), b"x" * 90_000)
    assert disk.fragments() == {first, third}
    fourth = disk.put_fragment(3)
    assert disk.fragments() == {first, fourth}
    assert not list((tmp_path / "incoming").glob("removed-*"))


def test_those_of_running_jobs_and_of_the_last_hour_stay(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 350_000)
    running, found, fresh = (disk.put_fragment(seed) for seed in range(3))
    disk.age(running, 9)
    disk.age(found, 9)
    disk.in_use = lambda: {running}
    path = FragmentPath(found, "model.onnx")
    checksum = hashlib.sha256(bytes([1]) * MODEL_BYTES).hexdigest()
    stored = disk.begin(path, MODEL_BYTES, checksum, "")
    assert isinstance(stored, StoredFile), "whoever brings a partition relies on what is stored"
    with pytest.raises(NoRoom):
        disk.put(JobPath("a", "in", "large.npz"), b"x" * 90_000)
    assert disk.fragments() == {running, found, fresh}
    disk.in_use = frozenset
    disk.put(JobPath("a", "in", "large.npz"), b"x" * 90_000)
    assert disk.fragments() == {found, fresh}


SHARED = bytes(range(256)) * 400


def test_a_file_of_several_fragments_is_sent_and_stored_once(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 350_000)
    (first, first_sent), (second, second_sent) = (disk.put_sharing(seed, SHARED) for seed in (1, 2))
    assert (first_sent, second_sent) == (True, False)
    assert disk.fragments() == {first, second}
    assert disk.spare_bytes() > 350_000 - len(SHARED) - 10_000


def test_what_came_of_a_file_that_another_fragment_has_by_now_is_not_kept(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 350_000)
    with pytest.raises(RuntimeError, match="broken off"):
        disk.put_sharing(2, SHARED, broken_off=True)
    assert list((tmp_path / "incoming").rglob("shared.0.bin.part"))
    disk.put_sharing(1, SHARED)
    digest, sent = disk.put_sharing(2, SHARED)
    assert not sent
    folder = tmp_path / "fragments" / digest.removeprefix("sha256:")
    assert sorted(os.listdir(folder)) == ["fragment.json", "model.onnx", "shared.0.bin"]


def test_a_shared_file_goes_with_the_last_fragment_that_has_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 350_000)
    first, second = (disk.put_sharing(seed, SHARED)[0] for seed in (1, 2))
    disk.age(first, 3)
    disk.in_use = lambda: {second}
    with pytest.raises(NoRoom):
        disk.put(JobPath("a", "in", "large.npz"), b"x" * 300_000)
    assert disk.fragments() == {second}
    assert FragmentStore(tmp_path).is_sound(second)
    disk.in_use = frozenset
    disk.age(second, 2)
    disk.put(JobPath("a", "in", "large.npz"), b"x" * 300_000)
    assert disk.fragments() == set()
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_shared_file_that_was_damaged_is_sent_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 350_000)
    disk.put_sharing(1, SHARED)
    (kept,) = (tmp_path / "shared").iterdir()
    with kept.open("r+b") as file:
        file.write(b"damage")
    second, sent = disk.put_sharing(2, SHARED)
    assert sent
    assert FragmentStore(tmp_path).is_sound(second)
    assert disk.put_sharing(3, SHARED)[1] is False, "what was sent is kept for the next"


async def test_a_job_that_has_not_ended_keeps_its_fragments(world: World) -> None:
    world.inputs(1)
    await world.submit()  # there is no device, so it waits
    held = world.coordinator.jobs.fragments_in_use()
    assert held == {fragment.digest for fragment in world.document.fragments}
    await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
    assert (await world.ended()).state == api.JobStatus.CANCELLED
    assert not world.coordinator.jobs.fragments_in_use()


def test_what_a_job_has_used_gives_way_once_it_has_ended(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 350_000)
    ended, waiting, running = (disk.put_fragment(seed) for seed in range(3))
    disk.serve([ended, running])
    disk.in_use = lambda: {running}
    disk.age_seconds(ended, SETTLED_SECONDS + 1)
    disk.age_seconds(running, SETTLED_SECONDS + 1)
    disk.put(JobPath("a", "in", "large.npz"), b"x" * 90_000)
    assert disk.fragments() == {waiting, running}, "the first waits for nobody"
    with pytest.raises(NoRoom):
        disk.put_fragment(3)


@pytest.mark.parametrize("again", ["asked for by another job just now", "delivered again"])
def test_what_a_job_has_used_stays_where_another_relies_on_it(tmp_path: Path, again: str) -> None:
    disk = Disk(tmp_path, 150_000)
    fragment = disk.put_fragment(0)
    disk.serve([fragment])
    disk.age_seconds(fragment, SETTLED_SECONDS + 1)
    if again == "delivered again":
        assert disk.put_fragment(0) == fragment
        disk.age_seconds(fragment, SETTLED_SECONDS + 1)
    else:
        disk.serve([fragment])
    with pytest.raises(NoRoom):
        disk.put(JobPath("a", "in", "large.npz"), b"x" * 90_000)
    assert disk.fragments() == {fragment}
