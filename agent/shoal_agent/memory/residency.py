"""The ledger of a device's memory: which fragments may be resident under a hard budget.

What counts against the budget, all above the agent's idle floor:

- *resident*: fragments that can run now, with weights, activations of one item and workspace;
- *in flight*: fragments that are being loaded, with what the plan reckons for them;
- *reserved*: activations that wait in memory, and memory that waits for such (transport.buffers);
- *moving*: activations that are being received or sent, results on their way among them, with the
  frames that carry them; and what is *barred* for a while: granted to nobody, it is no activation;
- *grown*: what the agent itself takes beyond its reserve.

The invariant, after every call: **resident + in flight + reserved + moving + grown <= budget**; and
under `single`, resident and in flight together are one fragment at most.

Fragments come before activations: an activation has another place to be (the disk), a fragment has
not. A load that would fit but for the reserved bytes makes room first: so many bytes of activations
are to be spilled, then it is asked for again. What moves cannot be spilled, but ends soon: a load
that would fit but for that is postponed. In both cases nothing else comes until it has its place,
but for text, which has no other place (`transport.buffers`).

The ledger holds what is so, not what is hoped for: spilled bytes are subtracted when they are on
disk (`return_space`). Where something that has happened leaves too little room for what waits in
memory, the answer says what to spill (`Spill`), and the invariant holds again when that is done; if
it cannot be done (`fail_spill`), fragments go instead. Other calls may come before that: nothing is
granted meanwhile.

An estimate is corrected upwards only. A fragment that was measured below its estimate keeps it: the
estimate is for the largest item of the plan, the measurement for the items seen so far.

A fragment that can run in blocks can run in less than it was loaded for (`Share`). It is not
evicted for what it could do without, and no load is refused for that: it is granted less (`Grant`),
and more again when there is more. Of what nobody has, half is lent to fragments that stream weights
(`lend`); activations take it back when they need it (`take_back`). Who gets how much is decided by
what it saves (`memory.allocation`).

The budget may change at any time (`change_budget`). What moves then is neither spilled nor a reason
to evict: until it has ended, it may exceed a budget that became smaller, and nothing is granted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from shoal_agent.memory.allocation import Delay, Point, Share, share_out
from shoal_agent.memory.demands import Demand, Evict, Grant, Load, MakeRoom, Reclaim, Refusal, Spill
from shoal_protocol.units import Bytes, format_apart, format_bytes

NOTHING: Final = Bytes(0)
_NOISE: Final = 32
"""Runs differ by one part in so many of what they take, as the transport beside them does."""

Held = TypeVar("Held")


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What is promised and to whom. `resident` is in the order in which fragments became that;
    `shares` are those of resident fragments that can run in blocks.

    Each method takes one event and returns what has to be done about it. The mappings are replaced,
    never changed: another thread may be reading one.
    """

    budget: Bytes
    single: bool = False
    resident: Mapping[str, Bytes] = field(default_factory=dict)
    in_flight: Mapping[str, Bytes] = field(default_factory=dict)
    shares: Mapping[str, Share] = field(default_factory=dict)
    delays: Mapping[str, Delay] = field(default_factory=dict)
    reserved: Bytes = NOTHING
    moving: Bytes = NOTHING
    barred: Bytes = NOTHING
    withheld: Bytes = NOTHING
    grown: Bytes = NOTHING
    _sum: tuple[object, object, Bytes] = field(default=(None, None, NOTHING), compare=False)

    @property
    def fragments(self) -> Bytes:
        """Bytes of fragments, resident and in flight; added up where these were replaced."""
        resident, in_flight, (were, came, size) = self.resident, self.in_flight, self._sum
        if were is not resident or came is not in_flight:
            size = Bytes(sum(resident.values()) + sum(in_flight.values()))
            self._sum = resident, in_flight, size
        return size

    @property
    def occupied(self) -> Bytes:
        """Bytes of fragments, and of the agent itself: neither can be spilled, nor ends soon."""
        return Bytes(self.fragments + self.grown)

    @property
    def activations(self) -> Bytes:
        """Bytes of activations, of those that wait and of those that move."""
        return Bytes(self.reserved + self.moving - self.barred)

    @property
    def free_for_fragments(self) -> Bytes:
        """What another fragment could get now, once all that waits is spilled; never below zero."""
        return Bytes(max(0, self.budget - self.occupied - self.moving))

    @property
    def free(self) -> Bytes:
        """What nobody has; never below zero."""
        return Bytes(max(0, self.budget - self.occupied - self.moving - self.reserved))

    @property
    def spare(self) -> Bytes:
        """What of it fragments may have that could do without; never below zero."""
        return Bytes(max(0, self.free - self.withheld))

    @property
    def excess(self) -> Bytes:
        """What of the reserved bytes has to leave memory for the invariant to hold."""
        wanted = self.occupied + self.moving + self.reserved
        return Bytes(min(self.reserved, max(0, wanted - self.budget)))

    # ---- fragments ---------------------------------------------------------------------------

    def request_load(self, digest: str, need: Bytes) -> Load | MakeRoom | Reclaim | Refusal:
        """A fragment is to become resident; `need` is what the plan reckons with."""
        if digest in self.resident or digest in self.in_flight:
            return Load.ALREADY_THERE
        held = [*self.resident, *self.in_flight]
        if self.single and held:
            reason = f"residency is Single and {short(held[0])} is resident: unload it first"
            return Refusal(need=need, have=NOTHING, reason=reason)
        have = Bytes(self.free_for_fragments + self.moving)
        if self.free_for_fragments < need <= have:
            return Load.POSTPONED
        if need > have:
            return self._reclaim(digest, need)
        if (excess := need - self.free_for_fragments + self.reserved) > 0 and self.reserved:
            return MakeRoom(size=Bytes(excess))
        self.in_flight = {**self.in_flight, digest: need}
        return Load.ADMITTED

    def _reclaim(self, digest: str, need: Bytes) -> Load | MakeRoom | Reclaim | Refusal:
        """Take what is missing from fragments that can do without, once nothing else is missing."""
        slack = self._slack
        have = Bytes(self.free_for_fragments + self.moving + slack)
        if need > have:
            return Refusal(need=need, have=have, reason=f"would need {self._short_of(need, have)}")
        if (missing := need - self.free) <= slack:
            grants = tuple(self._grant_less(missing))
            self.in_flight = {**self.in_flight, digest: need}
            return Reclaim(grants=grants)
        if self.moving:
            return Load.POSTPONED
        return MakeRoom(size=Bytes(missing - slack))

    def finish_load(
        self,
        digest: str,
        least: Bytes | None = None,
        curve: tuple[Point, ...] = (),
        granted: Bytes | None = None,
        urgency: float = 1.0,
    ) -> bool:
        """The fragment can run now, and in blocks within `least`, unless that is None, and no more
        than it is `granted`: all that it was loaded for by default. False: its place is gone."""
        if (need := self.in_flight.get(digest)) is not None:
            self.resident = {**self.resident, digest: need}
            self.in_flight = _without(self.in_flight, digest)
            if least is not None:
                within = need if granted is None else granted
                least = min(least, within)
                share = Share(least=least, granted=within, wanted=within, curve=curve)
                self.shares = {**self.shares, digest: replace(share, urgency=urgency)}
                self.delays = {**self.delays, digest: Delay()}
        return digest in self.resident

    def fail_load(self, digest: str) -> None:
        """It could not be fetched or opened; what was granted to it is free again."""
        self.in_flight = _without(self.in_flight, digest)

    def measure(self, digest: str, measured: Bytes, *, stopped: bool = False) -> list[Demand]:
        """A fragment has run and took that much. If that does not fit beside the others, or the run
        was `stopped`, it is granted less by what is missing; it goes if it cannot run in less."""
        known, share = self.resident.get(digest), self.shares.get(digest)
        if known is None:
            return []
        if measured <= known:
            if share is not None:  # it was measured beyond another grant, and is not beyond this
                granted = max(share.granted, measured)
                self.resident = {**self.resident, digest: granted}
            return []
        have = Bytes(max(0, self.budget - self.moving - self.occupied + known))
        demands: list[Demand] = []
        if stopped or measured > have + self.moving:
            if share is None or not share.slack:
                return [self._evict(digest, measured, "measured")]
            missing = (measured - have) * 5 // 4 + have // _NOISE
            less = Bytes(max(share.least, share.granted - missing))
            demands.append(self._grant(digest, less))
        # Measured while much moved: the ledger takes what there is; the next run measures again.
        self.resident = {**self.resident, digest: max(known, min(measured, have))}
        return [*demands, *self._spills(digest)]

    def grow(self, digest: str, size: Bytes, planned: Bytes) -> bool:
        """Whether pages may stay that a resident fragment has gathered: it does not need them, but
        would have to read them again. Beyond what is planned, it may have a quarter of what nobody
        else has."""
        if (resident := self.resident.get(digest)) is None:
            return False
        beyond = max(0, resident - planned)
        if size > self.spare or 4 * (beyond + size) > beyond + self.spare:
            return False
        self.resident = {**self.resident, digest: Bytes(resident + size)}
        return True

    def shrink(self, digest: str, planned: Bytes) -> None:
        """It has let them go, and is reckoned with as before."""
        if (share := self.shares.get(digest)) is not None:
            planned = max(planned, share.granted)
        if planned < self.resident.get(digest, NOTHING):
            self.resident = {**self.resident, digest: planned}

    def unload(self, digest: str) -> None:
        """The fragment has been given up and its memory is back."""
        self.resident = _without(self.resident, digest)
        self.shares = _without(self.shares, digest)
        self.delays = _without(self.delays, digest)

    def note_run(self, digest: str, seconds: float) -> None:
        """A fragment has run within what it is granted."""
        if (share := self.shares.get(digest)) is not None:
            self.delays[digest].observe(share.streamed_bytes(share.granted), seconds)

    # ---- the budget --------------------------------------------------------------------------

    def change_budget(self, budget: Bytes) -> list[Demand]:
        """There is more or less memory from now on. Fragments are evicted only where all of them
        together cannot run in it: loads in flight first, then what became resident first."""
        self.budget = budget
        if self.occupied - self._slack > budget:
            # What was measured beyond a grant says nothing of a run within much less.
            self.resident = {**self.resident, **{k: s.granted for k, s in self.shares.items()}}
        demands: list[Demand] = []
        for each in (*self.in_flight, *self.resident):
            if self.occupied - self._slack <= budget:
                break
            demands.append(self._evict(each, self._held(each), "the budget changed: would need"))
        demands += self._grant_less(self.occupied + self.moving - budget)
        return [*demands, *self._grant_more(), *self._spills()]

    def grow_itself(self, size: Bytes) -> list[Demand]:
        """The agent itself takes so much beyond its reserve: fragments have to do without it."""
        if size == self.grown:
            return []
        self.grown = size
        return self.change_budget(self.budget)

    def withhold(self, size: Bytes) -> list[Grant]:
        """Memory is short elsewhere: of what fragments can do without, none has so much. Loads and
        activations may."""
        self.withheld = size
        return [*self.lend(), *self._grant_less(size - self.free)]

    def lend(self) -> list[Grant]:
        """Nothing has been loaded or given up for now: fragments get what they were loaded for, and
        then half of what nobody has, the other half is for activations."""
        if grants := self._grant_more():
            return grants
        low = {each: share.granted - share.lent for each, share in self.shares.items()}
        high = {each: share.useful for each, share in self.shares.items()}
        loose = self.free + sum(share.lent for share in self.shares.values()) - self.withheld
        available = sum(low.values()) + max(0, loose) // 2
        return self._regrant(share_out(self.shares, self.delays, low, high, available))

    def take_back(self) -> list[Grant]:
        """An activation finds no room: what was lent is free again."""
        return self._regrant({k: s.granted - s.lent for k, s in self.shares.items()})

    def _grant_less(self, excess: int) -> list[Grant]:
        """Take so much from fragments that can do without, where it costs least; or where they can
        do without the most, if it is not known what that costs."""
        if excess <= 0:
            return []
        targets = {each: int(share.least) for each, share in self.shares.items()}
        granted = {each: int(share.granted) for each, share in self.shares.items()}
        available = sum(granted.values()) - excess
        if all(share.curve for share in self.shares.values()):
            targets = share_out(self.shares, self.delays, targets, granted, available)
        rest = available - sum(targets.values())
        for each, share in sorted(self.shares.items(), key=lambda item: item[1].slack):
            more = max(0, min(rest, share.granted - targets[each]))
            targets[each] += more
            rest -= more
        return self._regrant(targets)

    def _regrant(self, targets: Mapping[str, int]) -> list[Grant]:
        """Grant each share what is said; those that change, the largest cut first."""
        changes = {each: target - self.shares[each].granted for each, target in targets.items()}
        grants = []
        for each, change in sorted(changes.items(), key=lambda item: item[1]):
            if change:
                self.resident = {**self.resident, each: Bytes(self.resident[each] + change)}
                grants.append(self._grant(each, Bytes(targets[each])))
        return grants

    def _grant_more(self) -> list[Grant]:
        """Give back what nobody has to the fragments that were granted less than they want."""
        free, targets = self.spare, {}
        for each, share in self.shares.items():
            more = max(0, min(share.wanted - share.granted, free))
            targets[each] = share.granted + more
            free = Bytes(free - more)
        return self._regrant(targets)

    # ---- activations -------------------------------------------------------------------------

    def request_space(self, size: int) -> bool:
        """Whether an activation may stay in memory; else it goes to disk, or by another way."""
        if granted := size <= self.free:
            self.reserved = Bytes(self.reserved + size)
        return granted

    def return_space(self, size: int) -> None:
        """An activation has left memory."""
        self.reserved = Bytes(max(0, self.reserved - size))

    def request_move(self, size: int) -> bool:
        """Whether an activation may be received or sent, in memory."""
        if granted := size <= self.free:
            self.moving = Bytes(self.moving + size)
        return granted

    def end_move(self, size: int) -> None:
        """It has left memory."""
        self.moving = Bytes(max(0, self.moving - size))

    def bar(self, size: int) -> bool:
        """Whether so much is free: then it counts as moving, and nobody gets it."""
        if granted := self.request_move(size):
            self.barred = Bytes(self.barred + size)
        return granted

    def unbar(self, size: int) -> None:
        """What was barred is free again."""
        self.end_move(size)
        self.barred = Bytes(self.barred - size)

    def begin_move(self, size: int) -> None:
        """An activation that waited in memory is being sent."""
        size = min(size, self.reserved)
        self.reserved, self.moving = Bytes(self.reserved - size), Bytes(self.moving + size)

    def arrive(self, size: int) -> list[Demand]:
        """An activation that moved waits in memory now."""
        size = min(size, self.moving)
        self.reserved, self.moving = Bytes(self.reserved + size), Bytes(self.moving - size)
        return self._spills()

    def fail_spill(self, digest: str | None) -> list[Demand]:
        """What was to be spilled has no place on disk, so fragments go until it has: first that
        of the `Spill`, then loads in flight, then what became resident first."""
        reason = "the activations that need room in memory have none on disk"
        demands: list[Demand] = []
        first = [] if digest is None else [digest]
        for each in dict.fromkeys((*first, *self.in_flight, *self.resident)):
            if not self.excess:
                break
            if need := self._held(each):
                self._remove(each)
                have = self.free_for_fragments
                demands.append(Evict(digest=each, need=need, have=have, reason=reason))
        return demands

    # ---- inside ------------------------------------------------------------------------------

    @property
    def _slack(self) -> int:
        """What fragments can do without."""
        return sum(share.slack for share in self.shares.values())

    def _held(self, digest: str) -> Bytes:
        """What a fragment has, resident or in flight."""
        return self.in_flight.get(digest) or self.resident.get(digest, NOTHING)

    def _remove(self, digest: str) -> None:
        self.fail_load(digest)
        self.unload(digest)

    def _evict(self, digest: str, need: Bytes, cause: str) -> Evict:
        self._remove(digest)
        have = self.free_for_fragments
        reason = f"{cause} {self._short_of(need, have)}"
        return Evict(digest=digest, need=need, have=have, reason=reason)

    def _grant(self, digest: str, size: Bytes) -> Grant:
        self.shares = {**self.shares, digest: replace(self.shares[digest], granted=size)}
        return Grant(digest=digest, size=size)

    def _spills(self, digest: str | None = None) -> list[Demand]:
        """What of the activations has to leave memory, now that others have its room."""
        return [Spill(size=self.excess, digest=digest)] if self.excess else []

    def _short_of(self, need: Bytes, have: Bytes) -> str:
        needed, had = format_apart(need, have)
        own = (
            f", and the agent itself has grown by {format_bytes(self.grown)}" if self.grown else ""
        )
        return f"{needed}, have {had} of a budget of {format_bytes(self.budget)}{own}"


def _without(held: Mapping[str, Held], digest: str) -> Mapping[str, Held]:
    return {key: value for key, value in held.items() if key != digest}


def short(digest: str) -> str:
    """A digest as people can compare it: its first twelve digits."""
    return digest.removeprefix("sha256:")[:12]
