"""Coroutines that begin at once, as those of Python 3.12's eager tasks do.

A task of asyncio costs as much as a light run of a fragment, and begins in the event loop's next
turn. Most of what is begun here ends without having waited for anything.

What is run so must not ask for the task that it runs in before it first waits (`asyncio.timeout`
does).
"""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


def begin(work: Coroutine[Any, None, None]) -> asyncio.Task[None] | None:
    """Run until it first waits; the task that continues it. None: it has ended. Raises what it
    raises until then."""
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    rest = _finish(work, awaited)
    rest.send(None)  # a task that is cancelled before its first step would not begin it at all
    return asyncio.create_task(rest)


async def _finish(work: Coroutine[Any, None, None], awaited: object) -> None:
    await _rest(work, awaited)


@types.coroutine
def _rest(work: Coroutine[Any, None, None], awaited: object) -> Generator[object, None, None]:
    """What is left of a coroutine that waits for `awaited` now. The first step is `begin`'s."""
    stepped = False
    while True:
        thrown: BaseException | None = None
        try:
            yield awaited if stepped else None
        except BaseException as error:  # cancelled, mostly: it is for the coroutine to handle
            thrown = error
        try:
            if thrown is not None:
                awaited = work.throw(thrown)
            elif stepped:
                awaited = work.send(None)
        except StopIteration:
            return
        stepped = True
