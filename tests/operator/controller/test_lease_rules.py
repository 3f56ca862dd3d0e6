"""Who may lead, told from the times alone: two candidates with clocks of their own."""

from hypothesis import given
from hypothesis import strategies as st

from shoal_operator.controller.lease import FREE, LeaseTimes, Observation, Record


def held(renewed: str, holder: str = "other") -> Record:
    return Record(
        holder=holder, duration_seconds=15, acquired="then", renewed=renewed, transitions=1
    )


def test_a_free_lease_may_be_taken_at_once() -> None:
    observation = Observation()
    observation.see(FREE, 0.0)
    assert observation.is_free("me", 0.0)


def test_a_held_lease_is_free_only_when_it_was_seen_unchanged_for_its_whole_duration() -> None:
    observation = Observation()
    observation.see(held("a"), 100.0)
    assert not observation.is_free("me", 115.0)
    assert observation.is_free("me", 115.1)
    observation.see(held("b"), 115.2)
    assert not observation.is_free("me", 130.0)


def test_the_time_that_a_record_names_does_not_matter() -> None:
    observation = Observation()
    observation.see(held("1970-01-01T00:00:00Z"), 100.0)
    assert not observation.is_free("me", 101.0)


@given(
    renewals=st.lists(st.floats(0.1, 9.9), max_size=20),
    delay=st.floats(0.0, 4.0),
    offset=st.floats(-1e6, 1e6),
)
def test_a_leader_has_given_up_before_another_may_take_the_lease(
    renewals: list[float], delay: float, offset: float
) -> None:
    """The candidate sees each renewal `delay` after it was written, on a clock of its own."""
    times = LeaseTimes()
    observation, now = Observation(), 0.0
    for count, pause in enumerate([0.0, *renewals]):
        now += pause
        observation.see(held(str(count)), now + delay + offset)
    leads_until = now + times.give_up
    assert not observation.is_free("me", leads_until + offset)
