"""A minimum rate for streams, and concurrent calls in turns per caller."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from shoal_protocol.limits import CallLimiter, Stalled, StallWatch, TooManyCalls


class Clock:
    """The loop's time, which passes only where a test says so."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time()

    def time(self) -> float:
        return self.now

    async def after(self, seconds: float) -> str:
        self.now += seconds
        await asyncio.sleep(0)
        return "done"


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.time)
    return clock


async def test_a_silent_peer_is_given_up() -> None:
    watch = StallWatch(seconds=0.05, minimum_bytes=100)
    with pytest.raises(Stalled, match=r"stalled: 0 bytes in 0\.05 s"):
        await watch.wait(asyncio.Event().wait())


async def test_a_peer_that_drips_is_given_up(clock: Clock) -> None:
    watch = StallWatch(seconds=10.0, minimum_bytes=100)

    async def drip() -> None:
        for _ in range(99):
            await watch.wait(clock.after(1.0))
            watch.progress(1)

    with pytest.raises(Stalled, match=r"^stalled: 10 bytes in 10 s, fewer than 100; "):
        await drip()


async def test_a_steady_peer_may_take_longer_than_a_period(clock: Clock) -> None:
    watch = StallWatch(seconds=5.0, minimum_bytes=100)
    for _ in range(3):
        assert await watch.wait(clock.after(4.0)) == "done"
        watch.progress(100)


async def test_time_that_is_not_waited_for_the_peer_does_not_count(clock: Clock) -> None:
    watch = StallWatch(seconds=3.0, minimum_bytes=100)
    for _ in range(3):
        clock.now += 2.0
        assert await watch.wait(clock.after(0.5)) == "done"


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
