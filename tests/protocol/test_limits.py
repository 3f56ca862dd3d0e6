"""A minimum rate for streams, and concurrent calls in turns per caller."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from shoal_protocol.limits import CallLimiter, Stalled, StallWatch, TooManyCalls


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def test_a_silent_peer_is_given_up() -> None:
    watch = StallWatch(seconds=0.05, minimum_bytes=100)
    with pytest.raises(Stalled, match=r"stalled: 0 bytes in 0\.05 s"):
        await watch.wait(asyncio.Event().wait())


async def test_a_peer_that_drips_is_given_up() -> None:
    watch = StallWatch(seconds=0.2, minimum_bytes=100)

    async def drip() -> None:
        for _ in range(99):
            await watch.wait(after(0.01))
            watch.progress(1)

    with pytest.raises(Stalled) as caught:
        await drip()
    assert 0 < caught.value.moved_bytes < 99


async def test_a_steady_peer_may_take_longer_than_a_period() -> None:
    watch = StallWatch(seconds=5.0, minimum_bytes=100)
    watch_left = []
    for _ in range(3):
        assert await watch.wait(after(0.01)) == "done"
        watch_left.append(watch._left)
        watch.progress(100)
    assert all(4.5 < left < 5.0 for left in watch_left)


async def test_time_that_is_not_waited_for_the_peer_does_not_count() -> None:
    watch = StallWatch(seconds=0.3, minimum_bytes=100)
    for _ in range(3):
        await asyncio.sleep(0.2)
        assert await watch.wait(after(0)) == "done"


async def test_a_timeout_of_the_operation_itself_is_not_a_stall() -> None:
    async def late() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await StallWatch(seconds=60).wait(late())


async def test_a_callers_excess_waits_behind_its_own_calls_alone() -> None:
    limiter = CallLimiter(total=4, each=2, waiting=10)
    order: list[str] = []

    async def call(caller: str) -> None:
        async with limiter.turn(caller):
            order.append(caller)
            await asyncio.Event().wait()

    greedy = [asyncio.create_task(call("jetson")) for _ in range(10)]
    await asyncio.sleep(0)
    modest = [asyncio.create_task(call(name)) for name in ("nano", "pi-4")]
    while len(order) < 4:
        await asyncio.sleep(0)
    assert order == ["jetson", "jetson", "nano", "pi-4"]
    greedy[0].cancel()
    while len(order) < 5:
        await asyncio.sleep(0)
    assert order[-1] == "jetson"
    for task in (*greedy, *modest):
        task.cancel()
    await asyncio.gather(*greedy, *modest, return_exceptions=True)
    async with limiter.turn("jetson"):  # nothing is left of calls that were cancelled
        assert list(limiter._callers) == ["jetson"]


async def test_a_caller_with_too_many_calls_is_refused_at_once() -> None:
    limiter = CallLimiter(total=4, each=1, waiting=0)
    async with limiter.turn("jetson"):
        with pytest.raises(TooManyCalls, match="jetson has 1 calls of this kind open"):
            async with limiter.turn("jetson"):
                pass
        async with limiter.turn("nano"):
            pass
    async with limiter.turn("jetson"):
        pass


async def test_callers_without_a_name_share_the_total_alone() -> None:
    limiter = CallLimiter(total=3, each=1, waiting=0)
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(limiter.turn(None))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), limiter.turn(None):
                pass


async def test_one_caller_leaves_places_to_the_others_however_many_wait() -> None:
    limiter, leave = CallLimiter(total=3, each=2), asyncio.Event()
    served: list[str] = []

    async def hold(caller: str) -> None:
        async with limiter.turn(caller):
            served.append(caller)
            await leave.wait()

    held = [asyncio.create_task(hold(caller)) for caller in ["greedy"] * 5 + ["modest"]]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert served == ["greedy", "greedy", "modest"]
    leave.set()
    await asyncio.gather(*held)
    assert len(served) == 6
    assert not limiter._callers, "callers that left are remembered"
