"""What the operator does when a poll of a coordinator fails in a way that nobody foresaw."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio

from shoal_operator.controller.coordinators import IDLE_SECONDS, POLL_SECONDS, Coordinators
from shoal_operator.controller.telemetry import OperatorMetrics
from shoal_operator.controller.views import View
from shoal_operator.reconcile.snapshot import CoordinatorView, Unreachable
from shoal_protocol.channels import open_channel


class Faulty:
    """A coordinator that is dialled with a fault of the operator, until `mended`."""

    def __init__(self) -> None:
        self.mended = False
        self.changed = asyncio.Event()

    async def dial(self, namespace: str, pool: str, target: str) -> grpc.aio.Channel:
        if not self.mended:
            raise KeyError("nobody was prepared for this")
        return open_channel(target)


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()


@pytest_asyncio.fixture
async def polled(faulty: Faulty) -> AsyncIterator[Coordinators]:
    made = Coordinators(
        faulty.dial,
        OperatorMetrics(),
        has_work=lambda namespace, pool: True,
        changed=lambda topics: faulty.changed.set(),
    )
    yield made
    await made.close()


async def test_a_poll_that_nobody_was_prepared_for_is_told_and_the_next_one_is_made(
    coordinator: str, faulty: Faulty, polled: Coordinators, caplog: pytest.LogCaptureFixture
) -> None:
    def view() -> View:
        return polled.view("lab", "shelf")

    polled.follow("lab", "shelf", coordinator)
    async with asyncio.timeout(10 * POLL_SECONDS):
        await faulty.changed.wait()
    seen = view()
    assert isinstance(seen, Unreachable)
    assert "nobody was prepared for this" in seen.reason
    assert "Traceback" in caplog.text
    faulty.mended = True
    async with asyncio.timeout(30 * POLL_SECONDS):
        while not isinstance(view(), CoordinatorView):
            faulty.changed.clear()
            await faulty.changed.wait()


async def test_an_idle_coordinator_is_asked_soon_once_there_is_work(coordinator: str) -> None:
    """The pause of an idle pool may have begun a moment before."""
    busy, polled, metrics = False, asyncio.Event(), OperatorMetrics()

    async def connect(namespace: str, pool: str, target: str) -> grpc.aio.Channel:
        return open_channel(target)

    def has_work(namespace: str, pool: str) -> bool:
        polled.set()  # it is asked after each poll
        return busy

    def polls() -> float:
        return sum(
            sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.labels.get("method") == "ListJobs" and sample.name.endswith("_total")
        )

    made = Coordinators(connect, metrics, has_work=has_work, changed=lambda topics: None)
    try:
        made.follow("lab", "shelf", coordinator)
        async with asyncio.timeout(10 * POLL_SECONDS):
            await polled.wait()
        assert polls() == 1
        busy = True
        async with asyncio.timeout(IDLE_SECONDS / 2):
            while polls() < 2:
                await asyncio.sleep(0.05)
    finally:
        await made.close()
