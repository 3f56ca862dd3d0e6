"""When the tasks of an item were ready, were given, and had ended."""

from hypothesis import given
from hypothesis import strategies as st

from shoal_coordinator.dispatch.timings import ItemTiming, TaskTiming, phases
from shoal_protocol.units import Nanoseconds

TIMES = st.integers(100, 1000).map(Nanoseconds)


def item(*times: tuple[int, int | None]) -> ItemTiming:
    """From 100 to 1000; when its tasks were given, and when their ends were reported."""
    tasks = tuple(
        TaskTiming(
            stage,
            "a",
            Nanoseconds(given_at),
            None if ended_at is None else Nanoseconds(ended_at),
            Nanoseconds(1),
        )
        for stage, (given_at, ended_at) in enumerate(times)
    )
    return ItemTiming(0, Nanoseconds(100), Nanoseconds(1000), 0, tasks)


def test_a_task_is_ready_when_the_one_before_it_has_ended() -> None:
    found = phases(item((100, 200), (250, 300)), [(), (0,)])
    assert found == {0: (100, 100, 200), 1: (200, 250, 300)}


def test_a_task_that_was_given_ahead_was_given_when_it_was_ready() -> None:
    assert phases(item((100, 200), (110, 300)), [(), (0,)])[1] == (200, 200, 300)


def test_a_task_whose_device_reported_late_had_ended_before_its_consumer() -> None:
    found = phases(item((100, 400), (110, 300), (310, 350)), [(), (0,), (1,)])
    assert found == {0: (100, 100, 300), 1: (300, 300, 300), 2: (300, 310, 350)}


def test_a_task_that_waits_for_one_that_runs_has_no_end() -> None:
    assert phases(item((100, None), (110, None)), [(), (0,)])[1] == (100, 110, None)


@given(times=st.lists(st.tuples(TIMES, st.none() | TIMES), min_size=4, max_size=4))
def test_phases_follow_one_another_in_every_graph(times: list[tuple[int, int | None]]) -> None:
    before = [(), (0,), (0,), (1, 2)]
    found = phases(item(*times), before)
    for stage, (ready_at, given_at, ended_at) in found.items():
        assert 100 <= ready_at <= given_at
        assert ended_at is None or given_at <= ended_at
        for producer in before[stage]:
            end = found[producer].ended_at
            assert ready_at >= (100 if end is None else end)
