"""Room for a limit that is to be lowered is made less and less often where it does not last."""

from shoal_agent.budget import next_pause


def test_what_is_back_each_time_is_dropped_less_and_less_often() -> None:
    pauses = [2.0]
    for _ in range(5):
        pauses.append(next_pause(pauses[-1], had_to=True))
    assert pauses == [2, 4, 8, 16, 16, 16]


def test_what_stays_away_is_looked_for_as_often_as_at_first() -> None:
    assert next_pause(16.0, had_to=False) == 2.0
