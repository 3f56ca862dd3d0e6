"""Weights that several fragments have: fetched once, on the disk once, kept while any is there."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from agent.conftest import Joined
from agent.fragment_making import dense_model, write_fragment
from agent.scripted_coordinator import ConnectedDevice, ScriptedCoordinator
from agent.test_running import edge, task
from made_models import tied_encoder
from shoal_agent.cache.disk import FragmentCache
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.v1 import session_pb2 as pb

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20
pytestmark = pytest.mark.forked
MADE = tied_encoder(8, 512)
SHARED_BYTES = sum(each.nbytes for each in MADE.weights.values())


@pytest.fixture
def document(coordinator: ScriptedCoordinator, folder: Path) -> PartitionDocument:
    """Four fragments that share two weights of 1 MiB."""
    path = MADE.save(folder)
    profile = profile_model(path, MADE.shapes)
    cuts = choose_cuts(profile, CutRequest(fragments=4))
    assert not isinstance(cuts, Refusal)
    return cut_model(path, profile, cuts, coordinator.store)


def shared_files(joined: Joined) -> list[Path]:
    return sorted((joined.agent.cache / "fragments").glob("*/shared.0.bin"))


def disk_bytes(joined: Joined) -> int:
    """What the cache takes on the disk: a file with several names once."""
    files = (path.stat() for path in joined.agent.cache.rglob("*") if path.is_file())
    return sum({each.st_ino: each.st_size for each in files}.values())


def fetched(coordinator: ScriptedCoordinator) -> list[str]:
    """Of the shared file: for which fragment, each time that it was fetched."""
    wanted = [each for each in coordinator.fetches if each.file == "shared.0.bin"]
    return [each.digest for each in wanted if each.offset == 0]


async def prefetch(device: ConnectedDevice, digest: str) -> pb.Reply:
    reply = await device.ask("prefetch", pb.Prefetch(digest=digest))
    assert reply.HasField("prefetched"), reply
    return reply


async def run_all(device: ConnectedDevice, document: PartitionDocument) -> None:
    """The whole model, its fragments one after the other, gives what it should."""
    values = MADE.inputs()
    for item, fragment in enumerate(document.fragments):
        loaded = await device.load(fragment.digest, fragment.resident_bytes)
        assert loaded.HasField("loaded"), loaded
        takes = [each.name for each in fragment.inputs]
        await device.give(edge(-1, 0, item), {name: values[name] for name in takes})
        execute = pb.Execute(
            task=task(0, item),
            digest=fragment.digest,
            inputs=[pb.InputSource(producer=-1, tensors=takes)],
            results=[each.name for each in fragment.outputs],
        )
        reply = await device.ask("execute", execute)
        assert reply.HasField("executed"), reply
        values |= (await device.result()).tensors
    h, w, v = (each.astype(float) for each in (values["x"], *MADE.weights.values()))
    for _ in range(8):
        h = np.tanh(np.maximum(h @ w, 0) @ v + h)
    np.testing.assert_allclose(values["y"].astype(float), np.maximum(h, 0), 1e-3, 1e-4)


async def test_a_file_of_four_fragments_is_fetched_stored_and_mapped_once(
    coordinator: ScriptedCoordinator, join: Join, document: PartitionDocument
) -> None:
    joined = await join()
    await run_all(joined.device, document)
    assert len(fetched(coordinator)) == 1
    assert len(shared_files(joined)) == 4
    assert disk_bytes(joined) < SHARED_BYTES + MIB // 4
    maps = Path(f"/proc/{joined.agent.process.pid}/maps").read_text().splitlines()
    assert len({line.split()[4] for line in maps if "shared.0.bin" in line}) == 1


async def test_two_fragments_that_are_fetched_at_once_fetch_their_file_once(
    coordinator: ScriptedCoordinator, join: Join, document: PartitionDocument
) -> None:
    device = (await join()).device
    asked = (prefetch(device, each.digest) for each in document.fragments)
    replies = await asyncio.gather(*asked)
    assert len(fetched(coordinator)) == 1
    assert sum(each.prefetched.fetched_bytes for each in replies) < SHARED_BYTES + MIB // 4


async def test_a_peer_gives_the_shared_file_too(
    coordinator: ScriptedCoordinator, join: Join, document: PartitionDocument
) -> None:
    holder, other = await join("pi-4"), await join("jetson")
    first, second, *_ = document.fragments
    for each in (first, second):
        await prefetch(holder.device, each.digest)
    coordinator.fetches.clear()
    address = f"pi-4@{holder.device.hello.address}"
    for each in (first, second):
        reply = await other.device.load(each.digest, each.resident_bytes, address)
        assert reply.HasField("loaded"), reply
    assert coordinator.fetches == []
    assert len({path.stat().st_ino for path in shared_files(other)}) == 1


async def test_a_damaged_file_is_fetched_anew_and_all_fragments_run(
    coordinator: ScriptedCoordinator, join: Join, document: PartitionDocument
) -> None:
    joined = await join()
    for each in document.fragments:
        await prefetch(joined.device, each.digest)
    await joined.agent.kill()
    with shared_files(joined)[0].open("r+b") as file:
        file.write(b"damage")
    coordinator.fetches.clear()
    joined = await join()
    await run_all(joined.device, document)
    assert len(fetched(coordinator)) == 1
    assert disk_bytes(joined) < SHARED_BYTES + MIB // 4


async def test_an_agent_that_is_killed_in_the_fetch_continues_it(
    coordinator: ScriptedCoordinator, join: Join, document: PartitionDocument
) -> None:
    joined = await join()
    coordinator.cut_fetch_after_bytes = MIB
    first = document.fragments[0]
    reply = await joined.device.load(first.digest, first.resident_bytes)
    assert reply.failure.code == pb.UNAVAILABLE
    await joined.agent.kill()
    coordinator.fetches.clear()
    joined = await join()
    await run_all(joined.device, document)
    (request,) = [each for each in coordinator.fetches if each.file == "shared.0.bin"]
    assert request.offset > MIB // 2
    assert disk_bytes(joined) < SHARED_BYTES + MIB // 4


async def test_what_another_fragment_has_stays_when_one_is_dropped(
    coordinator: ScriptedCoordinator, join: Join, document: PartitionDocument
) -> None:
    first, second, *_ = document.fragments
    others = [
        write_fragment(coordinator.store, dense_model([256, 1024, 8], seed)) for seed in range(3)
    ]
    # Three quarters of it are for fragments: room for the shared file and two of the others.
    joined = await join("pi-4", "--cache-size", "6Mi")
    for digest in (first.digest, second.digest, *(each.digest for each in others[:2])):
        assert list((await prefetch(joined.device, digest)).prefetched.dropped) == []
    reply = await prefetch(joined.device, first.digest)  # used last, so it stays
    loaded = await joined.device.load(first.digest, first.resident_bytes)
    assert loaded.HasField("loaded"), loaded
    reply = await prefetch(joined.device, others[2].digest)
    assert list(reply.prefetched.dropped) == [second.digest, others[0].digest]
    await joined.device.unload(first.digest)
    coordinator.fetches.clear()
    await joined.agent.kill()
    joined = await join("pi-4", "--cache-size", "6Mi")
    loaded = await joined.device.load(first.digest, first.resident_bytes)
    assert loaded.HasField("loaded"), loaded
    assert coordinator.fetches == []


async def test_a_file_that_no_fragment_has_any_more_is_removed(
    document: PartitionDocument, coordinator: ScriptedCoordinator
) -> None:
    cache = FragmentCache(coordinator.store, 1 << 30)
    digests = [each.digest for each in document.fragments]
    assert cache.total_bytes < SHARED_BYTES + MIB // 4
    for digest in digests:
        assert len(list((coordinator.store / "shared").iterdir())) == 1
        cache.drop(digest)
    assert list((coordinator.store / "shared").iterdir()) == []
    assert cache.total_bytes == 0
