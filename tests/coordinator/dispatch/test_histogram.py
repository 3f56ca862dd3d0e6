"""Durations in buckets: what a quantile is exact about."""

from shoal_coordinator.dispatch.histogram import Histogram
from shoal_protocol.units import Nanoseconds


def test_every_quantile_of_a_single_duration_is_that_duration() -> None:
    for duration in range(100_000_000, 200_000_000, 1_234_567):
        histogram = Histogram()
        histogram.add(Nanoseconds(duration))
        assert {histogram.quantile(each) for each in (0.01, 0.5, 0.99)} == {duration}


def test_a_quantile_of_many_is_exact_to_six_percent_and_never_outside_of_them() -> None:
    histogram = Histogram()
    for duration in range(1_000_003, 2_000_000, 997):
        histogram.add(Nanoseconds(duration))
    assert abs(histogram.quantile(0.5) - 1_500_000) <= 0.06 * 1_500_000
    assert 1_000_003 <= histogram.quantile(0.0001) <= histogram.quantile(1.0) <= 2_000_000
