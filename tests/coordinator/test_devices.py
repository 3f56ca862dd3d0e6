"""Devices that come, go, fall silent or lie; and what they and others receive."""

import asyncio
import contextlib
import http.client
import random
from pathlib import Path

import grpc
import pytest

from coordinator.scripted import connected
from coordinator.world import World, refusal
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_protocol import PROTOCOL
from shoal_protocol.files import FileReceiver
from shoal_protocol.services import Connection, SessionClient
from shoal_protocol.units import seconds
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest


async def test_the_work_of_a_lost_device_is_done_by_another(world: World) -> None:
    rows = world.inputs(6)
    gate = asyncio.Semaphore(2)
    async with connected(world.device("a", gate=gate)):
        await world.submit()
        await world.until(lambda status: any(stage.finished for stage in status.stages))
    async with connected(world.device("b")):
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    assert last.retries > 0
    world.check_results(rows)
    response = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
    assert {device.name: device.state for device in response.devices}["a"] == (
        api.DeviceStatus.LOST
    )


async def test_a_device_that_falls_silent_is_probed_and_then_lost(world: World) -> None:
    rows = world.inputs(3)
    silent, steady = world.device("a", gate=asyncio.Semaphore(0)), world.device("b")
    async with connected(silent):
        await world.submit()
        await world.until(lambda status: status.active > 0)
        silent.deaf = True
        async with connected(steady):
            last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    world.check_results(rows)


async def test_a_device_is_said_to_load_until_it_has_answered(world: World) -> None:
    world.inputs(1)
    device = world.device("a")
    async with connected(device):
        device.deaf = True
        await world.submit()
        said = 0.0
        while not said:
            answer = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
            said = answer.devices[0].loading_seconds
    while answer.devices[0].HasField("loading_seconds"):  # until its session has ended
        answer = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
    assert answer.devices[0].state != api.DeviceStatus.READY


async def test_a_new_session_of_a_device_takes_the_place_of_the_old(world: World) -> None:
    rows = world.inputs(3)
    old, new = world.device("a", gate=asyncio.Semaphore(0)), world.device("a")
    running = asyncio.create_task(old.run())
    await old.welcome
    await world.submit()
    async with connected(new):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running
        assert caught.value.code() == grpc.StatusCode.ABORTED
        assert caught.value.details() == "the device has opened a new session"
        assert (await new.welcome).session > (await old.welcome).session
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE
    world.check_results(rows)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"protocol": 1},
            f"protocol 1; this coordinator speaks {PROTOCOL}: install the same version",
        ),
        ({"device": "Pi_4"}, "'Pi_4' is no DNS label"),
        ({"budget_bytes": 0}, "device a has a budget of 0 bytes"),
        ({"cached": [{"digest": "sha256:../x"}]}, "is no digest"),
        ({"resident": [{"digest": "sha256:" + "0" * 64}] * 4097}, "more than 4096 fragments"),
        ({"cached": [{"digest": "sha256:" + "0" * 64, "bytes": 1 << 63}]}, "has a fragment of 9"),
    ],
)
async def test_a_bad_hello_opens_no_session(world: World, fields: dict, text: str) -> None:  # type: ignore[type-arg]
    hello = pb.Hello(**{"protocol": PROTOCOL, "device": "a", "budget_bytes": 1, **fields})
    code, details = await refusal(world.device("a", hello=hello).run())
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert text in details


