"""The work queue: each key once, by one worker at a time, the earliest time counts."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_operator.controller.queue import LAST_BACKOFF_SECONDS, WorkQueue


def no_chance() -> float:
    return 0.0


async def test_a_key_added_many_times_is_taken_once() -> None:
    queue: WorkQueue[str] = WorkQueue(no_chance)
    for _ in range(5):
        queue.add("a")
    queue.add("b")
    assert [await queue.take(), await queue.take()] == ["a", "b"]
    assert queue.depth == 0


async def test_a_key_added_while_a_worker_has_it_comes_back_once_when_that_is_done() -> None:
    queue: WorkQueue[str] = WorkQueue(no_chance)
    queue.add("a")
    key = await queue.take()
    queue.add("a")
    queue.add("a")
    assert queue.depth == 0
    queue.done(key)
    assert await queue.take() == "a"
    queue.done("a")
    assert queue.depth == 0


async def test_the_earliest_of_several_times_counts() -> None:
    queue: WorkQueue[str] = WorkQueue(no_chance)
    queue.add("a", 3600)
    queue.add("a", 0.001)
    queue.add("a", 3600)
    async with asyncio.timeout(60):
        assert await queue.take() == "a"
    assert queue.waiting == 0


async def test_what_is_ready_is_not_put_off() -> None:
    queue: WorkQueue[str] = WorkQueue(no_chance)
    queue.add("a")
    queue.add("a", 3600)
    assert (queue.depth, queue.waiting) == (1, 0)


async def test_a_key_that_keeps_failing_waits_longer_each_time_up_to_a_bound() -> None:
    queue: WorkQueue[str] = WorkQueue(no_chance)
    delays = [queue.failed("a") for _ in range(40)]
    assert delays == sorted(delays)
    assert delays[0] > 0
    assert delays[-1] <= LAST_BACKOFF_SECONDS
    queue.succeeded("a")
    assert queue.failed("a") == delays[0]
    queue.close()


async def test_a_key_that_was_dropped_is_not_taken_any_more() -> None:
    queue: WorkQueue[str] = WorkQueue(no_chance)
    queue.add("gone")
    queue.add("later", 3600)
    queue.drop("gone")
    queue.drop("later")
    queue.add("here")
    assert await queue.take() == "here"
    assert (queue.depth, queue.waiting) == (0, 0)


async def test_a_key_dropped_and_added_again_is_taken_once() -> None:
    queue: WorkQueue[str] = WorkQueue(no_chance)
    queue.add("a")
    queue.drop("a")
    queue.add("a")
    assert await queue.take() == "a"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await queue.take()


@given(added=st.lists(st.integers(0, 5), max_size=60), workers=st.integers(1, 4))
def test_every_change_is_seen_after_it_was_made_and_no_key_by_two_workers(
    added: list[int], workers: int
) -> None:
    versions: Counter[int] = Counter()
    seen: Counter[int] = Counter()
    busy: set[int] = set()

    async def work(queue: WorkQueue[int]) -> None:
        while True:
            key = await queue.take()
            assert key not in busy
            busy.add(key)
            version = versions[key]
            await asyncio.sleep(0)
            seen[key] = version
            busy.discard(key)
            queue.done(key)

    async def run() -> None:
        queue: WorkQueue[int] = WorkQueue(no_chance)
        tasks = [asyncio.create_task(work(queue)) for _ in range(workers)]
        for key in added:
            versions[key] += 1
            queue.add(key)
            if key % 2:
                await asyncio.sleep(0)
        while queue.depth or busy or seen != versions:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert seen == versions
