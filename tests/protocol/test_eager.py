"""Coroutines that begin at once."""

import asyncio

import pytest

from shoal_protocol.eager import begin


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
