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


def test_devices_that_load_in_turn_do_not_wait_for_one_another() -> None:
    """The slower one sets the pace, with what comes to it and goes from it. The sum of both would
    be too long by a third."""
    found = list(bench.turns(bench.small_shelves(26, 2)))
    assert len(found) > 5
    assert median(found) < 0.15, sorted(found)
