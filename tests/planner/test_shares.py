"""The fragments that an even cut may have, against all that there could be."""

from hypothesis import given, settings
from hypothesis import strategies as st

from random_profiles import chain, profiles
from shoal_planner.chains import Candidate, Table, cheapest, smallest_largest, starts_of
from shoal_planner.counting import Counting
from shoal_planner.profile import Profile
from shoal_planner.segments import Growing, Layout
from shoal_planner.shares import SLACK, even_table, share


def every_fragment(layout: Layout, positions: tuple[int, ...]) -> Table:
    cost = share(layout.profile)
    return [
        [
            Candidate(end, cost(growing.grow_to(positions[end])), growing.incoming_bytes)
            for end in range(start + 1, len(positions))
        ]
        for start, position in enumerate(positions[:-1])
        for growing in [Growing(layout, position)]
    ]


def sent_by_best(table: Table, count: int) -> list[Candidate]:
    """The even cut into so many that sends the least."""
    starts = starts_of(table, count)
    largest = smallest_largest(table, starts)
    assert largest is not None
    most = largest + largest // SLACK
    near = [[each for each in row if each.cost <= most] for row in table]
    return cheapest(near, starts, lambda each: each.incoming_bytes)


@settings(max_examples=150, deadline=None)
@given(profile=profiles(), share_of_most=st.floats(0, 1))
def test_what_is_left_out_is_part_of_no_even_cut(profile: Profile, share_of_most: float) -> None:
    layout = Layout(profile)
    positions = (0, *layout.legal, len(profile.nodes))
    count = 1 + int(share_of_most * len(layout.legal))
    found = even_table(layout, positions, count)
    assert sent_by_best(found, count) == sent_by_best(every_fragment(layout, positions), count)


def test_only_what_begins_near_the_middle_is_looked_at_for_two_fragments() -> None:
    layout = Layout(chain(*[1 << 20] * 200))
    positions = (0, *layout.legal, len(layout.profile.nodes))
    begun = [start for start, row in enumerate(even_table(layout, positions, 2)) if row]
    assert begun[0] == 0
    assert all(85 <= start <= 115 for start in begun[1:])


@settings(max_examples=75, deadline=None)
@given(profile=profiles())
def test_what_is_counted_without_an_arena_is_what_is_counted_with_one(profile: Profile) -> None:
    layout, end = Layout(profile), len(profile.nodes)
    for start in (0, *layout.legal):
        counted, grown = Counting(layout, start).grow_to(end), Growing(layout, start).grow_to(end)
        assert share(profile)(counted) == share(profile)(grown)
        assert counted.incoming_bytes == grown.incoming_bytes
