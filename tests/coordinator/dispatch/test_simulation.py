"""1,000 seeds of lost, slow and returning devices (see `simulation`)."""

import pytest

from coordinator.dispatch.simulation import simulate

CHUNK = 100


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_every_input_ends_once_within_every_budget_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        world = simulate(seed)  # raises `Wrong` at the first step that breaks a rule
        assert set(world.finished) == set(world.specs)


def test_a_seed_tells_the_same_story_every_time() -> None:
    one, other = simulate(7), simulate(7)
    assert one.transcript == other.transcript
