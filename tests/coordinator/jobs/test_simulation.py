"""1,000 seeds of requests, answers and crashes in every order (see `simulation`)."""

import pytest

from coordinator.jobs.simulation import TROUBLED_STEPS, simulate

CHUNK = 250


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_every_job_ends_once_and_every_caller_is_answered_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        world = simulate(seed)  # raises `Wrong` at the first step that breaks a rule
        assert world.at_rest


@pytest.mark.parametrize("seed", range(4))
def test_a_crash_at_any_point_loses_no_accepted_job(seed: int) -> None:
    for crash_after in range(1, TROUBLED_STEPS + 1):
        assert simulate(seed, crash_after).at_rest


def test_a_seed_tells_the_same_story_every_time() -> None:
    one, other = simulate(7), simulate(7)
    assert one.transcript == other.transcript
