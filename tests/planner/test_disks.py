"""What fragments take of devices' disks, in plans: `test_placement` weighs them by brute force."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, SECOND, ceil, device, partition, placed, reloads
from shoal_planner.costs import Costs, Division, Span
from shoal_planner.device_costs import Holding
from shoal_planner.loads import from_cache, prepared
from shoal_planner.outcome import Infeasible
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective
from shoal_protocol.partition import Fragment
from shoal_protocol.turns import MOST_ITEMS


def test_what_a_disk_cannot_hold_together_is_on_other_devices() -> None:
    document = partition([10**9] * 3, [20 * MIB] * 3)
    small = device("small", 64 * MIB, 4 * SECOND, cache_bytes=15 * MIB)
    pool = [small, device("large", 64 * MIB, cache_bytes=64 * MIB)]
    answer = placed(plan(document, pool, Objective.LATENCY))
    assert answer.homes() == (("small",), ("large",), ("large",))
    lost = next(each for each in answer.rejected if each.alternative == "split by memory")
    taken = "its fragments take 20 MiB on disk; small has 15 MiB: it would load them in turn"
    assert lost.reason == taken


def test_what_no_disk_can_hold_together_is_loaded_in_turn() -> None:
    document = partition([10**9] * 3, [20 * MIB] * 3)
    answer = placed(
        plan(document, [device("a", 64 * MIB, cache_bytes=15 * MIB)], Objective.LATENCY)
    )
    assert reloads(answer)


def test_a_fragment_that_no_disk_has_room_for_is_refused_with_need_and_have() -> None:
    document = partition([10**9] * 2, [20 * MIB, 40 * MIB])
    pool = [device("a", 64 * MIB, cache_bytes=15 * MIB), device("b", 24 * MIB)]
    answer = plan(document, pool, Objective.LATENCY)
    assert isinstance(answer, Infeasible)
    assert answer.message("cut").startswith(
        "cut cannot be placed: a fragment takes 20.1 MiB on a device's disk; of the devices with "
        "enough memory there are for fragments: a 15 MiB; cut finer or raise the cache's size"
    )


def fetched_in_a_turn(fragments: Sequence[Fragment], cache_bytes: float) -> int:
    """Bytes of weights, in the last of several turns. What was used least recently is dropped."""
    cached, fetched = OrderedDict[str, int](), 0
    for _ in range(4):
        fetched = 0
        for each in fragments:
            if each.digest not in cached:
                stored = each.weight_bytes + 1024 * each.nodes
                while cached and sum(cached.values()) + stored > cache_bytes:
                    cached.popitem(last=False)
                cached[each.digest] = stored
                fetched += each.weight_bytes
            cached.move_to_end(each.digest)
    return fetched


@given(
    st.lists(st.integers(4, 20), min_size=2, max_size=6),
    st.one_of(st.none(), st.integers(10, 70)),
    st.sampled_from([10**6, 10**7]),
)
def test_what_is_loaded_in_turn_and_has_no_room_on_the_disk_is_fetched_for_each_turn(
    sizes: list[int], disk: int | None, link: int
) -> None:
    document = partition([10**8] * len(sizes), [size * MIB for size in sizes])
    cache_bytes = None if disk is None else disk * MIB + MIB // 2
    budget = max(sizes) * MIB + MIB // 2
    tight = device("a", budget, cache_bytes=cache_bytes, link_bytes_per_second=link)
    costs, whole = Costs(document), Span(0, len(sizes))
    if costs.holding(whole, tight) is not Holding.RELOADED:
        return
    cost, fragments = costs.on(whole, tight), document.fragments
    loads = sum(from_cache(each, tight) for each in fragments)
    fetches = ceil(fetched_in_a_turn(fragments, cache_bytes or inf) * SECOND, link)
    assert cost.read + cost.load == loads + fetches
    assert cost.read == ceil(loads + fetches, MOST_ITEMS)


@pytest.mark.parametrize(("items", "turns"), [(1, 1), (16, 1), (17, 2), (100, 7)])
def test_a_makespan_counts_what_is_fetched_for_each_turn(items: int, turns: int) -> None:
    """A turn fetches 30 MB over 100 MB/s, and maps them at 200 MB/s."""
    document = partition([10**8] * 3, [20 * 10**6] * 3)
    pool = [device("a", 24 * MIB, cache_bytes=25 * 10**6, link_bytes_per_second=10**8)]
    costs = Costs(document, items)
    period, latency = costs.totals([Division(Span(0, 3), tuple(pool))])
    once = sum(prepared(each, pool[0]) for each in document.fragments)
    turn = 300_000_000 + sum(from_cache(each, pool[0]) for each in document.fragments)
    took = latency + (items - 1) * period
    assert took == pytest.approx(items * 3 * 10**8 + turns * turn + once, abs=items)


def test_several_fragments_go_to_the_device_that_need_not_fetch_them_again() -> None:
    """The slower one."""
    document = partition([10**8] * 3, [20 * 10**6] * 3)
    small = device("a", 24 * MIB, 2 * SECOND, cache_bytes=15 * 10**6)
    pool = [replace(small, link_bytes_per_second=10**6), device("b", 24 * MIB)]
    answer = placed(plan(document, pool, Objective.LATENCY))
    assert sum(names == ("a",) for names in answer.homes()) == 1
    assert sum(names == ("b",) for names in answer.homes()) == 2
