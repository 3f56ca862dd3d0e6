"""A fragment that fits on no device, as measured, is divided where that helps."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import partition
from random_profiles import chain
from shoal_planner.cuts import Refusal
from shoal_planner.finer_cuts import divide, in_words, learned, to_divide
from shoal_planner.profile import Profile
from shoal_planner.segments import Layout
from shoal_protocol.partition import Outgrown
from shoal_protocol.seen_sizes import MOST_TENSORS, Sizes

MIB = 1 << 20


def outgrown(fragment: int, mib: int = 64) -> Outgrown:
    return Outgrown(fragment=fragment, need_bytes=mib * MIB)


def unknown(nodes: int) -> Profile:
    """A chain of which no size is known: cuts by bytes have nothing to go by."""
    profile = chain(*([10] * nodes))
    tensors = {name: replace(each, bytes=None) for name, each in profile.tensors.items()}
    return replace(profile, tensors=tensors)


def test_a_few_cuts_lead_down_to_the_node_that_takes_too_much() -> None:
    """Its estimate is a tenth of what it takes, whichever part of it is tried."""
    profile, peak = unknown(780), 555
    cuts: tuple[int, ...] = (100,)
    found = [outgrown(1)]
    while {peak, peak + 1} - set(cuts):
        made = divide(profile, (100,), found)
        assert not isinstance(made, Refusal)
        assert set(cuts) < set(made), "other fragments stay as they are"
        cuts = made
        borders = pairwise((0, *cuts, 780))
        number = next(place for place, (start, end) in enumerate(borders) if start <= peak < end)
        found.append(outgrown(number))
    assert len(found) <= 7
    assert len(cuts) <= 2 + 3 * 5
    refusal = divide(profile, (100,), found)
    assert isinstance(refusal, Refusal)
    assert (refusal.node, refusal.need_bytes) == (f"layer {peak} (MatMul)", 64 * MIB)
    assert refusal.reason.startswith(f"fragment {number} took 64 MiB, and it cannot be divided")


def test_what_is_stopped_early_is_refused_with_what_it_needs_by_estimate() -> None:
    """A run is stopped where it takes more than there is, so nobody knows how much more."""
    refusal = divide(chain(40 * MIB), (), [outgrown(0, mib=11)])
    assert isinstance(refusal, Refusal)
    assert "took 11 MiB, and it cannot be divided" in refusal.reason
    found = re.search(r"; by estimate it needs ([0-9.]+) MiB$", refusal.reason)
    assert found
    assert float(found[1]) >= 40
    assert (refusal.need_bytes or 0) >= 40 * MIB


def test_what_was_not_estimated_is_divided_by_nodes_and_what_was_by_bytes() -> None:
    profile = chain(*([40 * MIB] + [MIB] * 40))
    by_bytes = divide(profile, (), [outgrown(0, mib=80)])
    by_nodes = divide(profile, (), [outgrown(0, mib=1000)])
    assert isinstance(by_bytes, tuple)
    assert isinstance(by_nodes, tuple)
    assert by_bytes[0] <= 10 < by_nodes[0]


def test_near_the_middle_it_is_divided_where_the_fewest_bytes_cross() -> None:
    profile = unknown(40)
    crossing = {name: replace(each, bytes=MIB) for name, each in profile.tensors.items()}
    narrow = replace(crossing["t23"], bytes=1000)
    found = divide(replace(profile, tensors=crossing | {"t23": narrow}), (), [outgrown(0, 500)])
    assert found == (23,)


def test_a_part_that_blocks_do_not_make_smaller_than_what_was_too_much_is_divided_too() -> None:
    """What the whole took, it took in blocks. Its first half has hardly any weights to save; it
    holds its first tensor across a peak."""
    profile = chain(*([MIB // 100] * 8 + [2 * MIB] * 10))
    sizes = {"t1": 8 * MIB, "t4": 4 * MIB, "t5": 4 * MIB}
    tensors = {
        name: replace(each, bytes=sizes.get(name, each.bytes))
        for name, each in profile.tensors.items()
    }
    nodes = list(profile.nodes)
    nodes[7] = replace(nodes[7], inputs=(*nodes[7].inputs, "t1"))
    profile = replace(profile, nodes=tuple(nodes), tensors=tensors)
    layout = Layout(profile)
    assert layout.segment(0, 8).resident_bytes > 22 * MIB
    assert divide(profile, (), [outgrown(0, mib=24)]) == (8,)
    found = divide(profile, (), [outgrown(0, mib=22)])
    assert isinstance(found, tuple)
    assert found[-1] == 8, "the other half has weights, which blocks save"
    parts = [layout.segment(*each).resident_bytes for each in pairwise((0, *found))]
    assert len(parts) > 1
    assert max(parts) <= 22 * MIB


def test_a_part_is_tried_in_blocks_before_it_is_divided_where_blocks_save_weights() -> None:
    assert divide(chain(*([5 * MIB] * 20)), (), [outgrown(0, mib=16)]) == (10,)


def test_divisions_count_in_the_cut_that_those_before_them_made() -> None:
    profile = unknown(64)
    first = divide(profile, (), [outgrown(0)])
    assert isinstance(first, tuple)
    cuts = divide(profile, (), [outgrown(0), outgrown(1), outgrown(0)])
    assert isinstance(cuts, tuple)
    assert len(cuts) == 7
    assert cuts[3] == first[0], "each half is divided in four"
    assert isinstance(divide(profile, (), [outgrown(1)]), Refusal)


def test_what_was_only_expected_to_be_too_large_need_not_be_divisible() -> None:
    profile, cuts = unknown(40), (38, 39)
    made = divide(profile, cuts, [outgrown(1), outgrown(0)])
    assert isinstance(made, tuple)
    assert len(made) == 3
    assert isinstance(divide(profile, cuts, [outgrown(0), outgrown(2)]), Refusal)


def numbers(
    nodes: Sequence[int], known: Collection[int], *found: int, seen: bool = False
) -> list[int]:
    """Which fragments of so many nodes are divided; sizes are known in some of them."""
    document = partition([1] * len(nodes), [MIB] * len(nodes))
    fragments = tuple(
        replace(each, nodes=count, activation_bytes=1 if each.index in known else None)
        for each, count in zip(document.fragments, nodes, strict=True)
    )
    sizes = {"t": (9,)} if seen else {}
    divided = to_divide(replace(document, fragments=fragments), map(outgrown, found), sizes)
    return [each.fragment for each in divided]


def test_with_a_fragment_those_behind_it_are_divided_of_which_no_more_is_known() -> None:
    assert numbers([50, 40, 39, 60, 40], (), 1) == [4, 3, 1]
    assert numbers([50, 40, 39, 60, 40], (3,), 1) == [4, 1]
    assert numbers([50, 40, 39, 60, 40], (1,), 1) == [1], "its size was estimated"
    assert numbers([50, 40, 39, 60, 40], range(5), 0, 2) == [2, 0], "the last one comes first"
    assert numbers([50], (), 7) == [], "of another cut"


def test_in_a_cut_for_sizes_that_were_seen_a_fragment_is_divided_alone() -> None:
    assert numbers([50, 40, 39, 60, 40], (), 1, seen=True) == [1]


def test_sizes_are_learned_where_they_are_new_or_larger() -> None:
    known = {"a": (1, 8)}
    assert learned(known, {}) is None
    assert learned(known, {"a": (1, 7)}) is None
    assert learned(known, {"a": (1, 9)}) == {"a": (1, 9)}
    assert learned(known, {"a": (2, 7), "b": (3,)}) == {"a": (2, 8), "b": (3,)}
    assert learned(known, {"a": (9,)}) is None, "a tensor has one rank"


@given(st.lists(st.dictionaries(st.text("ab"), st.tuples(st.integers(0, 9)), max_size=9)))
def test_nothing_is_learned_twice(found: list[dict[str, tuple[int, ...]]]) -> None:
    known: Sizes = {}
    for each in found:
        known = learned(known, each) or known
    assert all(learned(known, each) is None for each in found)


def test_no_more_tensors_are_known_than_may_be_said() -> None:
    many = {f"t{number}": (number,) for number in range(2 * MOST_TENSORS)}
    known = learned({}, many)
    assert known is not None
    assert len(known) == MOST_TENSORS
    assert learned(known, many) is None


@pytest.mark.parametrize(
    ("numbers", "words"),
    [((3,), "fragment 3 is"), ((7, 3), "fragments 3 and 7 are"), ((1, 5, 2), "fragments 1, 2 and")],
)
def test_what_is_divided_is_said(numbers: tuple[int, ...], words: str) -> None:
    found = [outgrown(each) for each in numbers]
    assert in_words("too much", found).startswith(f"too much; now {words}")
    assert in_words("too much", []).endswith(
        "now it is cut for the sizes that items were seen to have"
    )
