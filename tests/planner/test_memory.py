"""Fragments in blocks: what a device grants them, what that costs, and what is said of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, SECOND, ceil, device, partition, placed, read_again
from shoal_planner.budgets import explain_budgets, with_other_budgets
from shoal_planner.costs import Costs, Division, Span
from shoal_planner.device_costs import DeviceCost, Holding, mean_period
from shoal_planner.devices import (
    PAGE_BYTES_PER_SECOND,
    PREPARING_NANOSECONDS,
    RELOAD_BYTES_PER_SECOND,
)
from shoal_planner.explanation import explain, summary
from shoal_planner.goal import Goal
from shoal_planner.loads import paged_bytes, prepared
from shoal_planner.outcome import Infeasible
from shoal_planner.placement import plan
from shoal_planner.speeds import refined
from shoal_protocol.choices import Objective
from shoal_protocol.frame_sizes import received_frame_bytes
from shoal_protocol.partition import MODEL, Edge
from shoal_protocol.units import Bytes, Nanoseconds, format_bytes


@given(st.data())
def test_no_way_to_grant_memory_reads_fewer_weights(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(4, 20).map(lambda n: n * MIB), min_size=1, max_size=4))
    least = [size * data.draw(st.integers(1, 4)) // 4 for size in sizes]
    document = partition([0] * len(sizes), sizes, least=least)
    budget = data.draw(st.integers(sum(least), sum(sizes)))
    one, span = device("one", budget=budget), range(len(sizes))
    answer = placed(plan(document, [one], Objective.LATENCY))
    read = read_again(document, span, one, moved=0)
    assert answer.stages[0].read_nanoseconds == ceil(read * SECOND, PAGE_BYTES_PER_SECOND)


def test_a_model_a_little_larger_than_the_fast_device_stays_there_in_blocks() -> None:
    document = partition([10**8] * 2, [18 * MIB] * 2, least=[6 * MIB] * 2)
    pool = [device("jetson", budget=32 * MIB, flops=8 * SECOND), device("pi-zero")]
    answer = placed(plan(document, pool, Objective.LATENCY))
    (stage,) = answer.stages
    assert stage.devices == ("jetson",)
    assert stage.grants(0) + stage.grants(1) == (18 * MIB, 12 * MIB)  # 2 MiB are kept free
    # Half of the second one's 9 MiB of weights are read again: of its 12 swappable MiB it lacks 6.
    read = ceil(9 * MIB // 2 * SECOND, PAGE_BYTES_PER_SECOND)
    assert answer.period_nanoseconds == 2 * 10**8 // 8 + read


def test_spare_memory_goes_to_the_fragment_that_it_saves_the_most_reading() -> None:
    document = partition([10**8] * 2, [20 * MIB] * 2, least=[4 * MIB, 12 * MIB])
    answer = placed(plan(document, [device("a", budget=24 * MIB)], Objective.LATENCY))
    # The second one reads 10 MiB for want of 8, the first for want of 16. A sixteenth is kept free.
    assert answer.grants() == ((4 * MIB,), (37 * MIB // 2,))


def test_in_blocks_there_is_room_for_the_activations_of_two_items() -> None:
    document = partition([10**8], [40 * MIB], [3 * MIB, 2 * MIB], least=[4 * MIB])
    answer = placed(plan(document, [device("a", budget=24 * MIB)], Objective.LATENCY))
    assert answer.grants() == ((14 * MIB,),)
    tight = placed(plan(document, [device("a", budget=12 * MIB)], Objective.LATENCY))
    assert tight.grants() == ((4 * MIB,),)


def test_a_device_of_residency_single_loads_in_turn_what_would_fit_in_blocks_together() -> None:
    document = partition([10**8] * 2, [20 * MIB] * 2, least=[4 * MIB] * 2)
    answer = placed(plan(document, [device("a", budget=12 * MIB, single=True)], Objective.LATENCY))
    (stage,) = answer.stages
    assert stage.held(Holding.RELOADED)
    granted = 12 * MIB * 15 // 16  # the rest is kept free
    assert answer.grants() == ((granted,), (granted,))
    assert stage.resident_bytes == granted


def test_a_fragment_loaded_in_turn_serves_several_items_and_the_first_waits_for_it() -> None:
    """Two loads of 110 ms each, which sixteen items share."""
    document = partition([10**8] * 2, [20 * 10**6] * 2)
    (stage,) = placed(plan(document, [device("a", budget=24 * MIB)], Objective.THROUGHPUT)).stages
    (cost,) = stage.costs
    assert (cost.read, cost.load) == (13_750_000, 206_250_000)
    assert cost.period == cost.compute + 13_750_000
    assert cost.latency == cost.compute + 220_000_000


@pytest.mark.parametrize(("mebibytes", "items"), [(1, 16), (10, 12), (100, 4), (None, 16)])
def test_fewer_items_share_a_load_where_more_lies_between_two_fragments(
    mebibytes: int | None, items: int
) -> None:
    size = None if mebibytes is None else mebibytes * MIB
    document = partition([10**8] * 2, [20 * 10**6] * 2, [100, size, 100])
    cost = Costs(document).on(Span(0, 2), device("a", single=True))
    assert cost.read == ceil(220_000_000, items)


@pytest.mark.parametrize(("items", "turns"), [(1, 1), (16, 1), (17, 2), (100, 7)])
def test_a_makespan_in_turn_takes_as_many_turns_as_there_are_items_to_share_them(
    items: int, turns: int
) -> None:
    """Of 220 ms each; the fragments are on the disk."""
    document = partition([10**8] * 2, [20 * 10**6] * 2)
    cached = tuple(each.digest for each in document.fragments)
    alone = device("a", budget=24 * MIB, cached=cached)
    period, latency = Costs(document, items).totals([Division(Span(0, 2), (alone,))])
    took = latency + (items - 1) * period
    assert took == pytest.approx(items * 2 * 10**8 + turns * 220_000_000, abs=items)


def test_what_runs_in_blocks_while_it_is_loaded_in_turn_reads_weights_for_each_item() -> None:
    """With a disk of 100 MB/s each byte takes 10 ns."""
    document = partition([10**8] * 2, [40 * MIB] * 2, least=[20 * MIB] * 2)
    tight = device("a", budget=32 * MIB, page_bytes_per_second=10**8)
    costs, whole = Costs(document), Span(0, 2)
    assert costs.holding(whole, tight) is Holding.RELOADED
    paged = sum(
        paged_bytes(each, granted)
        for each, granted in zip(document.fragments, costs.grants(whole, tight), strict=True)
    )
    assert paged > 0
    fast = replace(tight, page_bytes_per_second=10**18)
    with_disk, without = costs.on(whole, tight), costs.on(whole, fast)
    assert with_disk.read - without.read == pytest.approx(10 * paged, abs=10)
    assert sum(costs.times(whole, tight)) - sum(costs.times(whole, fast)) == pytest.approx(
        10 * paged, abs=10
    )


def test_what_loads_were_measured_to_take_takes_the_place_of_what_rates_predict() -> None:
    """Of the first fragment. The second takes the ratio that the device has."""
    document = partition([10**8] * 2, [20 * 10**6] * 2)
    loads = ((document.fragments[0].digest, Nanoseconds(11_000_000)),)
    (known,) = refined(document, [replace(device("a", budget=24 * MIB), loads=loads)])
    assert Costs(document).on(Span(0, 2), known).latency == 2 * (10**8 + 11_000_000)


def test_a_makespan_counts_fetching_and_preparing_too() -> None:
    """Of 5 MB over 10 MB/s, prepared in 300 ms and 25 ms, and loaded in 60 ms and 25 ms; and of
    1 MB, which is not prepared."""
    document = partition([10**8] * 2, [10 * 10**6, 2 * 10**6])
    linked = device("a", budget=48 * MIB, link_bytes_per_second=10**7)
    cold, warm = (Costs(document, items).on(Span(0, 2), linked) for items in (1, 0))
    assert cold.fetch - warm.fetch == 10**6 * (500 + 100)
    assert cold.latency - warm.latency == 10**6 * (300 + 25 + 60 + 25 + 60 + 5)
    assert cold.period == warm.period


def test_where_the_process_that_prepares_has_no_room_a_fragment_is_tried() -> None:
    """In 180 ms."""
    document = partition([10**8], [10 * 10**6])
    cold, warm = (Costs(document, items).on(Span(0, 1), device("a")) for items in (1, 0))
    assert cold.latency - warm.latency == 10**6 * (180 + 60 + 25)


@pytest.mark.parametrize(
    ("budget", "has_room"),
    [(53, False), (54, True), (55, True), (56, False), (58, False), (59, True)],
)
def test_the_process_that_prepares_needs_room_for_the_weights_it_saves(
    budget: int, has_room: bool
) -> None:
    """36 MiB and nine eighths of the weights: of all 20 MiB, or of a block with 16 MiB at most
    where the device has no room for the 56 MiB of the whole."""
    (fragment,) = partition([1], [40 * MIB], least=[16 * MIB]).fragments
    fragment = replace(fragment, resident_bytes=56 * MIB)
    took = prepared(fragment, device("a", budget=budget * MIB))
    saved = PREPARING_NANOSECONDS + ceil(20 * MIB * SECOND, RELOAD_BYTES_PER_SECOND)
    assert took == (saved if has_room else 180 * 10**6)


def test_weights_come_over_a_link_no_faster_than_the_processor_takes_them() -> None:
    slow = device("a", link_bytes_per_second=10**7, moved_bytes_per_second=5 * 10**6)
    cost = Costs(partition([1], [10**6]), loading_items=1).on(Span(0, 1), slow)
    assert cost.fetch == 10**8


def test_stages_fetch_at_the_same_time() -> None:
    """Each of two devices fetches for a second; the second one's is done when it has its turn."""
    document = partition([10**8] * 2, [20 * 10**6] * 2)
    pool = [device(name, link_bytes_per_second=10**7) for name in "ab"]
    costs = Costs(document, loading_items=1)
    spans = [Span(0, 1), Span(1, 2)]
    divisions = [Division(span, (each,)) for span, each in zip(spans, pool, strict=True)]
    one = costs.on(spans[0], pool[0])
    assert one.fetch == 10**9
    assert costs.totals(divisions)[1] == one.fetch + 2 * one.latency


