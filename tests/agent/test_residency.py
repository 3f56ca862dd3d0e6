"""The ledger against one that recounts everything from scratch."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_agent.memory import residency
from shoal_agent.memory.residency import (
    Admit,
    AlreadyThere,
    Arrived,
    BudgetChanged,
    Deny,
    Effect,
    Event,
    Evict,
    Grant,
    GrowthRequested,
    Ledger,
    LoadFailed,
    LoadFinished,
    LoadRequested,
    MakeRoom,
    Measured,
    MoveBegun,
    MoveEnded,
    MoveRequested,
    Postpone,
    Refuse,
    Shrunk,
    SpaceRequested,
    SpaceReturned,
    Spill,
    SpillFailed,
    Unloaded,
)
from shoal_protocol.units import Bytes


def load(ledger: Ledger, digest: str, need: int) -> Ledger:
    """A ledger with one more fragment resident."""
    ledger, effects = residency.step(ledger, LoadRequested(digest=digest, need=Bytes(need)))
    assert Admit(digest=digest) in effects
    return residency.step(ledger, LoadFinished(digest=digest))[0]


def test_a_load_that_fits_is_admitted_and_one_that_does_not_says_need_and_have() -> None:
    ledger = load(Ledger(budget=Bytes(100)), "a", 60)
    _, effects = residency.step(ledger, LoadRequested(digest="b", need=Bytes(41)))
    (refusal,) = effects
    assert isinstance(refusal, Refuse)
    assert (refusal.need, refusal.have) == (41, 40)
    assert refusal.reason == "would need 41 B, have 40 B of a budget of 100 B"


def test_a_load_in_flight_counts_as_if_it_were_resident() -> None:
    ledger, _ = residency.step(Ledger(budget=Bytes(100)), LoadRequested(digest="a", need=Bytes(60)))
    _, effects = residency.step(ledger, LoadRequested(digest="b", need=Bytes(60)))
    assert isinstance(effects[0], Refuse)


def test_asking_twice_for_a_fragment_loads_it_once() -> None:
    ledger, _ = residency.step(Ledger(budget=Bytes(100)), LoadRequested(digest="a", need=Bytes(60)))
    again, effects = residency.step(ledger, LoadRequested(digest="a", need=Bytes(60)))
    assert effects == (AlreadyThere(digest="a"),)
    assert again == ledger


def test_single_refuses_a_second_fragment_until_the_first_is_unloaded() -> None:
    ledger = load(Ledger(budget=Bytes(100), single=True), "a", 10)
    _, effects = residency.step(ledger, LoadRequested(digest="b", need=Bytes(10)))
    assert isinstance(effects[0], Refuse)
    assert "Single" in effects[0].reason
    ledger, _ = residency.step(ledger, Unloaded(digest="a"))
    assert "b" in load(ledger, "b", 10).resident


def test_a_fragment_measured_over_the_budget_is_evicted() -> None:
    ledger = load(Ledger(budget=Bytes(100)), "a", 50)
    ledger = load(ledger, "b", 40)
    ledger, effects = residency.step(ledger, Measured(digest="b", measured=Bytes(51)))
    (eviction,) = effects
    assert isinstance(eviction, Evict)
    assert (eviction.digest, eviction.need, eviction.have) == ("b", 51, 50)
    assert list(ledger.resident) == ["a"]


def test_an_estimate_is_corrected_upwards_only() -> None:
    ledger = load(Ledger(budget=Bytes(100)), "a", 50)
    ledger, _ = residency.step(ledger, Measured(digest="a", measured=Bytes(10)))
    assert ledger.resident["a"] == 50
    ledger, _ = residency.step(ledger, Measured(digest="a", measured=Bytes(70)))
    assert ledger.resident["a"] == 70


def test_activations_are_spilled_for_a_fragment_and_not_the_other_way_round() -> None:
    ledger, effects = residency.step(Ledger(budget=Bytes(100)), SpaceRequested(size=Bytes(70)))
    assert effects == (Grant(),)
    again, effects = residency.step(ledger, LoadRequested(digest="a", need=Bytes(50)))
    assert effects == (MakeRoom(digest="a", size=Bytes(20)),)
    assert again == ledger
    ledger, _ = residency.step(ledger, SpaceReturned(size=Bytes(20)))
    ledger = load(ledger, "a", 50)
    _, effects = residency.step(ledger, SpaceRequested(size=Bytes(1)))
    assert effects == (Deny(),)


def test_a_fragment_that_grew_is_given_up_where_activations_have_no_place_on_disk() -> None:
    ledger = load(load(Ledger(budget=Bytes(100)), "a", 40), "b", 30)
    ledger, _ = residency.step(ledger, SpaceRequested(size=Bytes(30)))
    ledger, effects = residency.step(ledger, Measured(digest="b", measured=Bytes(35)))
    assert effects == (Spill(size=Bytes(5), digest="b"),)
    ledger, effects = residency.step(ledger, SpillFailed(digest="b"))
    assert [effect.digest for effect in effects if isinstance(effect, Evict)] == ["b"]
    assert (ledger.resident, ledger.reserved) == ({"a": 40}, 30)
    assert residency.step(ledger, SpillFailed(digest="b")) == (ledger, ())


def test_what_moves_gets_what_is_free_and_pushes_nothing_out() -> None:
    ledger = load(Ledger(budget=Bytes(100)), "a", 50)
    ledger, _ = residency.step(ledger, SpaceRequested(size=Bytes(40)))
    ledger, effects = residency.step(ledger, MoveRequested(size=Bytes(11)))
    assert effects == (Deny(),)
    ledger, effects = residency.step(ledger, MoveRequested(size=Bytes(10)))
    assert effects == (Grant(),)
    assert (ledger.reserved, ledger.moving, ledger.free) == (40, 10, 0)


def test_a_load_waits_for_what_moves_and_is_refused_only_if_that_would_not_help() -> None:
    ledger, _ = residency.step(Ledger(budget=Bytes(100)), MoveRequested(size=Bytes(30)))
    again, effects = residency.step(ledger, LoadRequested(digest="a", need=Bytes(80)))
    assert effects == (Postpone(digest="a"),)
    assert again == ledger
    _, effects = residency.step(ledger, LoadRequested(digest="a", need=Bytes(101)))
    assert isinstance(effects[0], Refuse)
    ledger, _ = residency.step(ledger, MoveEnded(size=Bytes(30)))
    assert load(ledger, "a", 80).resident == {"a": 80}


def test_a_fragment_measured_beside_what_moves_is_not_evicted_for_that() -> None:
    ledger = load(Ledger(budget=Bytes(100)), "a", 50)
    ledger, _ = residency.step(ledger, MoveRequested(size=Bytes(30)))
    ledger, effects = residency.step(ledger, Measured(digest="a", measured=Bytes(90)))
    assert effects == ()
    assert ledger.resident == {"a": 70}


def test_an_activation_moves_and_waits_without_ever_counting_twice() -> None:
    ledger, _ = residency.step(Ledger(budget=Bytes(100)), MoveRequested(size=Bytes(60)))
    ledger, _ = residency.step(ledger, Arrived(size=Bytes(50)))
    assert (ledger.reserved, ledger.moving) == (50, 10)
    ledger, _ = residency.step(ledger, MoveBegun(size=Bytes(50)))
    assert (ledger.reserved, ledger.moving, ledger.free) == (0, 60, 40)


def test_under_a_smaller_budget_loads_in_flight_go_first_then_the_oldest() -> None:
    ledger = load(load(Ledger(budget=Bytes(100)), "a", 30), "b", 30)
    ledger, _ = residency.step(ledger, LoadRequested(digest="c", need=Bytes(30)))
    ledger, effects = residency.step(ledger, BudgetChanged(budget=Bytes(35)))
    assert [effect.digest for effect in effects if isinstance(effect, Evict)] == ["c", "a"]
    assert list(ledger.resident) == ["b"]
    _, effects = residency.step(ledger, LoadFinished(digest="c"))
    assert isinstance(effects[0], Evict)


def test_nothing_wraps_below_zero() -> None:
    ledger, _ = residency.step(Ledger(budget=Bytes(10)), SpaceReturned(size=Bytes(5)))
    assert ledger.reserved == 0
    ledger, _ = residency.step(ledger, BudgetChanged(budget=Bytes(0)))
    assert ledger.free == 0
    _, effects = residency.step(ledger, LoadRequested(digest="a", need=Bytes(1)))
    assert isinstance(effects[0], Refuse)
    assert effects[0].have == 0


# ---- against brute force -------------------------------------------------------------------------


def test_what_a_fragment_gathers_beyond_its_plan_has_a_quarter_of_what_is_free() -> None:
    planned = Bytes(20)
    ledger = Ledger(budget=Bytes(100), resident={"a": planned})
    granted = 0
    for _ in range(80):
        request = GrowthRequested(digest="a", size=Bytes(1), planned=planned)
        ledger, effects = residency.step(ledger, request)
        granted += effects == (Grant(),)
    assert granted == 20
    ledger, _ = residency.step(ledger, Shrunk(digest="a", resident=planned))
    assert ledger.free == 80


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

    def meet(self, event: Event, was: Ledger) -> None:  # noqa: C901 - one case per event
        """Take in what an event says of itself, whatever is answered to it."""
        match event:
            case LoadFailed(digest=digest) if digest in was.in_flight:
                self.remove(digest)
            case Measured(digest=digest, measured=measured) if digest in was.resident:
                room = self.budget - self.total() + self.size(digest)
                if room < measured <= room + self.activations + self.moving:
                    measured = min(measured, Bytes(room + self.activations))
                self.resize(digest, max(self.size(digest), measured))
            case Shrunk(digest=digest, resident=size) if digest in was.resident:
                self.resize(digest, min(self.size(digest), size))
            case Unloaded(digest=digest) if digest in was.resident:
                self.remove(digest)
            case SpaceReturned(size=size):
                self.activations = max(0, self.activations - size)
            case MoveEnded(size=size):
                self.moving = max(0, self.moving - size)
            case MoveBegun(size=size):
                self.shift(-min(size, self.activations))
            case Arrived(size=size):
                self.shift(min(size, self.moving))
            case BudgetChanged(budget=budget):
                self.budget = budget

    def follow(self, effect: Effect, event: Event, *, single: bool) -> None:
        """Do what the ledger answered to an event."""
        match effect, event:
            case Admit(digest=digest), LoadRequested(need=need):
                self.fragments.append((digest, need))
            case Evict(digest=digest), _:
                self.remove(digest)
            case Spill(size=size), _:
                assert 0 < size <= self.activations
            case MakeRoom(size=size), LoadRequested(need=need):
                assert 0 < size <= self.activations
                assert self.total() - size + need <= self.budget
            case Grant(), SpaceRequested(size=size):
                self.activations += size
            case Grant(), MoveRequested(size=size):
                self.moving += size
            case Grant(), GrowthRequested(digest=digest, size=size):
                assert size <= self.budget - self.total()
                self.resize(digest, self.size(digest) + size)
            case Refuse(need=need, have=have), _:
                assert have >= 0
                assert need > have or single
            case Admit() | Grant() | MakeRoom(), _:
                raise AssertionError(f"{effect} in answer to {event}")


sizes = st.integers(0, 120).map(Bytes)
digests = st.sampled_from("abcd")
events = st.one_of(
    st.builds(LoadRequested, digest=digests, need=sizes),
    st.builds(LoadFinished, digest=digests),
    st.builds(LoadFailed, digest=digests),
    st.builds(Measured, digest=digests, measured=sizes),
    st.builds(GrowthRequested, digest=digests, size=sizes, planned=sizes),
    st.builds(Shrunk, digest=digests, resident=sizes),
    st.builds(Unloaded, digest=digests),
    st.builds(SpaceRequested, size=sizes),
    st.builds(SpaceReturned, size=sizes),
    st.builds(MoveRequested, size=sizes),
    st.builds(MoveEnded, size=sizes),
    st.builds(MoveBegun, size=sizes),
    st.builds(Arrived, size=sizes),
    st.builds(BudgetChanged, budget=sizes),
)


@settings(max_examples=400, deadline=None)
@given(st.booleans(), st.booleans(), st.lists(events, max_size=40))
def test_the_invariant_holds_after_every_step_and_matches_a_recount(
    single: bool, disk_full: bool, history: list[Event]
) -> None:
    ledger = Ledger(budget=Bytes(100), single=single)
    recount = Recount(100)

    def step(event: Event) -> None:
        nonlocal ledger
        recount.meet(event, ledger)
        ledger, effects = residency.step(ledger, event)
        for effect in effects:
            recount.follow(effect, event, single=single)
            if isinstance(effect, Spill) and disk_full:
                step(SpillFailed(digest=effect.digest))
            elif isinstance(effect, Spill):
                step(SpaceReturned(size=effect.size))

    for event in history:
        step(event)
        held = dict(ledger.resident) | dict(ledger.in_flight)
        assert held == dict(recount.fragments)
        assert ledger.reserved == recount.activations
        assert ledger.moving == recount.moving
        # A budget can shrink below what moves: no fragment is there then, nor anything that the
        # disk had a place for.
        beside = recount.activations if disk_full else 0
        within = recount.total() <= max(recount.budget, recount.moving + beside)
        assert within, f"over the budget after {event}"
        assert not single or len(recount.fragments) <= 1
