"""What is predicted of jobs is what the dispatcher makes of them, in virtual time."""

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
