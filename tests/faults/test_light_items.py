"""Items that travel from device to device by themselves, with nothing kept of them on the way:
whatever happens to a device, the coordinator or a link, each has its own result, once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest
from pool import Pool, cut, running_pool

from made_models import TOPOLOGIES
from parity_with_whole import TOLERANCE, largest_difference, whole
from shoal_protocol.v1 import coordinator_pb2 as pb

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MADE = TOPOLOGIES["a chain"]
DEVICES = ("one", "two", "three")
ITEMS, KINDS = 8000, 50
SLOW = {"link": {"rate": "4M", "latencyMilliseconds": 20}}

Trouble = Callable[[Pool], AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def frozen(pool: Pool) -> AsyncIterator[None]:
    """The device in the middle stands still, until the job has ended without it."""
    process = pool.process_id("two")
    os.kill(process, signal.SIGSTOP)
    try:
        yield
        assert (await pool.devices())["two"].state == pb.DeviceStatus.LOST
    finally:
        os.kill(process, signal.SIGCONT)


@contextlib.asynccontextmanager
async def killed(pool: Pool) -> AsyncIterator[None]:
    """The last device is gone, and another process has its name."""
    pool.kill("three")
    yield
    assert pool.restarts("three") == 1


@contextlib.asynccontextmanager
async def coordinator_killed(pool: Pool) -> AsyncIterator[None]:
    """Another process goes on with the job, in a newer epoch."""
    pool.kill("coordinator")
    yield
    assert pool.restarts("coordinator") == 1


@contextlib.asynccontextmanager
async def nothing(_: Pool) -> AsyncIterator[None]:
    yield


async def wait_until_items_travel(pool: Pool, items: int) -> None:
    """Until so many have succeeded, of which most have travelled."""
    async with asyncio.timeout(120):
        while (await pool.status("flood")).succeeded < items:
            await asyncio.sleep(0.02)
    log = pool.workspace.log("coordinator").read_text()
    assert log.count("event ItemsTravelled(") > 10, "nothing has travelled"


@pytest.mark.parametrize(
    ("trouble", "device", "secured"),
    [
        pytest.param(frozen, {}, False, id="a frozen device", marks=pytest.mark.slow),
        pytest.param(frozen, {}, True, id="a frozen device over TLS", marks=pytest.mark.minutes),
        pytest.param(killed, {}, True, id="a killed device over TLS"),
        pytest.param(coordinator_killed, {}, False, id="a killed coordinator"),
        pytest.param(coordinator_killed, {}, True, id="the same over TLS"),
        pytest.param(nothing, SLOW, True, id="slow links", marks=pytest.mark.minutes),
        pytest.param(
            killed, SLOW, False, id="a killed device behind slow links", marks=pytest.mark.slow
        ),
    ],
)
async def test_each_item_has_its_own_result_once(
    trouble: Trouble, device: dict[str, object], secured: bool, tmp_path: Path
) -> None:
    devices = [{"name": name, "memory": "48Mi", **device} for name in DEVICES]
    model = MADE.save(tmp_path)
    inputs = [MADE.inputs(seed) for seed in range(KINDS)]
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", x=np.stack([inputs[i % KINDS]["x"] for i in range(ITEMS)]))
    async with running_pool(
        tmp_path / "pool", devices, cgroups=False, log_level="debug", secured=secured
    ) as pool:
        document = cut(model, pool.store, ("b", "d"), MADE.shapes)
        homes = [[name] for name in DEVICES]
        await pool.submit("flood", document, tmp_path / "in", tmp_path / "out", homes=homes)
        await wait_until_items_travel(pool, ITEMS // 4)
        async with trouble(pool):
            status = await pool.finish("flood")
        assert (status.succeeded, status.failed) == (ITEMS, 0)
    with np.load(tmp_path / "out" / "0.npz") as stored:
        assert len(stored["y"]) == ITEMS
        for number, right in enumerate(whole(model, inputs)):
            for row in stored["y"][number::KINDS]:
                assert largest_difference({"y": row}, right) <= TOLERANCE
