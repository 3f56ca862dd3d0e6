"""Notes of decisions become Events when they are new, not at each reconciliation."""

from shoal_operator.controller.events import BURST, REFILL_SECONDS, NoteHistory
from shoal_operator.reconcile.decision import Note
from shoal_operator.reconcile.times import as_time

LOST = Note(reason="LostDevice", message="pi-4 is lost", warning=True)


def at(text: str) -> str:
    return f"2026-03-01T{text}:00Z"


def ready(since: str) -> Note:
    return Note(reason="PoolReady", message="3 of 3 agents connected", since=since)


def test_a_state_is_posted_when_it_begins_and_when_it_begins_again() -> None:
    history = NoteHistory()
    told = [
        history.new("uid", notes, now)
        for notes, now in (
            ([LOST], at("12:00")),
            ([LOST], at("12:01")),
            ([], at("12:02")),
            ([LOST], at("12:03")),
            ([LOST], at("12:04")),
        )
    ]
    assert [[note for _, note in new] for new in told] == [[LOST], [], [], [LOST], []]
    first, again = told[0][0][0], told[3][0][0]
    assert first != again, "the second is an Event of its own"
    assert NoteHistory().new("uid", [LOST], at("13:00"))[0][0] == first, (
        "a new operator says the same"
    )


def test_an_occurrence_is_posted_once_however_often_it_is_decided() -> None:
    history = NoteHistory()
    assert len(history.new("uid", [ready(at("12:00"))], at("12:00"))) == 1
    assert history.new("uid", [], at("12:01")) == []
    assert history.new("uid", [ready(at("12:00"))], at("12:02")) == []
    assert len(history.new("uid", [ready(at("12:03"))], at("12:03"))) == 1


def test_a_note_that_was_not_posted_is_posted_at_the_next_reconciliation() -> None:
    history = NoteHistory()
    [(mark, _)] = history.new("uid", [LOST], at("12:00"))
    history.forget("uid", mark)
    assert history.new("uid", [LOST], at("12:01")) == [(mark, LOST)]


def test_each_object_has_a_history_of_its_own() -> None:
    history = NoteHistory()
    (one,) = history.new("one", [LOST], at("12:00"))
    (other,) = history.new("other", [LOST], at("12:00"))
    assert one[0] != other[0]


def test_what_begins_and_ends_all_the_time_is_told_a_number_of_times_and_then_seldom() -> None:
    """As Kubernetes' own client does it: a device at the edge of its network must fill no store."""
    history, told, other = NoteHistory(), 0, 0
    flaps, seconds = 2000, 2
    for number in range(flaps):
        now = as_time(number * seconds)
        told += len(history.new("uid", [LOST, ready(now)], now))
        other += len(history.new("quiet", [ready("once")], now))
        assert history.new("uid", [], now) == []
    later = flaps * seconds // REFILL_SECONDS
    assert BURST <= told <= BURST + later + 1
    assert other == 1, "another object has its own"
    rested = as_time(flaps * seconds + BURST * REFILL_SECONDS)
    assert len(history.new("uid", [LOST], rested)) == 1