def test_a_replica_takes_items_from_when_it_has_loaded() -> None:
    """Of eleven items a second each: one device has loaded five seconds before the other, so it has
    done five when they share the others."""
    alike = {
        "compute": SECOND,
        "read": 0,
        "move": 0,
        "receive": 0,
        "send": 0,
        "delay": 0,
        "overlap": 0,
    }
    costs = [
        DeviceCost(holding=Holding.WHOLE, fetch=fetch, load=load, **alike)  # type: ignore[arg-type]
        for fetch, load in ((4 * SECOND, SECOND), (0, 0))
    ]
    assert mean_period(costs, 11) == 8 * SECOND // 11 + 1
    assert mean_period(costs, 3) == SECOND, "the second one comes too late"


def test_a_refusal_says_what_a_fragment_needs_at_least_and_to_be_resident() -> None:
    document = partition([1], [int(41.2 * MIB)], least=[10 * MIB])
    answer = plan(document, [device("pi-zero", budget=8 * MIB)], Objective.THROUGHPUT)
    assert isinstance(answer, Infeasible)
    assert answer.message("rec", "raise the budget") == (
        "fragment 0 of rec needs at least 10 MiB in blocks, 41.2 MiB to be resident; "
        "pi-zero has 8 MiB; raise the budget"
    )


