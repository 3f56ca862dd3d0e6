"""The ledger against one that recounts everything from scratch."""

from copy import copy
from dataclasses import dataclass, field, replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal_agent.memory.allocation import Point
from shoal_agent.memory.residency import (
    Evict,
    Grant,
    Ledger,
    Load,
    MakeRoom,
    Reclaim,
    Refusal,
    Spill,
)
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


@dataclass(frozen=True)
class Event:
    """A call of a ledger's method."""

    name: str
    digest: str = "a"
    size: Bytes = Bytes(0)
    planned: Bytes = Bytes(0)
    least: Bytes | None = None
    curve: tuple[Point, ...] = ()

    def apply(self, ledger: Ledger) -> object:
        arguments = (getattr(self, each) for each in TAKES.get(self.name, ("size",)))
        answer: object = getattr(ledger, self.name)(*arguments)
        return answer


NAMES = (
    *("grow", "finish_load", "change_budget", "note_run", "withhold", "request_load", "measure"),
    *("shrink", "fail_load", "unload", "lend", "take_back", "request_space", "return_space"),
    *("request_move", "end_move", "begin_move", "arrive"),
)
TAKES: dict[str, tuple[str, ...]] = {
    "grow": ("digest", "size", "planned"),
    "finish_load": ("digest", "least", "curve"),
    **dict.fromkeys(("request_load", "measure", "shrink", "note_run"), ("digest", "size")),
    **dict.fromkeys(("fail_load", "unload"), ("digest",)),
    **dict.fromkeys(("lend", "take_back"), ()),
}
"""The arguments of a call; of all others the size alone."""


@dataclass
class Recount:
    """What effects promised, item by item: sums are taken anew each time."""

    budget: int
    fragments: list[tuple[str, int]] = field(default_factory=list)
    activations: int = 0
    moving: int = 0

    def total(self) -> int:
        return sum(size for _, size in self.fragments) + self.activations + self.moving

    def shift(self, size: int) -> None:
        self.activations += size
        self.moving -= size

    def size(self, digest: str) -> int:
        return next((size for key, size in self.fragments if key == digest), 0)

    def resize(self, digest: str, size: int) -> None:
        self.fragments = [(k, size if k == digest else n) for k, n in self.fragments]

    def remove(self, digest: str) -> None:
        self.fragments = [(key, size) for key, size in self.fragments if key != digest]

    def meet(self, event: Event, was: Ledger) -> None:  # noqa: C901, PLR0912 - one case per event
        """Take in what an event says of itself, whatever is answered to it."""
        digest, size = event.digest, event.size
        match event.name:
            case "fail_load" if digest in was.in_flight:
                self.remove(digest)
            case "measure" if digest in was.resident:
                room = self.budget - self.total() + self.size(digest)
                if size <= self.size(digest) and digest in was.shares:
                    self.resize(digest, max(was.shares[digest].granted, size))
                elif size <= room + self.activations + self.moving:
                    measured = min(size, room + self.activations)
                    self.resize(digest, max(self.size(digest), measured))
            case "shrink" if digest in was.resident:
                share = was.shares.get(digest)
                planned = size if share is None else max(size, share.granted)
                self.resize(digest, min(self.size(digest), planned))
            case "change_budget":
                self.budget = size
                slack = sum(share.slack for share in was.shares.values())
                if sum(held for _, held in self.fragments) - slack > size:
                    for each, share in was.shares.items():
                        self.resize(each, share.granted)
            case "unload" if digest in was.resident:
                self.remove(digest)
            case "return_space":
                self.activations = max(0, self.activations - size)
            case "end_move":
                self.moving = max(0, self.moving - size)
            case "begin_move":
                self.shift(-min(size, self.activations))
            case "arrive":
                self.shift(min(size, self.moving))

    def follow(  # noqa: C901, PLR0912 - one case per answer
        self, answer: object, event: Event, was: Ledger
    ) -> None:
        """Do what the ledger answered to an event."""
        match answer, event.name:
            case Load.ADMITTED, "request_load":
                self.fragments.append((event.digest, event.size))
            case Evict(digest=digest), _:
                assert event.name != "withhold"
                self.remove(digest)
            case Grant(digest=digest), "measure":
                room = self.budget - self.total() + self.size(digest) + self.activations
                self.resize(digest, max(self.size(digest), room))
            case (
                Grant(digest=digest, size=size),
                "change_budget" | "lend" | "take_back" | "withhold",
            ):
                self.resize(digest, self.size(digest) + size - was.shares[digest].granted)
            case Reclaim(grants=grants), "request_load":
                for each in grants:
                    assert was.shares[each.digest].least <= each.size
                    assert each.size < was.shares[each.digest].granted
                    self.follow(each, replace(event, name="change_budget"), was)
                self.fragments.append((event.digest, event.size))
            case Spill(size=size), _:
                assert 0 < size <= self.activations
            case MakeRoom(size=size), "request_load":
                assert 0 < size <= self.activations
                slack = sum(share.slack for share in was.shares.values())
                assert self.total() - size + event.size <= self.budget + slack
            case True, "request_space":
                self.activations += event.size
            case True, "request_move":
                self.moving += event.size
            case True, "grow":
                assert event.size <= self.budget - self.total()
                self.resize(event.digest, self.size(event.digest) + event.size)
            case Refusal(need=need, have=have), "request_load":
                assert have >= 0
                assert need > have or was.single
            case (Load() | bool(), "request_load" | "request_space" | "request_move" | "grow"):
                pass
            case (None, _) | (bool(), "finish_load"):
                pass
            case _:
                raise AssertionError(f"{answer} in answer to {event}")


