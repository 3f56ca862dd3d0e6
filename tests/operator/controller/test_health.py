"""When the operator is not ready, and when it must be started again."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from kubeconfigs import kubeconfig
from shoal_operator.controller.api import Api
from shoal_operator.controller.event_router import EventRouter
from shoal_operator.controller.health import Health, HealthLimits
from shoal_operator.controller.lease import Lease, LeaseTimes
from shoal_operator.controller.login import log_in
from shoal_operator.controller.telemetry import Telemetry


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest_asyncio.fixture
async def watched(tmp_path: Path) -> AsyncIterator[tuple[Clock, Health]]:
    """An operator's health at the moment of its start, without a heartbeat."""
    clock = Clock()
    telemetry = Telemetry(clock)
    (tmp_path / "token").write_text("t")
    login = await log_in(kubeconfig(tmp_path, server="https://127.0.0.1:1", tokenFile="token"))
    api = Api(login, telemetry, namespace="shoal-system")
    lease = Lease(api, name="l", identity="me", times=LeaseTimes(), clock=clock)
    health = Health(
        EventRouter(),
        lease,
        telemetry,
        clock=clock,
        limits=HealthLimits(),
        unseen=lambda: None,
    )
    try:
        yield clock, health
    finally:
        await api.close()


async def test_a_loop_that_stands_still_is_not_ready_and_after_a_minute_not_alive(
    watched: tuple[Clock, Health],
) -> None:
    clock, health = watched
    said = []
    for seconds in (10, 20, 59, 61):
        clock.seconds = seconds
        problem, hung = health.problem(), health.hung()
        said.append((problem is not None and "event loop" in problem, hung))
    assert said == [
        (False, None),
        (True, None),
        (True, None),
        (True, "the event loop has not moved for 61 s"),
    ]
