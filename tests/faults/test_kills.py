"""`kill -9` of any process at any moment: nothing is lost, done twice, or waits for ever."""

import asyncio
import os
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from pool import Pool, cut, read_results, running_pool, write_items

from made_models import TOPOLOGIES
from parity_with_whole import TOLERANCE, largest_difference, whole
from real_models import MODELS, find
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.v1 import coordinator_pb2 as pb

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MODEL = "ppocr_cls"
ITEMS = 150
RESTED_READINGS = 16
"""They come twice a second. A device hangs up within six seconds of rest, and what that broke would
keep the others from coming."""
PATIENCE_SECONDS = 60


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    """Three devices, each with room for a fragment or two."""
    devices = [{"name": name, "memory": "48Mi"} for name in ("one", "two", "three")]
    async with running_pool(
        tmp_path / "pool", devices, cgroups=False, log_level="debug"
    ) as running:
        yield running


def prepare(pool: Pool, folder: Path) -> tuple[PartitionDocument, Path]:
    """Three fragments of a real model, and items that differ."""
    model, path = MODELS[MODEL], find(MODEL)
    document = cut(path, pool.store, 3, model.shapes())
    return document, write_items(folder / "in", [model.inputs(seed) for seed in range(ITEMS)])


def check_results(outputs: Path) -> None:
    """Every item has its own result, and only that."""
    model, path = MODELS[MODEL], find(MODEL)
    results = read_results(outputs)
    assert len(results) == ITEMS
    sample = range(0, ITEMS, 10)
    expected = whole(path, [model.inputs(seed) for seed in sample])
    for seed, right in zip(sample, expected, strict=True):
        assert largest_difference(results[seed], right) <= TOLERANCE
    assert not list(outputs.glob("*.part")), "half-written results were left"


def readings(pool: Pool) -> Counter[str]:
    """How often the coordinator has heard the readings of each device."""
    log = pool.workspace.log("coordinator").read_text()
    return Counter(re.findall(r"event DeviceTelemetry\(.*?device='(\w+)'", log))


async def reach(pool: Pool, job: str, succeeded: int) -> pb.JobStatus:
    """Until so many items have succeeded."""
    async with asyncio.timeout(120):
        while True:
            status = await pool.status(job)
            if status.succeeded >= succeeded:
                return status
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.minutes)])
async def test_agents_killed_at_random_moments(pool: Pool, tmp_path: Path, seed: int) -> None:
    document, inputs = prepare(pool, tmp_path)
    await pool.submit("kills", document, inputs, tmp_path / "out")
    chance = random.Random(seed)  # noqa: S311 - which agent and when
    for part in range(1, 7):
        await reach(pool, "kills", part * ITEMS // 10)
        await asyncio.sleep(chance.uniform(0, 0.2))
        pool.kill(pool.device_names[part % 3] if part > 3 else chance.choice(pool.device_names))
        await asyncio.sleep(0.3)
        await pool.ready()
    status = await pool.finish("kills")
    assert status.state == pb.JobStatus.COMPLETE, status
    assert (status.succeeded, status.failed) == (ITEMS, 0)
    check_results(tmp_path / "out")


async def test_the_loss_of_a_device_in_a_flood_of_light_items_takes_no_other_with_it(
    pool: Pool, tmp_path: Path
) -> None:
    """Nor does their rest, in which they hang up on one another."""
    made, items = TOPOLOGIES["a chain"], 8000
    document = cut(made.save(tmp_path), pool.store, ("b", "d"), made.shapes)
    rows = np.stack([made.inputs(item % 50)["x"] for item in range(items)])
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", x=rows)
    homes = [[name] for name in ("one", "two", "three")]
    await pool.submit("flood", document, tmp_path / "in", tmp_path / "out", homes=homes)
    await reach(pool, "flood", items // 2)
    pool.kill("three")
    status = await pool.finish("flood")
    assert (status.succeeded, status.failed) == (items, 0)
    await pool.ready()
    before = readings(pool)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while min((readings(pool) - before)[name] for name in pool.device_names) < RESTED_READINGS:
            states = {each.state for each in (await pool.devices()).values()}
            assert states == {pb.DeviceStatus.READY}
            await asyncio.sleep(0.5)
    log = pool.workspace.log("coordinator").read_text()
    assert [log.count(f"device {name} joined") for name in ("one", "two", "three")] == [1, 1, 2]


@pytest.mark.minutes
async def test_all_agents_killed_at_once(pool: Pool, tmp_path: Path) -> None:
    document, inputs = prepare(pool, tmp_path)
    await pool.submit("massacre", document, inputs, tmp_path / "out")
    await reach(pool, "massacre", ITEMS // 4)
    for name in pool.device_names:
        pool.kill(name)
    status = await pool.finish("massacre")
    assert (status.succeeded, status.failed) == (ITEMS, 0)
    check_results(tmp_path / "out")


@pytest.mark.minutes
@pytest.mark.parametrize("everything", [False, True])
async def test_the_coordinator_killed_twice(pool: Pool, tmp_path: Path, everything: bool) -> None:
    document, inputs = prepare(pool, tmp_path)
    await pool.submit("restart", document, inputs, tmp_path / "out")
    before = pb.JobStatus()
    for part in (4, 2):
        before = await reach(pool, "restart", ITEMS // part)
        pool.kill("coordinator")
        if everything:
            pool.kill(pool.device_names[0])
        await asyncio.sleep(0.5)
    status = await pool.finish("restart")
    assert (status.succeeded, status.failed) == (ITEMS, 0)
    if status.epoch == before.epoch:  # on a quick machine all may have ended before the second kill
        assert status.resumed == before.resumed, "an ended job was run again"
    else:
        assert status.resumed >= before.succeeded, "finished items were run again"
    check_results(tmp_path / "out")


@pytest.mark.minutes
async def test_a_second_run_repeats_nothing(pool: Pool, tmp_path: Path) -> None:
    document, inputs = prepare(pool, tmp_path)
    first = await pool.run("twice", document, inputs, tmp_path / "out")
    assert first.succeeded == ITEMS
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.npz")}
    tasks = sum(device.tasks for device in (await pool.devices()).values())
    again = await pool.run("twice", document, inputs, tmp_path / "out")
    assert (again.succeeded, again.resumed) == (ITEMS, ITEMS)
    assert sum(device.tasks for device in (await pool.devices()).values()) == tasks
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.npz")}
    assert after == before


async def test_a_frozen_agent_is_lost_and_its_work_goes_on_elsewhere(
    pool: Pool, tmp_path: Path
) -> None:
    document, inputs = prepare(pool, tmp_path)
    await pool.submit("frozen", document, inputs, tmp_path / "out")
    await reach(pool, "frozen", ITEMS // 10)
    victim = pool.process_id("two")
    os.kill(victim, signal.SIGSTOP)
    try:
        status = await pool.finish("frozen")
        assert (status.succeeded, status.failed) == (ITEMS, 0)
        assert (await pool.devices())["two"].state == pb.DeviceStatus.LOST
    finally:
        os.kill(victim, signal.SIGCONT)
    await pool.ready()
    check_results(tmp_path / "out")
