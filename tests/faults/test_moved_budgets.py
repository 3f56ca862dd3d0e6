"""Budgets of a real pool move all the time, beyond those of the start as well, while a job runs: it
completes, with the results of the whole model, and the agents are those that there were. Whoever
looks later knows that there were other budgets.
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
LEAST = 8
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


def coordinator(folder: Path) -> tuple[object, ...]:
    return "shoal_coordinator", "--listen", f"unix:{folder}/c", "--store", folder / "store"


def agent(folder: Path, name: str) -> tuple[object, ...]:
    return (
        *("shoal_agent", "--name", name, "--budget-file", folder / name, "--threads", 1),
        *("--speed", os.devnull, "--cache", folder / f"cache-{name}"),
        *("--coordinator", f"unix:{folder}/c", "--listen", f"unix:{folder}/{name}.sock"),
    )


@contextlib.asynccontextmanager
async def asking(folder: Path) -> AsyncIterator[CoordinatorClient]:
    channel = open_channel(f"unix:{folder}/c")
    client = CoordinatorClient(channel, seconds=PATIENCE_SECONDS, wait=True)
    try:
        yield client
    finally:
        await client.close()


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
    tell(tmp_path, START)
    async with contextlib.AsyncExitStack() as stack:
        commands = [coordinator(tmp_path), *(agent(tmp_path, name) for name in AGENTS)]
        running = [await stack.enter_async_context(process(*each)) for each in commands]
        client = await stack.enter_async_context(asking(tmp_path))
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


async def test_what_was_taken_of_a_larger_budget_is_no_excess_for_a_coordinator_that_is_new(
    tmp_path: Path,
) -> None:
    model, path = MODELS[MODEL], find(MODEL)
    document = cut(path, tmp_path / "store", 2, model.shapes())
    inputs = write_items(tmp_path / "in", [model.inputs(0)])
    tell(tmp_path, max(MOVES))
    async with contextlib.AsyncExitStack() as agents:
        async with process(*coordinator(tmp_path)), asking(tmp_path) as client:
            for name in AGENTS:
                await agents.enter_async_context(process(*agent(tmp_path, name)))
            await until_all_have(client, max(MOVES))
            stages = [api.StagePlacement(devices=[name]) for name in AGENTS]
            await client.submit(submission(document, inputs, tmp_path / "out", stages=stages))
            async for status in client.watch("job", 0.05, seconds=PATIENCE_SECONDS):
                if status.state in ENDED:
                    break
            tell(tmp_path, LEAST)
            await until_all_have(client, LEAST)
        async with process(*coordinator(tmp_path)), asking(tmp_path) as client:
            await until_all_have(client, LEAST)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while min(each.peak_bytes for each in await client.devices()) <= LEAST * MIB:
                    await asyncio.sleep(0.02)
            over = [each for each in await client.devices() if each.HasField("budget_excess")]
            assert over == [], "the peaks are of the budget that there was"
