"""Pools and models for code that runs in an event loop; `synchronous` is made of them."""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Final, Literal, Self

from shoal.errors import ItemFailed, PoolClosed, PoolFailed
from shoal.items import Items, own_arrays
from shoal.loading import load, sizes_by_name, whole_number
from shoal.processes import running, settings
from shoal.remote import running_there
from shoal.running import OfOneProcess, Running
from shoal_protocol.choices import LARGEST_BATCH
from shoal_protocol.tensors import Array

LOOK_AHEAD: Final = 16
DEFAULT_BUDGET: Final = "64Mi"

Arrays = dict[str, Array]
"""By the names of the model's inputs, or of its outputs."""
OnError = Literal["raise", "return"]


class AsyncModel(OfOneProcess):
    """A model on a pool, until the pool is closed, or the program has the model no more. Calls may
    run at the same time."""

    def __init__(self, items: Items) -> None:
        self._items = items

    async def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """One item's results: arrays by the names of the model's outputs. `inputs` have the model's
        types and shapes, all axes included (see `Model.run`). Raises `ItemFailed`, and `TypeError`
        for what is no dictionary of arrays."""
        return await self._items.compute(0, own_arrays(inputs))

    async def map(
        self,
        items: Iterable[Mapping[str, Array]] | AsyncIterable[Mapping[str, Array]],
        *,
        look_ahead: int = LOOK_AHEAD,
        on_error: OnError = "raise",
    ) -> AsyncIterator[Arrays | ItemFailed]:
        """The results of many items, in their order. At most `look_ahead` items are taken before
        the result of the first of them is.

        An item that fails raises its `ItemFailed`; with `on_error="return"`, that is its result,
        and the others run.
        """
        check_map(look_ahead, on_error)
        waiting: deque[asyncio.Task[Arrays | ItemFailed]] = deque()
        try:
            place = 0
            async for item in _each(items):
                waiting.append(asyncio.create_task(self.compute(place, own_arrays(item), on_error)))
                place += 1
                if len(waiting) == look_ahead:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def compute(
        self, place: int, inputs: Mapping[str, Array], on_error: OnError
    ) -> Arrays | ItemFailed:
        """An item of a `map`, with arrays of its own."""
        try:
            return await self._items.compute(place, inputs)
        except ItemFailed as error:
            if on_error == "return":
                return error
            raise


class AsyncPool(OfOneProcess):
    """A pool, from `async with` to its end: see `async_pool`."""

    def __init__(self, start: Callable[[], AbstractAsyncContextManager[Running]]) -> None:
        self._start = start
        self._stack = contextlib.AsyncExitStack()
        self._run: Running | None = None
        self._begun = False
        self._models: set[Items] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._cutting = asyncio.Lock()
        self._failure: PoolFailed | None = None

    async def __aenter__(self) -> Self:
        self._begun = True
        async with contextlib.AsyncExitStack() as stack:
            self._run = await stack.enter_async_context(self._start())
            watching = asyncio.create_task(self._watch(self._run))
            stack.callback(watching.cancel)
            stack.push_async_callback(self._close_models)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the calls under way, and the pool's processes."""
        self._run = None
        await self._stack.aclose()

    async def load(
        self,
        path: str | PathLike[str],
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        fragments: int | None = None,
        batching: int = 1,
    ) -> AsyncModel:
        """Cut an ONNX file for the devices, and have them ready for its items.

        `shapes` are the largest of inputs whose sizes the model leaves open, by name. `fragments`:
        how many to cut it into, by default as suits the budgets. `batching`: so many items that
        wait on a device for one fragment may run there at once, where the model computes each by
        itself; results may differ in the last digits then. Raises `ModelFailed`, and `ValueError`
        for arguments that make no sense.
        """
        batch = whole_number("batching", batching, 1, LARGEST_BATCH)
        sizes = sizes_by_name({} if shapes is None else shapes)
        count = None if fragments is None else whole_number("fragments", fragments, 1)
        async with self._cutting:
            run = self._open_run()
            start = await load(Path(path), run, sizes, count)
            start.batch = batch
            self._open_run()  # it may have been closed meanwhile
        items = Items(run.open_channel(), run.target, start, run.reopen)
        self._models.add(items)
        model = AsyncModel(items)
        weakref.finalize(model, self._leave, asyncio.get_running_loop(), items).atexit = False
        return model

    def _open_run(self) -> Running:
        if self._failure is not None:
            raise self._failure
        if not self._begun:
            raise PoolFailed("the pool has not begun: it runs from `async with` to its end")
        if self._run is None:
            raise PoolClosed
        return self._run

    def _leave(self, loop: asyncio.AbstractEventLoop, items: Items) -> None:
        """The program has a model no more, as one of its threads has found just now: a coordinator
        serves so many at a time."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._close_model, items)

    def _close_model(self, items: Items) -> None:
        if items in self._models:
            self._models.remove(items)
            task = asyncio.get_running_loop().create_task(items.close())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _close_models(self) -> None:
        while self._models:
            await self._models.pop().close()
        await asyncio.gather(*self._leaving)

    async def _watch(self, run: Running) -> None:
        """A process of the pool that ends again and again ends everything."""
        try:
            await run.failed()
        except PoolFailed as error:
            self._failure = error
            for items in self._models:
                items.fail(self._failure)


def async_pool(
    *,
    devices: int | None = None,
    budget: str | int | Sequence[str | int] = DEFAULT_BUDGET,
    enforce: str = "auto",
    work: str | PathLike[str] | None = None,
    coordinator: str | None = None,
) -> AsyncPool:
    """A pool of devices that this machine pretends to be, for `async with`; or of those of a
    `coordinator` ("HOST:PORT", or "unix:/path") that `shoal join` has joined.

    `devices`: how many, by default 3, or as many as there are budgets. `budget`: what each may use
    for a model, such as "64Mi" or in bytes; or one for each device. `enforce`: "auto" limits each
    device by a cgroup where the machine allows it, "cgroup" insists on that, "none" only measures.
    `work`: a folder that outlives the pool, so that the next one finds its models cut.

    Raises `ValueError` for arguments that make no sense; `async with` raises `PoolFailed`.
    """
    folder = None if work is None else Path(work).absolute()  # the program may go elsewhere
    if coordinator is None:
        return AsyncPool(partial(running, settings(devices, budget, enforce, folder)))
    if (devices, budget, enforce) != (None, DEFAULT_BUDGET, "auto"):
        raise ValueError("the devices of a coordinator have budgets of their own: give none here")
    return AsyncPool(partial(running_there, coordinator, folder))


def check_map(look_ahead: int, on_error: str) -> None:
    """Raise `ValueError` for arguments of `map` that make no sense."""
    whole_number("look_ahead", look_ahead, 1)
    if on_error not in {"raise", "return"}:
        raise ValueError(f"on_error={on_error!r} is neither 'raise' nor 'return'")


async def _each(
    items: Iterable[Mapping[str, Array]] | AsyncIterable[Mapping[str, Array]],
) -> AsyncIterator[Mapping[str, Array]]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
