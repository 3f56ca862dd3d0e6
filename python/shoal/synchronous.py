"""Pools and models for ordinary code: `asynchronous`, in a thread that runs an event loop.

All pools of a process share the thread, for as long as the process lives: its end is what their
processes take for the end of this one. A process that is forked from this one has neither the
thread nor a gRPC that works: it can use no pool, and its end is nothing to the pools of this one.
"""

import asyncio
import atexit
import concurrent.futures
import functools
import os
import threading
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Self, TypeVar

from shoal.asynchronous import (
    DEFAULT_BUDGET,
    LOOK_AHEAD,
    Arrays,
    AsyncModel,
    AsyncPool,
    OnError,
    async_pool,
    check_map,
)
from shoal.errors import ItemFailed, PoolFailed
from shoal.items import own_arrays
from shoal.running import OfOneProcess
from shoal_protocol.tensors import Array

Value = TypeVar("Value")


class Model(OfOneProcess):
    """A model on a pool, until the pool is closed, or the program has the model no more. Threads
    may share it."""

    def __init__(self, model: AsyncModel) -> None:
        self._model = model

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """One item's results: arrays by the names of the model's outputs.

        `inputs` are arrays by the names of the model's inputs. Their types must be the model's, as
        nothing is converted; so must their shapes, all axes included, also one for a batch. Axes
        that the model leaves open may have any size, up to the `shapes` that it was loaded with.
        Results are arrays of the model's types and shapes, and the caller's own.

        Raises `ItemFailed` where the devices cannot compute the item (a wrong type or shape, too
        little memory), and `TypeError` for what is no dictionary of arrays.
        """
        return _wait(_submit(self._model.run(inputs)))

    def map(
        self,
        items: Iterable[Mapping[str, Array]],
        *,
        look_ahead: int = LOOK_AHEAD,
        on_error: OnError = "raise",
    ) -> Iterator[Arrays | ItemFailed]:
        """The results of many items, in their order. At most `look_ahead` items are taken before
        the result of the first of them is.

        An item that fails raises its `ItemFailed`; with `on_error="return"`, that is its result,
        and the others run.
        """
        check_map(look_ahead, on_error)
        return self._map(items, look_ahead, on_error)

    def _map(
        self, items: Iterable[Mapping[str, Array]], look_ahead: int, on_error: OnError
    ) -> Iterator[Arrays | ItemFailed]:
        waiting: deque[concurrent.futures.Future[Arrays | ItemFailed]] = deque()
        try:
            for place, item in enumerate(items):
                waiting.append(_submit(self._model.compute(place, own_arrays(item), on_error)))
                if len(waiting) == look_ahead:
                    yield _wait(waiting.popleft())
            while waiting:
                yield _wait(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()


class Pool(OfOneProcess):
    """A pool that runs, until `close` or the end of `with`: see `pool`."""

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        _wait(_submit(pool.__aenter__()))
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the calls under way, and the pool's processes. Closing twice does nothing; nor does
        it in a process that was forked from the pool's."""
        if _forked_from() is not None:
            return
        atexit.unregister(self.close)
        _wait(_submit(self._pool.close()))

    def load(
        self,
        path: str | PathLike[str],
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        fragments: int | None = None,
        batching: int = 1,
    ) -> Model:
        """Cut an ONNX file for the devices, and have them ready for its items.

        `shapes` are the largest of inputs whose sizes the model leaves open, by name. `fragments`:
        how many to cut it into, by default as suits the budgets. `batching`: so many items that
        wait on a device for one fragment may run there at once, where the model computes each by
        itself; results may differ in the last digits then. Raises `ModelFailed`, and `ValueError`
        for arguments that make no sense.
        """
        loading = self._pool.load(path, shapes=shapes, fragments=fragments, batching=batching)
        return Model(_wait(_submit(loading)))


def pool(
    *,
    devices: int | None = None,
    budget: str | int | Sequence[str | int] = DEFAULT_BUDGET,
    enforce: str = "auto",
    work: str | PathLike[str] | None = None,
    coordinator: str | None = None,
) -> Pool:
    """Start a pool of devices that this machine pretends to be; close it, or use it in `with`. With
    a `coordinator` ("HOST:PORT", or "unix:/path") that `shoal join` has joined, it has those of the
    coordinator.

    `devices`: how many, by default 3, or as many as there are budgets. `budget`: what each may use
    for a model, such as "64Mi" or in bytes; or one for each device. `enforce`: "auto" limits each
    device by a cgroup where the machine allows it, "cgroup" insists on that, "none" only measures.
    `work`: a folder that outlives the pool, so that the next one finds its models cut.

    Raises `ValueError` for arguments that make no sense, and `PoolFailed`.
    """

    async def make() -> AsyncPool:
        return async_pool(
            devices=devices, budget=budget, enforce=enforce, work=work, coordinator=coordinator
        )

    return Pool(_wait(_submit(make())))


@functools.cache
def _loop() -> tuple[asyncio.AbstractEventLoop, int]:
    """The loop, and the process that runs it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="shoal", daemon=True).start()
    return loop, os.getpid()


def _forked_from() -> int | None:
    """The process that runs the loop, if that is another one."""
    _, process = _loop()
    return None if process == os.getpid() else process


def _refuse_forked() -> None:
    if (process := _forked_from()) is not None:
        raise PoolFailed(
            f"process {os.getpid()} was forked from {process}, which has used pools, and can use "
            'none: start it with multiprocessing.get_context("spawn"), or fork before the first '
            "pool is started"
        )


def _submit(work: Coroutine[Any, Any, Value]) -> concurrent.futures.Future[Value]:
    try:
        _refuse_forked()
    except PoolFailed:
        work.close()
        raise
    return asyncio.run_coroutine_threadsafe(work, _loop()[0])


def _wait(future: concurrent.futures.Future[Value]) -> Value:
    """The result; what interrupts the wait (Ctrl-C) cancels the work."""
    _refuse_forked()  # nobody would end it
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
