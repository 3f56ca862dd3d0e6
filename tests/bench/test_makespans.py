"""What is predicted of jobs is what the dispatcher makes of them, in virtual time."""

from statistics import median

import makespans as bench
import pytest

LOADING = [*bench.random_shelves(30), *bench.small_shelves(20, 1), *bench.small_shelves(20, 2)]


def within_a_quarter(errors: list[float]) -> float:
    return sum(each <= 0.25 for each in errors) / len(errors)


@pytest.mark.parametrize("items", [4, 16])
def test_jobs_on_devices_that_have_nothing_end_when_they_were_to(items: int) -> None:
    found = list(bench.makespans(iter(LOADING), items))
    assert len(found) > 40
    assert within_a_quarter(found) > 0.95, sorted(found)


@pytest.mark.parametrize("items", [4, 100])
def test_a_device_that_holds_one_fragment_at_a_time_loads_it_for_many_items(items: int) -> None:
    found = list(bench.makespans(bench.single_shelves(24, 1), items))
    assert len(found) > 10
    assert max(found) < 0.05, sorted(found)


def test_devices_that_load_in_turn_do_not_wait_for_one_another() -> None:
    """The slower one sets the pace, with what it receives and sends beside its computing. The
    sum of both would be too long by a third."""
    found = list(bench.turns(bench.small_shelves(26, 2)))
    assert len(found) > 5
    assert median(found) < 0.15, sorted(found)


def test_devices_that_share_items_and_load_in_turn_do_not_hold_each_other_up() -> None:
    """A slow device that kept one stage to itself would make the fast one wait for it. What is left
    comes from slow links."""
    found = list(bench.replicas(bench.small_shelves(26, 2)))
    assert len(found) > 5
    assert median(error for error, _ in found) < 0.2, sorted(found)
    slower = [ratio for _, ratio in found if ratio > 1.05]
    assert len(slower) < 0.1 * len(found), slower
