"""What a coordinator shows to those who look: devices and jobs in detail, in a bounded answer."""

import asyncio
from pathlib import Path
from time import monotonic_ns

from coordinator.scripted import connected
from coordinator.world import World
from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.server.overview import DEVICES, PART_BYTES
from shoal_protocol.coordinator_client import CoordinatorClient
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds
from shoal_protocol.v1 import coordinator_pb2 as pb


async def overview(world: World, job: str = "") -> pb.Overview:
    return await CoordinatorClient(world.channel).overview(job)


def join(world: World, name: str, **fields: object) -> None:
    """A device as the dispatcher sees it, without a session."""
    at = Nanoseconds(monotonic_ns())
    budget = Bytes(10_000)
    joined = ev.DeviceJoined(at=at, device=name, session=1, budget=budget, **fields)  # type: ignore[arg-type]
    world.coordinator.driver.feed(joined)


async def test_a_device_is_shown_with_its_fragments_and_readings(world: World) -> None:
    world.inputs(2)
    device = world.device("a")
    async with connected(device):
        await device.telemetry(used_bytes=11, temperature_celsius=61.5)
        await world.submit()
        await world.ended()
        (shown,) = (await overview(world)).devices
    assert (shown.status.name, shown.status.used_bytes) == ("a", 11)
    assert shown.temperature_celsius == 61.5
    assert not shown.HasField("battery_fraction")
    held = {each.digest: (each.state, each.bytes) for each in shown.fragments}
    resident = (pb.HeldFragment.RESIDENT, 1000)
    assert held == {fragment.digest: resident for fragment in world.document.fragments}


async def test_a_device_that_a_stage_cannot_use_is_shown_with_need_have_and_reason(
    world: World,
) -> None:
    world.inputs(2)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("small", budget=500), world.device("large", gate=gate)):
        await world.submit(explanation=["because", *["x" * 9000] * 90])
        await world.until(lambda status: any(stage.running for stage in status.stages))
        (job,) = (await overview(world, "job")).jobs
        assert job.explanation[0] == "because"
        assert sum(map(len, job.explanation)) < 10_000
        first = job.stages[0]
        assert list(first.status.devices) == ["large"]
        assert [(each.device, each.need_bytes, each.have_bytes) for each in first.candidates] == [
            ("small", 1000, 500)
        ]
        assert first.candidates[0].reason == "the fragment does not fit"
        (unasked,) = (await overview(world)).jobs
        assert (list(unasked.stages[0].candidates), list(unasked.explanation)) == ([], [])
        gate.release()
        assert [(each.item, each.tasks[0].device) for each in job.oldest] == [
            (0, "large"),
            (1, "large"),
        ]
        assert [each.tasks[0].ended_seconds for each in job.oldest] == [0, 0]


async def test_the_slowest_items_are_shown_task_by_task(world: World) -> None:
    world.inputs(*[1] * 12)
    gate = asyncio.Semaphore(33)  # of 36 tasks
    async with connected(world.device("a", gate=gate), world.device("b", gate=gate)):
        await world.submit()
        await world.until(lambda status: status.succeeded >= 3)
        running = (await overview(world, "job")).jobs[0]
        for _ in range(3):
            gate.release()
        await world.ended()
        ended = (await overview(world, "job")).jobs[0]
    assert ended.status.state == pb.JobStatus.COMPLETE
    assert len(ended.slowest) == 8
    for job in (running, ended):
        took = [each.seconds for each in job.slowest]
        assert took == sorted(took, reverse=True)
        for item in job.slowest:
            check(item)
    assert running.slowest[0].input == f"{running.slowest[0].item:03}.npz[0]"


def check(item: pb.ItemTiming) -> None:
    assert [task.stage for task in item.tasks] == [0, 1, 2]
    for task in item.tasks:
        assert task.ready_seconds <= task.given_seconds <= task.ended_seconds <= item.seconds
        assert task.compute_seconds == 0.001
    assert item.tasks[1].ready_seconds == item.tasks[0].ended_seconds


async def test_a_device_that_keeps_failing_with_a_fragment_is_shown_with_the_reason(
    world: World,
) -> None:
    world.inputs(2)

    def broken(_: object) -> dict[str, object]:
        raise ValueError("no such node")

    async with connected(world.device("a", stages=(broken,) * 3)):
        await world.submit(backoff_limit=20)
        async with asyncio.timeout(60):
            while not (failed := [each for each in await fragments(world) if each.failures > 2]):
                await asyncio.sleep(0.05)
        (job,) = (await overview(world, "job")).jobs
    assert failed[0].failure == "no such node"
    assert failed[0].retry_seconds > 0
    assert job.stages[0].candidates[0].reason.endswith("in a row, at last: no such node")


async def fragments(world: World) -> list[pb.HeldFragment]:
    return [each for shown in (await overview(world)).devices for each in shown.fragments]


async def test_of_many_devices_and_fragments_as_many_are_shown_as_there_is_room_for(
    world: World,
) -> None:
    digests = [Digest(f"sha256:{number:064}") for number in range(100)]
    resident = {digest: Bytes(1) for digest in digests}
    for number in range(DEVICES + 44):
        join(world, f"{number:03}-{'x' * 40}", resident=resident)
    shown = await overview(world)
    assert 0 < len(shown.devices) <= DEVICES
    assert shown.omitted_devices == DEVICES + 44 - len(shown.devices)
    assert all(len(each.fragments) <= 64 for each in shown.devices)
    assert shown.ByteSize() < 2 * PART_BYTES


async def test_the_job_asked_for_comes_first_and_of_many_the_rest_is_counted(
    world: World, tmp_path: Path
) -> None:
    world.inputs(1)
    for number in range(70):
        await world.submit(name=f"job-{number:02}", outputs_uri=str(tmp_path / f"out-{number}"))
    shown = await overview(world, "job-66")
    assert shown.jobs[0].status.name == "job-66"
    assert (len(shown.jobs), shown.omitted_jobs) == (64, 6)
    assert shown.jobs[0].status.state == pb.JobStatus.PENDING