sizes = st.integers(0, 120).map(Bytes)
fields: dict[str, st.SearchStrategy[object]] = {
    "digest": st.sampled_from("abcd"),
    "size": sizes,
    "planned": sizes,
    "least": st.none() | sizes,
    "curve": st.lists(st.builds(Point, sizes, sizes.map(float)), max_size=4).map(
        lambda points: tuple(sorted(points))
    ),
}


def named(name: str) -> st.SearchStrategy[Event]:
    """Calls with the arguments that they take: others would be shrunk in vain."""
    taken = {each: fields[each] for each in TAKES.get(name, ("size",))}
    return st.builds(Event, st.just(name), **taken)


events = st.one_of(*map(named, NAMES))


# A failure is shown in seconds: to explain its parts takes minutes.
@settings(max_examples=400, deadline=None, phases=set(Phase) - {Phase.explain})
@given(st.booleans(), st.booleans(), st.lists(events, max_size=40))
def test_the_invariant_holds_after_every_call_and_matches_a_recount(
    single: bool, disk_full: bool, history: list[Event]
) -> None:
    ledger = Ledger(budget=Bytes(100), single=single)
    recount = Recount(100)

    def step(event: Event) -> None:
        was = copy(ledger)
        recount.meet(event, was)
        answer = event.apply(ledger)
        for each in answer if isinstance(answer, list) else [answer]:
            recount.follow(each, event, was)
            if isinstance(each, Spill) and disk_full:
                demands = ledger.fail_spill(each.digest)
                for demand in demands:
                    recount.follow(demand, event, was)
            elif isinstance(each, Spill):
                step(Event("return_space", size=each.size))

    late = 0  # What neither disk nor eviction could help when the budget became smaller.
    for event in history:
        step(event)
        if event.name == "change_budget":
            late = recount.moving + recount.activations * disk_full
        held = dict(ledger.resident) | dict(ledger.in_flight)
        assert held == dict(recount.fragments)
        assert ledger.reserved == recount.activations
        assert ledger.moving == recount.moving
        late = max(0, min(late, recount.total() - recount.budget))
        assert recount.total() - late <= recount.budget, f"over the budget after {event}"
        assert not single or len(recount.fragments) <= 1
