"""Fragments give way to what needs their room, unless somebody uses them."""

import hashlib
import os
from pathlib import Path

import pytest

from coordinator.world import World
from shoal_coordinator.storage.volume import UNUSED_SECONDS, NoRoom, StoredFile, Upload, Volume
from shoal_coordinator.storage.volume_paths import FragmentPath, JobPath
from shoal_protocol.digests import Digest, digest_of
from shoal_protocol.manifest import FileEntry, format_manifest
from shoal_protocol.v1 import coordinator_pb2 as api

MODEL_BYTES = 100_000


class Disk(Volume):
    """A volume on a disk with room for so much, whatever the machine's is."""

    def __init__(self, root: Path, size_bytes: int) -> None:
        super().__init__(root)
        self.root = root
        self.size_bytes = size_bytes

    def free_bytes(self) -> int:
        used = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        return max(0, self.size_bytes - used - self.promised)

    def put(self, path: FragmentPath | JobPath, content: bytes) -> None:
        upload = self.begin(path, len(content), hashlib.sha256(content).hexdigest(), "")
        if isinstance(upload, Upload):
            try:
                upload.open()
                upload.part.append(content)
                upload.finish()
            finally:
                upload.close()

    def put_fragment(self, seed: int) -> Digest:
        model = bytes([seed]) * MODEL_BYTES
        files = {"model.onnx": FileEntry(digest=digest_of(model), size_bytes=len(model))}
        manifest = format_manifest(files, {})
        digest = digest_of(manifest)
        self.put(FragmentPath(digest, "fragment.json"), manifest)
        self.put(FragmentPath(digest, "model.onnx"), model)
        return digest

    def fragments(self) -> set[Digest]:
        return {Digest(f"sha256:{each.name}") for each in self.list("fragments")}

    def age(self, digest: Digest, hours: int) -> None:
        """Let it have been used so long ago."""
        folder = self.root / "fragments" / digest.removeprefix("sha256:")
        then = folder.stat().st_mtime - hours * UNUSED_SECONDS
        os.utime(folder, (then, then))


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
    stands = disk.begin(path, MODEL_BYTES, checksum, "")
    assert isinstance(stands, StoredFile), "whoever brings a partition relies on what stands"
    with pytest.raises(NoRoom):
        disk.put(JobPath("a", "in", "large.npz"), b"x" * 90_000)
    assert disk.fragments() == {running, found, fresh}
    disk.in_use = frozenset
    disk.put(JobPath("a", "in", "large.npz"), b"x" * 90_000)
    assert disk.fragments() == {found, fresh}


async def test_a_job_that_has_not_ended_keeps_its_fragments(world: World) -> None:
    world.inputs(1)
    await world.submit()  # there is no device, so it waits
    held = world.coordinator.jobs.fragments_in_use()
    assert held == {fragment.digest for fragment in world.document.fragments}
    await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=10)
    assert (await world.ended()).state == api.JobStatus.CANCELLED
    assert not world.coordinator.jobs.fragments_in_use()
