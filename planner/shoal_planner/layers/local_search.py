"""Better groups by small moves: one device to another stage, to one of its own, or to rest, and two
devices that change places. Each is judged with the cuts that are best for it."""

from collections.abc import Callable, Iterator, Sequence

from shoal_planner.layers.arcs import Group

Groups = tuple[Group, ...]


def improved(
    groups: Groups, sizes: Sequence[int], worth: Callable[[Groups], float], tries: int
) -> Groups:
    """No move makes these groups better, or there were no tries left."""
    best, left = worth(groups), tries
    found = True
    while found and left > 0:
        found = False
        for moved in _moves(groups, sizes):
            if left <= 0:
                break
            left -= 1
            value = worth(moved)
            if value < best * (1 - 1e-6):
                groups, best, found = moved, value, True
                break
    return groups


def _moves(groups: Groups, sizes: Sequence[int]) -> Iterator[Groups]:
    spare = [size - sum(group[place] for group in groups) for place, size in enumerate(sizes)]
    for place in range(len(sizes)):
        if spare[place]:
            yield from _placed(groups, place)
    for number, group in enumerate(groups):
        for place, count in enumerate(group):
            if count:
                without = _changed(groups, number, place, -1)
                yield _packed(without)
                yield from map(_packed, _placed(without, place, but=number))
    for one in range(len(groups)):
        for other in range(one + 1, len(groups)):
            yield from _swapped(groups, one, other)


def _placed(groups: Groups, place: int, but: int | None = None) -> Iterator[Groups]:
    """One more device of a class: in every group, and in one of its own at every place."""
    for number in range(len(groups)):
        if number != but:
            yield _changed(groups, number, place, 1)
    own = tuple(int(each == place) for each in range(len(groups[0])))
    for number in range(len(groups) + 1):
        yield (*groups[:number], own, *groups[number:])


def _swapped(groups: Groups, one: int, other: int) -> Iterator[Groups]:
    for mine, count in enumerate(groups[one]):
        for its, its_count in enumerate(groups[other]):
            if count and its_count and mine != its:
                moved = _changed(_changed(groups, one, mine, -1), one, its, 1)
                yield _changed(_changed(moved, other, its, -1), other, mine, 1)


def _changed(groups: Groups, number: int, place: int, by: int) -> Groups:
    group = groups[number]
    new = (*group[:place], group[place] + by, *group[place + 1 :])
    return (*groups[:number], new, *groups[number + 1 :])


def _packed(groups: Groups) -> Groups:
    """Without empty groups; one stays, so that there is a plan to judge."""
    return tuple(group for group in groups if any(group)) or groups[:1]
