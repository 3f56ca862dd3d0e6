"""Items that wait on a device: which of them may run together."""

from shoal_agent.execution.legs import KNOWN_LEGS, MOST_ITEMS, WAITING_ITEMS, Arrived, Leg, Legs

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


def leg(job: str, epoch: int = 1) -> Leg:
    return _ONE._replace(job=job, epoch=epoch)


def test_a_leg_stays_however_often_another_job_plans_anew() -> None:
    legs: Legs[str] = Legs()
    legs.plan(b"quiet", leg("quiet"))
    for number in range(2 * KNOWN_LEGS):
        legs.plan(b"%d" % number, leg("busy"))
    assert legs.find(b"quiet") == leg("quiet")
    assert legs.find(b"%d" % (2 * KNOWN_LEGS - 1)) == leg("busy")
    assert legs.find(b"0") is None
    assert legs.known == KNOWN_LEGS


def test_legs_of_epochs_that_are_over_go() -> None:
    legs: Legs[str] = Legs()
    legs.plan(b"old", leg("job"))
    legs.plan(b"new", leg("job", 2))
    legs.plan(b"other", leg("other"))
    legs.void("job", 2)
    assert (legs.find(b"old"), legs.find(b"new")) == (None, leg("job", 2))
    legs.void("job", 3)
    assert legs.find(b"new") is None
    assert legs.find(b"other") == leg("other")


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
    assert taken(waiting(*items), 10) == [[0, 1], [3, 4], [2], [5]]


def test_legs_take_turns_however_many_items_wait_for_one_of_them() -> None:
    legs = waiting(*[(_ONE, b"a")] * 5, (_OTHER, b"a"))
    assert taken(legs, 2) == [[0, 1], [5], [2, 3], [4]]


def test_no_more_run_together_than_may() -> None:
    assert taken(waiting(*[(_ONE, b"a")] * 5), 2) == [[0, 1], [2, 3], [4]]
    assert taken(waiting(*[(_ONE, b"a")] * 3), 1) == [[0], [1], [2]]


def test_only_so_many_may_wait_for_one_leg_and_for_all() -> None:
    legs = waiting(*[(_ONE, b"a")] * (WAITING_ITEMS - 1))
    assert legs.room_for(_ONE, 1)
    assert not legs.room_for(_ONE, 2)
    assert legs.room_for(_OTHER, WAITING_ITEMS), "which has its own"
    assert legs.waiting == WAITING_ITEMS - 1
    others = [leg(f"job-{number}") for number in range(MOST_ITEMS // WAITING_ITEMS)]
    for other in others:
        legs.arrive(Arrived(other, 0, b"a", "") for _ in range(WAITING_ITEMS))
    assert not legs.room_for(_OTHER, 1)
    assert len(legs.clear()) == MOST_ITEMS + WAITING_ITEMS - 1
    assert (legs.waiting, legs.next_leg) == (0, None)


def test_what_waits_for_a_leg_that_goes_waits_no_more_and_others_do() -> None:
    legs: Legs[str] = Legs()
    legs.plan(b"old", leg("job"))
    legs.plan(b"other", leg("other"))
    items = [Arrived(leg("job"), 1, b"a", ""), Arrived(leg("other"), 2, b"a", "")]
    legs.arrive(items)
    assert legs.void("job", 2) == items[:1]
    assert legs.cancel(3) is None
    assert legs.cancel(2) == items[1]
    assert (legs.waiting, legs.next_leg) == (0, None)
