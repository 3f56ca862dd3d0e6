"""Placement against brute force, and what it says of plans and of refusals."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragment_pools import (
    MIB,
    SECOND,
    Division,
    ceil,
    device,
    every_division,
    frames_across,
    partition,
    placed,
    read_again,
    reloads,
)
from shoal_api.kinds.placement import Pin
from shoal_planner import advice
from shoal_planner.advice import CutAdvice
from shoal_planner.device_costs import Holding
from shoal_planner.devices import (
    LOADING_NANOSECONDS,
    PAGE_BYTES_PER_SECOND,
    RELOAD_BYTES_PER_SECOND,
    PoolDevice,
)
from shoal_planner.explanation import explain, explain_refusal, sentences, summary
from shoal_planner.outcome import Infeasible, Plan
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective, PinPolicy
from shoal_protocol.partition import Fragment, PartitionDocument

# ---- brute force: every division, weighed in the plainest way ------------------------------------


def fits(document: PartitionDocument, span: range, on: PoolDevice) -> bool:
    needed = sum(document.fragments[i].least_bytes for i in span) + frames_across(document, span)
    stored = sum(stored_bytes(document.fragments[i]) for i in span)
    fits_disk = on.cache_bytes is None or stored <= on.cache_bytes
    return fits_disk and needed <= on.budget_bytes and not (on.single and len(span) > 1)


def stored_bytes(fragment: Fragment) -> int:
    return fragment.weight_bytes + 1024 * fragment.nodes


def weigh(document: PartitionDocument, division: Division, items: int) -> tuple[int, int]:
    """Of so many items loads count; of none they do not."""
    period, latency = 0, 0
    for span, devices in division:
        rates, latencies, begins = [], [], []
        work = sum(document.fragments[i].flops or 0 for i in span)
        into = [e for e in document.edges if e.consumer in span and e.producer not in span]
        out = [e for e in document.edges if e.producer in span and e.consumer not in span]
        for each in devices:
            moved = sum(edge.bytes_per_item or 0 for edge in (*into, *out))
            paged = read_again(document, span, each, moved)
            compute = ceil(work * SECOND, each.flops_per_second)
            compute += ceil(paged * SECOND, PAGE_BYTES_PER_SECOND)
            link = each.link_bytes_per_second
            times = [
                ceil(sum(e.bytes_per_item or 0 for e in edges) * SECOND, link) if link else 0
                for edges in (into, out)
            ]
            delays = each.latency_nanoseconds * (bool(into) + bool(out))
            rates.append(max(compute, *times, 1))
            fetch, load = cold_load([document.fragments[i] for i in span], each)
            load, fetch = load * bool(items), fetch * bool(items)
            begins.append(fetch + load)
            latencies.append(max(latency, fetch) + compute + sum(times) + delays + load)
        scale = 10**24
        together = rates[0] if len(rates) == 1 else max(1, scale // sum(scale // r for r in rates))
        if items and len(rates) > 1:
            together = mean_period(items, begins, rates)
        latency = min(latencies) if items else max(latencies)
        period = max(period, together)
    return period, latency


def cold_load(fragments: Sequence[Fragment], on: PoolDevice) -> tuple[int, int]:
    """To fetch them, and to load them: weights of less than 4 MiB are not prepared."""
    link = on.link_bytes_per_second
    absent = [each.weight_bytes for each in fragments if each.digest not in on.cached]
    fetch = sum(ceil(weights * SECOND, link) for weights in absent) if link else 0
    mapped = [ceil(each.weight_bytes * SECOND, RELOAD_BYTES_PER_SECOND) for each in fragments]
    return fetch, sum(mapped) + LOADING_NANOSECONDS * len(fragments)


def mean_period(items: int, begins: Sequence[int], periods: Sequence[int]) -> int:
    """The time from the first begin to the end of so many items, by the devices that end soonest
    together."""
    devices = list(zip(begins, periods, strict=True))
    ends = [
        (items + sum(Fraction(begin, period) for begin, period in some))
        / sum(Fraction(1, period) for _, period in some)
        for count in range(1, len(devices) + 1)
        for some in combinations(devices, count)
    ]
    return max(1, math.ceil((min(ends) - min(begins)) / items))


@st.composite
def questions(draw: st.DrawFn) -> tuple[PartitionDocument, list[PoolDevice]]:
    count = draw(st.integers(1, 4))
    numbers = st.integers(0, 5)
    resident = [draw(st.integers(1, 5)) * MIB for _ in range(count)]
    swappable = draw(st.booleans())
    document = partition(
        [draw(numbers) * 10**8 for _ in range(count)],
        resident,
        [draw(numbers) * 10**5 for _ in range(count + 1)],
        [(0, count - 1, 10**5)] if count > 2 and draw(st.booleans()) else [],
        [size * draw(st.integers(1, 4)) // 4 for size in resident] if swappable else None,
    )
    digests = [each.digest for each in document.fragments]
    pool = [
        device(
            f"d{index}",
            cached=tuple(draw(st.sets(st.sampled_from(digests)))),
            budget=draw(st.integers(1, 9)) * MIB,
            flops=draw(st.integers(1, 3)) * SECOND,
            link_bytes_per_second=draw(st.sampled_from([None, 10**6, 10**7])),
            latency_nanoseconds=draw(st.sampled_from([0, 5_000_000])),
            cache_bytes=draw(st.sampled_from([None, MIB, 2 * MIB, 4 * MIB])),
            single=draw(st.booleans()),
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    return document, pool


@settings(max_examples=150, deadline=None)
@given(questions(), st.sampled_from(Objective))
def test_no_division_beats_the_plan(
    question: tuple[PartitionDocument, list[PoolDevice]], objective: Objective
) -> None:
    document, pool = question
    values = [
        weigh(document, division, 50 if objective is Objective.MAKESPAN else 0)
        for division in every_division(document, pool)
        if all(fits(document, span, each) for span, devices in division for each in devices)
    ]
    answer = plan(document, pool, objective, items=50)
    if not values:
        assert isinstance(answer, Infeasible) or reloads(answer)
        return
    best = placed(answer)
    period, latency = best.period_nanoseconds, best.latency_nanoseconds
    assert period is not None
    assert latency is not None
    assert (period, latency) in values, "the plan predicts what no division gives"
    match objective:
        case Objective.THROUGHPUT:
            assert (period, latency) == min(values)
        case Objective.LATENCY:
            assert (latency, period) == min((b, a) for a, b in values)
        case Objective.MAKESPAN:
            assert latency + 49 * period == min(b + 49 * a for a, b in values)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("first", ["a", "b"])
def test_of_equal_devices_each_serves_what_it_has_on_its_disk(
    objective: Objective, first: str
) -> None:
    document = partition([SECOND, SECOND], [20 * MIB, 20 * MIB])
    on_disk = [(each.digest,) for each in document.fragments]
    cached = dict(zip(("a", "b") if first == "a" else ("b", "a"), on_disk, strict=True))
    pool = [device(name, link_bytes_per_second=10**7, cached=held) for name, held in cached.items()]
    answer = placed(plan(document, pool, objective))
    assert [stage.devices for stage in answer.stages] == [(name,) for name in cached]


@settings(max_examples=100, deadline=None)
@given(questions(), st.sampled_from(Objective))
def test_a_plan_serves_each_fragment_and_keeps_every_budget(
    question: tuple[PartitionDocument, list[PoolDevice]], objective: Objective
) -> None:
    document, pool = question
    answer = plan(document, pool, objective)
    budgets = {each.name: each.budget_bytes for each in pool}
    if isinstance(answer, Infeasible) and answer.need_bytes is None:
        largest = max(map(stored_bytes, document.fragments))
        assert any(each.cache_bytes is not None and each.cache_bytes < largest for each in pool)
        assert "disk" in answer.problem
        return
    if isinstance(answer, Infeasible):
        assert answer.need_bytes is not None
        assert answer.need_bytes > max(budgets.values())
        return
    covered = [each for stage in answer.stages for each in stage.fragments]
    assert covered == list(range(len(document.fragments)))
    named = [name for stage in answer.stages for name in stage.devices]
    assert len(named) == len(set(named)), "a device serves two stages"
    for stage in answer.stages:
        fragments = [document.fragments[each] for each in stage.fragments]
        for share in stage.shares:
            pairs = list(zip(fragments, share.granted_bytes, strict=True))
            assert share.resident_bytes <= budgets[share.device]
            assert all(f.least_bytes <= granted <= f.resident_bytes for f, granted in pairs)
            stored = [stored_bytes(each) for each in fragments]
            in_turn = share.holding is Holding.RELOADED
            disk = next(each.cache_bytes for each in pool if each.name == share.device)
            assert disk is None or (max(stored) if in_turn else sum(stored)) <= disk
            whole = all(granted == f.resident_bytes for f, granted in pairs)
            assert whole == (share.holding is Holding.WHOLE) or share.holding is Holding.RELOADED


@settings(max_examples=50, deadline=None)
@given(questions(), st.sampled_from(Objective), st.randoms())
def test_the_order_of_the_pool_does_not_matter(
    question: tuple[PartitionDocument, list[PoolDevice]], objective: Objective, chance: object
) -> None:
    document, pool = question
    turned = list(reversed(pool))
    first, second = plan(document, pool, objective), plan(document, turned, objective)
    if isinstance(first, Plan):
        assert first.stages == placed(second).stages


# ---- examples ------------------------------------------------------------------------------------


def test_the_slowest_fragment_gets_the_fastest_device_and_spares_share_its_items() -> None:
    document = partition([10**9, 4 * 10**9, 10**9], [20 * MIB] * 3)
    pool = [device("a"), device("b"), device("c", flops=2 * SECOND), device("d", flops=2 * SECOND)]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    assert answer.homes() == (("a",), ("c", "d"), ("b",))
    assert answer.period_nanoseconds == SECOND
    assert answer.items_per_second == 1.0
    assert answer.gap == 0


def test_a_model_that_fits_on_every_device_is_not_split_for_throughput() -> None:
    document = partition([10**9] * 3, [5 * MIB] * 3, [10**6] * 4)
    pool = [device(name, link_bytes_per_second=10**7) for name in ("a", "b", "c")]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    assert answer.homes() == (("a", "b", "c"),) * 3


def test_latency_goes_to_the_one_fastest_device_when_it_holds_all() -> None:
    document = partition([10**9] * 3, [5 * MIB] * 3, [10**6] * 4)
    pool = [device("slow"), device("fast", flops=4 * SECOND)]
    answer = placed(plan(document, pool, Objective.LATENCY))
    assert answer.homes() == (("fast",),) * 3


def test_a_slow_link_keeps_fragments_together() -> None:
    document = partition([10**8, 10**8], [5 * MIB] * 2, [10, 10**8, 10])
    pool = [device(name, link_bytes_per_second=10**6, single=False) for name in ("a", "b")]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    assert [stage.fragments for stage in answer.stages] == [(0, 1)]


def test_single_residency_gives_each_fragment_a_device() -> None:
    document = partition([10**9] * 3, [MIB] * 3)
    pool = [device(name, single=True) for name in ("a", "b", "c")]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    assert [stage.fragments for stage in answer.stages] == [(0,), (1,), (2,)]


def test_devices_load_fragments_in_turn_only_where_there_is_no_other_way() -> None:
    document = partition([10**9] * 3, [20 * MIB] * 3)
    roomy = placed(plan(document, [device(n) for n in "abc"], Objective.LATENCY))
    assert not reloads(roomy)
    tight = placed(plan(document, [device(n) for n in "ab"], Objective.THROUGHPUT))
    assert [stage.held(Holding.RELOADED) for stage in tight.stages].count(True) == 1
    assert "loaded in turn, because no device holds its own together" in summary(tight)


def test_a_required_pin_is_kept_and_a_preferred_one_where_it_costs_nothing() -> None:
    document = partition([10**9] * 2, [20 * MIB] * 2)
    pool = [device("a"), device("b"), device("slow", flops=SECOND // 2)]
    required = [Pin(fragment=0, device="slow")]
    answer = placed(plan(document, pool, Objective.THROUGHPUT, pins=required))
    assert answer.homes()[0] == ("slow",)
    free = [Pin(fragment=0, device="b", policy=PinPolicy.PREFERRED)]
    answer = placed(plan(document, pool, Objective.LATENCY, pins=free))
    assert answer.homes() == (("b",), ("a",))
    dear = [Pin(fragment=0, device="slow", policy=PinPolicy.PREFERRED)]
    answer = placed(plan(document, pool, Objective.LATENCY, pins=dear))
    assert "slow" not in answer.homes()[0]


def test_a_plan_in_force_stays_when_nothing_is_better() -> None:
    document = partition([10**9] * 2, [20 * MIB] * 2)
    pool = [device("a"), device("b"), device("c")]
    pins = [Pin(fragment=0, device="c"), Pin(fragment=1, device="b")]
    before = placed(plan(document, pool, Objective.LATENCY, pins=pins))
    after = placed(plan(document, pool, Objective.LATENCY, previous=before))
    assert after.homes() == (("c",), ("b",))
    assert (before.epoch, after.epoch) == (1, 2)


def test_what_is_unknown_is_balanced_by_size_and_not_predicted() -> None:
    document = partition([None, 10**9], [10 * MIB, 20 * MIB], [None, None, None])
    answer = placed(plan(document, [device("a"), device("b")], Objective.THROUGHPUT))
    assert answer.period_nanoseconds is None
    assert answer.items_per_second is None
    assert answer.stages[0].compute_nanoseconds is None
    (stages,) = [table for table in explain(answer, document) if table.title == summary(answer)]
    assert stages.rows[0] == ("0", "0", "a", "?", "?", "", "?", "10 MiB of 24 MiB", "?")


def test_an_unknown_size_on_an_unlimited_link_spoils_no_prediction() -> None:
    document = partition([10**9, 10**9], [20 * MIB, 20 * MIB], [None, None, None])
    answer = placed(plan(document, [device("a"), device("b")], Objective.THROUGHPUT))
    assert answer.items_per_second == 1.0


def test_a_fragment_that_fits_nowhere_is_refused_with_needs_budgets_and_advice() -> None:
    document = partition([1, 1, 1], [10 * MIB, int(41.2 * MIB), MIB])
    pool = [device("pi-zero"), device("pi-4"), device("jetson", budget=32 * MIB)]
    answer = plan(document, pool, Objective.THROUGHPUT)
    assert isinstance(answer, Infeasible)
    assert answer.fragment == 1
    todo = advice.in_words(CutAdvice(5, int(22.8 * MIB)))
    assert answer.message("ppocr-rec-3", todo) == (
        "fragment 1 of ppocr-rec-3 needs 41.2 MiB resident; pi-zero has 24 MiB, pi-4 24 MiB, "
        "jetson 32 MiB; cut finer (fragments: 5 would need 22.8 MiB) or raise the budget"
    )
    (missing,) = explain_refusal(answer)
    title = "Fragment 1 needs at least 41.2 MiB, with what enters and leaves it"
    assert missing.title == title
    assert missing.headings == ("device", "has", "lacks")
    assert missing.rows == (
        ("pi-zero", "24 MiB", "17.2 MiB"),
        ("pi-4", "24 MiB", "17.2 MiB"),
        ("jetson", "32 MiB", "9.2 MiB"),
    )


@pytest.mark.parametrize(
    ("pool", "pins", "words"),
    [
        ([], [], "the pool has no device"),
        ([device("a")], [Pin(fragment=0, device="x")], "pinned to x; the pool has a"),
        ([device("a")], [Pin(fragment=7, device="a")], "but 0 is the last"),
        (
            [device("a", budget=MIB), device("b")],
            [Pin(fragment=0, device="a")],
            "needs 20 MiB resident and is pinned to a; a has 1 MiB",
        ),
    ],
)
def test_other_refusals_say_what_is_wrong(
    pool: list[PoolDevice], pins: list[Pin], words: str
) -> None:
    answer = plan(partition([1], [20 * MIB]), pool, Objective.THROUGHPUT, pins=pins)
    assert isinstance(answer, Infeasible)
    assert words in answer.message("p")


def test_required_pins_that_exclude_each_other_are_refused() -> None:
    document = partition([1, 1, 1], [20 * MIB] * 3)
    pins = [Pin(fragment=0, device="a"), Pin(fragment=1, device="b"), Pin(fragment=2, device="a")]
    answer = plan(document, [device("a"), device("b")], Objective.THROUGHPUT, pins=pins)
    assert isinstance(answer, Infeasible)
    assert "pins" in answer.message("p")


@pytest.mark.parametrize("policy", PinPolicy)
def test_pins_are_not_blamed_for_memory_that_the_pool_lacks_without_them(policy: PinPolicy) -> None:
    document = partition([1, 1], [20 * MIB] * 2, [10 * MIB] * 3)
    pool = [device("a", budget=19 * MIB), device("b", budget=19 * MIB)]
    pins = [Pin(fragment=1, device="a", policy=policy)]
    answer = plan(document, pool, Objective.THROUGHPUT, pins=pins)
    assert isinstance(answer, Infeasible)
    assert answer == plan(document, pool, Objective.THROUGHPUT)
    assert "needs 20 MiB resident; a has 19 MiB" in answer.message("p")


def test_a_large_pool_is_planned_with_bounded_work_and_no_worse_than_evenly() -> None:
    document = partition(
        [10**8 * (1 + i % 5) for i in range(16)], [(4 + i % 3) * MIB for i in range(16)]
    )
    pool = [
        device(f"d{i:03}", budget=(24 + i % 17) * MIB, flops=SECOND * (1 + i % 7))
        for i in range(60)
    ]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    assert answer.gap
    assert answer.even_split is not None
    assert answer.items_per_second is not None
    assert answer.items_per_second >= (answer.even_split.items_per_second or 0)
    assert len({name for home in answer.homes() for name in home}) > 30, "devices were left idle"


def test_the_explanation_shows_stages_and_why_alternatives_lost() -> None:
    document = partition([3 * 10**8, 10**8, 4 * 10**8], [14 * MIB, 12 * MIB, 10 * MIB], [1000] * 4)
    pool = [
        device("pi-4", flops=4 * SECOND),
        device("pi-zero", flops=2 * SECOND),
        device("jetson", budget=32 * MIB, flops=8 * SECOND),
    ]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    assert summary(answer) == (
        "2 stages on pi-4, pi-zero, jetson; 16 items/s; even split would give 13.3"
    )
    stages, memory, rejected = explain(answer, document)
    assert stages.title.startswith(summary(answer) + "; an item takes ")
    assert [row[:5] for row in stages.rows] == [
        ("0", "0", "pi-4", "67 %", "75 ms"),
        ("", "", "pi-zero", "33 %", "150 ms"),
        ("1", "1-2", "jetson", "100 %", "62.5 ms"),
    ]
    assert rejected.headings == ("alternative", "items/s", "an item takes", "because")
    costs = {row[0]: row[1:] for row in rejected.rows}
    assert costs["one device"] == (
        "?",
        "?",
        "all fragments need 36 MiB together; jetson has 32 MiB",
    )
    assert costs["even split"][:2] == ("13.3", "175 ms")
    assert costs["split by memory"][:2] == ("5", "262 ms")
    assert costs["without replicas"] == (
        "13.3",
        "138 ms",
        "pi-4 would need 75 ms an item, against 62.5 ms",
    )
    assert sentences(answer)[0] == summary(answer)
    one = "one device: all fragments need 36 MiB together; jetson has 32 MiB"
    assert one in sentences(answer)
    assert memory.rows[0] == ("0", "14 MiB", "14 MiB", "3.9 KiB", "all on pi-4, pi-zero")
    for table in (stages, memory, rejected):
        assert table.numbers <= set(table.headings)
        assert all(len(row) == len(table.headings) for row in table.rows)


def test_a_rate_that_no_device_could_serve_is_unknown() -> None:
    document = partition([10, 10], [MIB, MIB], [0] * 3)
    answer = placed(plan(document, [device("pi-4"), device("jetson")], Objective.THROUGHPUT))
    assert answer.items_per_second is None
    assert "; items/s unknown, the work on an item is too little to be estimated" in summary(answer)
    stages, *_ = explain(answer, document)
    assert "an item takes" not in stages.title
    assert all(row[-1] == "?" for row in stages.rows)
