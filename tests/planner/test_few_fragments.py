"""How many fragments a cut has: as few as keep the limit, and what is said where those are many."""

import re
from dataclasses import replace

import pytest

from random_profiles import chain
from shoal_planner.cuts import CutRequest, Frames, Refusal, choose_cuts
from shoal_planner.few_fragments import (
    FEW,
    MANY,
    comfortable,
    cut_for_budgets,
    cut_within,
    many_in_words,
)
from shoal_planner.profile import Profile
from shoal_planner.segments import Growing, Layout

KIB, MIB = 1 << 10, 1 << 20


def fewest(profile: Profile, limit: int) -> int:
    """Each fragment as long as the limit allows, which is best in a chain of equal tensors."""
    layout = Layout(profile, moving=True)
    ends, start = [*layout.legal, len(profile.nodes)], 0
    count = 0
    while start < len(profile.nodes):
        growing, last = Growing(layout, start), start
        for end in (each for each in ends if each > start):
            while growing.end < end:
                growing.grow()
            if growing.resident_bytes > limit:
                break
            last = end
        start, count = last, count + 1
    return count


SMALL_LAYERS = chain(*[(1 + number % 3) * KIB for number in range(300)])
LARGE_LAYERS = chain(*[MIB] * 300)


def count_of(cuts: tuple[int, ...] | Refusal) -> int:
    assert isinstance(cuts, tuple), cuts
    return len(cuts) + 1


def counts_of(profile: Profile, budget: int) -> tuple[int, int]:
    """With some of the budget left free, and with all of it; on one device."""
    roomy, full = (
        count_of(choose_cuts(profile, CutRequest(max_bytes=limit, frames=Frames.MODEL)))
        for limit in (comfortable(budget), budget)
    )
    return roomy, full


@pytest.mark.parametrize("limit_kib", [1_850, 1_870, 1_900, 1_950])
def test_a_long_chain_has_as_few_fragments_as_keep_the_limit(limit_kib: int) -> None:
    """Also where they reach over a few each of the positions that are tried at first."""
    profile = chain(*[(1 + number % 3) * KIB for number in range(750)])
    limit = limit_kib * KIB
    assert count_of(choose_cuts(profile, CutRequest(max_bytes=limit))) == fewest(profile, limit)


def test_a_limit_with_next_to_nothing_over_what_a_fragment_takes_gives_way_to_the_budget() -> None:
    """What is left free of so small a budget is most of what fragments differ in."""
    budget = 2_450 * KIB
    roomy, full = counts_of(SMALL_LAYERS, budget)
    assert roomy == len(SMALL_LAYERS.nodes)
    assert count_of(cut_for_budgets(SMALL_LAYERS, [budget], one_device=True)) == full <= FEW


@pytest.mark.parametrize(
    ("profile", "budget"), [(SMALL_LAYERS, 3_000 * KIB), (LARGE_LAYERS, 16 * MIB)]
)
def test_some_of_the_budget_stays_free_where_fragments_are_few_or_hardly_more(
    profile: Profile, budget: int
) -> None:
    roomy, full = counts_of(profile, budget)
    assert full < roomy
    assert roomy <= FEW or roomy < 2 * full
    assert count_of(cut_for_budgets(profile, [budget], one_device=True)) == roomy


def test_a_budget_that_no_cut_keeps_leaves_it_to_the_next_larger_one() -> None:
    alone = cut_for_budgets(SMALL_LAYERS, [4 * MIB], one_device=False)
    for others in ([MIB], [MIB, MIB + 1], [MIB, MIB + 1, 6 * MIB]):
        assert cut_for_budgets(SMALL_LAYERS, [4 * MIB, *others], one_device=False) == alone
    refused = cut_for_budgets(SMALL_LAYERS, [MIB, MIB // 2], one_device=False)
    assert refused == choose_cuts(SMALL_LAYERS, CutRequest(max_bytes=MIB, frames=Frames.MODEL))
    assert isinstance(refused, Refusal)
    assert refused.have_bytes == MIB


def test_what_takes_more_with_the_frames_of_other_items_is_cut_for_one_device() -> None:
    """What crosses its cuts is wide: a frame of it comes and another one goes."""
    profile = chain(*[8 * MIB] * 12)
    wide = {f"t{number}": profile.tensors[f"t{number}"] for number in range(1, 12)}
    tensors = {name: replace(each, bytes=4 * MIB) for name, each in wide.items()}
    profile = replace(profile, tensors={**profile.tensors, **tensors})
    apart, alone = (
        choose_cuts(profile, CutRequest(max_bytes=1, frames=frames))
        for frames in (Frames.FRAGMENT, Frames.MODEL)
    )
    assert isinstance(apart, Refusal)
    assert isinstance(alone, Refusal)
    assert (alone.need_bytes or 0) + MIB < (apart.need_bytes or 0)
    for limit in (alone.need_bytes or 0, (apart.need_bytes or 0) - 1):
        cuts = choose_cuts(profile, CutRequest(max_bytes=limit, frames=Frames.MODEL))
        assert cut_within(profile, limit) == cuts
        assert not isinstance(cut_for_budgets(profile, [MIB, limit], one_device=False), Refusal)
    refused = cut_within(profile, (alone.need_bytes or 0) - 1)
    assert isinstance(refused, Refusal)
    assert refused.need_bytes == alone.need_bytes


@pytest.mark.parametrize("one_device", [False, True])
def test_where_items_wait_their_frames_need_no_room(one_device: bool) -> None:
    profile = chain(*[8 * MIB] * 12)
    (taken,) = profile.inputs
    wide = replace(profile.tensors[taken.name], bytes=4 * MIB)
    profile = replace(profile, tensors={**profile.tensors, taken.name: wide})

    def cut(limit: int, *, waiting: bool) -> tuple[int, ...] | Refusal:
        return cut_for_budgets(profile, [MIB, limit], one_device=one_device, waiting=waiting)

    meanwhile, least = cut(MIB, waiting=False), cut(MIB, waiting=True)
    assert isinstance(meanwhile, Refusal)
    assert isinstance(least, Refusal)
    need = least.need_bytes or 0
    assert need + 4 * MIB < (meanwhile.need_bytes or 0)
    assert isinstance(cut(need, waiting=False), Refusal)
    assert isinstance(cut(need - 1, waiting=True), Refusal)
    assert cut(need, waiting=True) == cut_within(profile, need, waiting=True)


@pytest.mark.parametrize("one_device", [False, True])
def test_many_fragments_are_told_with_a_budget_that_takes_as_few_as_it_says(
    one_device: bool,
) -> None:
    said = many_in_words(SMALL_LAYERS, MANY + 1, one_device=one_device)
    assert said.startswith(f"these budgets take {MANY + 1} fragments, ")
    told = re.search(r"budgets of ([\d.]+) MiB take (\d+)", said)
    assert told is not None
    budget, number = int(float(told[1]) * MIB), int(told[2])
    assert (
        count_of(cut_for_budgets(SMALL_LAYERS, [budget], one_device=one_device))
        <= number
        <= 2 * FEW
    )


def test_few_fragments_are_not_worth_a_word() -> None:
    assert many_in_words(SMALL_LAYERS, MANY, one_device=True) == ""
