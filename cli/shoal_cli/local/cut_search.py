"""Where a model is cut: for its devices, for its inputs, and where fragments took too much."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final

from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.known_cuts import Base
from shoal_cli.local.sampled_inputs import with_values
from shoal_cli.local.steps import Json
from shoal_coordinator.storage.inputs import (
    InputSet,
    Shapes,
)
from shoal_planner.advice import largest
from shoal_planner.cut_tables import table_of
from shoal_planner.cuts import CutRequest, Frames, Refusal, choose_cuts
from shoal_planner.devices import PoolDevice
from shoal_planner.few_fragments import cut_for_budgets, cut_within, many_in_words
from shoal_planner.finer_cuts import divide
from shoal_planner.least_limit import least_needs
from shoal_planner.outcome import Infeasible, Plan
from shoal_planner.placement import plan_without_alternatives
from shoal_planner.planned_cuts import choose_cut, cut_order, rejected_cut
from shoal_planner.profile import Profile
from shoal_planner.segments import Layout
from shoal_planner.sharing import is_at_once

if TYPE_CHECKING:
    from shoal_compiler.cutting import Cut
    from shoal_compiler.profile import Source

_NAMED_FILES: Final = 5
_LARGE_TRIED: Final = 2
"""Parts of so many sizes are tried in blocks, the largest that may fit: smaller ones seldom help,
and take seconds each."""
_SMALL_SHARE: Final = 1 / 16
"""Of what a cut needs: so much less is not worth smaller parts."""
_OUTGROWN: Final = "fragments for them took more than the devices have"


class PreparationRefused(Exception):
    """The model cannot be cut as asked; the text says why and what would do. `need_bytes`: the
    smallest limit that some cut keeps, where a limit is too low."""

    def __init__(self, reason: str, need_bytes: int | None = None) -> None:
        super().__init__(reason)
        self.need_bytes = need_bytes


@dataclass(frozen=True, slots=True)
class Suited:
    """A model that is to be cut, its profile for the `shapes` of the inputs, and where it may be
    cut. The `best` of these cuts, and the others, where that is known already. `learned` is the
    profile with the sizes that items were seen to have besides: what is sought in it holds for
    these items, and is promised for none. `rest`: inputs beyond the shapes are run afterwards, in
    another cut."""

    model: "Source"
    profile: Profile
    learned: Profile
    shapes: Shapes
    choices: Sequence[tuple[int, ...]]
    note: str = ""
    rest: bool = False
    best: tuple["Cut", list[Json]] | None = None


class Unplaceable(PreparationRefused):
    """The cut that was asked for is on no device."""

    def __init__(self, reason: str, need_bytes: int | None, suited: Suited) -> None:
        super().__init__(reason, need_bytes)
        self.suited = suited


def _suit(
    order: CutOrder, model: "Source", profile: Profile, shapes: Shapes, *, waiting: bool
) -> Suited:
    """Where to cut; `waiting`: with no room for other items. Raises `PreparationRefused`."""
    choices, learned = _choices(order, profile, waiting=waiting), profile
    if order.seen:
        learned = model.profile(shapes, order.seen)
        choices = [_as_seen(order, learned)]
    return Suited(model, profile, learned, shapes, choices)


def _as_seen(order: CutOrder, learned: Profile) -> tuple[int, ...]:
    """Where to cut for sizes that items were seen to have. What no cut parts may be over the limit
    by estimate: devices measure what it takes."""
    try:
        return _as_asked(order, learned)
    except PreparationRefused:
        limit = order.max_bytes or max((each.budget_bytes for each in order.devices), default=None)
        request = CutRequest(max_bytes=limit, frames=Frames.NONE, nearest=True)
        nearest = None if limit is None else choose_cuts(learned, request)
        if nearest is None or isinstance(nearest, Refusal):
            raise
        return nearest


def _choices(order: CutOrder, profile: Profile, *, waiting: bool) -> list[tuple[int, ...]]:
    """Where to cut. Left to us: as few fragments as fit every device, else as fit the largest.

    If those are more than there are devices, some device holds several, in blocks or in turn. Then
    there is a choice: it may do better with one larger fragment in blocks.
    """
    fine = _as_asked(order, profile, waiting=waiting)
    if not order.is_free or len(fine) < len(order.devices):
        return [fine]
    return [*_coarse(order, profile), fine]


def _coarse(order: CutOrder, profile: Profile) -> list[tuple[int, ...]]:
    """A fragment for each device, if there are so many."""
    cuts = choose_cuts(profile, CutRequest(fragments=len(order.devices)))
    return [] if isinstance(cuts, Refusal) else [cuts]


def _may_be_large(order: CutOrder, profile: Profile) -> bool:
    """Whether devices could hold each node in blocks, as far as is known without a cut."""
    most = max((device.budget_bytes for device in order.devices), default=0)
    layout = Layout(profile, row_items=1, gathered=True)
    return order.is_free and max(least_needs(layout), default=0) <= most


def _large(order: CutOrder, model: "Source", profile: Profile, shapes: Shapes) -> Suited | None:
    """Fragments that no device holds whole, where the devices can hold them in blocks: what reads a
    table, or works out its weights, may take less so than any finer cut. None: they cannot."""
    choices = list(dict.fromkeys([(), *_coarse(order, profile)]))
    suited = Suited(model, profile, profile, shapes, choices)
    cut, rejected, found = _best_on(order.devices, order, suited)
    found = found or _plan(cut, order.devices, order)
    return None if isinstance(found, Infeasible) else replace(suited, best=(cut, rejected))


def find_cut(order: CutOrder, suited: Suited, base: Base | None = None) -> tuple["Cut", Base]:
    """The best cut, divided as is ordered; and what it was before, unless that is known."""
    if base is not None:
        return _divided(order, suited, base.positions), base
    cut, rejected = suited.best or _best(order, suited)
    base = Base(
        slicing=suited.model.slicing,
        shapes=suited.shapes,
        choices=suited.choices,
        positions=cut.positions,
        rejected=rejected,
        note=suited.note,
        rest=suited.rest,
    )
    return _divided(order, suited, cut.positions) if order.outgrown else cut, base


def _best(order: CutOrder, suited: Suited) -> tuple["Cut", list[Json]]:
    """The cut whose plan costs the least, the planned one only if it is better than the others;
    what its fragments need in blocks, cutting shows. Then the others, as `Rejected`. Beside other
    models that is the best cut for what they leave, where it can be held at once in that."""
    if order.beside:
        cut, rejected, found = _best_on(order.beside, order, suited)
        if is_at_once(found or _plan(cut, order.beside, order)):
            return cut, rejected
    cut, rejected, _ = _best_on(order.devices, order, suited)
    return cut, rejected


def _divided(order: CutOrder, suited: Suited, positions: tuple[int, ...]) -> "Cut":
    """A cut, of which those fragments are divided that took more than a device has."""
    from shoal_compiler.cutting import Cut  # noqa: PLC0415 - needs onnx

    found = divide(suited.learned, positions, order.outgrown)
    if isinstance(found, Refusal):
        raise PreparationRefused(f"{order.name}: {found.reason}")
    return Cut(suited.model, suited.profile, found, suited.learned)


def _best_on(
    pool: Sequence[PoolDevice], order: CutOrder, suited: Suited
) -> tuple["Cut", list[Json], Plan | Infeasible | None]:
    """With the plan of the best cut, where there was a choice."""
    from shoal_compiler.cutting import Cut  # noqa: PLC0415 - needs onnx

    choices = dict.fromkeys([*suited.choices, *_planned(order, pool, suited.profile)])
    cuts = [Cut(suited.model, suited.profile, each, suited.learned) for each in choices]
    if len(cuts) == 1:
        return cuts[0], [], None
    plans = [_plan(each, pool, order) for each in cuts]
    best = min(range(len(cuts)), key=lambda place: cut_order(plans[place], order.goal))
    rejected: list[Json] = [
        asdict(rejected_cut(len(cut.document.fragments), lost, plans[best]))
        for place, (cut, lost) in enumerate(zip(cuts, plans, strict=True))
        if place != best
    ]
    return cuts[best], rejected, plans[best]


def _plan(cut: "Cut", pool: Sequence[PoolDevice], order: CutOrder) -> Plan | Infeasible:
    return plan_without_alternatives(cut.document, pool, order.goal)


def is_planned(order: CutOrder) -> bool:
    """Whether cuts and devices are chosen together: one device has all fragments anyway, and plans
    know nothing of sizes that were seen."""
    return order.planned and len(order.devices) > 1 and not order.seen


def _planned(
    order: CutOrder, pool: Sequence[PoolDevice], profile: Profile
) -> Iterator[tuple[int, ...]]:
    """The cut that was chosen together with the devices, where that was asked for."""
    if not is_planned(order):
        return
    found = choose_cut(table_of(profile), pool, order.goal)
    if found is None:
        return
    cuts = choose_cuts(profile, CutRequest(tensors=found.tensors)) if found.tensors else ()
    if not isinstance(cuts, Refusal):
        yield cuts


def _as_asked(order: CutOrder, profile: Profile, *, waiting: bool = False) -> tuple[int, ...]:
    todo = ""
    if order.tensors:
        cuts = choose_cuts(profile, CutRequest(tensors=order.tensors))
    elif order.fragments is not None:
        request = CutRequest(fragments=order.fragments, max_bytes=order.max_bytes)
        cuts = choose_cuts(profile, request)
    elif order.max_bytes is not None:
        cuts = cut_within(profile, order.max_bytes, waiting=waiting)
    else:
        budgets = [device.budget_bytes for device in order.devices]
        one = len(order.devices) == 1
        cuts = cut_for_budgets(profile, budgets, one_device=one, waiting=waiting)
        todo = "; raise the budget"
    if isinstance(cuts, Refusal):
        raise PreparationRefused(f"{order.name}: {cuts.reason}{todo}", cuts.need_bytes)
    return cuts


def many_fragments(order: CutOrder, suited: Suited, fragments: int) -> str:
    """A note where the budgets take many fragments; else empty."""
    if order.tensors or order.fragments or order.max_bytes:
        return ""
    one_device = len(order.devices) == 1
    said = many_in_words(suited.profile, fragments, one_device=one_device)
    return said and f"{order.name}: {said}"


def suited_as_it_is(order: CutOrder, model: "Source") -> Suited:
    """A cut where inputs leave nothing open; one that is on no device where none is: the plan says
    why."""

    def profiled(sliced: "Source") -> Profile:
        return sliced.profile(order.shapes)

    def suit(sliced: "Source", own: Profile, waiting: bool) -> Suited:
        suited = _suit(order, sliced, own, order.shapes, waiting=waiting)
        return _placeable(order, suited)

    try:
        return _in_parts(order, model, order.shapes, profiled, suit)
    except Unplaceable as refusal:
        return refusal.suited


def suited_to(order: CutOrder, model: "Source", inputs: InputSet, envelope: Shapes) -> Suited:
    """A cut for inputs of at most these shapes."""
    shapes = {**envelope, **order.shapes}

    def profiled(sliced: "Source") -> Profile:
        return with_values(sliced.profile(shapes), inputs)

    def suit(sliced: "Source", profile: Profile, waiting: bool) -> Suited:
        suited = _suit(order, sliced, profile, shapes, waiting=waiting)
        return _placeable(order, suited)

    return _in_parts(order, model.fitted(shapes, order.seen), shapes, profiled, suit)


def _in_parts(
    order: CutOrder,
    model: "Source",
    shapes: Shapes,
    profiled: Callable[["Source"], Profile],
    suit: Callable[["Source", Profile, bool], Suited],
) -> Suited:
    """What suits, with the largest layers in as many parts as that takes; else in blocks alone.
    Where that is loaded in turn, or there is none, the better of it and of what suits with other
    items `waiting`. What refuses all is the reason that needs the least."""
    tried: list[tuple[Source, Profile]] = []
    refusals: list[PreparationRefused] = []
    found: list[Suited] = []
    for sliced in _as_fine(order, model, shapes) if order.seen else model.slicings():
        tried.append((sliced, profiled(sliced)))
        try:
            found.append(suit(*tried[-1], False))
            break
        except PreparationRefused as error:
            refusals.insert(0, error)
    if not found:
        large = (each for each in tried if not order.seen and _may_be_large(order, each[1]))
        for sliced, profile in islice(large, _LARGE_TRIED):
            if (suited := _large(order, sliced, profile, shapes)) is not None:
                found.append(suited)
                break
    if found and _is_enough(order, found[0]):
        return found[0]
    for each in tried:
        try:
            found.append(suit(*each, True))
            break
        except PreparationRefused as error:
            refusals.insert(0, error)
    if found:
        return _best_of(order, found)
    need = refusals[0].need_bytes
    raise refusals[0] if need is None else min(refusals, key=lambda each: each.need_bytes or inf)


def _best_of(order: CutOrder, found: Sequence[Suited]) -> Suited:
    """To weigh one that is alone would be to cut it once more."""
    if len(found) == 1:
        return found[0]
    plans = [weighed(order, each) for each in found]
    return min(plans, key=lambda each: cut_order(each[1], order.goal))[0]


def weighed(order: CutOrder, suited: Suited) -> tuple[Suited, Plan | Infeasible]:
    """The same with its best cut, and the plan of that."""
    cut, rejected = suited.best or _best(order, suited)
    return replace(suited, best=(cut, rejected)), _plan(cut, order.devices, order)


def _is_enough(order: CutOrder, suited: Suited) -> bool:
    """Whether nothing better need be looked for: it was asked for, or devices hold all of it at
    once, with room for other items, for which few fragments need no plan."""
    return not order.is_free or suited.best is None or is_at_once(weighed(order, suited)[1])


def _as_fine(order: CutOrder, model: "Source", shapes: Shapes) -> "list[Source]":
    """The model in as small parts as sizes that were seen ask for, by what the finest cut needs: a
    search in each would take long, and end with the nearest cut where none keeps the limit. Then
    smaller parts are taken only where they need much less."""
    limit = order.max_bytes or max((each.budget_bytes for each in order.devices), default=inf)
    tried: list[tuple[int, Source]] = []
    for sliced in model.slicings():
        layout = Layout(sliced.profile(shapes, order.seen), moving=True)
        tried.append((max(layout.finest_needs), sliced))
        if tried[-1][0] <= limit:
            return [sliced]
    enough = min(need for need, _ in tried) * (1 + _SMALL_SHARE)
    return [next(sliced for need, sliced in tried if need <= enough)]


def _placeable(order: CutOrder, suited: Suited) -> Suited:
    """The same, with the best cut where it takes a plan to say that the devices can hold it. Raises
    `Unplaceable`."""
    most = max((device.budget_bytes for device in order.devices), default=None)
    if most is None:
        return suited
    if len(suited.choices) == 1 and largest(suited.profile, suited.choices[0]) <= most:
        return suited
    suited, found = weighed(order, suited)
    if isinstance(found, Infeasible):
        text = found.message(order.name, "raise the budget")
        raise Unplaceable(text, found.need_bytes or None, suited)
    return suited
