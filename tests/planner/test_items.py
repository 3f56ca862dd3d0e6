"""A makespan is of the items that a job has, and a plan says how many those are."""

import pytest

from fragment_pools import MIB, SECOND, device, partition, placed
from shoal_planner.explanation import summary
from shoal_planner.figures import makespan
from shoal_planner.outcome import duration
from shoal_planner.placement import plan, replan
from shoal_protocol.choices import Objective


def test_how_many_items_a_job_has_decides_how_many_devices_load() -> None:
    """A device that is far away is worth its cold load where there are many items."""
    document = partition([SECOND // 10], [20 * MIB])
    pool = [device("near"), device("far", link_bytes_per_second=10**6)]
    few, many = (placed(plan(document, pool, Objective.MAKESPAN, items=n)) for n in (4, 1000))
    assert few.homes() == (("near",),)
    assert set(many.homes()[0]) == {"near", "far"}
    assert replan(document, pool, few, few.stages).makespan_nanoseconds == few.makespan_nanoseconds


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (16, "16 items take {} with loading"),
        (1, "1 item takes {} with loading"),
        (None, "100 items take {} with loading (their number is assumed)"),
    ],
)
def test_a_makespan_says_for_how_many_items_it_is_and_whether_that_is_assumed(
    items: int | None, said: str
) -> None:
    document = partition([SECOND // 10], [20 * MIB])
    found = placed(plan(document, [device("a")], Objective.MAKESPAN, items=items))
    assert found.latency_nanoseconds is not None
    took = found.latency_nanoseconds + ((items or 100) - 1) * (SECOND // 10)
    assert said.format(duration(took)) in summary(found).split("; ")
    figures = makespan(found)
    assert figures is not None
    assert (figures.items, figures.assumed) == (items or 100, items is None)
    throughput = placed(plan(document, [device("a")], Objective.THROUGHPUT, items=items))
    assert "with loading" not in summary(throughput)
    assert makespan(throughput) is None
