"""The fragments that a cut into as few as possible may have, against all that there could be."""

from hypothesis import given, settings
from hypothesis import strategies as st

from random_profiles import chain, profiles
from shoal_planner.chains import Candidate, Table, cheapest, least_to_end, starts_of
from shoal_planner.limited import Limited
from shoal_planner.profile import Profile
from shoal_planner.segments import Growing, Layout


def limited(layout: Layout, limit: int) -> Limited:
    positions = (0, *layout.legal, len(layout.profile.nodes))
    return Limited(layout, positions, limit)


def fewest(table: Table) -> list[list[Candidate]]:
    """The cuts into as few as possible that are best by what they take, and by what they send."""
    count = least_to_end(table)[0]
    if count is None:
        return []
    starts = starts_of(table, count)
    return [
        cheapest(table, starts, lambda each: each.cost**2),
        cheapest(table, starts, lambda each: each.incoming_bytes),
    ]


@settings(max_examples=200, deadline=None)
@given(profile=profiles(), share=st.integers(20, 110))
def test_what_is_left_out_is_part_of_no_shortest_cut(profile: Profile, share: int) -> None:
    layout = Layout(profile, moving=True)
    limit = layout.segment(0, len(profile.nodes)).resident_bytes * share // 100
    assert fewest(limited(layout, limit).shortest()) == fewest(limited(layout, limit).table())


def test_where_two_fragments_suffice_no_third_is_looked_at() -> None:
    layout = Layout(chain(*[1 << 10] * 200))
    whole = Growing(layout, 0).grow_to(len(layout.profile.nodes)).resident_bytes
    searched = limited(layout, whole - (700 << 10))
    begun = [start for start, row in enumerate(searched.shortest()) if row]
    assert len(begun) > 1
    assert len(begun) < sum(map(bool, searched.table())) / 2
