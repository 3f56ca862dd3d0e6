"""Coroutines that begin at once, as those of Python 3.12's eager tasks do, or go on at once.

A task of asyncio costs as much as a light run of a fragment, and begins in the event loop's next
turn. Most of what is begun here ends without having waited for anything. What waits for a `Prompt`
goes on in the turn in which its result comes.

What `begin` begins must not ask for the task that it runs in before it first waits
(`asyncio.timeout` does); what `start` starts never has one.
"""

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
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


def start(work: Coroutine[Any, None, Result]) -> "Running[Result] | None":
    """Run until it first waits, as `begin` does, but without a task for the rest."""
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    return Running(work, awaited)


class Running(Generic[Result]):
    """A coroutine that goes on in callbacks of the event loop.

    Where it gives a `Prompt`, who waits for that goes on inside of it: two tasks cannot nest so. It
    has no task to ask for at any time; what needs one is to be awaited as a task of its own.
    """

    def __init__(
        self, work: Coroutine[Any, None, Result], awaited: asyncio.Future[Any] | None
    ) -> None:
        """A coroutine that waits for `awaited` now; None: for the next turn of the loop, in which
        it may as well begin. `ended` has what it returns or raises."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Result] = asyncio.Future(loop=self._loop)
        self._work = work
        self._context = copy_context()
        self._cancelled = False
        self._awaited: asyncio.Future[Any] | None
        self._wait_for(awaited)

    def cancel(self) -> None:
        """Cancel what it waits for, as a task does."""
        if self._awaited is None or not self._awaited.cancel():
            self._cancelled = True

    def _go_on(self, _: object = None) -> None:
        self._awaited = None
        try:
            if self._cancelled:
                self._cancelled = False
                awaited = self._work.throw(asyncio.CancelledError())
            else:
                awaited = self._work.send(None)
        except StopIteration as stop:
            self.ended.set_result(stop.value)
        except asyncio.CancelledError:
            self.ended.cancel()
        except Exception as error:
            self.ended.set_exception(error)
        else:
            self._wait_for(awaited)

    def _wait_for(self, awaited: asyncio.Future[Any] | None) -> None:
        self._awaited = awaited
        if awaited is None:  # for a turn of the loop
            self._loop.call_soon(self._go_on, context=self._context)
        else:
            awaited._asyncio_future_blocking = False  # its word that it is awaited, not yielded
            awaited.add_done_callback(self._go_on, context=self._context)
            if self._cancelled and awaited.cancel():  # by who went on inside of it
                self._cancelled = False


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
        """Set the result, and have who waits go on before this returns. For a callback of the event
        loop, or what runs in one: no task may run now."""
        goes_on, context = self._goes_on, self._context
        if goes_on is None or context is None:
            self.set_result(result)
            return
        self.remove_done_callback(goes_on)
        self.set_result(result)
        context.run(goes_on, self)
