"""What the ledger decides, case by case."""

from copy import copy

from shoal_agent.memory.demands import Evict, Grant, Load, MakeRoom, Refusal, Spill
from shoal_agent.memory.residency import Ledger
from shoal_protocol.units import Bytes


def new_ledger(budget: int = 100, *, single: bool = False, **loaded: int) -> Ledger:
    """A ledger with these fragments resident."""
    ledger = Ledger(budget=Bytes(budget), single=single)
    for digest, need in loaded.items():
        load(ledger, digest, need)
    return ledger


def load(ledger: Ledger, digest: str, need: int) -> None:
    """Make one more fragment resident."""
    assert ledger.request_load(digest, Bytes(need)) is Load.ADMITTED
    assert ledger.finish_load(digest)


def test_a_load_that_fits_is_admitted_and_one_that_does_not_says_need_and_have() -> None:
    refusal = new_ledger(a=60).request_load("b", Bytes(41))
    assert isinstance(refusal, Refusal)
    assert (refusal.need, refusal.have) == (41, 40)
    assert refusal.reason == "would need 41 B, have 40 B of a budget of 100 B"


def test_a_load_in_flight_counts_as_if_it_were_resident() -> None:
    ledger = new_ledger()
    ledger.request_load("a", Bytes(60))
    assert isinstance(ledger.request_load("b", Bytes(60)), Refusal)


def test_asking_twice_for_a_fragment_loads_it_once() -> None:
    ledger = new_ledger()
    ledger.request_load("a", Bytes(60))
    before = copy(ledger)
    assert ledger.request_load("a", Bytes(60)) is Load.ALREADY_THERE
    assert ledger == before


def test_single_refuses_a_second_fragment_until_the_first_is_unloaded() -> None:
    ledger = new_ledger(single=True, a=10)
    refusal = ledger.request_load("b", Bytes(10))
    assert isinstance(refusal, Refusal)
    assert "Single" in refusal.reason
    ledger.unload("a")
    load(ledger, "b", 10)
    assert "b" in ledger.resident


def test_a_fragment_measured_over_the_budget_is_evicted() -> None:
    ledger = new_ledger(a=50, b=40)
    (eviction,) = ledger.measure("b", Bytes(51))
    assert isinstance(eviction, Evict)
    assert (eviction.digest, eviction.need, eviction.have) == ("b", 51, 50)
    assert list(ledger.resident) == ["a"]


def test_a_fragment_whose_run_was_stopped_goes_also_where_there_would_be_room_for_more() -> None:
    ledger = new_ledger(a=50)
    (eviction,) = ledger.measure("a", Bytes(75), stopped=True)
    assert isinstance(eviction, Evict)
    assert (eviction.digest, eviction.need) == ("a", 75)
    in_blocks(ledger, "b", 60, least=20)
    assert ledger.measure("b", Bytes(100), stopped=True) == [Grant(digest="b", size=Bytes(57))]


def test_an_estimate_is_corrected_upwards_only() -> None:
    ledger = new_ledger(a=50)
    assert ledger.measure("a", Bytes(10)) == []
    assert ledger.resident["a"] == 50
    assert ledger.measure("a", Bytes(70)) == []
    assert ledger.resident["a"] == 70


def test_activations_are_spilled_for_a_fragment_and_not_the_other_way_round() -> None:
    ledger = new_ledger()
    assert ledger.request_space(70)
    before = copy(ledger)
    assert ledger.request_load("a", Bytes(50)) == MakeRoom(size=Bytes(20))
    assert ledger == before
    ledger.return_space(20)
    load(ledger, "a", 50)
    assert not ledger.request_space(1)


def test_a_fragment_that_grew_is_given_up_where_activations_have_no_place_on_disk() -> None:
    ledger = new_ledger(a=40, b=30)
    ledger.request_space(30)
    assert ledger.measure("b", Bytes(35)) == [Spill(size=Bytes(5), digest="b")]
    demands = ledger.fail_spill("b")
    assert [each.digest for each in demands if isinstance(each, Evict)] == ["b"]
    assert (ledger.resident, ledger.reserved) == ({"a": 40}, 30)
    before = copy(ledger)
    assert ledger.fail_spill("b") == []
    assert ledger == before


def test_what_moves_gets_what_is_free_and_pushes_nothing_out() -> None:
    ledger = new_ledger(a=50)
    ledger.request_space(40)
    assert not ledger.request_move(11)
    assert ledger.request_move(10)
    assert (ledger.reserved, ledger.moving, ledger.free) == (40, 10, 0)


def test_a_load_waits_for_what_moves_and_is_refused_only_if_that_would_not_help() -> None:
    ledger = new_ledger()
    ledger.request_move(30)
    before = copy(ledger)
    assert ledger.request_load("a", Bytes(80)) is Load.POSTPONED
    assert ledger == before
    assert isinstance(ledger.request_load("a", Bytes(101)), Refusal)
    ledger.end_move(30)
    load(ledger, "a", 80)
    assert ledger.resident == {"a": 80}


def test_a_fragment_measured_beside_what_moves_is_not_evicted_for_that() -> None:
    ledger = new_ledger(a=50)
    ledger.request_move(30)
    assert ledger.measure("a", Bytes(90)) == []
    assert ledger.resident == {"a": 70}


def test_an_activation_moves_and_waits_without_ever_counting_twice() -> None:
    ledger = new_ledger()
    ledger.request_move(60)
    ledger.arrive(50)
    assert (ledger.reserved, ledger.moving) == (50, 10)
    ledger.begin_move(50)
    assert (ledger.reserved, ledger.moving, ledger.free) == (0, 60, 40)


