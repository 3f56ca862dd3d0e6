"""What a segment counts while it grows, against what it could run."""

from itertools import combinations

from hypothesis import given, settings

from random_profiles import profiles
from shoal_planner.counting import Counting
from shoal_planner.profile import Profile, Role
from shoal_planner.segments import Layout


def could_run(layout: Layout, start: int, end: int) -> set[int]:
    """Its own nodes, and those before it that are made again for them, as far as can be."""
    nodes = layout.profile.nodes
    found = {each for each in range(start, end) if nodes[each].role is not Role.CONSTANT}
    needed = [name for each in found for name in nodes[each].inputs]
    needed += layout.loose_outputs if end == len(nodes) else ()
    while needed:
        maker = layout.makers.get(needed.pop())
        if maker is None or maker in found or maker >= start:
            continue
        if nodes[maker].role is not Role.COMPUTE:
            found.add(maker)
            needed += nodes[maker].inputs
    return found


@settings(max_examples=200, deadline=None)
@given(profile=profiles())
def test_each_node_counts_once_however_many_need_what_it_makes_again(profile: Profile) -> None:
    layout = Layout(profile)
    for start, end in combinations((0, *layout.legal, len(profile.nodes)), 2):
        counted = Counting(layout, start).grow_to(end).node_count
        nodes = could_run(layout, start, end)
        assert counted == sum(layout.steps[each].runtime_nodes for each in nodes)
