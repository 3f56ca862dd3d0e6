"""The smallest limit that a cut keeps, against every cut there is."""

from dataclasses import replace
from itertools import accumulate, pairwise
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from random_profiles import chain, every_cut, profiles
from shoal_planner import least_limit
from shoal_planner.cuts import CutRequest, Frames, Refusal, choose_cuts
from shoal_planner.least_limit import least_around, least_needs, smallest_limit
from shoal_planner.profile import Profile
from shoal_planner.segments import Layout
from shoal_protocol.frame_sizes import frame_bytes, received_frame_bytes

MIB = 1 << 20


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """With what there may be beside a fragment."""
    frames = draw(st.sampled_from([0, MIB]))
    return Layout(draw(profiles()), moving=draw(st.booleans()), frames_bytes=frames)


@settings(max_examples=150, deadline=None)
@given(layout=layouts())
def test_no_cut_keeps_a_smaller_limit(layout: Layout) -> None:
    largest = [
        max(segment.resident_bytes for segment in segments)
        for count in range(1, len(layout.legal) + 2)
        for segments in every_cut(layout, count)
    ]
    assert smallest_limit(layout) == min(largest)


@settings(max_examples=100, deadline=None)
@given(layout=layouts())
def test_no_fragment_needs_less_than_the_bound_of_a_node_in_it(layout: Layout) -> None:
    bounds = list(least_needs(layout))
    ends = (*layout.legal, len(layout.profile.nodes))
    for start in (0, *layout.legal):
        for end in (each for each in ends if each > start):
            assert max(bounds[start:end]) <= layout.segment(start, end).resident_bytes


@settings(max_examples=100, deadline=None)
@given(layout=layouts())
def test_no_fragment_around_a_piece_needs_less_than_the_bound_of_its_start(layout: Layout) -> None:
    positions = (0, *layout.legal, len(layout.profile.nodes))
    for piece in pairwise(positions):
        bounds = least_around(layout, range(*piece))
        needs = [
            min(layout.segment(start, end).resident_bytes for end in positions if end >= piece[1])
            for start in positions
            if start <= piece[0]
        ]
        for start, need in zip(positions, accumulate(needs, min), strict=False):
            assert bounds[start] <= need


@settings(max_examples=75, deadline=None)
@given(profile=profiles(), near=st.integers(0, 2), far=st.integers(1, 3))
def test_a_limit_that_is_found_with_few_starts_is_kept_by_some_cut(
    profile: Profile, near: int, far: int
) -> None:
    layout = Layout(profile, moving=True)
    with mock.patch.multiple(least_limit, NEAR=near, FAR=far):
        found = smallest_limit(layout)
    assert found >= smallest_limit(layout)
    assert isinstance(choose_cuts(profile, CutRequest(max_bytes=found)), tuple)


@settings(max_examples=75, deadline=None)
@given(profile=profiles())
def test_a_refusal_names_the_smallest_limit_that_is_not_refused(profile: Profile) -> None:
    refused = choose_cuts(profile, CutRequest(max_bytes=1))
    assert isinstance(refused, Refusal)
    assert refused.need_bytes is not None
    assert isinstance(choose_cuts(profile, CutRequest(max_bytes=refused.need_bytes)), tuple)
    less = choose_cuts(profile, CutRequest(max_bytes=refused.need_bytes - 1))
    assert isinstance(less, Refusal)


@settings(max_examples=75, deadline=None)
@given(profile=profiles(), share=st.integers(5, 100))
def test_the_nearest_cut_has_nothing_over_the_limit_that_could_be_parted(
    profile: Profile, share: int
) -> None:
    layout = Layout(profile, moving=True)
    limit = layout.segment(0, len(profile.nodes)).resident_bytes * share // 100
    cuts = choose_cuts(profile, CutRequest(max_bytes=limit, nearest=True))
    assert isinstance(cuts, tuple)
    counts = [
        count
        for count in range(1, len(layout.legal) + 2)
        for segments in every_cut(layout, count)
        if all(
            segment.resident_bytes <= limit
            or not any(segment.start < at < segment.end for at in layout.legal)
            for segment in segments
        )
    ]
    assert len(cuts) + 1 == min(counts)


@settings(max_examples=75, deadline=None)
@given(profile=profiles(), count=st.integers(2, 5), share=st.integers(30, 100))
def test_a_number_of_fragments_is_refused_with_the_smallest_limit_that_it_keeps(
    profile: Profile, count: int, share: int
) -> None:
    layout = Layout(profile, moving=True)
    limit = layout.segment(0, len(profile.nodes)).resident_bytes * share // 100
    refused = choose_cuts(profile, CutRequest(fragments=count, max_bytes=limit))
    if not isinstance(refused, Refusal) or "fragments would need" not in refused.reason:
        return
    largest = [
        max(segment.resident_bytes for segment in segments) for segments in every_cut(layout, count)
    ]
    assert refused.need_bytes == min(largest) > limit


def test_a_cut_for_one_device_leaves_room_for_an_item_that_comes_meanwhile() -> None:
    layers = chain(*[MIB] * 12)
    large = replace(layers.tensors["t0"], bytes=2 * MIB)
    profile = replace(layers, tensors={**layers.tensors, "t0": large})
    limit = 16 * MIB
    cuts = choose_cuts(profile, CutRequest(max_bytes=limit, frames=Frames.MODEL))
    assert isinstance(cuts, tuple)
    pieces = Layout(profile).pieces(cuts)
    assert max(each.segment.resident_bytes for each in pieces) + received_frame_bytes(
        2 * MIB
    ) <= limit - frame_bytes(1000)
