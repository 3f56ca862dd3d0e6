"""The choice of blocks against trying every cut there is, on random profiles."""

from itertools import combinations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from random_profiles import chain, profiles
from shoal_planner.blocks import (
    LEAST_POSITIONS,
    MOST_BLOCKS,
    NEAR,
    SESSION_BYTES,
    STEP,
    BlockCost,
    block_costs,
    choose_blocks,
    need_bytes,
)
from shoal_planner.profile import Profile, Role
from shoal_planner.segments import NODE_BYTES, Layout

MIB = 1 << 20


def every_cut(layout: Layout) -> list[list[BlockCost]]:
    return [
        block_costs(layout, cuts)
        for count in range(min(MOST_BLOCKS, len(layout.legal) + 1))
        for cuts in combinations(layout.legal, count)
    ]


@settings(max_examples=150, deadline=None)
@given(profile=profiles())
def test_no_cut_is_much_better_and_none_that_is_as_good_has_fewer_blocks(profile: Profile) -> None:
    layout = Layout(profile)
    chosen = block_costs(layout, choose_blocks(layout))
    options = every_cut(layout)
    least = min(need_bytes(each) for each in options)
    # The search steps over at most one part in STEP - 1 of the need.
    assert need_bytes(chosen) * NEAR * (STEP - 1) <= least * (NEAR + 1) * STEP
    for option in options:
        if len(option) < len(chosen):
            assert need_bytes(option) * NEAR * STEP >= least * (NEAR + 1) * (STEP - 1)


@settings(max_examples=100, deadline=None)
@given(profile=profiles(), data=st.data())
def test_working_memory_holds_all_that_is_alive_while_a_block_runs(
    profile: Profile, data: st.DataObject
) -> None:
    layout = Layout(profile)
    assume(layout.legal)
    cuts = tuple(sorted(data.draw(st.sets(st.sampled_from(layout.legal)))))
    pieces, costs = layout.pieces(cuts), block_costs(layout, cuts)
    inputs = {each.name for each in profile.inputs}
    wanted = {each.name for each in profile.outputs}
    for index, (piece, cost) in enumerate(zip(pieces, costs, strict=True)):
        given_before = {name for each in pieces[:index] for name in each.gives}
        needed = wanted.union(*(each.takes for each in pieces[index:]))
        alive = inputs | (given_before & needed) | set(piece.gives)
        alive -= {
            name
            for name in alive
            if name in layout.makers and profile.nodes[layout.makers[name]].role is Role.CONSTANT
        }
        assert cost.working_bytes >= sum(profile.tensors[name].bytes or 0 for name in alive)
        weights = sum(profile.weights[name] for name in piece.weights)
        assert cost.weight_bytes >= weights
        assert cost.held_bytes >= SESSION_BYTES + NODE_BYTES * len(piece.nodes)


def test_an_even_chain_makes_even_blocks_as_few_as_are_near_the_least() -> None:
    layout = Layout(chain(*[4 * MIB] * 12))
    costs = block_costs(layout, choose_blocks(layout))
    assert {each.weight_bytes for each in costs} == {4 * MIB}


def test_where_sessions_cost_what_smaller_weights_save_there_are_fewer_blocks() -> None:
    layout = Layout(chain(*[MIB // 4] * 12))
    costs = block_costs(layout, choose_blocks(layout))
    assert len(costs) == 2


def test_what_is_in_the_model_is_held_and_what_is_mapped_is_not() -> None:
    profile = chain(4 * MIB, 4 * MIB)
    mapped = block_costs(Layout(profile), (1,))
    inside = block_costs(Layout(profile, inside=frozenset({"w0"})), (1,))
    assert inside[1] == mapped[1]
    assert inside[0].weight_bytes == 0
    assert inside[0].held_bytes == mapped[0].held_bytes + 4 * MIB


def test_a_long_fragment_is_cut_nearly_as_well_as_if_every_position_were_tried() -> None:
    layers = 40 * LEAST_POSITIONS
    layout = Layout(chain(*[MIB // 4] * layers))
    costs = block_costs(layout, choose_blocks(layout))
    even = layers * MIB // 4 // len(costs)
    assert max(each.weight_bytes for each in costs) < 1.2 * even
