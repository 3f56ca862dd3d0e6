"""An agent's disk: fragments that are damaged or find no room, activations that overflow."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from agent.conftest import Joined
from agent.fragment_making import MadeFragment, dense_model, write_fragment
from agent.scripted_coordinator import ScriptedCoordinator
from agent.test_faults import execute, runs
from agent.test_running import edge
from shoal_agent.cache.disk import FragmentCache
from shoal_protocol.digests import Digest
from shoal_protocol.fragment_store import read_manifest
from shoal_protocol.manifest import FragmentDamaged
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement
from small_disk import small_disk
from troubled_disk import no_descriptors, slow_disk

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20
pytestmark = pytest.mark.forked


@pytest.fixture
def fragment(coordinator: ScriptedCoordinator) -> MadeFragment:
    return write_fragment(coordinator.store, dense_model([64, 512, 64]))


def cached(joined: Joined, fragment: MadeFragment, file: str) -> Path:
    return joined.agent.cache / "fragments" / fragment.folder.name / file


# ---- the cache -----------------------------------------------------------------------------------


async def test_nothing_is_prefetched_where_there_is_no_room_for_what_is_received_ahead(
    coordinator: ScriptedCoordinator, join: Join, fragment: MadeFragment
) -> None:
    other = write_fragment(coordinator.store, dense_model([512] * 3, seed=1))
    joined = await join(budget="12Mi")
    loaded = await joined.device.load(fragment.digest, 9 << 20)
    assert loaded.HasField("loaded"), loaded
    failure = (await joined.device.ask("prefetch", pb.Prefetch(digest=other.digest))).failure
    assert failure.code == pb.BUDGET, failure
    assert failure.message.endswith("is not fetched now: needs 6 MiB on its way, have 3 MiB")
    reply = await joined.device.ask("prefetch", pb.Prefetch(digest=fragment.digest))
    assert reply.prefetched.fetched_bytes == 0, "it is there"
    await joined.device.unload(fragment.digest)
    reply = await joined.device.ask("prefetch", pb.Prefetch(digest=other.digest))
    assert reply.prefetched.fetched_bytes > 1 << 20


@pytest.mark.parametrize("damage", ["flipped byte", "truncated", "manifest"])
async def test_a_damaged_cached_fragment_is_detected_and_fetched_again(
    coordinator: ScriptedCoordinator, join: Join, fragment: MadeFragment, damage: str
) -> None:
    joined = await join()
    await joined.device.ask("prefetch", pb.Prefetch(digest=fragment.digest))
    await joined.agent.kill()
    weights = cached(joined, fragment, "weights.bin")
    match damage:
        case "flipped byte":
            data = bytearray(weights.read_bytes())
            data[5000] ^= 1
            weights.write_bytes(data)
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1])
        case _:
            cached(joined, fragment, "fragment.json").write_text("{}")
    coordinator.fetches.clear()
    joined = await join()
    noticed_at_start = damage != "flipped byte"
    assert [c.digest for c in joined.device.hello.cached] == (
        [] if noticed_at_start else [fragment.digest]
    )
    await runs(joined.device, fragment)
    assert {request.file for request in coordinator.fetches} >= {"weights.bin"}
    assert weights.read_bytes() == (fragment.folder / "weights.bin").read_bytes()


async def test_a_cached_fragment_is_not_fetched_again_after_a_restart(
    coordinator: ScriptedCoordinator, join: Join, fragment: MadeFragment
) -> None:
    joined = await join()
    await runs(joined.device, fragment)
    await joined.agent.kill()
    coordinator.fetches.clear()
    joined = await join()
    assert [c.digest for c in joined.device.hello.cached] == [fragment.digest]
    reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
    assert reply.loaded.fetched_bytes == 0
    assert coordinator.fetches == []


async def test_a_fetch_that_breaks_is_continued_where_it_ended(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([512, 1024, 512]))
    joined = await join()
    coordinator.cut_fetch_after_bytes = MIB // 2
    reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
    assert reply.failure.code == pb.UNAVAILABLE
    assert "coordinator: UNAVAILABLE the link broke" in reply.failure.message
    await joined.agent.kill()  # not even the process has to be the same
    joined = await join()
    coordinator.fetches.clear()
    reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
    assert reply.HasField("loaded"), reply
    offsets = [each.offset for each in coordinator.fetches if each.file == "weights.bin"]
    assert offsets[0] > MIB // 4
    assert all(after - before >= MIB for before, after in pairwise(offsets))


async def test_a_peer_is_asked_first_and_the_coordinator_when_it_lies(
    coordinator: ScriptedCoordinator, join: Join, fragment: MadeFragment
) -> None:
    holder, other = await join("pi-4"), await join("jetson")
    await holder.device.load(fragment.digest, fragment.resident_bytes)
    address = f"pi-4@{holder.device.hello.address}"
    coordinator.fetches.clear()
    reply = await other.device.load(fragment.digest, fragment.resident_bytes, address)
    assert reply.loaded.fetched_bytes > 0
    assert coordinator.fetches == []

    weights = cached(holder, fragment, "weights.bin")
    data = bytearray(weights.read_bytes())
    data[0] ^= 1
    weights.unlink()  # what is mapped stays as it was
    weights.write_bytes(data)
    third = await join("pi-zero")
    reply = await third.device.load(
        fragment.digest, fragment.resident_bytes, f"nobody@unix:{holder.agent.cache}/no", address
    )
    assert reply.HasField("loaded"), reply
    assert {request.file for request in coordinator.fetches} >= {"weights.bin"}


async def test_a_fragment_that_nobody_has_is_unavailable_with_every_answer(join: Join) -> None:
    joined = await join()
    reply = await joined.device.load("sha256:" + "0" * 64, MIB)
    assert reply.failure.code == pb.UNAVAILABLE
    assert "coordinator: NOT_FOUND" in reply.failure.message
    reply = await joined.device.load("sha256:../../etc/passwd", MIB)
    assert reply.failure.code == pb.UNAVAILABLE
    assert "no digest" in reply.failure.message


async def test_a_store_that_gives_wrong_bytes_is_corrupt_and_leaves_nothing(
    join: Join, fragment: MadeFragment
) -> None:
    weights = fragment.folder / "weights.bin"
    weights.write_bytes(bytes(weights.stat().st_size))
    joined = await join()
    reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
    assert reply.failure.code == pb.CORRUPT
    assert "weights.bin does not match its digest" in reply.failure.message
    assert list((joined.agent.cache / "fragments").iterdir()) == []


async def test_the_cache_drops_what_was_used_longest_ago_but_not_what_is_resident(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    first, second, third, fourth = (
        write_fragment(coordinator.store, dense_model([256, 1024, 8], seed)) for seed in range(4)
    )
    # Three quarters of it are for fragments: room for two.
    joined = await join("pi-4", "--cache-size", "3500Ki")
    await joined.device.load(first.digest, first.resident_bytes)
    await joined.device.ask("prefetch", pb.Prefetch(digest=second.digest))
    reply = await joined.device.ask("prefetch", pb.Prefetch(digest=third.digest))
    assert list(reply.prefetched.dropped) == [second.digest]
    reply = await joined.device.load(third.digest, third.resident_bytes)
    assert reply.loaded.fetched_bytes == 0
    reply = await joined.device.ask("prefetch", pb.Prefetch(digest=fourth.digest))
    assert reply.failure.code == pb.DISK_FULL
    assert reply.failure.need_bytes > reply.failure.have_bytes
    names = {path.name for path in (joined.agent.cache / "fragments").iterdir()}
    assert names == {first.folder.name, third.folder.name}


async def test_a_full_disk_fails_the_load_cleans_up_and_leaves_the_agent_alive(
    coordinator: ScriptedCoordinator, join: Join, fragment: MadeFragment
) -> None:
    large = write_fragment(coordinator.store, dense_model([1024, 2048, 8]))
    joined = await join("pi-4", file_limit_bytes=4 * MIB)
    reply = await joined.device.load(large.digest, large.resident_bytes)
    assert reply.failure.code == pb.DISK_FULL, reply
    folder = joined.agent.cache / "fragments"
    assert f"the disk of {folder} is full: {large.digest} does not fit" in reply.failure.message
    assert "make room for 8.1 MiB there" in reply.failure.message
    assert list(folder.iterdir()) == []
    await runs(joined.device, fragment)


async def test_a_load_tells_what_the_cache_has_dropped_for_it(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    first, second, third = (
        write_fragment(coordinator.store, dense_model([256, 1024, 8], seed)) for seed in range(3)
    )
    joined = await join("pi-4", "--cache-size", "3500Ki")
    for each in (first, second):
        reply = await joined.device.load(each.digest, each.resident_bytes)
        assert list(reply.loaded.dropped) == []
        await joined.device.unload(each.digest)
    reply = await joined.device.load(third.digest, third.resident_bytes)
    assert list(reply.loaded.dropped) == [first.digest]


@pytest.mark.real
async def test_a_full_disk_drops_as_many_fragments_as_the_new_one_needs(
    coordinator: ScriptedCoordinator, join: Join, folder: Path
) -> None:
    small = [
        write_fragment(coordinator.store, dense_model([256, 512, 8], seed)) for seed in range(4)
    ]
    large = write_fragment(coordinator.store, dense_model([1024, 512, 8]))  # 2 MiB
    with small_disk(folder / "cache-pi-4", "2700k"):
        joined = await join()
        for each in small:
            reply = await joined.device.ask("prefetch", pb.Prefetch(digest=each.digest))
            assert reply.HasField("prefetched"), reply
        reply = await joined.device.ask("prefetch", pb.Prefetch(digest=large.digest))
        assert list(reply.prefetched.dropped) == [each.digest for each in small[:3]], reply
        assert (await joined.device.load(large.digest, 8 * MIB)).loaded.fetched_bytes == 0


@pytest.mark.real
@pytest.mark.parametrize("others", [0, 4])
async def test_a_disk_without_a_byte_left_makes_room_too_or_says_what_is_needed(
    coordinator: ScriptedCoordinator, join: Join, folder: Path, others: int
) -> None:
    """Something else has filled it, so that not even the manifest has a place."""
    small = [
        write_fragment(coordinator.store, dense_model([256, 512, 8], seed))
        for seed in range(others)
    ]
    large = write_fragment(coordinator.store, dense_model([1024, 400, 8]))  # 1.6 MiB
    with small_disk(folder / "cache-pi-4", "2700k"):
        joined = await join()
        for each in small:
            await joined.device.ask("prefetch", pb.Prefetch(digest=each.digest))
        with suppress(OSError), (folder / "cache-pi-4" / "another").open("wb", 0) as file:
            while True:
                file.write(bytes(4096))
        reply = await joined.device.ask("prefetch", pb.Prefetch(digest=large.digest))
        if others:
            assert list(reply.prefetched.dropped) == [each.digest for each in small], reply
            assert (await joined.device.load(large.digest, 8 * MIB)).loaded.fetched_bytes == 0
        else:
            assert reply.failure.code == pb.DISK_FULL, reply
            assert reply.failure.message.endswith("; make room for 1.6 MiB there")


@pytest.mark.real
async def test_a_disk_that_has_become_read_only_serves_what_is_on_it(
    coordinator: ScriptedCoordinator, join: Join, folder: Path, fragment: MadeFragment
) -> None:
    other = write_fragment(coordinator.store, dense_model([64, 256, 64]))
    with small_disk(folder / "cache-pi-4", "2700k"):
        before = await join()
        await runs(before.device, fragment)
        await before.agent.kill()
        mount = ("mount", "-o", "remount,ro", str(folder / "cache-pi-4"))
        subprocess.run(mount, check=True)
        joined = await join()
        await runs(joined.device, fragment)
        reply = await joined.device.load(other.digest, other.resident_bytes)
        assert "Read-only file system" in reply.failure.message


@pytest.mark.parametrize("name", ["weights.bin", "fragment.json"])
@pytest.mark.parametrize("change", ["another byte", "another file", "gone"])
def test_a_cached_fragment_that_changed_since_it_was_verified_is_verified_again(
    tmp_path: Path, change: str, name: str
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 512, 64]))
    cache = FragmentCache(tmp_path, 1 << 30)
    assert cache.verify(made.digest) == cache.verify(made.digest) == made.folder
    path = made.folder / name
    data, before = bytearray(path.read_bytes()), path.stat()
    data[len(data) // 2] ^= 1
    match change:
        case "another byte":
            with path.open("r+b") as file:
                file.write(data)
        case "another file":
            path.unlink()
            path.write_bytes(data)
        case _:
            path.unlink()
    if change != "gone":  # not even the time that people see gives it away
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FragmentDamaged, match=str(path)):
        cache.verify(made.digest)
    assert made.digest not in cache


def test_a_cached_fragment_that_is_as_it_was_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 512, 64]))
    cache = FragmentCache(tmp_path, 1 << 30)
    cache.verify(made.digest)
    monkeypatch.setattr("shoal_agent.cache.disk.file_digest", lambda path: pytest.fail(str(path)))
    assert cache.verify(made.digest) == made.folder


async def test_the_event_loop_reads_the_cache_while_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 512, 64]))
    cache = FragmentCache(tmp_path, 1 << 30)
    manifest = read_manifest(made.folder, Digest(made.digest))
    cache.drop(made.digest)
    shutil.copytree(
        write_fragment(tmp_path / "other", dense_model([64, 512, 64])).folder,
        cache.part(made.digest),
        dirs_exist_ok=True,
    )
    with slow_disk(monkeypatch) as disk:
        admitting = asyncio.create_task(asyncio.to_thread(cache.admit, manifest))
        await asyncio.to_thread(disk.entered.wait)
        assert made.digest not in cache
        assert cache.cached() == {}
        cache.pin(made.digest)
        assert not disk.released.is_set(), "the event loop waited for the disk"
    await admitting
    assert made.digest in cache


async def test_other_fragments_are_dropped_while_one_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_fragment(tmp_path, dense_model([8, 512, 8]))
    cache = FragmentCache(tmp_path, 1 << 30)
    made = write_fragment(tmp_path / "elsewhere", dense_model([64, 512, 64]))
    shutil.copytree(made.folder, cache.part(made.digest), dirs_exist_ok=True)
    manifest = read_manifest(made.folder, Digest(made.digest))
    with slow_disk(monkeypatch) as disk:
        admitting = asyncio.create_task(asyncio.to_thread(cache.admit, manifest))
        await asyncio.to_thread(disk.entered.wait)
        assert await asyncio.to_thread(cache.drop_oldest) == other.digest
        assert not disk.released.is_set(), "a lock was held while the disk was slow"
    await admitting
    assert list(cache.cached()) == [made.digest]


def test_of_more_fragments_than_a_message_may_name_the_ones_used_last_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [write_fragment(tmp_path, dense_model([8, 8 + width, 8])) for width in range(4)]
    cache = FragmentCache(tmp_path, 1 << 30)
    assert cache.listed() == cache.cached()
    for each in (made[2], made[0]):
        cache.open(each.digest, "fragment.json")[0].close()
    monkeypatch.setattr("shoal_agent.cache.disk.MAXIMUM_LISTED", 2)
    assert list(cache.listed()) == [made[0].digest, made[2].digest]
    assert len(cache.cached()) == 4


def test_a_process_out_of_file_descriptors_drops_no_cached_fragment(tmp_path: Path) -> None:
    made = write_fragment(tmp_path, dense_model([64, 512, 64]))
    cache = FragmentCache(tmp_path, 1 << 30)
    with no_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            cache.verify(made.digest)
        with pytest.raises(OSError, match="Too many open files"):
            FragmentCache(tmp_path, 1 << 30)
    assert cache.verify(made.digest) == made.folder


# ---- activations ---------------------------------------------------------------------------------


async def test_activations_beyond_memory_are_spilled_and_beyond_the_disk_are_put_off(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([1024, 16]), 14 * MIB)
    joined = await join("pi-4", "--cache-size", "24Mi", budget="18Mi")
    await joined.device.load(fragment.digest, 14 * MIB)
    outcomes = []
    # A megabyte each, and frames: two fit into memory, four onto the disk, which has a place for
    # all six.
    for item in range(8):
        x = np.full((256, 1024), item, np.float32)
        outcomes.append((await joined.device.give(edge(-1, 0, item), {"x": x})).outcome)
    accepted, busy = Acknowledgement.ACCEPTED, Acknowledgement.BUSY
    assert outcomes == [accepted] * 6 + [busy] * 2
    assert sum(1 for _ in (joined.agent.cache / "activations").iterdir()) == 4
    weight = json.loads((fragment.folder / "fragment.json").read_text())["initializers"]["w0"]
    raw = (fragment.folder / "weights.bin").read_bytes()[weight["offset"] :][: weight["bytes"]]
    matrix = np.frombuffer(raw, np.float32).reshape(weight["shape"])
    for item in range(6):
        reply = await joined.device.ask("execute", execute(fragment, item))
        assert reply.HasField("executed"), reply
        expected = np.maximum(np.full((256, 1024), item, np.float32) @ matrix, 0)
        received = await joined.device.result()
        np.testing.assert_allclose(received.tensors["y"], expected, rtol=1e-4, atol=1e-4)
    async with asyncio.timeout(30):  # files are removed in another thread
        while any((joined.agent.cache / "activations").iterdir()):
            await asyncio.sleep(0.01)


@pytest.mark.real
async def test_a_load_that_finds_no_disk_for_activations_says_so_and_works_when_there_is_room(
    coordinator: ScriptedCoordinator, join: Join, folder: Path
) -> None:
    small, large = (
        write_fragment(coordinator.store, dense_model([64, 16, 64], seed), 2 * MIB)
        for seed in range(2)
    )
    with small_disk(folder / "cache-pi-4", "3m"):
        joined = await join(budget="16Mi")
        device = joined.device
        await runs(device, small)
        x = np.zeros((4096, 64), np.float32)
        for item in range(1, 11):  # a megabyte each, in memory
            answer = await device.give(edge(-1, 0, item), {"x": x})
            assert answer.outcome == Acknowledgement.ACCEPTED
        for _ in range(2):
            reply = await device.load(large.digest, 12 * MIB)
            assert reply.failure.code == pb.DISK_FULL, reply
            assert "No space left on device" in reply.failure.message
        for item in range(1, 11):  # what waited is unharmed, also that which found a place
            reply = await device.ask("execute", execute(small, item))
            assert reply.HasField("executed"), reply
            assert (await device.result()).tensors["y"].shape == (4096, 64)
        await runs(device, large, 11)
        assert joined.agent.errors.read_text().count("unexpected error") == 0
