"""Background tasks that must not end: whatever one raises is logged and counted, and it is started
again, later each time in a row."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

FIRST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 30.0


def supervise(
    name: str,
    task: Callable[[], Awaitable[None]],
    count_failure: Callable[[str], None],
    logger: logging.Logger,
) -> asyncio.Task[None]:
    """Run `task` until the returned one is cancelled. `count_failure` gets the name each time."""
    return asyncio.create_task(_run(name, task, count_failure, logger), name=name)


async def _run(
    name: str,
    task: Callable[[], Awaitable[None]],
    count_failure: Callable[[str], None],
    logger: logging.Logger,
) -> None:
    delay = FIRST_SECONDS
    while True:
        started = monotonic()
        try:
            await task()
            return
        except Exception:
            if monotonic() - started > LONGEST_SECONDS:
                delay = FIRST_SECONDS
            logger.exception("background task %s failed; it starts again in %g s", name, delay)
            count_failure(name)
        await asyncio.sleep(delay)
        delay = min(2 * delay, LONGEST_SECONDS)
