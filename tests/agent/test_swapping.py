"""Plans for swapping: against brute force, and executed step by step."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_agent.memory.swapping import HUGE_PAGE_BYTES, SwapPlan, as_granted, plan_swapping
from shoal_protocol.blocks import Block, arena_beside, least_bytes


def block(weights: int, held: int = 0, working: int = 0, *, empties: bool = False) -> Block:
    """One of which only the sizes matter."""
    return Block(
        model_offset=0,
        model_bytes=0,
        takes=(),
        gives=(),
        held_bytes=held,
        weight_bytes=weights,
        working_bytes=working,
        empties_arena=empties,
    )


def test_with_room_for_all_everything_is_kept() -> None:
    plan = plan_swapping([block(30, held=1, working=5), block(50, held=2, working=7)], 90)
    assert plan == SwapPlan(kept_bytes=(30, 50), peak_bytes=90, prefetches=False)


PAGE = HUGE_PAGE_BYTES


def test_in_the_least_bytes_the_largest_block_keeps_what_it_has_beyond_the_others() -> None:
    blocks = [block(30, held=1, working=5), block(50, held=2, working=7), block(20)]
    least = least_bytes(blocks)
    plan = plan_swapping(blocks, least)
    assert plan == SwapPlan(kept_bytes=(0, 20, 0), peak_bytes=least, prefetches=False)
    assert plan_swapping(blocks, least - 1) is None


def test_between_the_two_large_blocks_stream_the_same_number_of_huge_pages() -> None:
    plan = plan_swapping([block(10 * PAGE)] * 10, 56 * PAGE)
    # Level 5 takes 55 and leaves 1; level 4 would take 64.
    kept = (6 * PAGE, *[5 * PAGE] * 9)
    assert plan == SwapPlan(kept_bytes=kept, peak_bytes=56 * PAGE, prefetches=False)


def test_between_the_two_small_blocks_are_kept_as_a_whole() -> None:
    plan = plan_swapping([block(100), block(80), block(90), block(80)], 275)
    assert plan == SwapPlan(kept_bytes=(100, 80, 10, 0), peak_bytes=270, prefetches=False)


def test_two_blocks_stream_at_once_where_one_is_prefetched() -> None:
    plan = plan_swapping([block(10 * PAGE)] * 10, 52 * PAGE, prefetch=True)
    kept = (4 * PAGE,) * 10
    assert plan == SwapPlan(kept_bytes=kept, peak_bytes=52 * PAGE, prefetches=True)
    assert plan_swapping([block(PAGE)] * 10, 2 * PAGE - 1, prefetch=True) is None


def test_a_block_that_reads_rows_keeps_none() -> None:
    blocks = [block(30), block(50), block(40)]
    plan = plan_swapping(blocks, 120, rows={0})
    assert plan == SwapPlan(kept_bytes=(0, 50, 40), peak_bytes=120, prefetches=False)
    assert plan_swapping(blocks, 49, rows={0}) is None


def test_an_emptied_arena_leaves_room_where_the_weights_are() -> None:
    blocks = [
        block(PAGE, working=9 * PAGE, empties=True),
        block(8 * PAGE, working=2 * PAGE, empties=True),
        block(8 * PAGE),
    ]
    least = least_bytes(blocks)
    assert least == 10 * PAGE
    assert plan_swapping(blocks, least - 1) is None
    plan = plan_swapping(blocks, least)
    assert plan == SwapPlan(kept_bytes=(0, 0, 0), peak_bytes=least, prefetches=False)
    plan = plan_swapping(blocks, 18 * PAGE)
    kept = (PAGE, 7 * PAGE, PAGE)
    assert plan == SwapPlan(kept_bytes=kept, peak_bytes=18 * PAGE, prefetches=False)


def test_the_arena_is_kept_where_the_grant_has_room_for_it() -> None:
    blocks = [block(1, working=9, empties=True), block(8, working=2, empties=True)]
    assert least_bytes(blocks) == 10
    assert as_granted(blocks, 16) == blocks
    assert as_granted(blocks, 17) == [block(1, working=9), block(8, working=2)]


def streamed(blocks: Sequence[Block], plan: SwapPlan) -> list[int]:
    pairs = zip(blocks, plan.kept_bytes, strict=True)
    return [block.weight_bytes - kept for block, kept in pairs]


sizes = st.integers(0, 5)
some_blocks = st.lists(
    st.builds(block, sizes, sizes, sizes, empties=st.booleans()), min_size=2, max_size=4
)


@settings(max_examples=300, deadline=None)
@given(some_blocks, st.integers(0, 45), st.sets(st.integers(0, 1)))
def test_no_other_plan_keeps_more(blocks: list[Block], granted: int, rows: set[int]) -> None:
    fixed, beside = sum(each.held_bytes for each in blocks), arena_beside(blocks)
    best = None

    def peak(plan: SwapPlan) -> int:
        most = max(map(sum, zip(streamed(blocks, plan), beside, strict=True)))
        return fixed + sum(plan.kept_bytes) + most

    most = [0 if index in rows else each.weight_bytes for index, each in enumerate(blocks)]
    for kept in itertools.product(*(range(each + 1) for each in most)):
        other = SwapPlan(kept_bytes=kept, peak_bytes=0, prefetches=False)
        if peak(other) <= granted:
            best = max(best or 0, sum(kept))
    plan = plan_swapping(blocks, granted, rows=rows, huge_page_bytes=1)
    if plan is None or best is None:
        assert (plan, best) == (None, None)
        return
    # Where pages are single bytes; the level is the same for all blocks.
    assert best - len(blocks) < sum(plan.kept_bytes) <= best
    assert peak(plan) <= plan.peak_bytes <= granted


@dataclass
class Memory:
    """What a fragment takes, as its plans are carried out step by step."""

    blocks: Sequence[Block]
    weights: list[int] = field(init=False)
    arena: int = 0
    highest: int = 0

    def __post_init__(self) -> None:
        self.weights = [0] * len(self.blocks)
        self.note()

    def note(self) -> None:
        held = sum(each.held_bytes for each in self.blocks)
        self.highest = max(self.highest, held + sum(self.weights) + self.arena)

    def adopt(self, plan: SwapPlan) -> None:
        for index in range(len(self.blocks)):
            self.drop(index, plan)
        self.highest = 0

    def run(self, plan: SwapPlan) -> None:
        for index, each in enumerate(self.blocks):
            if each.empties_arena:
                self.arena = 0
            self.arena = max(self.arena, each.working_bytes)
            self.touch(index)
            if plan.prefetches and index + 1 < len(self.blocks):
                self.touch(index + 1)
            self.drop(index, plan)

    def touch(self, index: int) -> None:
        self.weights[index] = self.blocks[index].weight_bytes
        self.note()

    def drop(self, index: int, plan: SwapPlan) -> None:
        self.weights[index] = min(self.weights[index], plan.kept_bytes[index])
        self.note()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_grant_changes_to_it_is_never_exceeded(seed: int) -> None:
    chance = np.random.default_rng(seed)

    def below(most: int) -> int:
        return int(chance.integers(most))

    blocks = [
        block(
            below(4) // 3 * 900 + below(1000),
            below(50),
            300 + seed % 2 * below(300),
            empties=seed % 2 == 1 and below(3) == 0,
        )
        for _ in range(2 + below(28))
    ]
    least, whole = least_bytes(blocks), sum(each.weight_bytes for each in blocks) + 2000
    memory = Memory(blocks)
    for _ in range(50):
        granted = least + below(whole - least)
        plan = plan_swapping(blocks, granted)
        if below(2):
            plan = plan_swapping(blocks, granted, prefetch=True) or plan
        assert plan is not None
        memory.adopt(plan)
        for _ in range(1 + below(2)):
            memory.run(plan)
        assert memory.highest <= plan.peak_bytes <= granted