def test_where_activations_have_no_place_loads_in_flight_go_first_then_the_oldest() -> None:
    ledger = new_ledger(a=20, b=20)
    ledger.request_load("c", Bytes(20))
    ledger.request_space(40)
    assert ledger.measure("b", Bytes(60)) == [Spill(size=Bytes(40), digest="b")]
    demands = ledger.fail_spill(None)
    assert [each.digest for each in demands if isinstance(each, Evict)] == ["c", "a"]
    assert list(ledger.resident) == ["b"]
    assert not ledger.finish_load("c")
    assert list(ledger.resident) == ["b"]


def test_nothing_wraps_below_zero() -> None:
    ledger = new_ledger(10)
    ledger.return_space(5)
    assert ledger.reserved == 0
    ledger.end_move(5)
    assert ledger.moving == 0
    ledger.request_move(10)
    refusal = ledger.request_load("a", Bytes(11))
    assert isinstance(refusal, Refusal)
    assert refusal.have == 10


def in_blocks(ledger: Ledger, digest: str, need: int, least: int) -> None:
    """Make a fragment resident that can run in blocks."""
    assert ledger.request_load(digest, Bytes(need)) is Load.ADMITTED
    assert ledger.finish_load(digest, Bytes(least))


def test_a_fragment_in_blocks_that_takes_more_than_there_is_is_granted_less_by_that() -> None:
    ledger = new_ledger(a=50)
    in_blocks(ledger, "b", 40, least=19)
    assert ledger.measure("b", Bytes(55)) == [Grant(digest="b", size=Bytes(33))]
    assert ledger.resident == {"a": 50, "b": 50}
    # It still takes more than it is granted, and so on, until it can do without no more.
    assert ledger.measure("b", Bytes(60)) == [Grant(digest="b", size=Bytes(20))]
    assert ledger.measure("b", Bytes(30)) == []
    assert ledger.resident == {"a": 50, "b": 30}
    assert ledger.measure("b", Bytes(60)) == [Grant(digest="b", size=Bytes(19))]
    (eviction,) = ledger.measure("b", Bytes(51))
    assert isinstance(eviction, Evict)
    assert (ledger.resident, ledger.shares) == ({"a": 50}, {})


def test_under_a_smaller_budget_the_fragment_gives_most_that_can_do_without_most() -> None:
    ledger = new_ledger(a=30)
    in_blocks(ledger, "b", 30, least=20)
    in_blocks(ledger, "c", 40, least=15)
    assert ledger.change_budget(Bytes(90)) == [Grant(digest="c", size=Bytes(30))]
    assert ledger.change_budget(Bytes(70)) == [
        Grant(digest="c", size=Bytes(15)),
        Grant(digest="b", size=Bytes(25)),
    ]
    assert ledger.resident == {"a": 30, "b": 25, "c": 15}
    assert ledger.change_budget(Bytes(200)) == [
        Grant(digest="b", size=Bytes(30)),
        Grant(digest="c", size=Bytes(40)),
    ]


def test_under_a_budget_too_small_for_all_the_oldest_goes_and_the_others_give_only_the_rest() -> (
    None
):
    ledger = new_ledger(a=30)
    in_blocks(ledger, "b", 40, least=20)
    ledger.request_space(30)
    eviction, grant, spill = ledger.change_budget(Bytes(35))
    assert isinstance(eviction, Evict)
    assert eviction.reason == "the budget changed: would need 30 B, have 0 B of a budget of 35 B"
    assert (grant, spill) == (Grant(digest="b", size=Bytes(35)), Spill(size=Bytes(30)))


def test_a_fragment_measured_beyond_its_grant_is_not_evicted_for_that_when_it_can_run_in_less() -> (
    None
):
    ledger = new_ledger(a=30)
    in_blocks(ledger, "b", 70, least=20)
    assert ledger.measure("b", Bytes(71)) == [Grant(digest="b", size=Bytes(67))]
    assert ledger.resident == {"a": 30, "b": 70}
    assert ledger.change_budget(Bytes(51)) == [Grant(digest="b", size=Bytes(21))]
    assert ledger.resident == {"a": 30, "b": 21}


def test_what_moves_may_end_when_the_budget_shrinks_and_no_fragment_goes_for_it() -> None:
    ledger = new_ledger(a=40)
    ledger.request_move(60)
    assert ledger.change_budget(Bytes(50)) == []
    assert not ledger.request_space(1)
    assert ledger.request_load("b", Bytes(5)) is Load.POSTPONED
    ledger.end_move(60)
    assert ledger.request_space(10)


# ---- against brute force -------------------------------------------------------------------------


def test_what_a_fragment_runs_within_is_the_most_that_it_can_need() -> None:
    ledger = Ledger(budget=Bytes(100))
    assert ledger.request_load("a", Bytes(23)) is Load.ADMITTED
    ledger.finish_load("a", Bytes(101))
    assert ledger.withhold(Bytes(78)) == []
    assert ledger.resident == {"a": 23}


def test_what_a_fragment_gathers_beyond_its_plan_has_a_quarter_of_what_is_free() -> None:
    planned = Bytes(20)
    ledger = new_ledger(a=planned)
    assert sum(ledger.grow("a", Bytes(1), planned) for _ in range(80)) == 20
    ledger.shrink("a", planned)
    assert ledger.free == 80
