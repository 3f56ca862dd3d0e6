"""The ledger against one that recounts everything from scratch."""

from copy import copy
from dataclasses import dataclass, field, replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal_agent.memory.allocation import Point
from shoal_agent.memory.demands import Evict, Grant, Load, MakeRoom, Reclaim, Refusal, Spill
from shoal_agent.memory.residency import Ledger
from shoal_protocol.units import Bytes


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
    *("request_move", "end_move", "begin_move", "arrive", "grow_itself"),
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
    grown: int = 0

    def total(self) -> int:
        held = sum(size for _, size in self.fragments)
        return held + self.activations + self.moving + self.grown

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
                self.forget_beyond_grants(was)
            case "grow_itself" if size != self.grown:
                self.grown = size
                self.forget_beyond_grants(was)
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

    def forget_beyond_grants(self, was: Ledger) -> None:
        """What was measured beyond them, where fragments have to run in much less."""
        slack = sum(share.slack for share in was.shares.values())
        if sum(held for _, held in self.fragments) + self.grown - slack > self.budget:
            for each, share in was.shares.items():
                self.resize(each, share.granted)

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
                "change_budget" | "lend" | "take_back" | "withhold" | "grow_itself",
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
        if event.name in ("change_budget", "grow_itself"):
            late = recount.moving + recount.activations * disk_full
            late += max(0, recount.grown - recount.budget)
        held = dict(ledger.resident) | dict(ledger.in_flight)
        assert held == dict(recount.fragments)
        assert ledger.reserved == recount.activations
        assert ledger.moving == recount.moving
        late = max(0, min(late, recount.total() - recount.budget))
        assert recount.total() - late <= recount.budget, f"over the budget after {event}"
        assert not single or len(recount.fragments) <= 1
