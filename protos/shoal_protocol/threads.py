"""Blocking work beside an event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


async def in_thread(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """`asyncio.to_thread`, but a cancelled caller first waits for the function's end: nothing that
    it left behind is still being changed then."""
    return await in_executor(None, partial(function, *arguments, **options))


async def in_executor(executor: Executor | None, function: Callable[[], Result]) -> Result:
    """`in_thread`, in a thread of an executor of one's own."""
    call = asyncio.get_running_loop().run_in_executor(executor, function)
    cancelled: asyncio.CancelledError | None = None
    while not call.done():
        try:
            await asyncio.wait((call,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return call.result()
    if not call.cancelled():
        call.exception()  # seen, so that nobody is warned of it
    raise cancelled
