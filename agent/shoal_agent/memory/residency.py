"""The ledger of a device's memory: which fragments may be resident under a hard budget.

What counts against the budget, all above the agent's idle floor:

- *resident*: fragments that can run now, with weights, activations of one item and workspace;
- *in flight*: fragments that are being loaded, with what the plan reckons for them;
- *reserved*: activations that wait in memory (inputs of tasks to come, outputs that are kept);
- *moving*: activations that are being received or sent, results on their way among them, with the
  frames that carry them.

The invariant, after every step: **resident + in flight + reserved + moving <= budget**; and under
`single`, resident and in flight together are one fragment at most. (Where the budget shrinks below
what is moving, everything else goes, and the moving goes by itself.)

Fragments come before activations: an activation has another place to be (the disk), a fragment has
not. A load that would fit but for the reserved bytes makes room first: so many bytes of activations
are to be spilled, then it is asked for again. What moves cannot be spilled, but ends soon: a load
that would fit but for that is postponed.

The ledger holds what is so, not what is hoped for: spilled bytes are subtracted when they are on
disk (`SpaceReturned`). Where something that has happened leaves too little room for what waits in
memory, the step says what to spill (`Spill`), and the invariant holds again when that is done; if
it cannot be done (`SpillFailed`), fragments go instead. Other steps may come before that: nothing
is granted meanwhile.

An estimate is corrected upwards only. A fragment that was measured below its estimate keeps it: the
estimate is for the largest item of the plan, the measurement for the items seen so far.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from shoal_protocol.units import Bytes, format_bytes

NOTHING: Final = Bytes(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What is promised and to whom. `resident` is in the order in which fragments became that."""

    budget: Bytes
    single: bool = False
    resident: Mapping[str, Bytes] = field(default_factory=dict)
    in_flight: Mapping[str, Bytes] = field(default_factory=dict)
    reserved: Bytes = NOTHING
    moving: Bytes = NOTHING

    @property
    def fragments(self) -> Bytes:
        """Bytes of fragments, resident and in flight."""
        return Bytes(sum(self.resident.values()) + sum(self.in_flight.values()))

    @property
    def free_for_fragments(self) -> Bytes:
        """What another fragment could get now, once all that waits is spilled; never below zero."""
        return Bytes(max(0, self.budget - self.fragments - self.moving))

    @property
    def free(self) -> Bytes:
        """What nobody has; never below zero."""
        return Bytes(max(0, self.free_for_fragments - self.reserved))

    @property
    def excess(self) -> Bytes:
        """What of the reserved bytes has to leave memory for the invariant to hold."""
        wanted = self.fragments + self.moving + self.reserved
        return Bytes(min(self.reserved, max(0, wanted - self.budget)))


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequested:
    """A fragment is to become resident; `need` is what the plan reckons with."""

    digest: str
    need: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFinished:
    """The fragment can run now."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed:
    """It could not be fetched or opened; what was granted to it is free again."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A resident fragment has run and took that much."""

    digest: str
    measured: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRequested:
    """A resident fragment has gathered pages that it does not need, but would have to read again:
    may they stay? Beyond what is planned, it may have a quarter of what nobody else has."""

    digest: str
    size: Bytes
    planned: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """It has let them go, and is reckoned with as before."""

    digest: str
    resident: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloaded:
    """The fragment has been given up and its memory is back."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRequested:
    """An activation wants to stay in memory."""

    size: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceReturned:
    """An activation has left memory."""

    size: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested:
    """An activation is to be received or sent, in memory."""

    size: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnded:
    """It has left memory."""

    size: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveBegun:
    """An activation that waited in memory is being sent."""

    size: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """An activation that moved waits in memory now."""

    size: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillFailed:
    """What was to be spilled has no place on disk; `digest` as the `Spill` had it."""

    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChanged:
    """The device may use more or less from now on."""

    budget: Bytes


Event = (
    LoadRequested
    | LoadFinished
    | LoadFailed
    | Measured
    | GrowthRequested
    | Shrunk
    | Unloaded
    | SpaceRequested
    | SpaceReturned
    | MoveRequested
    | MoveEnded
    | MoveBegun
    | Arrived
    | SpillFailed
    | BudgetChanged
)


# ---- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Load it; the bytes are its own from now on."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyThere:
    """It is resident, or on the way; nothing is to be done."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """It does not fit."""

    digest: str
    need: Bytes
    have: Bytes
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Postpone:
    """It fits as soon as what moves has ended: ask again then."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeRoom:
    """It fits as soon as that many bytes of activations are on disk: spill them, then ask again."""

    digest: str
    size: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """Bring at least that many bytes of activations to disk; `digest` is the fragment that needs
    their room, None: no single one does."""

    size: Bytes
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Unload a fragment, or give up loading it: it has no place in the ledger any more."""

    digest: str
    need: Bytes
    have: Bytes
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The activation may stay in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deny:
    """There is no room in memory: the activation goes to disk, or by another way."""


Effect = Admit | AlreadyThere | Refuse | Postpone | MakeRoom | Spill | Evict | Grant | Deny
_GRANTED: Final = (Grant(),)


def step(  # noqa: C901, PLR0911, PLR0912 - one case per event
    ledger: Ledger, event: Event
) -> tuple[Ledger, tuple[Effect, ...]]:
    """What an event changes, and what the shell has to do about it."""
    match event:
        case LoadRequested():
            return _request(ledger, event)
        case LoadFinished(digest=digest):
            if digest in ledger.resident:
                return ledger, ()
            if digest not in ledger.in_flight:  # its place went with a smaller budget
                return ledger, (_homeless(ledger, digest),)
            resident = {**ledger.resident, digest: ledger.in_flight[digest]}
            in_flight = _without(ledger.in_flight, digest)
            return replace(ledger, resident=resident, in_flight=in_flight), ()
        case LoadFailed(digest=digest):
            return replace(ledger, in_flight=_without(ledger.in_flight, digest)), ()
        case Measured(digest=digest, measured=measured):
            if measured <= ledger.resident.get(digest, measured):
                return ledger, ()
            resident = {**ledger.resident, digest: measured}
            return _settle(replace(ledger, resident=resident), digest)
        case GrowthRequested():
            return _grow(ledger, event)
        case Shrunk(digest=digest, resident=size):
            if size >= ledger.resident.get(digest, size):
                return ledger, ()
            return replace(ledger, resident={**ledger.resident, digest: size}), ()
        case Unloaded(digest=digest):
            return replace(ledger, resident=_without(ledger.resident, digest)), ()
        case SpaceRequested(size=size):
            if size > ledger.free:
                return ledger, (Deny(),)
            return _with_amounts(ledger, ledger.reserved + size, ledger.moving), _GRANTED
        case SpaceReturned(size=size):
            return _with_amounts(ledger, max(0, ledger.reserved - size), ledger.moving), ()
        case MoveRequested(size=size):
            if size > ledger.free:
                return ledger, (Deny(),)
            return _with_amounts(ledger, ledger.reserved, ledger.moving + size), _GRANTED
        case MoveEnded(size=size):
            return _with_amounts(ledger, ledger.reserved, max(0, ledger.moving - size)), ()
        case MoveBegun(size=size):
            return _shift(ledger, -min(size, ledger.reserved)), ()
        case Arrived(size=size):
            ledger = _shift(ledger, min(size, ledger.moving))
            return ledger, _spills(ledger)
        case SpillFailed(digest=digest):
            reason = "the activations that need room in memory have none on disk"
            first = () if digest is None else (digest,)
            return _give_up(ledger, first, ledger.reserved, reason)
        case BudgetChanged(budget=budget):
            return _resize(replace(ledger, budget=budget))
    assert_never(event)


def _request(ledger: Ledger, event: LoadRequested) -> tuple[Ledger, tuple[Effect, ...]]:
    digest, need = event.digest, event.need
    if digest in ledger.resident or digest in ledger.in_flight:
        return ledger, (AlreadyThere(digest=digest),)
    held = [*ledger.resident, *ledger.in_flight]
    if ledger.single and held:
        other = held[0]
        reason = f"residency is Single and {short(other)} is resident: unload it first"
        return ledger, (Refuse(digest=digest, need=need, have=Bytes(0), reason=reason),)
    have = Bytes(ledger.free_for_fragments + ledger.moving)
    if ledger.free_for_fragments < need <= have:
        return ledger, (Postpone(digest=digest),)
    if need > have:
        reason = f"would need {format_bytes(need)}, have {format_bytes(have)} of a budget of "
        reason += format_bytes(ledger.budget)
        return ledger, (Refuse(digest=digest, need=need, have=have, reason=reason),)
    if (excess := need - ledger.free_for_fragments + ledger.reserved) > 0 and ledger.reserved:
        return ledger, (MakeRoom(digest=digest, size=Bytes(excess)),)
    ledger = replace(ledger, in_flight={**ledger.in_flight, digest: need})
    return ledger, (Admit(digest=digest),)


def _grow(ledger: Ledger, event: GrowthRequested) -> tuple[Ledger, tuple[Effect, ...]]:
    resident = ledger.resident.get(event.digest)
    if resident is None:
        return ledger, (Deny(),)
    beyond = max(0, resident - event.planned)
    if event.size > ledger.free or 4 * (beyond + event.size) > beyond + ledger.free:
        return ledger, (Deny(),)
    grown = {**ledger.resident, event.digest: Bytes(resident + event.size)}
    return replace(ledger, resident=grown), _GRANTED


def _settle(ledger: Ledger, digest: str) -> tuple[Ledger, tuple[Effect, ...]]:
    """After a fragment was reckoned anew: it goes if it does not fit beside the others."""
    need = ledger.resident[digest]
    others = replace(ledger, resident=_without(ledger.resident, digest))
    have = others.free_for_fragments
    if have < need <= have + ledger.moving:
        # Measured while much moved: the ledger takes what there is, and the shell measures again.
        ledger = replace(ledger, resident={**ledger.resident, digest: have})
        return ledger, _spills(ledger, digest)
    if need > have:
        reason = f"measured {format_bytes(need)}, have {format_bytes(have)} of a budget of "
        reason += format_bytes(ledger.budget)
        return others, (Evict(digest=digest, need=need, have=have, reason=reason),)
    return ledger, _spills(ledger, digest)


def _resize(ledger: Ledger) -> tuple[Ledger, tuple[Effect, ...]]:
    """Under a smaller budget fragments go, until what moves has room beside the others."""
    reason = f"the budget is {format_bytes(ledger.budget)} now"
    ledger, effects = _give_up(ledger, (), NOTHING, reason)
    return ledger, (*effects, *_spills(ledger))


def _give_up(
    ledger: Ledger, first: tuple[str, ...], beside: Bytes, reason: str
) -> tuple[Ledger, tuple[Effect, ...]]:
    """Evict until what stays has room with `beside` bytes of activations: `first`, then loads in
    flight, then what became resident first."""
    effects: list[Effect] = []
    for digest in dict.fromkeys((*first, *ledger.in_flight, *ledger.resident)):
        if ledger.fragments + ledger.moving + beside <= ledger.budget:
            break
        need = ledger.in_flight.get(digest) or ledger.resident.get(digest)
        if need is None:
            continue
        ledger = replace(
            ledger,
            in_flight=_without(ledger.in_flight, digest),
            resident=_without(ledger.resident, digest),
        )
        have = ledger.free_for_fragments
        effects.append(Evict(digest=digest, need=need, have=have, reason=reason))
    return ledger, tuple(effects)


def _spills(ledger: Ledger, digest: str | None = None) -> tuple[Spill, ...]:
    """What of the activations has to leave memory, now that others have its room."""
    excess = ledger.excess
    return (Spill(size=excess, digest=digest),) if excess else ()


def _with_amounts(ledger: Ledger, reserved: int, moving: int) -> Ledger:
    """What activations take has changed: the most frequent of all changes, ten for a task."""
    return Ledger(
        budget=ledger.budget,
        single=ledger.single,
        resident=ledger.resident,
        in_flight=ledger.in_flight,
        reserved=Bytes(reserved),
        moving=Bytes(moving),
    )


def _shift(ledger: Ledger, size: int) -> Ledger:
    """Bytes that moved wait from now on; below zero: the other way."""
    return _with_amounts(ledger, ledger.reserved + size, ledger.moving - size)


def _homeless(ledger: Ledger, digest: str) -> Evict:
    have = ledger.free_for_fragments
    reason = "the budget shrank while it was loaded"
    return Evict(digest=digest, need=Bytes(0), have=have, reason=reason)


def _without(held: Mapping[str, Bytes], digest: str) -> Mapping[str, Bytes]:
    return {key: value for key, value in held.items() if key != digest}


def short(digest: str) -> str:
    """A digest as people can compare it: its first twelve digits."""
    return digest.removeprefix("sha256:")[:12]
