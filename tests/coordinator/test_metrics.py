"""What a coordinator counts of jobs, items and tasks."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from cryptography import x509
from prometheus_client.parser import text_string_to_metric_families

from certificates import Pki
from coordinator.scripted import connected
from coordinator.world import World
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_coordinator.storage.volume import Volume
from shoal_protocol.v1 import coordinator_pb2 as api

PREFIX = "shoal_coordinator_"


async def measured(world: World) -> dict[str, float]:
    """All samples that have one label at most, as NAME or NAME/VALUE OF THE LABEL."""

    def get() -> str:
        url = f"{world.coordinator.metrics_url}/metrics"
        with urlopen(url, timeout=60) as answer:  # noqa: S310 - loopback
            text: str = answer.read().decode()
            return text

    return {
        "/".join((sample.name.removeprefix(PREFIX), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(await asyncio.to_thread(get))
        for sample in family.samples
    }


async def test_jobs_and_items_are_counted_by_how_they_ended(world: World) -> None:
    world.inputs(2)
    np.savez(world.folder / "in" / "odd.npz", x=np.zeros((2, 2, 3, 7)))
    before = await measured(world)
    assert before["jobs_ended_total/failed"] == before["items_ended_total/failed"] == 0
    async with connected(world.device("a")):
        await world.submit()
        assert (await world.ended()).state == api.JobStatus.FAILED
        (world.folder / "in" / "odd.npz").unlink()
        await world.submit(name="second", outputs_uri=str(world.folder / "second"))
        assert (await world.ended("second")).state == api.JobStatus.COMPLETE
    after = await measured(world)
    assert after["jobs_ended_total/failed"] == after["jobs_ended_total/complete"] == 1
    assert after["jobs_ended_total/cancelled"] == 0
    assert after["job_seconds_count"] == after["job_wait_seconds_count"] == 2
    assert after["items_ended_total/succeeded"] == after["item_seconds_count"] == 4
    assert after["items_ended_total/failed"] == after["item_failures_total/InvalidInput"] == 1
    tasks = sum(after[f"tasks_total/{tier}"] for tier in ("resident", "cached", "idle", "evict"))
    assert after["task_wait_seconds_count"] == tasks
    assert after["task_retries_total"] == 0


async def counted(world: World, **devices: int) -> None:
    """Wait until there are so many devices of each state."""
    async with asyncio.timeout(60):
        while True:
            found = await measured(world)
            if all(found[f"devices/{state}"] == count for state, count in devices.items()):
                return
            await asyncio.sleep(0.05)


async def have_left(world: World) -> list[str]:
    """The devices of which the coordinator says so."""
    answer = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
    return [device.name for device in answer.devices if device.has_left]


async def test_a_device_that_leaves_in_order_is_not_lost(world: World) -> None:
    """Its node was taken out of the pool, or its pod is replaced: nobody is to be told for ever."""
    stays, leaves = world.device("stays"), world.device("leaves")
    async with connected(stays):
        async with connected(leaves):
            await leaves.drain()
            await counted(world, Ready=1, Draining=1)
        await counted(world, Ready=1, Draining=0, Lost=0)
        assert await have_left(world) == ["leaves"]
        async with connected(world.device("leaves")):
            await counted(world, Ready=2, Lost=0)
            assert await have_left(world) == []
        await counted(world, Ready=1, Lost=1)  # it came back, and has gone without a word
        assert await have_left(world) == []
        assert (await measured(world))["devices/Silent"] == 0


async def test_a_task_that_is_given_again_is_counted_as_a_retry(world: World) -> None:
    world.inputs(2)
    lost = world.device("a", gate=asyncio.Semaphore(0))
    async with connected(lost):
        await world.submit()
        await world.until(lambda status: any(stage.running for stage in status.stages))
    async with connected(world.device("b")):
        await world.ended()
    assert (await measured(world))["task_retries_total"] >= 1


async def test_the_space_of_the_volume_is_measured(world: World) -> None:
    after = await measured(world)
    assert 0 < after["volume_free_bytes"] < after["volume_size_bytes"]
    assert "certificate_expiration_timestamp_seconds" not in after, "it has no certificate"


def test_the_end_of_the_certificate_is_that_of_the_file(tmp_path: Path) -> None:
    credentials = Pki(tmp_path).issue("coordinator")
    registry = CoordinatorMetrics(Volume(tmp_path), credentials).registry
    certificate = x509.load_pem_x509_certificate(credentials.certificate.read_bytes())
    expires = registry.get_sample_value(f"{PREFIX}certificate_expiration_timestamp_seconds")
    assert expires == certificate.not_valid_after_utc.timestamp()
    assert expires > datetime.now(UTC).timestamp()
