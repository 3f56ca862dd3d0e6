"""What is asked of many spans of fragments takes as long for a long one as for a short one."""

import gc
import sys
from collections.abc import Callable
from itertools import combinations
from math import inf
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, ceil, device, frames_across, partition
from shoal_planner.borders import Borders
from shoal_planner.costs import Costs, Span
from shoal_planner.device_costs import Holding
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_planner.loads import from_cache, paged_bytes, time_of
from shoal_planner.ranges import Maxima, sums_of
from shoal_planner.search import Question, Wishes, spans_of
from shoal_protocol.choices import Objective
from shoal_protocol.frame_sizes import INLINE_BYTES
from shoal_protocol.partition import MODEL, PartitionDocument
from shoal_protocol.turns import items_in_turn


@given(st.lists(st.integers(), min_size=1, max_size=20))
def test_sums_and_maxima_of_any_range_are_those_of_its_amounts(amounts: list[int]) -> None:
    maxima, sums = Maxima(amounts), sums_of(amounts)
    for start, end in combinations(range(len(amounts) + 1), 2):
        assert maxima.of(start, end) == max(amounts[start:end])
        assert sums[end] - sums[start] == sum(amounts[start:end])


def steps_of(work: Callable[[], object]) -> int:
    """Instructions of Python that it takes, but for those that run at each garbage collection."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return steps


def chain(fragments: int) -> PartitionDocument:
    return partition([10**9] * fragments, [20 * MIB] * fragments, least=[10 * MIB] * fragments)


def steps_to_weigh(fragments: int, budget: int) -> int:
    """Of a chain that a device loads in turn, when what is worked out once has been."""
    costs = Costs(chain(fragments))
    span, tight = Span(0, fragments), device("a", budget)
    assert costs.holding(span, tight) is Holding.RELOADED
    costs.on(span, tight)
    return steps_of(lambda: costs.on(span, tight))


@pytest.mark.parametrize("budget", [24 * MIB, 15 * MIB])
def test_what_a_long_chain_costs_is_found_in_as_many_steps_as_of_a_short_one(budget: int) -> None:
    assert steps_to_weigh(400, budget) == steps_to_weigh(4, budget) > 0


def steps_to_follow_wishes(fragments: int) -> int:
    present = frozenset((index, "a") for index in range(0, fragments, 2))
    wishes = Wishes(required={1: "a"}, preferred=frozenset({(1, "b")}), present=present)
    span = Span(0, fragments)
    expected = 1_000_000 + fragments // 2
    assert wishes.penalty(span, ["a"]) == expected
    return steps_of(lambda: (wishes.allow(span, ["a"]), wishes.penalty(span, ["a"])))


def test_what_is_wished_of_a_long_chain_is_found_in_as_many_steps_as_of_a_short_one() -> None:
    assert steps_to_follow_wishes(400) == steps_to_follow_wishes(4) > 0


def steps_to_find_spans(fragments: int) -> int:
    """On devices that hold three fragments at once."""
    costs = Costs(partition([10**9] * fragments, [20 * MIB] * fragments))
    pool = [device(name, 70 * MIB) for name in "abc"]
    question = Question(costs=costs, pool=pool, goal=Goal(Objective.LATENCY))
    expected = 3 * fragments - 3
    assert len(list(spans_of(question))) == expected
    return steps_of(lambda: list(spans_of(question)))


def test_no_span_is_looked_at_that_is_longer_than_one_that_is_too_large() -> None:
    short, long = steps_to_find_spans(50), steps_to_find_spans(100)
    assert 0 < long - short == steps_to_find_spans(150) - long


@st.composite
def questions(draw: st.DrawFn) -> tuple[PartitionDocument, list[PoolDevice]]:
    """Of fragments and devices of about the same sizes; edges lead past other fragments, too."""
    count = draw(st.integers(1, 7))
    sizes = st.integers(0, 3 * MIB)
    resident = [draw(st.integers(1, 6)) * MIB for _ in range(count)]
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    skips = [(a, b) for a, b in sorted(draw(st.sets(pairs, max_size=4))) if a + 1 < b]
    document = partition(
        [10**8] * count,
        resident,
        [draw(sizes) for _ in range(count + 1)],
        [(a, b, draw(sizes)) for a, b in skips],
        [size * draw(st.integers(1, 4)) // 4 for size in resident],
    )
    pool = [
        device(
            f"d{index}",
            draw(st.integers(1, 24)) * MIB,
            cache_bytes=draw(st.sampled_from([None, 2 * MIB, 5 * MIB])),
            single=draw(st.booleans()),
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    return document, pool


@given(questions(), st.booleans())
def test_all_spans_are_found_that_some_device_can_serve_beside_others_around_it(
    question: tuple[PartitionDocument, list[PoolDevice]], reloading: bool
) -> None:
    document, pool = question
    asked = Question(
        costs=Costs(document), pool=pool, goal=Goal(Objective.LATENCY), reloading=reloading
    )
    count = len(document.fragments)
    every = [Span(start, end) for end in range(1, count + 1) for start in range(end)]
    able = [span for span in every if any(serves(document, span, at, reloading) for at in pool)]
    devices = [1 + (span.start > 0) + (span.end < count) for span in able]
    expected = [span for span, least in zip(able, devices, strict=True) if least <= len(pool)]
    assert list(spans_of(asked)) == expected


@pytest.mark.parametrize(("devices", "spans"), [(1, 1), (2, 2 * 600 - 1)])
def test_of_few_devices_no_span_is_weighed_that_leaves_them_too_few(
    devices: int, spans: int
) -> None:
    pool = [device(str(index), 70 * MIB) for index in range(devices)]
    goal = Goal(Objective.LATENCY)
    asked = Question(costs=Costs(chain(600)), pool=pool, goal=goal, reloading=True)
    assert len(list(spans_of(asked))) == spans


def serves(document: PartitionDocument, span: Span, on: PoolDevice, reloading: bool) -> bool:
    """Whether all fragments have room at once, or each of them by itself."""
    fragments = document.fragments[span.start : span.end]
    frames = frames_across(document, range(span.start, span.end))
    needs = [each.least_bytes for each in fragments]
    stored = [each.weight_bytes + 1024 * each.nodes for each in fragments]
    disk = inf if on.cache_bytes is None else on.cache_bytes
    at_once = sum(needs) + frames <= on.budget_bytes and sum(stored) <= disk
    in_turn = max(needs) + frames <= on.budget_bytes and max(stored) <= disk
    return (at_once and not (on.single and len(fragments) > 1)) or (reloading and in_turn)


@given(questions())
def test_what_a_span_reads_again_is_the_sum_of_what_its_fragments_do(
    question: tuple[PartitionDocument, list[PoolDevice]],
) -> None:
    document, pool = question
    costs = Costs(document)
    for start, end in combinations(range(costs.count + 1), 2):
        span = Span(start, end)
        for each in pool:
            if (holding := costs.holding(span, each)) is None:
                continue
            fragments = document.fragments[start:end]
            read = sum(map(paged_bytes, fragments, costs.grants(span, each)))
            time = time_of(read, each.page_bytes_per_second)
            if holding is Holding.RELOADED:
                loads = sum(from_cache(fragment, each) for fragment in fragments)
                made = (document.output_bytes(index) for index in range(costs.count))
                time += ceil(loads, items_in_turn(made))
            assert costs.on(span, each).read == time


@given(questions())
def test_what_crosses_the_ends_of_a_span_is_the_sum_of_the_edges_across(
    question: tuple[PartitionDocument, list[PoolDevice]],
) -> None:
    document, _ = question
    borders = Borders(document)
    for start, end in [*combinations(range(len(document.fragments) + 1), 2)][::-1]:
        span = Span(start, end)
        coming = [e for e in document.edges if e.consumer in span and e.producer not in span]
        going = [e for e in document.edges if e.producer in span and e.consumer not in span]
        sizes = [[each.bytes_per_item or 0 for each in edges] for edges in (coming, going)]
        small = [
            each
            for each in (*coming, *going)
            if MODEL in (each.producer, each.consumer)
            and (each.bytes_per_item or 0) <= INLINE_BYTES
        ]
        assert borders.of(start, end) == (
            *(sum(each) if each else None for each in sizes),
            len(coming) + len(going) - len(small),
            frames_across(document, range(start, end)),
        )


wishes = st.sets(st.tuples(st.integers(0, 5), st.sampled_from("abc"))).map(frozenset)


@given(wishes, wishes, st.lists(st.integers(0, 9), min_size=6, max_size=6), st.booleans())
def test_a_penalty_counts_each_wish_that_is_not_followed(
    preferred: frozenset[tuple[int, str]],
    present: frozenset[tuple[int, str]],
    weights: list[int],
    weighed: bool,
) -> None:
    asked = Wishes(preferred=preferred, present=present, weights=weights if weighed else ())
    for start, end in combinations(range(7), 2):
        for devices in ("a", "bc"):
            inside = {(fragment, each) for fragment in range(start, end) for each in devices}
            ignored = {wish for wish in preferred if start <= wish[0] < end} - inside
            moved = inside - present if present else set()
            moves = sum(weights[fragment] if weighed else 1 for fragment, _ in moved)
            expected = 1_000_000 * len(ignored) + moves
            assert asked.penalty(Span(start, end), list(devices)) == expected
