"""A coordinator whose dispatcher stands still is not ready, and after a minute not alive."""

import asyncio
import http.client
import re
import time
from contextlib import closing
from threading import Thread

import pytest

from coordinator.world import World
from shoal_coordinator.server import progress
from shoal_coordinator.server.progress import Progress

STANDS = re.compile(r"the dispatcher has not moved for \d+ s\n")


def answer(world: World, path: str) -> tuple[int, str]:
    """What a probe gets."""
    url = world.coordinator.metrics_url
    assert url is not None
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as asking:
        asking.request("GET", path)
        response = asking.getresponse()
        return response.status, response.read().decode()


def test_a_dispatcher_that_stands_still_is_not_ready_and_after_a_minute_not_alive() -> None:
    now = [0]
    progress = Progress(lambda: now[0])
    said = []
    for seconds in (5, 6, 60, 61):
        now[0] = seconds * 10**9
        said.append((progress.problem(), progress.hung()))
    progress.moved()
    assert said == [
        (None, None),
        ("the dispatcher has not moved for 6 s", None),
        ("the dispatcher has not moved for 60 s", None),
        *[("the dispatcher has not moved for 61 s",) * 2],
    ]
    assert (progress.problem(), progress.hung()) == (None, None)


async def test_a_loop_that_is_stuck_fails_the_liveness_probe_until_it_moves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "HUNG_SECONDS", 4.0)
    assert await asyncio.to_thread(answer, world, "/healthz") == (200, "ok\n")
    found: list[tuple[int, str]] = []

    def probe() -> None:
        while not found or found[-1][0] == 200:
            found.append(answer(world, "/healthz"))

    asking = Thread(target=probe)
    asking.start()
    while asking.is_alive():
        time.sleep(0.1)
    assert found[0] == (200, "ok\n")
    assert found[-1][0] == 503
    assert STANDS.fullmatch(found[-1][1])
    while (await asyncio.to_thread(answer, world, "/healthz"))[0] != 200:
        await asyncio.sleep(0.1)


async def test_a_dispatcher_that_fails_at_each_tick_is_not_alive_however_its_loop_moves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "HUNG_SECONDS", 4.0)

    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("shoal_coordinator.server.driver.step", broken)
    while (said := await asyncio.to_thread(answer, world, "/healthz"))[0] == 200:
        await asyncio.sleep(0.1)
    assert said[0] == 503
    assert STANDS.fullmatch(said[1])


async def test_a_loop_that_is_busy_is_alive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HUNG_SECONDS", 4.0)
    end, said = time.monotonic() + 6, set()
    while time.monotonic() < end:
        time.sleep(0.3)
        said.add(await asyncio.to_thread(answer, world, "/healthz"))
    assert said == {(200, "ok\n")}
