"""Plans for swapping: against brute force, and executed step by step."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_agent.memory.swapping import SwapPlan, plan_swapping
from shoal_protocol.blocks import Block, least_bytes


def block(weights: int, held: int = 0, working: int = 0) -> Block:
    """One of which only the sizes matter."""
    return Block(
        model_offset=0,
        model_bytes=0,
        takes=(),
        gives=(),
        held_bytes=held,
        weight_bytes=weights,
        working_bytes=working,
    )


def test_with_room_for_all_everything_is_kept() -> None:
    plan = plan_swapping([block(30, held=1, working=5), block(50, held=2, working=7)], 90)
    assert plan == SwapPlan(kept_bytes=(30, 50), peak_bytes=90, prefetches=False)


def test_in_the_least_bytes_the_largest_block_keeps_what_it_has_beyond_the_others() -> None:
    blocks = [block(30, held=1, working=5), block(50, held=2, working=7), block(20)]
    least = least_bytes(blocks)
    plan = plan_swapping(blocks, least)
    assert plan == SwapPlan(kept_bytes=(0, 20, 0), peak_bytes=least, prefetches=False)
    assert plan_swapping(blocks, least - 1) is None


def test_between_the_two_every_block_streams_the_same_share() -> None:
    plan = plan_swapping([block(100)] * 10, 550)
    assert plan == SwapPlan(kept_bytes=(50,) * 10, peak_bytes=550, prefetches=False)


def test_two_blocks_stream_at_once_where_one_is_prefetched() -> None:
    plan = plan_swapping([block(100)] * 10, 520, prefetch=True)
    assert plan == SwapPlan(kept_bytes=(40,) * 10, peak_bytes=520, prefetches=True)
    assert plan_swapping([block(100)] * 10, 199, prefetch=True) is None


def test_a_block_that_reads_rows_keeps_none() -> None:
    plan = plan_swapping([block(30), block(50), block(40)], 100, rows={0})
    assert plan == SwapPlan(kept_bytes=(0, 20, 10), peak_bytes=60, prefetches=False)


def streamed(blocks: Sequence[Block], plan: SwapPlan) -> list[int]:
    pairs = zip(blocks, plan.kept_bytes, strict=True)
    return [block.weight_bytes - kept for block, kept in pairs]


sizes = st.integers(0, 5)
some_blocks = st.lists(st.builds(block, sizes, sizes, sizes), min_size=2, max_size=4)


@settings(max_examples=300, deadline=None)
@given(some_blocks, st.integers(0, 45))
def test_no_other_plan_keeps_more(blocks: list[Block], granted: int) -> None:
    fixed = sum(each.held_bytes for each in blocks) + max(each.working_bytes for each in blocks)
    best = None
    for kept in itertools.product(*(range(each.weight_bytes + 1) for each in blocks)):
        other = SwapPlan(kept_bytes=kept, peak_bytes=0, prefetches=False)
        if fixed + sum(kept) + max(streamed(blocks, other)) <= granted:
            best = max(best or 0, sum(kept))
    plan = plan_swapping(blocks, granted)
    if plan is None or best is None:
        assert (plan, best) == (None, None)
        return
    # Levels are whole bytes, the same for all blocks.
    assert best - len(blocks) < sum(plan.kept_bytes) <= best
    assert fixed + sum(plan.kept_bytes) + max(streamed(blocks, plan)) <= plan.peak_bytes <= granted


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
    chance = Random(seed)
    blocks = [
        block(chance.choice([0, 1, 900]) + chance.randrange(1000), chance.randrange(50), 300)
        for _ in range(chance.randrange(2, 30))
    ]
    least, whole = least_bytes(blocks), sum(each.weight_bytes for each in blocks) + 2000
    memory = Memory(blocks)
    for _ in range(50):
        granted = chance.randrange(least, whole)
        plan = plan_swapping(blocks, granted)
        if chance.random() < 0.5:
            plan = plan_swapping(blocks, granted, prefetch=True) or plan
        assert plan is not None
        memory.adopt(plan)
        for _ in range(chance.randrange(1, 3)):
            memory.run(plan)
        assert memory.highest <= plan.peak_bytes <= granted
