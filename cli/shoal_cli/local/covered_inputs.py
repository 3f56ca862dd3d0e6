"""Which of a job's inputs a cut is for: all of them, or, where there is none for the largest or it
is much slower than one for the others, as many as one is good for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.cut_search import (
    PreparationRefused,
    Suited,
    Unplaceable,
    suited_as_it_is,
    suited_to,
    weighed,
)
from shoal_cli.local.known_cuts import Base
from shoal_cli.local.sampled_inputs import rows_as_items, sampled, with_values
from shoal_coordinator.storage.inputs import InputSet, Shapes
from shoal_planner.outcome import Plan
from shoal_planner.sharing import is_at_once
from shoal_protocol.units import counted, format_upwards, listed

if TYPE_CHECKING:
    from shoal_compiler.profile import Source

_NAMED_FILES: Final = 5
_OUTGROWN: Final = "fragments for them took more than the devices have"
_AGAIN_NANOSECONDS: Final = 5 * 10**9
"""What a second cut costs: the model is cut twice, and devices start twice."""
_TRIED_NANOSECONDS: Final = 2 * 10**9
"""What it takes a device to find out that it has no room for an item."""


def suit_inputs(order: CutOrder, model: "Source", base: Base | None = None) -> Suited:
    """A cut for every input; where there is none, for as many of the smaller ones as there is one
    for, so that an item that is too large fails by itself. With a `base`, what was found then
    holds."""
    specs = model.inputs(order.shapes)
    inputs = sampled(order, specs)
    envelopes = () if inputs is None else inputs.envelopes()
    if base is not None:
        return _as_it_was(order, model, inputs, base)
    if inputs is None or not envelopes:
        if order.left_out:  # nothing depends on how large its items are: that was tried
            raise PreparationRefused(f"{order.name}: {_OUTGROWN}")
        return suited_as_it_is(order, model)
    envelopes = _not_left_out(order, envelopes)
    try:
        suited = suited_to(order, model, inputs, envelopes[-1])
    except PreparationRefused as error:
        needs = error.need_bytes is not None  # else it is no matter of how large items are
        hint = rows_as_items(specs, inputs, envelopes[-1]) if needs else ""
        return _as_many(order, model, inputs, envelopes, error, hint)
    if order.left_out:
        note = _beyond(order, inputs.beyond(envelopes[-1]), _OUTGROWN)
        return replace(suited, note=note)
    return _smaller_first(order, model, inputs, envelopes, suited)


def _as_it_was(order: CutOrder, model: "Source", inputs: InputSet | None, base: Base) -> Suited:
    profile = model.profile(base.shapes)
    if inputs is not None and inputs.envelopes():
        profile = with_values(profile, inputs)
    learned = model.profile(base.shapes, order.seen) if order.seen else profile
    choices, note = base.choices, base.note
    return Suited(model, profile, learned, base.shapes, choices, note=note, rest=base.rest)


def _as_many(
    order: CutOrder,
    model: "Source",
    inputs: InputSet,
    envelopes: tuple[Shapes, ...],
    of_all: PreparationRefused,
    hint: str,
) -> Suited:
    """A cut for as many of the smaller inputs as there is one for, where the one `of_all` is
    refused."""
    refusal = of_all
    covering: tuple[Suited, Shapes] | None = None
    low, high = 0, len(envelopes) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            covering = suited_to(order, model, inputs, envelopes[middle]), envelopes[middle]
            low = middle + 1
        except PreparationRefused as error:
            refusal, high = error, middle
    if covering is None and isinstance(refusal, Unplaceable):
        return refusal.suited  # the plan says why
    if covering is None:
        raise _of_smallest(refusal, of_all, hint)
    suited, envelope = covering
    note = _beyond(order, inputs.beyond(envelope), f"{refusal}{hint}")
    return _smaller_first(order, model, inputs, envelopes[:low], replace(suited, note=note))


def _smaller_first(
    order: CutOrder,
    model: "Source",
    inputs: InputSet,
    envelopes: tuple[Shapes, ...],
    of_most: Suited,
) -> Suited:
    """Where the cut `of_most`, for all of these, is one whose fragments take turns, or leaves no
    room for other items, and most inputs are smaller: one for as many as devices hold at once.
    Where that saves too little, the other."""
    if not order.smaller_first or order.seen or not order.is_free or len(envelopes) == 1:
        return of_most
    of_most, slow = weighed(order, of_most)
    if not isinstance(slow, Plan) or is_at_once(slow) or not _may_pay(order, inputs, slow):
        return of_most
    found: tuple[Suited, Plan, Shapes] | None = None
    low, high = 0, len(envelopes) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            suited, quick = weighed(order, suited_to(order, model, inputs, envelopes[middle]))
        except PreparationRefused:
            return of_most
        if isinstance(quick, Plan) and is_at_once(quick):
            found, low = (suited, quick, envelopes[middle]), middle + 1
        else:
            high = middle
    if found is None:
        return of_most
    suited, quick, envelope = found
    beyond = inputs.beyond(envelope)
    named = frozenset(beyond)
    larger = sum(file.items for file in inputs.files if file.name in named)
    if not _pays(order, len(inputs), larger, _gain(slow, quick)):
        return of_most
    return replace(suited, rest=True, note=_afterwards(order, beyond, slow))


def _afterwards(order: CutOrder, files: Sequence[str], slow: Plan) -> str:
    verb = "are" if len(files) > 1 else "is"
    fragments = counted(len(slow.homes()), "fragment")
    why = "while other items wait on disk" if slow.waiting else "which devices load in turn"
    return (
        f"{order.name}: {listed(files, _NAMED_FILES)} {verb} larger than this cut is for; what "
        f"does not fit runs afterwards, in another, of {fragments}, {why}"
    )


def _may_pay(order: CutOrder, inputs: InputSet, slow: Plan) -> bool:
    """Whether it is worth looking for one: it would pay if one item were larger, and the others
    took no time."""
    return _pays(order, len(inputs), 1, slow.period_nanoseconds or 0)


def _pays(order: CutOrder, items: int, larger: int, gain: int) -> bool:
    """Whether a cut without the larger items is worth having, where others come faster by so many
    nanoseconds each."""
    tried = larger * _TRIED_NANOSECONDS // max(1, len(order.devices))
    return (items - larger) * gain >= _AGAIN_NANOSECONDS + tried


def _gain(slow: Plan, quick: Plan) -> int:
    """By how many nanoseconds items come faster, as far as that is known; what takes next to
    nothing is not."""
    return (slow.period_nanoseconds or 0) - (quick.period_nanoseconds or 0)


def _of_smallest(
    refusal: PreparationRefused, of_all: PreparationRefused, hint: str
) -> PreparationRefused:
    """No inputs suit: the limit that a cut for the smallest ones keeps is not what the others
    take, so both are told."""
    need, all_need, both = refusal.need_bytes, of_all.need_bytes, ""
    if need is not None and all_need is not None and need < all_need:
        enough = f"{format_upwards(need)} are enough for its smallest inputs"
        both = f": {enough}, {format_upwards(all_need)} for all of them"
    return PreparationRefused(f"{refusal}{both}{hint}", need)


def _not_left_out(order: CutOrder, envelopes: tuple[Shapes, ...]) -> tuple[Shapes, ...]:
    """Those that the cut may cover, one at least."""
    if order.left_out and order.left_out // 2 >= len(envelopes) - 1:
        # The time before, half as many were left out: all but the smallest.
        raise PreparationRefused(f"{order.name}: {_OUTGROWN}")
    return envelopes[: max(1, len(envelopes) - order.left_out)]


def _beyond(order: CutOrder, files: Sequence[str], refusal: object) -> str:
    named = listed(files, _NAMED_FILES)
    verb, items = ("are", "their items") if len(files) > 1 else ("is", "its items")
    return (
        f"{order.name}: {named} {verb} larger than the plan covers, so {items} may fail; "
        f"the others run. With the next larger inputs it would not fit: {refusal}"
    )
