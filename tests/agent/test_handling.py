"""What tasks and transfers take of the processor, as an agent finds it while it works."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from agent.conftest import Joined
from agent.fragment_making import dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ScriptedCoordinator
from agent.test_memory_of_fragments import run
from shoal_agent.telemetry.handling import Handling, HandlingMeter, Moved
from shoal_protocol.speeds import Speed

EACH, PER_BYTE = 0.001, 5e-9
KIB = 1 << 10
NOTHING = Moved(0, 0)


@dataclass
class Process:
    """Handles tasks at these costs, each with one transfer, and has counters as an agent has."""

    each: float = EACH
    per_byte: float = PER_BYTE
    now: float = 0.0
    used: float = 0.0
    moved: Moved = NOTHING

    def __post_init__(self) -> None:
        self.meter = HandlingMeter(lambda: self.moved, lambda: self.used, lambda: self.now)
        self.meter.measured(Speed(processors=0.5))

    def work(
        self, tasks: int, size_bytes: int, *, computing: float = 0.02, waiting: float = 0.0
    ) -> None:
        for _ in range(tasks):
            self.moved = Moved(self.moved.transfers + 1, self.moved.size_bytes + size_bytes)
            self.used += 2 * self.each + size_bytes * self.per_byte + computing
            self.now += computing + 0.02 + waiting
            self.meter.ran(1, computing, computing)

    def known(self, probed_seconds_per_byte: float | None = None) -> Handling:
        known = self.meter.read(probed_seconds_per_byte)
        assert known is not None
        return known


def test_jobs_of_different_kinds_tell_tasks_from_bytes() -> None:
    process = Process()
    process.work(64, 8 * KIB)
    process.work(64, 800 * KIB)
    known = process.known()
    assert known.seconds == pytest.approx(EACH, rel=0.1)
    assert known.seconds_per_byte == pytest.approx(PER_BYTE, rel=0.1)


@pytest.mark.parametrize("factor", [0.3, 1.0, 5.0])
def test_one_kind_of_job_gives_their_sum_in_the_usual_proportion(factor: float) -> None:
    size = 400 * KIB
    process = Process(each=factor * EACH, per_byte=factor * PER_BYTE)
    process.work(64, size)
    known = process.known()
    sum_of_both = 2 * known.seconds + size * known.seconds_per_byte
    assert sum_of_both == pytest.approx(factor * (2 * EACH + size * PER_BYTE), rel=0.05)
    assert 0.5 < known.seconds_per_byte / (factor * PER_BYTE) < 2


def test_until_tasks_have_run_it_is_what_a_probe_suggests_or_unknown() -> None:
    meter = HandlingMeter()
    assert meter.read(None) is None
    known = meter.read(2e-9)
    assert known is not None
    assert 2e-9 < known.seconds_per_byte < 5e-9
    assert 1e-4 < known.seconds < 1e-3


def test_what_a_load_takes_is_no_cost_of_a_task() -> None:
    process = Process()
    for _ in range(8):
        process.work(10, 8 * KIB)
        process.used += 5.0
        process.meter.begin()
        process.work(16, 8 * KIB)
    assert process.known().seconds == pytest.approx(EACH, rel=0.1)


def test_what_a_resting_agent_takes_is_no_cost_of_a_task() -> None:
    process = Process()
    for _ in range(8):
        process.work(17, 8 * KIB)
        process.used += 5.0
        process.now += 60.0
    assert process.known().seconds == pytest.approx(EACH, rel=0.1)


def test_tasks_that_take_long_are_no_rest() -> None:
    process = Process()
    process.work(32, 8 * KIB, computing=10.0)
    assert process.known().seconds == pytest.approx(EACH, rel=0.1)


def test_tasks_that_ran_together_are_as_many() -> None:
    process = Process()
    for _ in range(16):
        process.used += 4 * EACH + 0.01
        process.now += 0.02
        process.meter.ran(4, 0.01, 0.01)
    assert process.known().seconds == pytest.approx(EACH, rel=0.01)


def test_it_changes_only_when_it_has_changed_much() -> None:
    process = Process()
    process.work(256, 8 * KIB)
    before = process.known()
    process.each *= 1.05
    process.work(256, 8 * KIB)
    assert process.known() == before
    process.each *= 1.5
    process.work(256, 8 * KIB)
    assert process.known().seconds > 1.4 * before.seconds


def test_a_device_that_was_busy_says_more_than_one_that_waited() -> None:
    process = Process(each=3 * EACH)
    process.work(128, 8 * KIB, waiting=0.5)
    process.each = EACH
    process.work(128, 8 * KIB)
    assert process.known().seconds == pytest.approx(EACH, rel=0.1)


@pytest.mark.forked
async def test_an_agent_reports_it_when_tasks_have_run(
    coordinator: ScriptedCoordinator, join: Callable[..., Awaitable[Joined]]
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 64]), 2 * KIB * KIB)
    joined = await join()
    assert not (await joined.device.telemetry.get()).HasField("handling_seconds")
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    for item in range(48):
        await run(joined.device, fragment.digest, 64, item)
    telemetry = await joined.device.telemetry.get()
    while not telemetry.HasField("handling_seconds"):  # it was read before they had run
        telemetry = await asyncio.wait_for(joined.device.telemetry.get(), PATIENCE_SECONDS)
    assert telemetry.handling_seconds > 0
    assert telemetry.transfer_seconds_per_byte > 0
