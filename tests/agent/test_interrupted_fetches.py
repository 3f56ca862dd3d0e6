"""What becomes of a fetch when the link to a peer is closed, its session ends, whoever waits for it
gives up, or power fails."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from agent.conftest import Joined
from agent.fragment_making import dense_model, write_fragment
from agent.in_process import at_once
from agent.scripted_coordinator import PATIENCE_SECONDS, ScriptedCoordinator
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.cache.fetching import Fetched, Fetcher, Source
from shoal_agent.telemetry.counters import Counters
from shoal_agent.transport.links import PeerLinks
from shoal_agent.transport.serving import Peers
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.listener import Listener
from shoal_protocol.services import add_peer_service
from shoal_protocol.v1 import session_pb2 as pb
from troubled_disk import slow_disk

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20


class TwoDevices:
    """One has a fragment; the other has links to it, and fetches."""

    def __init__(self, folder: Path, widths: list[int]) -> None:
        self.made = write_fragment(folder / "there", dense_model(widths))
        there = FragmentCache(folder / "there", 1 << 30)
        peers = Peers("jetson", there, lambda: None, Uplink(), Counters())
        self.listener = Listener(lambda server: add_peer_service(server, peers), connections=10)
        self.address = f"unix:{folder}/jetson.sock"
        self.links = PeerLinks(None, Uplink(), Counters(), insecure=False)
        self.cache = FragmentCache(folder / "here", 1 << 30)
        fetch = partial(self.links.fetch_fragment, "jetson", self.address)
        self.sources = [Source("jetson", fetch)]

    async def __aenter__(self) -> "TwoDevices":
        await self.listener.open(self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.links.close()
        await self.listener.stop(0)

    def ensure(self, fetcher: Fetcher) -> "asyncio.Task[Fetched]":
        return asyncio.create_task(fetcher.ensure(self.made.digest, self.sources))


async def in_spite(pace: Awaitable[None], ends: asyncio.Event) -> None:
    """The same, which ends when it may, however often it is cancelled."""
    try:
        await pace
    finally:
        await ends.wait()


async def test_a_link_that_is_closed_while_the_disk_is_slow_is_opened_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TwoDevices(folder, [64, 512, 64]) as two:
        fetcher = Fetcher(two.cache, lambda *_: None, at_once)
        with slow_disk(monkeypatch) as disk:
            fetching = two.ensure(fetcher)
            await asyncio.to_thread(disk.entered.wait)
            await two.links.close_idle()  # as an agent does that counts nothing for two seconds
            assert len(two.links) == 0
            disk.released.set()
            assert (await fetching).fetched_bytes > 0
        assert two.made.digest in two.cache


async def test_a_fetch_goes_on_while_the_certificate_is_renewed(folder: Path) -> None:
    async with TwoDevices(folder, [1024] * 5) as two:
        came = 0

        def count(_: str, size: int) -> None:
            nonlocal came
            came += size
            if came - size < 4 * MIB <= came:
                two.links.renew()

        fetched = await two.ensure(Fetcher(two.cache, count, Uplink(4e8).depart))
        assert came == fetched.fetched_bytes > 4 * MIB


async def test_a_fetch_ends_when_the_last_who_waits_gives_up_and_is_resumed_by_the_next(
    folder: Path,
) -> None:
    async with TwoDevices(folder, [1024] * 5) as two:
        came, half = 0, asyncio.Event()
        released = asyncio.Event()

        def count(_: str, size: int) -> None:
            nonlocal came
            came += size
            if came > 4 * MIB:
                half.set()

        async def pace(_: int) -> None:
            if half.is_set():
                await released.wait()

        fetcher = Fetcher(two.cache, count, pace)
        first, second = two.ensure(fetcher), two.ensure(fetcher)
        await half.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not second.done(), "another waits still"
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        before = came
        released.set()
        fetched = await two.ensure(fetcher)
        assert came == before + fetched.fetched_bytes, "nothing came meanwhile"
        assert fetched.fetched_bytes < (two.made.folder / "weights.bin").stat().st_size - 3 * MIB
        assert two.made.digest in two.cache


async def test_who_comes_while_a_fetch_is_being_ended_has_one_of_its_own(folder: Path) -> None:
    async with TwoDevices(folder, [1024] * 5) as two:
        came, ends = asyncio.Event(), asyncio.Event()

        asked = 0

        async def pace(_: int) -> None:
            nonlocal asked
            asked += 1
            came.set()
            await ends.wait()  # nothing goes on, and the end takes a while

        fetcher = Fetcher(two.cache, lambda *_: None, lambda count: in_spite(pace(count), ends))
        given_up = two.ensure(fetcher)
        await came.wait()
        given_up.cancel()
        await asyncio.sleep(0)
        another = two.ensure(fetcher)
        await asyncio.wait((another,), timeout=0.5)
        assert asked == 1, "two fetch into one part"
        ends.set()
        await another
        assert given_up.cancelled()
        assert two.made.digest in two.cache


@pytest.mark.forked
async def test_a_fetch_of_a_session_that_has_ended_is_none_of_the_next(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 512, 64]))
    joined, other = await join(), await join("jetson")
    await other.device.load(fragment.digest, fragment.resident_bytes)
    other.agent.process.send_signal(signal.SIGSTOP)
    try:
        peer = f"jetson@{other.device.hello.address}"
        load = pb.Load(digest=fragment.digest, resident_bytes=fragment.resident_bytes, peers=[peer])
        joined.device.begin("load", load)
        joined.device.send(welcome=pb.Welcome())  # a second one ends a session
        again = await asyncio.wait_for(coordinator.device(), PATIENCE_SECONDS)
        reply = await again.load(fragment.digest, fragment.resident_bytes)
        assert reply.HasField("loaded"), reply
    finally:
        other.agent.process.send_signal(signal.SIGCONT)


@pytest.mark.forked
async def test_what_a_power_failure_left_of_a_fetch_is_not_blamed_on_the_source(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([512, 1024, 512]))
    joined = await join()
    coordinator.cut_fetch_after_bytes = 1 << 19
    reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
    assert reply.failure.code == pb.UNAVAILABLE
    await joined.agent.kill()
    (part,) = (joined.agent.cache / "fragments").glob("*.part")
    weights = part / "weights.bin"
    with weights.open("r+b") as file:  # a size that was written, of bytes that were not
        file.seek(weights.stat().st_size - (64 << 10))
        file.write(bytes(64 << 10))
    coordinator.cut_fetch_after_bytes = None
    joined = await join()
    reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
    assert reply.HasField("loaded"), reply


@pytest.mark.forked
async def test_what_is_left_of_a_fetch_makes_way_for_another(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    one = write_fragment(coordinator.store, dense_model([1024, 1536, 1024]))
    other = write_fragment(coordinator.store, dense_model([1024, 1536, 1024], seed=1))
    joined = await join("pi-4", "--cache-size", "24Mi")
    coordinator.cut_fetch_after_bytes = MIB // 2
    reply = await joined.device.ask("prefetch", pb.Prefetch(digest=one.digest))
    assert reply.failure.code == pb.UNAVAILABLE, reply
    coordinator.cut_fetch_after_bytes = None
    reply = await joined.device.ask("prefetch", pb.Prefetch(digest=other.digest))
    assert reply.HasField("prefetched"), reply
    (there,) = (joined.agent.cache / "fragments").iterdir()
    assert other.digest.endswith(there.name)
