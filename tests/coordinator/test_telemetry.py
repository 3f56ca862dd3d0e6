"""What devices tell unasked: readings, and what a device that lies or floods can do by them."""

import asyncio
import time
from collections.abc import Callable

import grpc
import pytest

from coordinator.scripted import connected
from coordinator.world import World, refusal
from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.server import sessions, wire
from shoal_coordinator.server.sessions import UNASKED_AT_ONCE, UNASKED_PER_SECOND
from shoal_protocol.pacing import BATCHED_MESSAGES
from shoal_protocol.speeds import Link, link_of
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb


async def listed(world: World, has: Callable[[api.DeviceStatus], bool]) -> api.DeviceStatus:
    """The only device there is, once it is shown with what it has told: that comes another way than
    the question."""
    async with asyncio.timeout(60):
        while True:
            response = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
            (status,) = response.devices
            if has(status):
                return status
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "absurd",
    [
        {"cpu_fraction": 1e308},
        {"cpu_fraction": float("nan")},
        {"cpu_fraction": -0.1},
        {"temperature_celsius": 1e308},
        {"temperature_celsius": float("-inf")},
        {"battery_fraction": 1e308},
        {"round_trip_seconds": 1e308},
        {"round_trip_seconds": float("nan")},
        {"round_trip_seconds": -1.0},
    ],
)
def test_a_reading_that_no_device_can_have_is_unknown(absurd: dict[str, float]) -> None:
    readings = wire.telemetry_of(pb.Telemetry(**absurd))  # type: ignore[arg-type]
    assert readings == wire.telemetry_of(pb.Telemetry())


def test_readings_at_their_bounds_are_taken() -> None:
    message = pb.Telemetry(
        cpu_fraction=1, temperature_celsius=-40, battery_fraction=0, round_trip_seconds=2
    )
    readings = wire.telemetry_of(message)
    assert (readings.cpu_fraction, readings.temperature_celsius) == (1, -40)
    assert (readings.battery_fraction, readings.round_trip) == (0, 2_000_000_000)


def test_what_a_device_says_that_it_lacks_is_no_more_than_a_device_can_have() -> None:
    """A Partition says it too, in a number that has no room for 64 bits without a sign."""
    most = (1 << 64) - 1
    failure = wire.failure_of(pb.Failure(code=pb.BUDGET, need_bytes=most, have_bytes=most), "a")
    assert failure.need == failure.have == 1 << 50
    stated = wire.failure_of(pb.Failure(code=pb.BUDGET, need_bytes=5, have_bytes=4), "a")
    assert (stated.need, stated.have) == (5, 4)


async def test_replies_that_peers_cause_do_not_hold_up_what_a_device_says(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that sends a device rubbish has it answer what it was never asked."""
    monkeypatch.setattr(sessions, "UNASKED_PER_SECOND", 1.0)  # they would do so for 20 minutes
    device, heard = world.device("a"), asyncio.Event()
    driver = world.coordinator.driver
    feed = driver.feed

    def note(event: ev.Event, job: str | None = None, device: str | None = None) -> None:
        feed(event, job, device)
        if isinstance(event, ev.DeviceTelemetry):
            heard.set()

    driver.feed = note  # type: ignore[method-assign]
    failed = pb.Reply(instruction=1 << 40, failure=pb.Failure(code=pb.INVALID_INPUT))
    batch = pb.AgentBatch(messages=[pb.AgentMessage(reply=failed)] * BATCHED_MESSAGES)
    async with connected(device):
        for _ in range(1500 // BATCHED_MESSAGES):
            await device.say(pb.AgentMessage(batch=batch))
        await device.telemetry(used_bytes=1)
        await asyncio.wait_for(heard.wait(), 60)
    assert heard.is_set()


async def test_absurd_counts_do_not_spoil_the_list_of_devices(world: World) -> None:
    most = (1 << 64) - 1
    device = world.device("a")
    async with connected(device):
        await device.telemetry(memory_available_bytes=most, fetched_bytes=most, used_bytes=most)
        status = await listed(world, lambda status: status.used_bytes > 0)
    assert status.name == "a"


async def test_what_is_told_of_a_device_can_be_written_down_whatever_it_claims(
    world: World,
) -> None:
    """A Device of a cluster has numbers with a sign, and names of some length: one that could not
    be written would keep all of its pool from being ready."""
    most, long = (1 << 64) - 1, "x" * 300
    device = world.device("a")
    device.hello.floor_bytes = most
    names = ("b", "b", "", long, "no name", "c")
    links = [pb.PeerLink(device=name, bytes_per_second=1e6) for name in names]
    async with connected(device):
        counts = ("used_bytes", "peak_bytes", "sent_bytes", "received_bytes", "fetched_bytes")
        await device.telemetry(links=links, **dict.fromkeys(counts, most))
        status = await listed(world, lambda status: status.used_bytes > 0)
    assert {getattr(status, name) for name in ("floor_bytes", *counts)} == {1 << 50}
    assert [each.device for each in status.links] == ["b", "", "c"]


async def test_a_device_that_floods_is_read_slowly_and_nobody_else_waits_for_it(
    world: World,
) -> None:
    rows = world.inputs(20)
    flooding, honest = world.device("a", budget=1), world.device("b")
    handled = 0

    driver = world.coordinator.driver
    feed = driver.feed

    def count(event: ev.Event, job: str | None = None, device: str | None = None) -> None:
        nonlocal handled
        handled += isinstance(event, ev.DeviceTelemetry) and event.device == "a"
        feed(event, job, device)

    driver.feed = count  # type: ignore[method-assign]

    async def flood() -> None:
        message = pb.AgentMessage(telemetry=pb.Telemetry(cpu_fraction=0.5))
        batch = pb.AgentMessage(batch=pb.AgentBatch(messages=[message] * BATCHED_MESSAGES))
        for _ in range(500):
            await flooding.say(batch)

    async with connected(flooding, honest):
        begun = time.monotonic()
        flooder = asyncio.create_task(flood())
        await world.submit()
        last = await world.ended()
        response = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
        most = UNASKED_AT_ONCE + UNASKED_PER_SECOND * (time.monotonic() - begun)
        assert 0 < handled <= most + 1
        flooder.cancel()
        await asyncio.gather(flooder, return_exceptions=True)
    assert len(response.devices) == 2
    assert last.state == api.JobStatus.COMPLETE, last.message
    world.check_results(rows)


async def test_a_batch_beyond_the_bound_ends_the_session(world: World) -> None:
    device = world.device("a")
    running = asyncio.create_task(device.run())
    await device.welcome
    message = pb.AgentMessage(telemetry=pb.Telemetry())
    batch = pb.AgentBatch(messages=[message] * (BATCHED_MESSAGES + 1))
    await device.say(pb.AgentMessage(batch=batch))
    code, details = await refusal(running)
    assert code == grpc.StatusCode.ABORTED
    assert details == "65 messages in a batch, at most 64"


async def test_the_links_of_a_device_are_shown_by_the_other_end(world: World) -> None:
    device = world.device("a")
    async with connected(device):
        links = [pb.PeerLink(device="b", bytes_per_second=1e6)]
        handling = {"transfer_seconds_per_byte": 6e-9, "handling_seconds": 8e-4}
        await device.telemetry(links=links, **handling)
        link = link_of(await listed(world, lambda status: len(status.links) > 0))
    assert link.peers == (("b", Link(bytes_per_second=1e6)),)
    assert (link.transfer_seconds_per_byte, link.handling_seconds) == (6e-9, 8e-4)