def test_the_explanation_says_what_each_fragment_needs_and_what_it_is_granted() -> None:
    document = partition([10**8] * 2, [18 * MIB] * 2, least=[6 * MIB] * 2)
    pool = [device("a", budget=36 * MIB), device("b"), device("c")]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    assert summary(answer).endswith(
        "; where memory is short, fragments run in blocks and read weights again"
    )
    stages, memory, _ = explain(answer, document)
    assert [(*row[:3], row[-2]) for row in stages.rows] == [
        ("0", "0-1", "a", "36 MiB of 36 MiB"),
        ("", "", "b, c", "22.5 MiB of 24 MiB (in blocks)"),
    ]
    assert [row[5].endswith("ms") for row in stages.rows] == [False, True], "weights read again"
    assert memory.headings == ("fragment", "at least", "resident", "in and out", "granted")
    assert memory.rows == (
        ("0", "6 MiB", "18 MiB", "0 B", "all on a; 16.5 MiB in blocks on b, c"),
        ("1", "6 MiB", "18 MiB", "", "all on a; 6 MiB in blocks on b, c"),
    )


def test_what_a_fragment_needs_and_what_enters_and_leaves_are_the_smallest_budget() -> None:
    document = partition([10**8], [18 * MIB], [3 * MIB, 2 * MIB], least=[6 * MIB])
    pool = [device("a", budget=36 * MIB)]
    memory = explain(placed(plan(document, pool, Objective.THROUGHPUT)), document)[1]
    _, least, _, frames, _ = memory.rows[0]
    others = with_other_budgets(document, pool, Goal(Objective.THROUGHPUT))
    smallest = others.smallest_bytes
    assert (least, frames) == ("6 MiB", format_bytes(Bytes(smallest - 6 * MIB)))
    assert smallest > others.smallest_in_turn_bytes == 6 * MIB
    tight = placed(plan(document, [device("a", budget=smallest - 1)], Objective.THROUGHPUT))
    assert tight.waiting
    assert summary(tight).endswith(
        "; other items wait on disk, because no memory is left beside a fragment"
    )


