"""Memory that nobody has is lent to fragments in blocks, and goes back when it is needed."""

from agent.test_residency import new_ledger
from shoal_agent.memory.allocation import Point, urgency_of
from shoal_agent.memory.demands import Grant, Load, Reclaim, Refusal
from shoal_agent.memory.residency import Ledger
from shoal_protocol.units import Bytes

LINEAR = tuple(Point(granted, 100.0 - granted) for granted in (10, 30, 50, 70, 100))
"""Of a fragment that streams less with each byte, the last of it all in one piece."""


def streaming(ledger: Ledger, digest: str, need: int, priority: int = 0) -> None:
    """Make a fragment resident that could use up to 70, and without blocks 100."""
    assert ledger.request_load(digest, Bytes(need)) is Load.ADMITTED
    assert ledger.finish_load(digest, Bytes(10), LINEAR, urgency=urgency_of(priority))


def test_half_of_what_nobody_has_is_lent_to_a_fragment_that_streams() -> None:
    ledger = new_ledger()
    streaming(ledger, "a", 10)
    assert ledger.lend() == [Grant(digest="a", size=Bytes(50))]
    assert ledger.lend() == [], "what is lent does not grow by itself"
    assert ledger.free == 50
    ledger.change_budget(Bytes(400))
    assert ledger.lend() == [Grant(digest="a", size=Bytes(70))], "more needs other sessions"


def test_what_is_lent_goes_back_when_an_activation_finds_no_room() -> None:
    ledger = new_ledger()
    streaming(ledger, "a", 10)
    ledger.lend()
    assert not ledger.request_space(60)
    assert ledger.take_back() == [Grant(digest="a", size=Bytes(10))]
    assert ledger.request_space(60)
    assert ledger.take_back() == []


def test_what_a_fragment_took_beyond_its_grant_in_a_trial_is_not_lent_to_it() -> None:
    ledger = new_ledger()
    assert ledger.request_load("a", Bytes(60)) is Load.ADMITTED
    assert ledger.finish_load("a", Bytes(10), LINEAR, Bytes(20))
    assert ledger.measure("a", Bytes(35)) == []
    assert ledger.lend() == [Grant(digest="a", size=Bytes(50))]
    assert (ledger.resident["a"], ledger.free) == (65, 35), "15 beyond the grant, as in the trial"
    assert ledger.take_back() == [Grant(digest="a", size=Bytes(20))]


def test_a_load_takes_what_others_can_do_without_and_they_get_it_back() -> None:
    ledger = new_ledger()
    streaming(ledger, "a", 60)
    ledger.lend()
    assert ledger.request_load("b", Bytes(80)) == Reclaim(
        grants=(Grant(digest="a", size=Bytes(20)),)
    )
    assert ledger.finish_load("b")
    refusal = ledger.request_load("c", Bytes(11))
    assert isinstance(refusal, Refusal)
    assert refusal.have == 10
    ledger.unload("b")
    assert ledger.lend() == [Grant(digest="a", size=Bytes(60))]


def test_the_fragment_that_runs_most_gets_what_is_lent() -> None:
    ledger = new_ledger(120)
    streaming(ledger, "a", 10)
    streaming(ledger, "b", 10)
    for digest, runs in (("a", 2), ("b", 9)):
        for _ in range(runs):
            ledger.note_run(digest, 0.1)
    assert ledger.lend() == [Grant(digest="b", size=Bytes(50))]


def test_the_fragment_of_the_more_urgent_job_gets_what_is_lent() -> None:
    ledger = new_ledger(120)
    streaming(ledger, "a", 10, priority=-300)
    streaming(ledger, "b", 10)
    for digest, runs in (("a", 9), ("b", 2)):
        for _ in range(runs):
            ledger.note_run(digest, 0.1)
    assert ledger.lend() == [Grant(digest="b", size=Bytes(50))]
