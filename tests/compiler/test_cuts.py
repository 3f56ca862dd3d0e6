"""The choice of cuts against trying every cut there is, on random profiles."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from random_profiles import chain, every_cut, profiles, spec
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts
from shoal_planner.pieces import Segment
from shoal_planner.profile import Profile, Role
from shoal_planner.segments import LARGER_BYTES, Layout
from shoal_planner.shares import SLACK

MILLION = 1_000_000


def share(layout: Layout, segment: Segment) -> int:
    """The cost that `choose_cuts` says it minimises, written down independently."""
    profile = layout.profile
    nodes = [profile.nodes[position] for position in segment.nodes]
    flops = sum(node.flops or 0 for node in profile.nodes)
    weights = {name for node in nodes for name in node.weights}
    held = sum(profile.weights[name] for name in weights)
    own = sum(node.flops or 0 for node in nodes)
    total = own * MILLION // flops if flops else 0
    return total + held * MILLION // profile.weight_bytes


def best(options: list[tuple[list[Segment], list[int]]]) -> int:
    """The smallest second value among those whose first is within the slack of the smallest."""
    largest = min(max(costs) for _, costs in options)
    near = [each for each in options if max(each[1]) <= largest + largest // SLACK]

    def sent(segments: list[Segment]) -> int:
        return sum(segment.incoming_bytes for segment in segments)

    fewest = min(near, key=lambda each: (sent(each[0]), [s.start for s in each[0]]))
    unit, mean = max(1, sent(fewest[0])), max(1, sum(fewest[1]) // len(fewest[1]))
    return min(weigh(segments, costs, mean, unit) for segments, costs in near)


def weigh(segments: list[Segment], costs: list[int], mean: int, unit: int) -> int:
    return sum(
        cost**2 * MILLION // mean**2 + segment.incoming_bytes * MILLION // unit
        for segment, cost in zip(segments, costs, strict=True)
    )


def chosen_value(
    layout: Layout, cuts: tuple[int, ...], options: list[tuple[list[Segment], list[int]]]
) -> int:
    starts = [0, *cuts]
    largest = min(max(costs) for _, costs in options)
    near = [each for each in options if max(each[1]) <= largest + largest // SLACK]
    fewest = min(
        near,
        key=lambda each: (
            sum(segment.incoming_bytes for segment in each[0]),
            [segment.start for segment in each[0]],
        ),
    )
    unit = max(1, sum(segment.incoming_bytes for segment in fewest[0]))
    mean = max(1, sum(fewest[1]) // len(fewest[1]))
    found = next(each for each in near if [segment.start for segment in each[0]] == starts)
    return weigh(found[0], found[1], mean, unit)


@settings(max_examples=75, deadline=None)
@given(profile=profiles(), fraction=st.integers(1, 12))
def test_a_limit_gives_the_fewest_fragments_and_of_those_the_best(
    profile: Profile, fraction: int
) -> None:
    layout = Layout(profile, moving=True)
    limit = layout.segment(0, len(profile.nodes)).resident_bytes * fraction // 10
    result = choose_cuts(profile, CutRequest(max_bytes=limit))
    for count in range(1, len(layout.legal) + 2):
        fitting = [
            (segments, [segment.resident_bytes for segment in segments])
            for segments in every_cut(layout, count)
            if all(segment.resident_bytes <= limit for segment in segments)
        ]
        if fitting:
            assert not isinstance(result, Refusal)
            assert len(result) == count - 1
            assert chosen_value(layout, result, fitting) == best(fitting)
            return
    assert isinstance(result, Refusal)
    assert result.have_bytes == limit


@settings(max_examples=75, deadline=None)
@given(profile=profiles(), count=st.integers(1, 5))
def test_a_number_of_fragments_gives_the_best_balance(profile: Profile, count: int) -> None:
    layout = Layout(profile)
    result = choose_cuts(profile, CutRequest(fragments=count))
    if count > len(layout.legal) + 1:
        assert isinstance(result, Refusal)
        assert f"finest possible cut gives {len(layout.legal) + 1}" in result.reason
        return
    assert not isinstance(result, Refusal)
    assert len(result) == count - 1
    assert set(result) <= set(layout.legal)


@settings(max_examples=60, deadline=None)
@given(profile=profiles(), count=st.integers(1, 4))
def test_with_compute_nodes_only_the_balance_is_the_best_there_is(
    profile: Profile, count: int
) -> None:
    nodes = tuple(replace(node, role=Role.COMPUTE) for node in profile.nodes)
    plain = replace(profile, nodes=nodes)
    layout = Layout(plain)
    result = choose_cuts(plain, CutRequest(fragments=count))
    options = [
        (segments, [share(layout, segment) for segment in segments])
        for segments in every_cut(layout, count)
    ]
    if isinstance(result, Refusal):
        assert not options
    else:
        assert chosen_value(layout, result, options) == best(options)


@settings(max_examples=60, deadline=None)
@given(profile=profiles(), data=st.data())
def test_pieces_fit_together(profile: Profile, data: st.DataObject) -> None:
    layout = Layout(profile)
    chosen = st.sets(st.sampled_from(layout.legal)) if layout.legal else st.just(set[int]())
    pieces = layout.pieces(tuple(sorted(data.draw(chosen))))
    made = {"x"}
    for piece in pieces:
        assert set(piece.takes) <= made
        inside = set(piece.takes)
        for position in piece.nodes:
            node = profile.nodes[position]
            assert set(node.inputs) <= inside
            assert set(node.weights) <= set(piece.weights)
            inside |= set(node.outputs)
        assert set(piece.gives) <= inside
        made |= set(piece.gives)
    assert {each.name for each in profile.outputs} <= made


MIB = 1 << 20


def test_nothing_asked_leaves_the_model_whole() -> None:
    assert choose_cuts(chain(1, 2, 3), CutRequest()) == ()


def test_an_even_chain_is_cut_evenly() -> None:
    assert choose_cuts(chain(*[MIB] * 6), CutRequest(fragments=3)) == (2, 4)


def test_too_large_a_node_is_named_with_what_it_needs() -> None:
    refused = choose_cuts(chain(MIB, 40 * MIB, MIB), CutRequest(max_bytes=24 * MIB))
    assert isinstance(refused, Refusal)
    assert refused.node == "layer 1 (MatMul)"
    assert refused.need_bytes is not None
    assert refused.need_bytes > 40 * MIB
    assert refused.have_bytes == 24 * MIB
    assert "layer 1 (MatMul) needs 41.8 MiB by itself, the limit is 24 MiB" in refused.reason
    assert "the smallest limit that some cut keeps is 41.8 MiB" in refused.reason


def test_a_model_of_constants_alone_says_what_it_needs() -> None:
    profile = chain(40 * MIB)
    made = replace(profile.nodes[0], role=Role.CONSTANT, inputs=())
    constant = replace(profile, nodes=(made,), inputs=(), outputs=(spec("t1"),))
    refused = choose_cuts(constant, CutRequest(max_bytes=24 * MIB))
    assert isinstance(refused, Refusal)
    assert "node layer 0 (MatMul) needs 41.8 MiB by itself" in refused.reason


def test_a_model_that_hands_a_large_tensor_through_says_what_it_needs() -> None:
    profile = chain(MIB, sent=40 * MIB)
    given = replace(profile, nodes=(), inputs=(spec("t1"),), outputs=(spec("t1"),))
    refused = choose_cuts(given, CutRequest(max_bytes=24 * MIB))
    assert isinstance(refused, Refusal)
    assert refused.node is None
    assert refused.reason.startswith("what is handed through needs 48.8 MiB by itself")


def test_nodes_that_cannot_be_parted_say_why() -> None:
    profile = chain(20 * MIB, 20 * MIB, MIB, obstacle="it is a sequence, not a tensor")
    refused = choose_cuts(profile, CutRequest(max_bytes=30 * MIB))
    assert isinstance(refused, Refusal)
    assert "t1 would cross, and it is a sequence, not a tensor" in refused.reason


def test_a_number_that_does_not_keep_the_limit_says_which_would() -> None:
    refused = choose_cuts(chain(*[10 * MIB] * 6), CutRequest(fragments=2, max_bytes=24 * MIB))
    assert isinstance(refused, Refusal)
    assert (
        "2 fragments would need 31.8 MiB, the limit is 24 MiB; 3 fragments would do"
        in refused.reason
    )


def test_more_fragments_than_there_can_be_are_refused_with_the_finest() -> None:
    refused = choose_cuts(chain(1, 2, 3, obstacle="it is a map"), CutRequest(fragments=3))
    assert isinstance(refused, Refusal)
    assert "the finest possible cut gives 2" in refused.reason
    assert refused.node == "layer 1 (MatMul)"


def test_cuts_at_named_tensors() -> None:
    assert choose_cuts(chain(1, 2, 3, 4), CutRequest(tensors=("t3", "t1"))) == (1, 3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere", "no node makes a tensor of that name"),
        ("w1", "that is a weight"),
        ("t0", "is an input"),
        ("t4", "nothing comes after"),
        ("t1", "it is a sequence"),
    ],
)
def test_tensors_that_cannot_be_cut_at_are_refused(name: str, reason: str) -> None:
    profile = chain(1, 2, 3, 4, obstacle="it is a sequence")
    refused = choose_cuts(profile, CutRequest(tensors=(name,)))
    assert isinstance(refused, Refusal)
    assert reason in refused.reason


def test_a_long_model_is_cut_as_well_as_if_every_position_were_looked_at() -> None:
    profile = chain(*(MIB + number * 7919 % MIB for number in range(1200)))
    layout = Layout(profile)
    cuts = choose_cuts(profile, CutRequest(fragments=3))
    assert not isinstance(cuts, Refusal)
    shares = [share(layout, piece.segment) for piece in layout.pieces(cuts)]
    assert max(shares) < 1.07 * sum(shares) / 3


def test_a_fragment_that_works_in_much_is_reckoned_with_more() -> None:
    little, much = (
        Layout(chain(MIB, MIB, sent=sent)).segment(1, 2).resident_bytes - sent
        for sent in (7 * MIB, 9 * MIB)
    )
    assert much - little == LARGER_BYTES
