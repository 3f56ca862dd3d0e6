"""The choice of blocks against trying every cut there is, on random profiles."""

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from random_profiles import chain, profiles
from shoal_planner.arena import TABLE_BYTES, arena_bytes
from shoal_planner.blocks import (
    BLOCK_NODE_BYTES,
    CLOSE,
    FIXED_BYTES,
    LEAST_POSITIONS,
    MOST_BLOCKS,
    NEAR,
    SESSION_BYTES,
    STEP,
    BlockCost,
    Blocking,
    Table,
    block_costs,
    choose_blocks,
    emptied,
    estimates,
    fewest_near_least,
    least_by_number,
    least_by_number_emptied,
    need_bytes,
)
from shoal_planner.profile import Profile, Role
from shoal_planner.segments import Layout

MIB = 1 << 20


def every_chain(table: Table, start: int = 0) -> Iterator[list[BlockCost]]:
    """Every way from a position to the last."""
    if start == len(table):
        yield []
        return
    for block in table[start]:
        for rest in every_chain(table, block.end):
            yield [block, *rest]


def costs_of(layout: Layout) -> list[BlockCost]:
    chosen = choose_blocks(layout)
    return block_costs(layout, layout.pieces(chosen.cuts), chosen.emptied)


@settings(max_examples=75, deadline=None)
@given(profile=profiles())
def test_no_cut_is_much_better_and_none_that_is_as_good_has_fewer_blocks(profile: Profile) -> None:
    layout = Layout(profile)
    table = estimates(layout, (0, *layout.legal, len(profile.nodes)))
    chains = least_by_number(table)
    chosen = chains[fewest_near_least({n: need_bytes(each) for n, each in chains.items()})]
    assert chosen in list(every_chain(table))
    least = min(need_bytes(each) for each in every_chain(table) if len(each) <= MOST_BLOCKS)
    # The search steps over at most one part in STEP - 1 of the need.
    assert need_bytes(chosen) * NEAR * (STEP - 1) <= least * (NEAR + 1) * STEP
    for option in every_chain(table):
        if len(option) < len(chosen):
            assert need_bytes(option) * NEAR * STEP >= least * (NEAR + 1) * (STEP - 1)


@settings(max_examples=50, deadline=None)
@given(profile=profiles(), data=st.data())
def test_working_memory_holds_all_that_is_alive_while_a_block_runs(
    profile: Profile, data: st.DataObject
) -> None:
    layout = Layout(profile)
    assume(layout.legal)
    cuts = tuple(sorted(data.draw(st.sets(st.sampled_from(layout.legal)))))
    pieces = layout.pieces(cuts)
    costs = block_costs(layout, pieces)
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
        assert cost.held_bytes >= SESSION_BYTES + BLOCK_NODE_BYTES * len(piece.nodes)


def test_an_even_chain_makes_even_blocks_as_few_as_are_near_the_least() -> None:
    layout = Layout(chain(*[4 * MIB] * 12))
    costs = costs_of(layout)
    assert {each.weight_bytes for each in costs} == {4 * MIB}


