"""Blocking work beside an event loop."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from shoal_protocol.threads import in_executor, in_thread, open_in_thread


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as own:
        yield own


async def test_what_a_function_returns_or_raises_is_the_callers(
    executor: ThreadPoolExecutor,
) -> None:
    def fail() -> int:
        raise KeyError("it")

    assert await in_executor(executor, lambda: 7) == 7
    with pytest.raises(KeyError):
        await in_executor(executor, fail)


async def test_the_caller_goes_on_in_the_turn_in_which_the_loop_hears_of_the_end(
    executor: ThreadPoolExecutor,
) -> None:
    gate, seen = threading.Event(), list[str]()

    async def call() -> None:
        await in_executor(executor, gate.wait)
        seen.append("went on")

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    gate.set()
    executor.submit(lambda: None).result()  # the function has ended, and has told the loop
    asyncio.get_running_loop().call_soon(seen.append, "what came later")
    await task
    assert seen == ["went on", "what came later"]


async def test_a_cancelled_caller_waits_for_the_end(executor: ThreadPoolExecutor) -> None:
    gate, done = threading.Event(), list[str]()

    def work() -> None:
        gate.wait()
        done.append("done")

    task = asyncio.create_task(in_executor(executor, work))
    await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["done"]


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("has_own", [False, True])
async def test_what_failed_waits_for_no_garbage_collection(
    executor: ThreadPoolExecutor, *, has_own: bool, is_cancelled: bool
) -> None:
    asyncio.get_running_loop().set_default_executor(executor)
    gate, inputs = threading.Event(), list[weakref.ref[object]]()

    def fail() -> None:
        array = np.zeros(1)
        inputs.append(weakref.ref(array))
        gate.wait()
        raise KeyError(array.size)

    begun = in_executor(executor, fail) if has_own else in_thread(fail)
    task: asyncio.Task[None] | None = asyncio.create_task(begun)
    while not inputs:
        await asyncio.sleep(0)
    assert task is not None
    if is_cancelled:
        task.cancel()
    gate.set()
    with suppress(KeyError, asyncio.CancelledError):
        await task
    task = None
    executor.submit(lambda: None).result()  # the thread has let go of what it ran
    await asyncio.sleep(0)  # and the event loop of the callback that went on here
    assert inputs[0]() is None


async def test_a_file_whose_opener_is_cancelled_meanwhile_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"some")
    opening, gate, files = threading.Event(), threading.Event(), list[BinaryIO]()

    def opened() -> tuple[BinaryIO, int]:
        opening.set()
        gate.wait()
        files.append(path.open("rb"))
        return files[0], 4

    async def read() -> None:
        async with open_in_thread(opened):
            pytest.fail("it was cancelled before")

    reading = asyncio.create_task(read())
    await asyncio.to_thread(opening.wait)
    reading.cancel()
    gate.set()
    await asyncio.wait((reading,))
    assert reading.cancelled()
    assert [file.closed for file in files] == [True]


async def test_a_file_that_a_thread_opened_is_closed_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"some")
    async with open_in_thread(lambda: (path.open("rb"), 4)) as (file, size):
        assert (file.read(), size) == (b"some", 4)
    assert file.closed
