"""Items that wait on a device: which of them may run together."""

from shoal_agent.execution.legs import WAITING_ITEMS, Arrived, Leg, Legs

_ONE, _OTHER = (
    Leg(
        job="job",
        epoch=epoch,
        steps=(),
        sends=(),
        device="",
        address="",
        next_ticket=bytes([epoch]),
    )
    for epoch in (1, 2)
)


def waiting(*items: tuple[Leg, bytes]) -> Legs[str]:
    """Items of legs and layouts, numbered in order."""
    legs: Legs[str] = Legs()
    legs.arrive(Arrived(leg, number, layout, "") for number, (leg, layout) in enumerate(items))
    return legs


def taken(legs: Legs[str], most: int) -> list[list[int]]:
    groups = []
    while together := legs.next(most):
        groups.append([each.instruction for each in together])
    return groups


def test_items_of_one_leg_and_layout_that_follow_one_another_may_run_together() -> None:
    items = [(_ONE, b"a"), (_ONE, b"a"), (_ONE, b"b"), (_OTHER, b"b"), (_OTHER, b"b"), (_ONE, b"a")]
    assert taken(waiting(*items), 10) == [[0, 1], [2], [3, 4], [5]]


def test_no_more_run_together_than_may() -> None:
    assert taken(waiting(*[(_ONE, b"a")] * 5), 2) == [[0, 1], [2, 3], [4]]
    assert taken(waiting(*[(_ONE, b"a")] * 3), 1) == [[0], [1], [2]]


def test_only_so_many_may_wait() -> None:
    legs = waiting(*[(_ONE, b"a")] * (WAITING_ITEMS - 1))
    assert legs.room_for(1)
    assert not legs.room_for(2)
    assert legs.waiting == WAITING_ITEMS - 1
