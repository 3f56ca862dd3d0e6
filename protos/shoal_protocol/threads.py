"""Blocking work beside an event loop. A caller that is cancelled first waits for the end of what it
has begun: nothing that it left behind is still being changed then.

What is raised refers to the frames that it came through, with all that they refer to. None of those
refers to what is raised, so what failed is freed with it, and waits for no garbage collection.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import BinaryIO, ParamSpec, TypeVar

from shoal_protocol.eager import Prompt

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


async def in_thread(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """`asyncio.to_thread`, whose end is waited for."""
    call = asyncio.get_running_loop().run_in_executor(
        None, partial(function, *arguments, **options)
    )
    cancelled: asyncio.CancelledError | None = None
    while not call.done():
        try:
            await asyncio.wait((call,))
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if cancelled is None:
            return call.result()
        if not call.cancelled():
            call.exception()  # seen, so that nobody is warned of it
        raise cancelled
    finally:
        del call, cancelled


@asynccontextmanager
async def open_in_thread(
    function: Callable[[], tuple[BinaryIO, int]],
) -> AsyncIterator[tuple[BinaryIO, int]]:
    """A file that a thread opens, and its size. It is closed in the end, also where the caller is
    cancelled meanwhile."""
    with ExitStack() as resources:

        def opened() -> tuple[BinaryIO, int]:
            file, size = function()
            return resources.enter_context(file), size

        yield await in_thread(opened)


async def in_executor(executor: Executor, function: Callable[[], Result]) -> Result:
    """The same in a thread of an executor of one's own, for work of milliseconds: the caller goes
    on in the turn in which the event loop hears of the end, where asyncio takes three."""
    loop = asyncio.get_running_loop()
    ended: Prompt[None] = Prompt()
    has_ended = False

    def end() -> None:
        nonlocal has_ended
        has_ended = True
        if not ended.done():
            ended.give(None)

    def tell(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end)

    call = executor.submit(function)
    call.add_done_callback(tell)
    cancelled: asyncio.CancelledError | None = None
    while not has_ended:
        try:
            await ended
        except asyncio.CancelledError as error:
            cancelled, ended = error, Prompt()
    try:
        if cancelled is None:
            return call.result()
        raise cancelled
    finally:
        del call, cancelled