async def test_the_status_of_devices_is_what_they_reported(world: World) -> None:
    world.inputs(2)
    cached = pb.CachedFragment(digest="sha256:" + "a" * 64, bytes=500)
    hello = pb.Hello(
        protocol=PROTOCOL,
        device="a",
        budget_bytes=1500,
        floor_bytes=77,
        cache_bytes=10**9,
        capabilities=pb.Capabilities(architecture="aarch64"),
        cached=[cached],
    )
    device = world.device("a", hello=hello)
    async with connected(device):
        await device.telemetry(used_bytes=11, peak_bytes=22, sent_bytes=33, fetched_bytes=44)
        await world.submit()
        await world.ended()
        world.coordinator.driver.excesses.executed(hello, pb.Executed(peak_bytes=33))
        assert world.coordinator.driver.state.devices["a"].health.fetched == 44
        response = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
    (status,) = response.devices
    assert (status.name, status.state, status.architecture) == ("a", 0, "aarch64")
    assert (status.budget_bytes, status.floor_bytes) == (1500, 77)
    assert status.cache_bytes == 10**9
    assert (status.used_bytes, status.peak_bytes) == (11, 33), "the peak of a task is newer"
    assert (status.sent_bytes, status.fetched_bytes) == (33, 44)
    # One fragment fits at a time, and three were used.
    assert (status.resident_bytes, len(status.resident)) == (1000, 1)
    assert status.loads >= 3
    assert status.evictions == status.loads - 1
    assert status.tasks == 6
    assert not status.HasField("budget_excess")
    hits = status.tier_hits
    assert hits.resident + hits.cached + hits.idle + hits.evict == 6
    assert status.cached_fragments == 4
    assert status.cached_bytes == 500 + 3 * 800_000


async def test_a_budget_that_has_changed_is_that_of_the_device_from_then_on(world: World) -> None:
    device = world.device("a", hello=pb.Hello(protocol=PROTOCOL, device="a", budget_bytes=1500))

    def known_budget() -> int | None:
        known = world.coordinator.driver.state.devices.get("a")  # it joins behind its welcome
        return None if known is None else known.memory.budget

    async with connected(device):
        for budget, used in ((900, 800), (2000, 1900)):
            await device.telemetry(budget_bytes=budget, used_bytes=used, peak_bytes=used)
            async with asyncio.timeout(60):
                while known_budget() != budget:
                    await asyncio.sleep(0.01)
            response = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
            (status,) = response.devices
            assert status.budget_bytes == budget
            assert not status.HasField("budget_excess")


async def test_a_device_above_its_budget_is_listed_as_such(world: World) -> None:
    hello = pb.Hello(protocol=PROTOCOL, device="a", budget_bytes=1500)
    device = world.device("a", hello=hello)
    async with connected(device):
        await device.telemetry(used_bytes=11, peak_bytes=1890)
        world.inputs(1)
        await world.submit()
        await world.ended()
        response = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
    (status,) = response.devices
    assert status.budget_excess.peak_bytes == 1890
    assert status.budget_excess.budget_bytes == 1500


async def test_fragments_are_served_from_any_offset(world: World) -> None:
    digest = world.document.fragments[0].digest
    content = (
        world.folder / "store/fragments" / digest.removeprefix("sha256:") / "model.onnx"
    ).read_bytes()
    client = SessionClient(world.channel)

    async def fetch(offset: int, name: str = "model.onnx", named: str = digest) -> bytes:
        request = FetchFragmentRequest(digest=named, file=name, offset=offset)
        receiver = FileReceiver(request, 1 << 24)
        frames = [frame async for frame in client.fetch_fragment(request, 10)]
        data = b"".join(bytes(receiver.feed(frame)) for frame in frames)
        assert receiver.complete
        return data

    assert await fetch(0) == content
    assert await fetch(len(content) - 1000) == content[-1000:]
    assert await fetch(len(content)) == b""
    assert (await refusal(fetch(len(content) + 1)))[0] == grpc.StatusCode.OUT_OF_RANGE
    missing = grpc.StatusCode.NOT_FOUND
    assert (await refusal(fetch(0, "../fragment.json")))[0] == missing
    assert (await refusal(fetch(0, named="sha256:../../etc")))[0] == missing
    assert (await refusal(fetch(0, named="sha256:" + "0" * 64)))[0] == missing


async def last_of(control: Connection) -> None:
    """Read until the coordinator ends the session: raises why."""
    while isinstance(await control.read(), pb.CoordinatorMessage):
        pass


