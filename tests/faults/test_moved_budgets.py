"""Budgets of a real pool move all the time, beyond those of the start as well, while a job runs: it
completes, with the results of the whole model, and the agents are those that there were.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from pool import cut, read_results, write_items

from coordinator.scripted import submission
from parity_with_whole import TOLERANCE, largest_difference, whole
from real_models import MODELS, find
from shoal_protocol.channels import open_channel
from shoal_protocol.coordinator_client import ENDED, CoordinatorClient
from shoal_protocol.v1 import coordinator_pb2 as api

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MIB = 1 << 20
MODEL = "ppocr_rec"
AGENTS = ("one", "two")
ITEMS = 60
START = 24
MOVES = (40, 20, 64, 32, 96, 24)
"""In MiB; each of the fragments takes 20 as a whole, or less in blocks."""
PATIENCE_SECONDS = 120.0


@contextlib.asynccontextmanager
async def process(*command: object) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(sys.executable, "-m", *map(str, command))
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


def tell(folder: Path, size_mib: int) -> None:
    """All agents, each in its own file, as a kubelet does."""
    for name in AGENTS:
        new = folder / "new"
        new.write_text(f"{size_mib}Mi")
        new.rename(folder / name)


async def budgets(client: CoordinatorClient) -> Mapping[str, int]:
    return {each.name: each.budget_bytes for each in await client.devices()}


async def until_all_have(client: CoordinatorClient, size_mib: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await budgets(client) != dict.fromkeys(AGENTS, size_mib * MIB):
            await asyncio.sleep(0.02)


async def test_a_job_completes_while_the_budgets_of_all_its_devices_move(tmp_path: Path) -> None:
    model, path = MODELS[MODEL], find(MODEL)
    document = cut(path, tmp_path / "store", 2, model.shapes())
    items = [model.inputs(seed) for seed in range(ITEMS)]
    inputs = write_items(tmp_path / "in", items)
    target = f"unix:{tmp_path}/c"
    tell(tmp_path, START)
    commands: list[tuple[object, ...]] = [
        ("shoal_coordinator", "--listen", target, "--store", tmp_path / "store"),
        *(
            (
                *("shoal_agent", "--name", name, "--budget-file", tmp_path / name, "--threads", 1),
                *("--speed", os.devnull, "--cache", tmp_path / f"cache-{name}"),
                *("--coordinator", target, "--listen", f"unix:{tmp_path}/{name}.sock"),
            )
            for name in AGENTS
        ),
    ]
    async with contextlib.AsyncExitStack() as stack:
        running = [await stack.enter_async_context(process(*each)) for each in commands]
        client = CoordinatorClient(open_channel(target), seconds=PATIENCE_SECONDS, wait=True)
        stack.push_async_callback(client.close)
        await until_all_have(client, START)
        stages = [api.StagePlacement(devices=[name]) for name in AGENTS]
        job = submission(document, inputs, tmp_path / "out", stages=stages, backoff_limit=3)
        await client.submit(job)
        moves = 0

        async def move() -> None:
            nonlocal moves
            while True:
                size = MOVES[moves % len(MOVES)]
                tell(tmp_path, size)
                await until_all_have(client, size)
                moves += 1

        moving = asyncio.create_task(move())
        async for status in client.watch("job", 0.05, seconds=PATIENCE_SECONDS):
            if status.state in ENDED:
                break
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        assert status.state == api.JobStatus.COMPLETE, status
        assert moves > 0, "budgets moved while the job ran"
        over = [each for each in await client.devices() if each.HasField("budget_excess")]
        assert over == [], "peaks are within budgets"
        assert [each.returncode for each in running] == [None] * len(running)
    for given, right in zip(read_results(tmp_path / "out"), whole(path, items), strict=True):
        assert largest_difference(given, right) <= TOLERANCE
