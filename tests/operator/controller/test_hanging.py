"""A coordinator that hangs holds up its own jobs only."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterable

import grpc.aio
import pytest
import pytest_asyncio

from shoal_operator.controller import open_calls
from shoal_operator.controller.cache import Topic
from shoal_operator.controller.controller import WORKERS
from shoal_operator.controller.coordinators import Coordinators
from shoal_operator.controller.open_calls import CoordinatorFailed
from shoal_operator.controller.telemetry import OperatorMetrics
from shoal_operator.controller.views import run_part, topic
from shoal_operator.reconcile.decision import CancelJob
from shoal_operator.reconcile.snapshot import CoordinatorView
from shoal_protocol.channels import open_channel

Process = tuple[str, "subprocess.Popen[bytes]"]


async def _dial(namespace: str, pool: str, target: str) -> grpc.aio.Channel:
    return open_channel(target)


class Shelf:
    """A pool whose coordinator is followed, what has changed there, and its calls that ended."""

    def __init__(self) -> None:
        self._metrics = OperatorMetrics()
        self._topics: set[Topic] = set()
        self._changed = asyncio.Event()
        self.coordinators = Coordinators(
            _dial, self._metrics, has_work=lambda namespace, pool: True, changed=self._note
        )

    def _note(self, topics: Iterable[Topic]) -> None:
        self._topics.update(topics)
        self._changed.set()

    def ended_calls(self) -> float:
        return sum(
            sample.value
            for metric in self._metrics.registry.collect()
            for sample in metric.samples
            if sample.labels.get("method") == "CancelJob" and sample.name.endswith("_total")
        )

    async def cancel(self, job: str) -> None:
        """What a worker does that is to cancel a job."""
        await self.coordinators.call("lab", CancelJob(pool="shelf", job=job, reason="a test"))

    async def until_it_answers(self) -> None:
        while not isinstance(self.coordinators.view("lab", "shelf"), CoordinatorView):
            await self._next_change()

    async def until_told_of(self, job: str) -> None:
        while topic("lab", "shelf", run_part(job)) not in self._topics:
            await self._next_change()

    async def _next_change(self) -> None:
        self._changed.clear()
        async with asyncio.timeout(60):
            await self._changed.wait()


@pytest_asyncio.fixture
async def shelf(coordinator: str) -> AsyncIterator[Shelf]:
    made = Shelf()
    made.coordinators.follow("lab", "shelf", coordinator)
    await made.until_it_answers()
    yield made
    await made.coordinators.close()


async def test_a_coordinator_that_hangs_keeps_no_worker_until_its_calls_end(
    shelf: Shelf, coordinator_process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = coordinator_process[1]
    process.send_signal(signal.SIGSTOP)
    calls = (shelf.cancel(f"job-{number}") for number in range(WORKERS))
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(each) for each in ends} == {CoordinatorFailed}
    assert shelf.ended_calls() == 0, "the workers are free, and what they called hangs"
    (refused,) = await asyncio.gather(shelf.cancel("one-more"), return_exceptions=True)
    assert isinstance(refused, CoordinatorFailed)
    process.send_signal(signal.SIGCONT)
    await shelf.until_told_of("one-more")
    assert shelf.ended_calls() == WORKERS, "what was refused was not sent"
    # A worker would come again while the machine is too busy to answer it in time.
    monkeypatch.setattr(open_calls, "PATIENCE_SECONDS", 60.0)
    await shelf.cancel("one-more")


async def test_a_worker_outlives_the_connection_that_its_call_hangs_in(
    shelf: Shelf, coordinator_process: Process
) -> None:
    coordinator_process[1].send_signal(signal.SIGSTOP)
    worker = asyncio.create_task(shelf.cancel("job"))
    await asyncio.sleep(0.2)  # it has called
    shelf.coordinators.leave("lab", "shelf")
    (end,) = await asyncio.gather(worker, return_exceptions=True)
    assert isinstance(end, CoordinatorFailed)
