"""Coroutines that begin, or go on, at once."""

import asyncio
import gc
import weakref

import pytest

from shoal_protocol.eager import Prompt, Running, begin, start


async def test_what_waits_for_nothing_ends_at_once_without_a_task() -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("begun")

    assert begin(work()) is None
    assert done == ["begun"]


async def test_what_waits_goes_on_as_a_task() -> None:
    done: list[object] = []
    gates = [asyncio.get_running_loop().create_future() for _ in range(2)]

    async def work() -> None:
        for gate in gates:
            done.append(await gate)
            await asyncio.sleep(0)
        done.append(asyncio.current_task() is task)

    task = begin(work())
    assert task is not None
    for number, gate in enumerate(gates):
        assert len(done) == number
        gate.set_result(f"gate {number}")
        for _ in range(5):
            await asyncio.sleep(0)
    await task
    assert done == ["gate 0", "gate 1", True]


async def test_errors_come_from_where_they_are_raised() -> None:
    async def fails_at_once() -> None:
        raise ValueError("at once")

    async def fails_later() -> None:
        await asyncio.sleep(0)
        raise ValueError("later")

    with pytest.raises(ValueError, match="at once"):
        begin(fails_at_once())
    task = begin(fails_later())
    assert task is not None
    with pytest.raises(ValueError, match="later"):
        await task


async def test_a_cancelled_task_cleans_up_and_may_wait_for_that() -> None:
    done: list[str] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    task = begin(work())
    assert task is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["cleaned up"]


async def test_a_task_that_never_ran_on_is_cancelled_in_its_coroutine_too() -> None:
    done: list[str] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            done.append("cancelled")
            raise

    task = begin(work())
    assert task is not None
    task.cancel()  # before the loop's next turn
    await asyncio.wait((task,))
    assert task.cancelled()
    assert done == ["cancelled"]


async def test_who_waits_for_a_prompt_goes_on_before_give_returns() -> None:
    done: list[object] = []
    prompt: Prompt[int] = Prompt()

    async def work() -> None:
        done.append(await prompt)
        done.append(asyncio.current_task() is task)

    def give() -> None:
        prompt.give(7)
        done.append("given")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(give)
    await task
    assert done == [7, True, "given"]


async def test_who_asks_for_a_prompt_late_finds_its_result() -> None:
    prompt: Prompt[int] = Prompt()
    prompt.give(7)
    assert await prompt == 7


async def test_who_was_cancelled_is_given_nothing() -> None:
    prompt: Prompt[int] = Prompt()

    async def work() -> None:
        await prompt

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    assert prompt.cancelled()


@pytest.mark.parametrize("ends", ["given", "failed", "cancelled"])
async def test_a_task_that_has_gone_on_is_freed_with_its_prompt(ends: str) -> None:
    """A link has a task and buffers: many come and go before anybody collects garbage."""
    prompt: Prompt[int] = Prompt()

    async def work() -> None:
        waited_for = prompt
        await waited_for

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    left = weakref.ref(task)
    gc.collect()
    gc.disable()
    try:
        match ends:
            case "given":
                asyncio.get_running_loop().call_soon(prompt.give, 7)
            case "failed":
                prompt.set_exception(ConnectionError("closed"))
            case _:
                task.cancel()
        await asyncio.wait((task,))
        task.cancelled() or task.exception()
        del task
        await asyncio.sleep(0)
        assert left() is None
    finally:
        gc.enable()


async def test_what_waits_for_nothing_has_ended_when_it_was_started() -> None:
    done: list[object] = []

    async def work() -> None:
        done.append(asyncio.current_task())

    assert start(work()) is None
    assert done == [asyncio.current_task()]


async def test_what_is_started_goes_on_without_a_task() -> None:
    done: list[object] = []
    first: asyncio.Future[str] = asyncio.Future()

    async def work() -> str:
        done.append(await first)
        await asyncio.sleep(0)
        done.append(asyncio.current_task())
        done.append(await asyncio.create_task(asyncio.sleep(0, "of a task")))
        return "over"

    running = start(work())
    assert running is not None
    first.set_result("first")
    assert await running.ended == "over"
    assert done == ["first", None, "of a task"]


async def test_what_is_started_raises_where_its_end_is_waited_for() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise KeyError("lost")

    running = start(work())
    assert running is not None
    with pytest.raises(KeyError, match="lost"):
        await running.ended


@pytest.mark.parametrize("waits_for", ["future", "result", "turn"])
async def test_what_is_started_may_be_cancelled_and_clean_up(waits_for: str) -> None:
    done: list[str] = []
    future: asyncio.Future[None] = asyncio.Future()

    async def work() -> None:
        try:
            await (asyncio.sleep(0) if waits_for == "turn" else future)
            done.append("went on")
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    running = start(work())
    assert running is not None
    if waits_for == "result":
        future.set_result(None)
    running.cancel()
    await asyncio.wait((running.ended,))
    assert running.ended.cancelled()
    assert done == ["cleaned up"]


async def test_what_is_started_is_cancelled_by_who_goes_on_within_it() -> None:
    prompt: Prompt[Running[None]] = Prompt()

    async def wait() -> None:
        (await prompt).cancel()

    async def work() -> None:
        await asyncio.sleep(0)
        prompt.give(running)
        await asyncio.Future()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    running = Running(work(), None)
    async with asyncio.timeout(10):
        await asyncio.wait((running.ended,))
    assert running.ended.cancelled()
    await task


async def test_a_task_goes_on_within_what_gives_it_a_prompt() -> None:
    done: list[object] = []
    prompt: Prompt[int] = Prompt()

    async def wait() -> None:
        done.append(await prompt)

    async def work() -> None:
        await asyncio.sleep(0)
        prompt.give(7)
        done.append("given")

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    running = start(work())
    assert running is not None
    await running.ended
    await task
    assert done == [7, "given"]
