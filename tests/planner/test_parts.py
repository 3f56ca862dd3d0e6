"""A fragment is divided where its parts take less than it does."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from random_profiles import chain, every_cut, profiles
from shoal_planner.parts import LESS, NEAR, Parts
from shoal_planner.pieces import Segment
from shoal_planner.profile import Profile
from shoal_planner.segments import Layout

MIB = 1 << 20


def divided(layout: Layout, need: int) -> tuple[int, ...]:
    whole = (0, len(layout.profile.nodes))
    return Parts(layout, layout.crossing_bytes, *whole, need).divide(1)


@settings(max_examples=200, deadline=None)
@given(profile=profiles(), need=st.integers(0, 100))
def test_parts_are_nearly_as_small_as_can_be_and_more_than_two_only_where_that_helps(
    profile: Profile, need: int
) -> None:
    layout = Layout(profile)
    found = divided(layout, need * MIB)
    if not found:
        assert not layout.legal
        return
    estimate = layout.segment(0, len(profile.nodes)).resident_bytes
    excess = max(0, need * MIB - estimate)
    before = [0]
    for node in profile.nodes:
        before.append(before[-1] + (node.role != "constant"))

    def largest(parts: list[Segment]) -> int:
        return max(
            part.resident_bytes + excess * (before[part.end] - before[part.start]) // before[-1]
            for part in parts
        )

    def within(most: int, count: int) -> list[list[Segment]]:
        return [parts for parts in every_cut(layout, count) if largest(parts) <= most]

    ends = pairwise((0, *found, len(profile.nodes)))
    made = [layout.segment(start, end) for start, end in ends]
    whole = estimate + excess
    less = whole - whole // LESS
    counts = range(2, len(layout.legal) + 2)
    least = min(largest(parts) for count in counts for parts in every_cut(layout, count))
    if len(made) > 2:
        near = min(less, least * (NEAR + 1) // NEAR)
        assert largest(made) <= near
        assert not any(within(near, count) for count in range(2, len(made)))
        sent = [sum(part.incoming_bytes for part in parts) for parts in within(near, len(made))]
        assert sum(part.incoming_bytes for part in made) == min(sent)
    else:
        halves = min(map(largest, every_cut(layout, 2)))
        assert largest(made) <= halves * (NEAR + 1) // NEAR
        assert largest(made) <= less or least > less


def test_what_is_held_across_a_peak_is_left_out_of_the_part_in_the_middle() -> None:
    """The first tensor is needed by the last node, so one of two parts has it and the peak."""
    profile = chain(*([1000] * 30))
    sizes = {1: 24 * MIB} | dict.fromkeys(range(12, 18), 16 * MIB)
    tensors = {
        name: replace(each, bytes=sizes.get(int(name[1:]), 1000))
        for name, each in profile.tensors.items()
    }
    *others, last = profile.nodes
    nodes = (*others, replace(last, inputs=(*last.inputs, "t1")))
    layout = Layout(replace(profile, nodes=nodes, tensors=tensors))
    first, second = divided(layout, 0)
    assert 2 <= first <= 11
    assert 18 <= second <= 29
    whole, middle = layout.segment(0, 30), layout.segment(first, second)
    assert middle.resident_bytes + 20 * MIB < whole.resident_bytes
