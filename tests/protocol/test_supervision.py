"""Background tasks that are kept running."""

import asyncio
import logging

import pytest

from shoal_protocol.supervision import supervise

PATIENCE_SECONDS = 10


async def test_a_background_task_that_fails_is_counted_and_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: list[str] = []
    third = asyncio.Event()

    async def task() -> None:
        if len(counted) == 2:
            third.set()
            await asyncio.Event().wait()
        raise ZeroDivisionError("a bug")

    supervised = supervise("sampler", task, counted.append, logging.getLogger("whose"))
    await asyncio.wait_for(third.wait(), PATIENCE_SECONDS)
    supervised.cancel()
    assert counted == ["sampler", "sampler"]
    # Others may say something as well: asyncio does, of a task that a test before has left.
    said = [each.exc_info and each.exc_info[0] for each in caplog.records if each.name == "whose"]
    assert said == 2 * [ZeroDivisionError]


async def test_a_background_task_that_has_nothing_to_do_ends() -> None:
    counted: list[str] = []

    async def task() -> None:
        """Nothing."""

    supervised = supervise("sampler", task, counted.append, logging.getLogger("whose"))
    await asyncio.wait_for(supervised, PATIENCE_SECONDS)
    assert counted == []