def test_where_sessions_cost_what_smaller_weights_save_there_are_fewer_blocks() -> None:
    layout = Layout(chain(*[MIB // 4] * 12))
    costs = costs_of(layout)
    assert len(costs) == 4


def test_what_is_in_the_model_is_held_and_what_is_mapped_is_not() -> None:
    profile = chain(4 * MIB, 4 * MIB)
    mapped = estimates(Layout(profile), (0, 1, 2))
    inside = estimates(Layout(profile, inside=frozenset({"w0"})), (0, 1, 2))
    assert inside[1] == mapped[1]
    assert inside[0][0].weight_bytes == 0
    assert inside[0][0].held_bytes == mapped[0][0].held_bytes + 4 * MIB


def test_what_outlives_its_block_leaves_a_hole_that_a_larger_tensor_does_not_fit() -> None:
    profile = chain(MIB, MIB, MIB)
    sizes = {"t0": 0, "t1": 4 * MIB, "t2": MIB, "t3": 5 * MIB}
    tensors = {name: replace(profile.tensors[name], bytes=size) for name, size in sizes.items()}
    layout = Layout(replace(profile, tensors=tensors))
    alone = estimates(layout, (0, 2, 3))[1][0]
    together = block_costs(layout, layout.pieces((2,)))[1]
    fixed = FIXED_BYTES + sizes["t3"]
    tables = TABLE_BYTES
    assert alone.working_bytes == fixed + arena_bytes(6 * MIB + tables)
    assert together.working_bytes == fixed + arena_bytes(10 * MIB + tables)


def test_what_a_node_takes_beside_the_arena_comes_to_what_others_left_in_it() -> None:
    profile = sized(chain(MIB, MIB), 0, 8 * MIB, MIB // 4)
    taking = replace(profile.nodes[1], beside_bytes=8 * MIB)
    layout = Layout(replace(profile, nodes=(profile.nodes[0], taking)))
    first, second = block_costs(layout, layout.pieces((1,)))
    fixed, arena = FIXED_BYTES + MIB // 4, (8 + 1 / 4) * MIB + TABLE_BYTES
    assert first.working_bytes < second.working_bytes == fixed + arena_bytes(int(arena)) + 8 * MIB
    (whole,) = layout.pieces(())
    assert whole.segment.resident_bytes > FIXED_BYTES + 16 * MIB


def test_what_the_first_block_takes_beside_the_arena_comes_to_what_the_last_has_left_there() -> (
    None
):
    profile = sized(chain(MIB, MIB), 0, MIB // 4, 8 * MIB)
    taking = replace(profile.nodes[0], beside_bytes=16 * MIB)
    layout = Layout(replace(profile, nodes=(taking, profile.nodes[1])))
    costs = block_costs(layout, layout.pieces((1,)))
    beside, fixed = [each.beside_bytes for each in costs], FIXED_BYTES + 8 * MIB
    assert beside == [16 * MIB, 0]
    assert costs[1].working_bytes >= fixed + arena_bytes(8 * MIB)
    assert need_bytes(costs) >= 2 * SESSION_BYTES + MIB + costs[1].working_bytes + 16 * MIB
    emptied_costs = block_costs(layout, layout.pieces((1,)), {0, 1})
    assert need_bytes(emptied_costs, emptied=True) < need_bytes(costs) - 7 * MIB


def test_what_blocks_leave_in_the_arena_decides_between_cuts_that_come_close() -> None:
    profile = chain(8 * MIB, 4 * MIB, 4 * MIB, 8 * MIB)
    sizes = dict(zip(profile.tensors, (8 * MIB, 4 * MIB, MIB, MIB, 8 * MIB), strict=True))
    tensors = {name: replace(profile.tensors[name], bytes=size) for name, size in sizes.items()}
    layout = Layout(replace(profile, tensors=tensors))
    alone = least_by_number(estimates(layout, range(5)))
    assert need_bytes(alone[3]) < need_bytes(alone[4])
    assert [each.end for each in alone[3]] == [1, 3, 4]
    of_three, of_four = (block_costs(layout, layout.pieces(cuts)) for cuts in ((1, 3), (1, 2, 3)))
    assert need_bytes(of_four) < need_bytes(of_three)
    assert choose_blocks(layout) == Blocking((1, 2, 3))


def sized(profile: Profile, *sizes: int) -> Profile:
    """The profile with other sizes of its tensors, in their order."""
    pairs = zip(profile.tensors.items(), sizes, strict=True)
    tensors = {name: replace(each, bytes=size) for (name, each), size in pairs}
    return replace(profile, tensors=tensors)


def test_where_first_layers_work_with_much_and_last_ones_weigh_much_the_arena_is_emptied() -> None:
    profile = chain(0, 0, 0, *[8 * MIB] * 6)
    layout = Layout(sized(profile, MIB, 12 * MIB, 12 * MIB, *[MIB // 4] * 7))
    chosen = choose_blocks(layout)
    costs = block_costs(layout, layout.pieces(chosen.cuts), chosen.emptied)
    assert min(chosen.emptied) == 0
    assert len(chosen.emptied) == 2
    most = max(each.weight_bytes for each in costs) + max(each.working_bytes for each in costs)
    assert max(each.weight_bytes + each.working_bytes for each in costs) < most * 9 // 10


def test_where_each_layer_works_with_as_much_the_arena_is_kept() -> None:
    assert choose_blocks(Layout(chain(*[8 * MIB] * 6))).emptied == frozenset()


def test_what_is_alive_when_the_arena_is_emptied_is_there_twice_and_then_beside_it() -> None:
    layout = Layout(sized(chain(0, 0, 0), 0, 8 * MIB, MIB, 2 * MIB))
    first, second = block_costs(layout, layout.pieces((2,)), {0, 1})
    fixed, tables = FIXED_BYTES + 2 * MIB, TABLE_BYTES
    assert first.working_bytes == fixed + arena_bytes((8 + 1 + 1) * MIB + tables)
    assert second.working_bytes == fixed + arena_bytes((1 + 2) * MIB + tables)


@settings(max_examples=75, deadline=None)
@given(profile=profiles())
def test_no_cut_needs_less_where_the_arena_is_emptied_before_each_block(profile: Profile) -> None:
    layout = Layout(profile)
    table = estimates(layout, (0, *layout.legal, len(profile.nodes)))
    found = least_by_number_emptied(table)
    for number, chain_found in found.items():
        assert len(chain_found) == number
        others = (each for each in every_chain(table) if len(each) == number)
        assert need_bytes(chain_found, emptied=True) == min(
            need_bytes(each, emptied=True) for each in others
        )
        enough = need_bytes(chain_found, emptied=True) - number * SESSION_BYTES
        places, working = emptied(chain_found), 0
        for index, block in enumerate(chain_found):
            working = max(0 if index in places else working, block.working_bytes)
            assert (working + block.weight_bytes) * CLOSE <= enough * (CLOSE + 1)


def test_no_cut_is_before_what_works_in_place() -> None:
    profile = chain(*[4 * MIB, 0] * 6)
    nodes = tuple(
        node if node.parameter_bytes else replace(node, weights=(), in_place=True)
        for node in profile.nodes
    )
    cuts = choose_blocks(Layout(replace(profile, nodes=nodes))).cuts
    assert cuts
    assert all(position % 2 == 0 for position in cuts)


def test_a_long_fragment_is_cut_nearly_as_well_as_if_every_position_were_tried() -> None:
    layers = 40 * LEAST_POSITIONS
    layout = Layout(chain(*[MIB // 4] * layers))
    costs = costs_of(layout)
    even = layers * MIB // 4 // len(costs)
    assert max(each.weight_bytes for each in costs) < 1.2 * even
