"""What an agent reports of its device and its link, measured by itself."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from pathlib import Path

import pytest

from agent.conftest import Joined
from agent.scripted_coordinator import ScriptedCoordinator
from shoal_agent.calibration import probes
from shoal_agent.calibration.joining import in_words
from shoal_agent.telemetry.link import (
    AGE_SECONDS,
    COORDINATOR,
    LARGE_BYTES,
    MAXIMUM_LINKS,
    LinkMeter,
    LinkMeters,
)
from shoal_agent.telemetry.task_times import TaskTimes
from shoal_protocol.speed_files import store_speed, stored_speed, subject
from shoal_protocol.speeds import Speed, speed_message, speed_of

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20
SOME = Speed(processors=2.0, product_flops_per_second=8e9, disk_bytes_per_second=4e7)


@pytest.mark.real
async def test_an_agent_measures_its_device_once_and_says_it_when_it_joins(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    first = await join("pi-4", "--measured")
    speed = speed_of(first.device.hello.speed)
    assert None not in astuple(speed)
    assert speed.processors is not None
    assert speed.processors <= 1.0  # it has one thread
    await first.agent.kill()
    again = await join("pi-4", "--measured")
    assert speed_of(again.device.hello.speed) == speed


@pytest.mark.real
async def test_agents_of_one_machine_share_what_was_measured_and_have_their_own_processors(
    coordinator: ScriptedCoordinator, join: Join, folder: Path
) -> None:
    store_speed(folder / "speed.json", SOME, "this machine")
    joined = await join("pi-4", "--speed", str(folder / "speed.json"))
    speed = speed_of(joined.device.hello.speed)
    assert speed.product_flops_per_second == SOME.product_flops_per_second
    assert speed.memory_bytes_per_second is None
    assert speed.processors == 1.0


def test_what_does_not_fit_the_budget_is_not_measured(tmp_path: Path) -> None:
    speed = probes.measure(1, tmp_path, 4 * MIB)
    assert speed.product_flops_per_second is None
    assert speed.disk_bytes_per_second is not None
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_is_not_known_and_the_rest_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    speed = probes.measure(1, tmp_path / "file" / "cache", 64 * MIB)
    assert speed.disk_bytes_per_second is None
    assert speed.convolution_flops_per_second is not None


def test_a_stored_measurement_is_of_one_processor_runtime_and_share_and_ages(
    tmp_path: Path,
) -> None:
    path, of = tmp_path / "speed.json", subject(0.5, "1.31")
    assert stored_speed(path, of) is None
    store_speed(path, SOME, of)
    assert stored_speed(path, of) == SOME
    assert stored_speed(path, subject(1.0, "1.31")) is None
    assert stored_speed(path, subject(0.5, "1.32")) is None
    os.utime(path, (0, 0))
    assert stored_speed(path, of, 3600.0) is None
    assert stored_speed(path, of) == SOME


@pytest.mark.parametrize("content", ["", "[]", '{"of": 1, "processors": "x"}', '{"speed": 1}'])
def test_a_damaged_measurement_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "speed.json"
    path.write_text(content)
    assert stored_speed(path) is None


def test_numbers_that_no_device_has_are_not_known() -> None:
    sent = speed_message(Speed(processors=-1.0, page_bytes_per_second=float("inf")))
    assert speed_of(sent) == Speed()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_measurement_is_logged_in_words() -> None:
    speed = Speed(processors=2.0, product_flops_per_second=39.516e9, disk_bytes_per_second=350e6)
    assert in_words(speed) == "product flops 39.5 G/s, disk bytes 0.35 G/s"


def test_a_link_carries_what_its_fastest_large_transfer_did() -> None:
    link = LinkMeter(Clock())
    assert link.read().bytes_per_second is None
    link.transferred(LARGE_BYTES - 1, 1e-9)  # small: a round trip rather than a rate
    assert link.read().bytes_per_second is None
    link.transferred(MIB, 1.0)
    link.transferred(8 * MIB, 2.0)
    assert link.read().bytes_per_second == 4 * MIB


def test_a_link_that_became_slow_shows_when_the_old_transfers_have_aged() -> None:
    clock = Clock()
    link = LinkMeter(clock)
    link.transferred(8 * MIB, 1.0)
    assert link.read().bytes_per_second == 8 * MIB
    clock.now = AGE_SECONDS + 1
    link.transferred(MIB, 1.0)
    assert link.read().bytes_per_second == MIB
    clock.now += AGE_SECONDS + 1
    assert link.read().bytes_per_second is None


def test_the_fastest_transfer_of_a_busy_link_counts_for_as_long_as_that_of_another() -> None:
    clock = Clock()
    link = LinkMeter(clock)
    link.transferred(8 * MIB, 1.0)
    for _ in range(1000):
        clock.now += 0.1
        link.transferred(MIB, 1.0)
    assert link.read().bytes_per_second == 8 * MIB
    for _ in range(5000):
        clock.now += 0.1
        link.transferred(MIB, 1.0)
    assert link.read().bytes_per_second == MIB


def test_a_report_of_a_link_stays_while_it_changes_little() -> None:
    link = LinkMeter(Clock())
    link.pinged(0.0100)
    assert link.read().round_trip_seconds == 0.0100
    link.pinged(0.0085)
    assert link.read().round_trip_seconds == 0.0100
    link.pinged(0.0050)
    assert link.read().round_trip_seconds == 0.0050


def test_each_peer_has_a_link_and_the_device_has_the_fastest() -> None:
    meters = LinkMeters(Clock())
    meters.to("jetson").transferred(MIB, 1.0)
    meters.to(COORDINATOR).transferred(MIB, 0.5)
    meters.to(COORDINATOR).pinged(0.01)
    meters.to("silent")
    link = meters.read()
    assert (link.bytes_per_second, link.round_trip_seconds) == (2 * MIB, 0.01)
    assert [name for name, _ in link.peers] == [COORDINATOR, "jetson"]
    assert dict(link.peers)["jetson"].bytes_per_second == MIB


def test_links_are_bounded_and_the_one_that_was_used_longest_ago_goes() -> None:
    meters = LinkMeters(Clock())
    for number in range(MAXIMUM_LINKS + 1):
        meters.to(f"pi-{number}").pinged(0.01)
    names = {name for name, _ in meters.read().peers}
    assert len(names) == MAXIMUM_LINKS
    assert "pi-0" not in names


def test_a_link_is_to_be_measured_until_it_was_and_again_when_that_has_aged() -> None:
    clock = Clock()
    link = LinkMeter(clock)
    assert link.ages
    link.transferred(MIB, 1.0)
    assert not link.ages
    clock.now = AGE_SECONDS / 2 + 1
    assert link.ages
    assert link.read().bytes_per_second == MIB  # it counts until there is another


def test_what_tasks_take_is_the_median_of_enough_runs_and_changes_when_that_has_much() -> None:
    times = TaskTimes(threads=1)
    for _ in range(4):
        times.note("f", 1.0, 1.0)
    assert times.read("f") is None
    times.note("f", 50.0, 1.0)  # disturbed
    assert times.read("f") == 1.0
    for _ in range(15):
        times.note("f", 1.05, 1.0)
    assert times.read("f") == 1.0
    for _ in range(15):
        times.note("f", 2.0, 1.0)
    assert times.read("f") == 2.0


def test_under_a_quota_a_task_takes_its_processor_time_at_the_rate_of_the_quota() -> None:
    times = TaskTimes(threads=1)
    times.measured(Speed(processors=0.25))
    for _ in range(5):
        times.note("f", 0.01, 0.01)  # too short for the quota to show in it
    assert times.read("f") == 0.04


def test_a_run_in_blocks_counts_without_what_it_takes_to_map_weights_again() -> None:
    """Plans reckon that by itself, since it follows from what a fragment is granted."""
    times = TaskTimes(threads=1)
    times.measured(Speed(processors=0.5, page_bytes_per_second=1e9))
    for _ in range(5):
        times.note("f", 5.0, 0.4, streamed_bytes=100_000_000)
    assert times.read("f") == pytest.approx(0.6)


def test_a_run_in_blocks_says_nothing_where_it_is_not_known_what_mapping_takes() -> None:
    times = TaskTimes(threads=1)
    for _ in range(5):
        times.note("f", 0.5, 0.4, streamed_bytes=1)
    assert times.read("f") is None


def within(times: TaskTimes, digest: str = "f") -> dict[int, float]:
    return {each.granted_bytes: each.seconds for each in times.within(digest)}


def test_what_a_run_took_as_it_ran_is_known_by_its_grant_apart_from_what_it_is_as_a_whole() -> None:
    times = TaskTimes(threads=1)
    times.measured(Speed(processors=1.0, page_bytes_per_second=1e9))
    for _ in range(5):
        assert within(times) == {}
        times.note("f", 0.75, 0.5, streamed_bytes=100_000_000, granted_bytes=7)
    assert within(times) == {7: 0.75}
    assert times.read("f") == pytest.approx(0.4)
    for _ in range(5):
        times.note("f", 0.25, 0.25)
    assert within(times) == {7: 0.75, 0: 0.25}


def test_of_a_fragment_in_blocks_the_last_grants_are_known_and_of_fragments_the_last_that_ran() -> (
    None
):
    times = TaskTimes(threads=1)
    for grant in range(1, 9):
        for _ in range(5):
            times.note("f", grant, grant, streamed_bytes=1, granted_bytes=grant)
    assert within(times) == {grant: float(grant) for grant in (5, 6, 7, 8)}
    for number in range(300):
        for _ in range(5):
            times.note(f"other-{number}", 1.0, 1.0)
            times.note("f", 8.0, 8.0, streamed_bytes=1, granted_bytes=8)
    known = [number for number in range(300) if times.read(f"other-{number}") is not None]
    assert known == [*range(45, 300)]
    assert within(times)[8] == 8.0


def test_within_a_quota_a_run_in_blocks_takes_no_less_than_its_processor_time_at_that_rate() -> (
    None
):
    times = TaskTimes(threads=1)
    times.measured(Speed(processors=0.25))
    for _ in range(5):
        times.note("held", 0.5, 0.5, granted_bytes=7)
        times.note("waiting", 3.0, 0.5, granted_bytes=7)
    assert (within(times, "held"), within(times, "waiting")) == ({7: 2.0}, {7: 3.0})


def test_the_next_start_knows_what_tasks_take_of_fragments_that_it_still_has(
    tmp_path: Path,
) -> None:
    path, times = tmp_path / "times.json", TaskTimes(threads=1)
    for _ in range(5):
        times.note("kept", 1.0, 1.0)
        times.note("kept", 2.0, 2.0, streamed_bytes=1, granted_bytes=7)
        times.note("gone", 1.0, 1.0)
    times.store(path)
    again = TaskTimes(threads=1)
    again.restore(path, {"kept": 1})
    assert (again.read("kept"), again.read("gone")) == (1.0, None)
    assert (within(again, "kept"), within(again, "gone")) == ({0: 1.0, 7: 2.0}, {})


@pytest.mark.parametrize("content", ["", "[]", '{"kept": "x"}', '{"kept": -1}', '{"kept@x": 1}'])
def test_damaged_times_of_tasks_are_not_used(tmp_path: Path, content: str) -> None:
    (tmp_path / "times.json").write_text(content)
    times = TaskTimes(threads=1)
    times.restore(tmp_path / "times.json", {"kept": 1})
    assert times.read("kept") is None
