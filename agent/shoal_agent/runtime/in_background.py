"""Work that goes on beside whoever began it."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


def begin(
    work: Coroutine[None, None, Result], tasks: set[asyncio.Task[Result]]
) -> asyncio.Task[Result]:
    """Keep it among `tasks` until it has ended."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
