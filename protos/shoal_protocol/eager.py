"""Coroutines that begin at once, as those of Python 3.12's eager tasks do, or go on at once.

A task of asyncio costs as much as a light run of a fragment, and begins in the event loop's next
turn. Most of what is begun here ends without having waited for anything. A task that waits for a
`Prompt` goes on in the turn in which its result comes.

What is begun so must not ask for the task that it runs in before it first waits (`asyncio.timeout`
does).
"""

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Generic, Self, TypeVar

Result = TypeVar("Result")


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


class Prompt(asyncio.Future[Result], Generic[Result]):
    """A future that one task waits for."""

    _goes_on: Callable[[Any], object] | None = None
    _context: Context | None = None

    def add_done_callback(
        self,
        fn: Callable[[Self], object],
        /,
        *,
        context: Context | None = None,
    ) -> None:
        self._goes_on, self._context = fn, context
        super().add_done_callback(fn, context=context)

    def __await__(self) -> Generator[Any, None, Result]:
        try:
            return (yield from super().__await__())
        finally:
            self._goes_on = self._context = None  # or the task and its future keep each other

    def give(self, result: Result) -> None:
        """Set the result, and have the task go on before this returns. For a callback of the event
        loop: no task may run now."""
        goes_on, context = self._goes_on, self._context
        if goes_on is None or context is None:
            self.set_result(result)
            return
        self.remove_done_callback(goes_on)
        self.set_result(result)
        context.run(goes_on, self)