async def test_a_stream_that_is_no_frames_is_hung_up(world: World) -> None:
    client = SessionClient(world.channel)
    control = client.connect()
    await control.write(pb.AgentMessage(hello=world.device("a").hello))
    assert isinstance(await control.read(), pb.CoordinatorMessage)
    call = client.exchange("a")
    await call.write(b"no frame at all")
    with pytest.raises(grpc.aio.AioRpcError, match="does not start with a header"):
        await call.read()
    # Its session ends with it, and says the same.
    with pytest.raises(grpc.aio.AioRpcError, match="does not start with a header"):
        await last_of(control)


async def test_a_message_beyond_the_limit_is_not_received(world: World) -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(world.target, unlimited) as channel:
        client = SessionClient(channel)
        control = client.connect()
        await control.write(pb.AgentMessage(hello=world.device("a").hello))
        assert isinstance(await control.read(), pb.CoordinatorMessage)
        call = client.exchange("a")
        await call.write(b"no frame" * (5 << 17))
        code, _ = await refusal(call.read())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_progress_and_counts_are_exposed(world: World) -> None:
    world.inputs(2)
    async with connected(world.device("a")):
        await world.submit()
        await world.ended()
    url = world.coordinator.metrics_url
    assert url is not None

    def get(path: str) -> str:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    assert await asyncio.to_thread(get, "/healthz") == "ok\n"
    assert await asyncio.to_thread(get, "/readyz") == "ok\n"
    text = await asyncio.to_thread(get, "/metrics")
    assert 'shoal_coordinator_tasks_total{tier="resident"}' in text
    assert "shoal_coordinator_step_seconds_bucket" in text
    assert "shoal_coordinator_task_compute_seconds_count 6.0" in text


async def test_what_a_plan_predicts_and_what_devices_measure_is_compared(world: World) -> None:
    world.inputs(2)
    placement = api.StagePlacement(devices=["a"], predicted_seconds=[0.004])
    async with connected(world.device("a")):
        await world.submit(stages=[placement] * 3)
        last = await world.ended()
    (time,) = last.stages[0].times
    assert (time.device, time.predicted_seconds) == ("a", 0.004)
    assert time.measured_seconds == pytest.approx(0.001, rel=0.1)


async def test_what_a_device_was_measured_to_do_is_told_and_of_an_old_agent_nothing(
    world: World,
) -> None:
    old, new = world.device("a"), world.device("b")
    new.hello.speed.processors = 0.5
    async with connected(old, new):
        response = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
    silent, told = response.devices
    assert not silent.HasField("speed")
    assert not silent.HasField("link_bytes_per_second")
    assert told.speed == pb.Speed(processors=0.5)


async def come_and_go(world: World, name: str, seed: int) -> None:
    """A device whose sessions break after a while, again and again."""
    chance = random.Random(seed)  # noqa: S311
    while True:
        device = world.device(name, budget=chance.choice((1500, 2500, 9000)))
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(chance.uniform(0.05, 0.5)):
                await device.run()


@pytest.mark.parametrize(("task", "overdue"), [(5.0, 600.0), (540.0, 600.0), (3600.0, 3660.0)])
async def test_an_answer_is_awaited_for_longer_than_a_task_may_take(
    tmp_path: Path, task: float, overdue: float
) -> None:
    settings = CoordinatorSettings(
        listen=f"unix:{tmp_path}/s",
        store=tmp_path / "store",
        state=tmp_path / "state",
        task_seconds=task,
    )
    async with serving(settings) as coordinator:
        assert seconds(coordinator.driver.state.limits.overdue) == overdue


@pytest.mark.parametrize("seed", range(3))
async def test_devices_may_come_and_go_at_any_moment(world: World, seed: int) -> None:
    rows = world.inputs(*[7] * 10)
    wanderers = [
        asyncio.create_task(come_and_go(world, name, seed * 100 + ord(name))) for name in "abc"
    ]
    try:
        async with connected(world.device("steady", budget=1500)):
            await world.submit(backoff_limit=1000)
            last = await world.ended()
    finally:
        for wanderer in wanderers:
            wanderer.cancel()
        await asyncio.gather(*wanderers, return_exceptions=True)
    assert last.state == api.JobStatus.COMPLETE, last.message
    assert last.succeeded == 70, last.failures
    world.check_results(rows)
