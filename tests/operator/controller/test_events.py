"""Notes of decisions become Events when they are new, not at each reconciliation."""

from shoal_operator.controller.events import NoteHistory
from shoal_operator.reconcile.decision import Note

LOST = Note(reason="LostDevice", message="pi-4 is lost", warning=True)


def ready(since: str) -> Note:
    return Note(reason="PoolReady", message="3 of 3 agents connected", since=since)


def test_a_state_is_posted_when_it_begins_and_when_it_begins_again() -> None:
    history = NoteHistory()
    told = [
        history.new("uid", notes, now)
        for notes, now in (
            ([LOST], "12:00"),
            ([LOST], "12:01"),
            ([], "12:02"),
            ([LOST], "12:03"),
            ([LOST], "12:04"),
        )
    ]
    assert [[note for _, note in new] for new in told] == [[LOST], [], [], [LOST], []]
    first, again = told[0][0][0], told[3][0][0]
    assert first != again, "the second is an Event of its own"
    assert NoteHistory().new("uid", [LOST], "13:00")[0][0] == first, "a new operator says the same"


def test_an_occurrence_is_posted_once_however_often_it_is_decided() -> None:
    history = NoteHistory()
    assert len(history.new("uid", [ready("12:00")], "12:00")) == 1
    assert history.new("uid", [], "12:01") == []
    assert history.new("uid", [ready("12:00")], "12:02") == []
    assert len(history.new("uid", [ready("12:03")], "12:03")) == 1


def test_a_note_that_was_not_posted_is_posted_at_the_next_reconciliation() -> None:
    history = NoteHistory()
    [(mark, _)] = history.new("uid", [LOST], "12:00")
    history.forget("uid", mark)
    assert history.new("uid", [LOST], "12:01") == [(mark, LOST)]


def test_each_object_has_a_history_of_its_own() -> None:
    history = NoteHistory()
    (one,) = history.new("one", [LOST], "12:00")
    (other,) = history.new("other", [LOST], "12:00")
    assert one[0] != other[0]