def test_alternatives_that_would_load_fragments_in_turn_say_what_these_need_in_blocks() -> None:
    document = partition([10**8] * 3, [20 * MIB] * 3, least=[10 * MIB] * 3)
    pool = [device("a", budget=24 * MIB), device("b", budget=12 * MIB)]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    reasons = {each.alternative: each.reason for each in answer.rejected}
    assert reasons["one device"] == (
        "all fragments need at least 30 MiB together, in blocks; a has 24 MiB"
    )
    assert reasons["even split"] == (
        "its fragments need at least 20 MiB together, in blocks; b has 12 MiB: "
        "it would load them in turn"
    )


def test_the_next_item_waits_where_a_fragment_leaves_no_room_for_its_frames() -> None:
    document = partition([10**8], [20 * MIB], [12 * MIB, 0], least=[16 * MIB])
    frames = received_frame_bytes(12 * MIB)
    whole = placed(plan(document, [device("a", budget=20 * MIB + frames)], Objective.LATENCY))
    assert whole.stages[0].held(Holding.WHOLE)
    in_blocks = placed(plan(document, [device("a", budget=16 * MIB + frames)], Objective.LATENCY))
    assert in_blocks.stages[0].held(Holding.IN_BLOCKS)
    assert not in_blocks.waiting
    for budget in (16 * MIB + frames - 1, 16 * MIB):
        tight = placed(plan(document, [device("a", budget=budget)], Objective.LATENCY))
        assert tight.stages[0].held(Holding.IN_BLOCKS)
        assert tight.waiting
    short = plan(document, [device("a", budget=16 * MIB - 1)], Objective.LATENCY)
    assert isinstance(short, Infeasible)
    assert (short.need_bytes, short.resident_bytes) == (16 * MIB, 20 * MIB)
    assert "needs at least 16 MiB in blocks, 20 MiB to be resident;" in short.message("det")


