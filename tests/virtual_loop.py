"""An event loop whose time is a simulation's: what is asynchronous runs in it, under a seed."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Later = Callable[[float, Callable[[], object]], None]
"""Does something after so many seconds."""


class VirtualLoop:
    """What tasks, futures, locks and `asyncio.sleep` need of a loop. What would be done in another
    thread is done after a while."""

    def __init__(self, later: Later, now: Callable[[], float], work: Callable[[], float]) -> None:
        """`work` says how many seconds a thread takes."""
        self._later, self._now, self._work = later, now, work
        self._self: Any = self  # an event loop, to whom it may concern
        self.errors: list[BaseException] = []
        """What ended a task, or a callback."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """It is the running loop."""
        asyncio._set_running_loop(self._self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
        self.check()

    def check(self) -> None:
        """Nothing has gone wrong so far."""
        if self.errors:
            raise self.errors[0]

    def time(self) -> float:
        return self._now()

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._self, context)
        self._later(0, lambda: None if handle.cancelled() else handle._run())
        return handle

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self._self, context)
        self._later(when - self._now(), lambda: None if handle.cancelled() else handle._run())
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self._self)

    def create_task(self, coro: Any, **_: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self._self)
        task.add_done_callback(self._note_end)
        return task

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # it is who waits for it that has to bear it
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self._later(self._work(), work)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or AssertionError(context["message"]))

    def _note_end(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)
