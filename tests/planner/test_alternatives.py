"""What is said of the plans that were not taken."""

import pytest

from fragment_pools import MIB, device, partition, placed
from shoal_api.kinds.placement import Pin
from shoal_planner.explanation import could_be_better
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective


def test_of_a_faster_plan_that_pins_forbid_it_is_said_that_they_do() -> None:
    document = partition([10**9] * 2, [4 * MIB] * 2, [64 * MIB] * 3)
    pins = [Pin(fragment=0, device="a"), Pin(fragment=1, device="b")]
    pool = [device("a"), device("b")]
    answer = placed(plan(document, pool, Objective.LATENCY, pins=pins))
    reasons = {each.alternative: each.reason for each in answer.rejected}
    assert reasons["all on a"] == "fragment 1 is pinned to b"
    free = placed(plan(document, pool, Objective.LATENCY))
    assert not any("pinned" in each.reason for each in free.rejected)


@pytest.mark.parametrize(("gap", "said"), [(0.08, "7.4 %"), (24.0, "96 %"), (999.0, "100 %")])
def test_what_a_search_may_have_missed_is_a_number_for_people(gap: float, said: str) -> None:
    assert could_be_better(gap).endswith(f"could be better by {said}")
