"""The rules of leader election, by the times alone: two candidates, each with its own clock."""

from hypothesis import given
from hypothesis import strategies as st

from shoal_operator.controller.lease import RELEASED, LeaseTimes, Observation, Record


def held(renewed: str, holder: str = "other") -> Record:
    return Record(
        holder=holder, duration_seconds=15, acquired="then", renewed=renewed, transitions=1
    )


def test_a_released_lease_may_be_acquired_at_once() -> None:
    observation = Observation()
    observation.observe(RELEASED, 0.0)
    assert observation.may_acquire("me", 0.0)


def test_a_held_lease_expires_only_when_it_was_observed_unchanged_for_its_whole_duration() -> None:
    observation = Observation()
    observation.observe(held("a"), 100.0)
    assert not observation.may_acquire("me", 115.0)
    assert observation.may_acquire("me", 115.1)
    observation.observe(held("b"), 115.2)
    assert not observation.may_acquire("me", 130.0)


def test_the_time_that_a_record_names_does_not_matter() -> None:
    observation = Observation()
    observation.observe(held("1970-01-01T00:00:00Z"), 100.0)
    assert not observation.may_acquire("me", 101.0)


@given(
    renewals=st.lists(st.floats(0.1, 9.9), max_size=20),
    delay=st.floats(0.0, 4.0),
    offset=st.floats(-1e6, 1e6),
)
def test_a_leader_has_stopped_before_another_may_acquire_the_lease(
    renewals: list[float], delay: float, offset: float
) -> None:
    """The candidate observes each renewal `delay` after it was written, by its own clock."""
    times = LeaseTimes()
    observation, now = Observation(), 0.0
    for count, pause in enumerate([0.0, *renewals]):
        now += pause
        observation.observe(held(str(count)), now + delay + offset)
    leads_until = now + times.renew_deadline
    assert not observation.may_acquire("me", leads_until + offset)