@pytest.mark.parametrize("least", [16 * MIB, 20 * MIB])
def test_what_is_alone_on_a_device_is_loaded_once_though_other_items_wait(least: int) -> None:
    document = partition([10**8], [20 * MIB], [12 * MIB, 0], least=[least])
    pool = [device("a", budget=21 * MIB), device("slow", budget=MIB)]
    answer = placed(plan(document, pool, Objective.LATENCY))
    (cost,) = answer.stages[0].costs
    assert answer.waiting
    assert "in turn" not in summary(answer)
    assert cost.holding is (Holding.IN_BLOCKS if least < 20 * MIB else Holding.WHOLE)
    assert cost.load == 0
    (fragment,) = document.fragments
    read = ceil(paged_bytes(fragment, Bytes(least)) * SECOND, PAGE_BYTES_PER_SECOND)
    assert cost.period == cost.compute + read
    table = explain_budgets(with_other_budgets(document, pool, Goal(Objective.LATENCY)))
    need = format_bytes(Bytes(least))
    assert table.title.endswith(f"on each of 2 devices; {need} where other items wait")
    assert {row[-1] for row in table.rows} <= {"whole", "in blocks"}
    assert not any("all fragments need" in each.reason for each in answer.rejected)


def test_devices_that_hold_all_while_other_items_wait_come_before_one_that_loads_in_turn() -> None:
    document = partition([10**8] * 2, [20 * MIB] * 2, [12 * MIB, 12 * MIB, 0])
    small, large = [device(name, budget=21 * MIB) for name in "ab"], device("c", budget=32 * MIB)
    in_turn = placed(plan(document, [large], Objective.THROUGHPUT))
    assert (in_turn.reloading, in_turn.waiting) == (True, False)
    answer = placed(plan(document, [*small, large], Objective.THROUGHPUT))
    assert (answer.reloading, answer.waiting) == (False, True)
    reasons = {each.alternative: each.reason for each in answer.rejected}
    assert "they wait" not in " ".join(reasons.values()), "in the best they do as well"


def test_an_alternative_in_which_other_items_wait_says_so() -> None:
    document = partition([10**8] * 2, [12 * MIB, 16 * MIB], [0, 12 * MIB, 0])
    pool = [device("a", budget=48 * MIB), device("b", budget=17 * MIB)]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    reasons = {each.alternative: each.reason for each in answer.rejected}
    assert reasons["even split"] == ("b has no room for other items beside a fragment: they wait")


def test_what_enters_a_run_of_fragments_has_room_beside_each_that_is_loaded_in_turn() -> None:
    document = partition([10**8] * 2, [8 * MIB, 20 * MIB], [12 * MIB, 0, 0])
    frames = received_frame_bytes(12 * MIB)
    for budget, waiting in ((20 * MIB + frames, False), (25 * MIB, True)):
        answer = placed(plan(document, [device("a", budget=budget)], Objective.LATENCY))
        assert answer.stages[0].held(Holding.RELOADED)
        assert answer.waiting is waiting
    short = plan(document, [device("a", budget=19 * MIB)], Objective.LATENCY)
    assert isinstance(short, Infeasible)
    assert short.message("det") == (
        "fragment 1 of det needs 20 MiB resident; a has 19 MiB; cut finer or raise the budget"
    )


def test_where_a_larger_device_has_room_for_other_items_nothing_waits() -> None:
    document = partition([10**8], [20 * MIB], [12 * MIB, 0])
    pool = [
        device("small", budget=25 * MIB, flops=10 * SECOND),
        device("large", budget=27 * MIB, flops=SECOND),
    ]
    answer = placed(plan(document, pool, Objective.LATENCY))
    assert not answer.waiting
    assert answer.homes() == (("large",),)


def test_inputs_that_several_fragments_take_have_room_for_those_of_one() -> None:
    """Each reads its own when its turn comes, so one of the two is under way, not both."""
    chained = partition([10**8] * 3, [20 * MIB] * 3, [MIB // 2, 0, 0, 0])
    again = Edge(producer=MODEL, consumer=2, tensors=("t",), bytes_per_item=MIB // 2)
    document = replace(chained, edges=(*chained.edges, again))
    budget = 20 * MIB + received_frame_bytes(MIB // 2)
    answer = placed(plan(document, [device("a", budget=budget)], Objective.LATENCY))
    assert answer.stages[0].held(Holding.RELOADED)
    assert answer.stages[0].received_bytes == MIB, "both take their time on the link"
    assert not answer.waiting
    tight = placed(plan(document, [device("a", budget=budget - 1)], Objective.LATENCY))
    assert tight.waiting
