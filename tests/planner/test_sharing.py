"""Several models on one pool: each plan has what those before it leave."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fragment_pools import MIB, device, every_division, partition, placed
from shoal_planner.costs import Costs, Division, Span
from shoal_planner.devices import PeerLink
from shoal_planner.explanation import summary
from shoal_planner.outcome import Plan
from shoal_planner.placement import plan
from shoal_planner.sharing import Taken, beside, crowded, is_at_once, left_over, taken_by
from shoal_protocol.choices import Objective
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Nanoseconds

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(SIZES, SIZES, st.lists(st.integers(4, 20), min_size=1, max_size=3))
def test_two_plans_together_keep_every_budget(
    first: list[int], second: list[int], budgets: list[int]
) -> None:
    pool = [device(f"d{number}", size * MIB) for number, size in enumerate(budgets)]
    models = [
        partition([10**8] * len(sizes), [size * MIB for size in sizes]) for sizes in (first, second)
    ]
    one = plan(models[0], pool, Objective.THROUGHPUT)
    if not is_at_once(one):
        return
    taken = taken_by([placed(one)])
    other = plan(models[1], left_over(pool, taken), Objective.THROUGHPUT)
    if is_at_once(other):
        together = taken_by([placed(one), placed(other)])
        assert all(
            together[each.name].held_bytes <= each.budget_bytes
            for each in pool
            if each.name in together
        )


def test_the_second_model_goes_where_the_first_leaves_room() -> None:
    pool = [device("one", 12 * MIB), device("two", 24 * MIB)]
    large = partition([10**8], [20 * MIB])
    taken = taken_by([placed(plan(large, pool, Objective.LATENCY))])
    assert set(taken) == {"two"}
    small = partition([10**8], [10 * MIB])
    second = placed(plan(small, left_over(pool, taken), Objective.LATENCY))
    assert second.homes() == (("one",),)


def test_a_device_that_serves_another_model_three_fifths_of_the_time_has_two_fifths_left() -> None:
    """The second stage works all the time, the first one three fifths of it."""
    pool = [device("one", 24 * MIB), device("two", 24 * MIB)]
    first = placed(plan(partition([6 * 10**8, 10**9], [20 * MIB] * 2), pool, Objective.THROUGHPUT))
    assert first.homes() == (("one",), ("two",))
    taken = taken_by([first])
    assert [taken[name].busy for name in ("one", "two")] == [0.6, 1.0]
    left = left_over(pool, taken)
    assert [each.flops_per_second for each in left] == [4 * 10**8, 25 * 10**7]
    second = beside(placed(plan(partition([10**8], [MIB]), left, Objective.LATENCY)), taken)
    assert second.homes() == (("one",),)
    assert second.latency_nanoseconds == 250_000_000
    assert "other models leave one 40 % of its processor and 4 MiB" in summary(second)


@given(SIZES, st.lists(st.integers(4, 20), min_size=1, max_size=4), st.sampled_from(Objective))
def test_no_device_is_busy_for_longer_than_there_is_time(
    sizes: list[int], budgets: list[int], objective: Objective
) -> None:
    pool = [
        device(f"d{number}", size * MIB, flops=10**9 * (1 + number))
        for number, size in enumerate(budgets)
    ]
    found = plan(partition([10**8] * len(sizes), [each * MIB for each in sizes]), pool, objective)
    if isinstance(found, Plan) and is_at_once(found):
        busy = [each.busy for each in taken_by([found]).values()]
        assert all(0 <= each <= 1 for each in busy)
        assert max(busy) == 1, "what is slowest limits all"


def test_the_second_model_goes_round_a_link_that_the_first_takes() -> None:
    """`far` is fast behind a slow link, which the first model takes all the time, and its processor
    a fifth of it. `near` takes longer, unless items of two models share the link."""
    pool = [
        device("far", 24 * MIB, flops=5 * 10**9, link_bytes_per_second=10**6),
        device("near", 24 * MIB, flops=5 * 10**8),
    ]
    document = partition([10**8], [MIB], [10**5, 0])
    first = placed(plan(document, pool, Objective.LATENCY))
    assert first.homes() == (("far",),)
    taken = taken_by([first])
    assert taken["far"] == Taken(held_bytes=MIB, busy=0.2, link=1.0)
    second = placed(plan(document, left_over(pool, taken), Objective.LATENCY))
    assert second.homes() == (("near",),)
    blind = left_over(pool, {"far": replace(taken["far"], link=0.0)})
    assert placed(plan(document, blind, Objective.LATENCY)).homes() == (("far",),)
    third = placed(plan(document, left_over(pool[:1], taken), Objective.LATENCY))
    assert "80 % of its processor, 25 % of its link and 23 MiB" in summary(beside(third, taken))


def test_of_a_link_between_two_devices_as_much_is_left_as_of_the_end_that_has_less() -> None:
    links = (PeerLink("b", 1000, Nanoseconds(0)), PeerLink("c", 1000, Nanoseconds(0)))
    pool = [replace(device("a", link_bytes_per_second=4000), peers=links), device("b"), device("c")]
    taken = {"a": Taken(0, 0.0, link=0.2), "b": Taken(0, 0.0, link=0.5)}
    one, other, _ = left_over(pool, taken)
    assert [each.bytes_per_second for each in one.peers] == [500, 800]
    assert (one.link_bytes_per_second, other.link_bytes_per_second) == (3200, None)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_division_of_the_second_model_beats_its_plan_on_what_the_first_leaves(
    data: st.DataObject,
) -> None:
    """Links that are taken are slower by the part of the time in which the first one's items take
    them, in tenths; a quarter is always left."""
    sizes, rates = st.integers(0, 5), st.sampled_from([10**6, 10**7, 10**8])

    def model() -> PartitionDocument:
        count = data.draw(st.integers(1, 3))
        crossing = [10**5 * data.draw(sizes) for _ in range(count + 1)]
        return partition([10**8] * count, [MIB] * count, crossing)

    pool = [
        device(f"d{number}", 24 * MIB, link_bytes_per_second=data.draw(rates))
        for number in range(data.draw(st.integers(1, 3)))
    ]
    first, document = placed(plan(model(), pool, Objective.THROUGHPUT)), model()
    left = []
    for each in pool:
        parts = {"busy": 0.0, "link": 0.0}
        for stage in first.stages:
            if each.name in stage.devices:
                cost = stage.costs[stage.devices.index(each.name)]
                together, period = stage.period_nanoseconds, first.period_nanoseconds
                assert together
                assert period
                share = together / cost.period / period
                parts["busy"] += share * (cost.compute + cost.read + cost.move)
                parts["link"] += share * max(cost.receive, cost.send)
        rest = {name: max(0.25, 1 - round(min(1, part), 1)) for name, part in parts.items()}
        speed, rate = each.flops_per_second, each.link_bytes_per_second or 0
        left.append(
            replace(
                each,
                flops_per_second=int(speed * round(rest["busy"], 2)),
                link_bytes_per_second=int(rate * round(rest["link"], 2)),
            )
        )
    every = (
        [Division(Span(span[0], span[-1] + 1), tuple(devices)) for span, devices in division]
        for division in every_division(document, left)
    )
    least = min(Costs(document).totals(each)[0] for each in every)
    second = placed(plan(document, left_over(pool, taken_by([first])), Objective.THROUGHPUT))
    assert second.period_nanoseconds == least


def test_a_plan_says_where_no_other_model_is() -> None:
    pool = [device("one", 12 * MIB), device("two", 24 * MIB)]
    taken = taken_by([placed(plan(partition([10**8], [20 * MIB]), pool, Objective.LATENCY))])
    second = placed(plan(partition([10**8], [10 * MIB]), left_over(pool, taken), Objective.LATENCY))
    assert "on devices that no other model uses" in summary(beside(second, taken))


def test_a_plan_as_if_it_were_alone_names_the_devices_that_have_no_room_for_both() -> None:
    pool = [device("one", 24 * MIB), device("two", 40 * MIB), device("three", 24 * MIB)]
    taken = {name: Taken(held_bytes=20 * MIB, busy=0.5) for name in ("one", "two")}
    alone = placed(plan(partition([10**8], [20 * MIB]), pool, Objective.THROUGHPUT))
    assert alone.homes() == (("one", "three", "two"),)
    assert "no room on one, where their fragments and these are" in summary(crowded(alone, taken))
    assert crowded(alone, {}) == alone
