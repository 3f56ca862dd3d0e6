"""From a model's file to a partition in the store: check, profile, cut. A step (see `steps`).

The fragments of an order are reused when the order, the model's bytes and the cuts to choose
from are those of last time (`source.json` beside `partition.json`). Where nothing at all has
changed, no process is started to find that out (`known_cuts`).
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.known_cuts import VERSION, find_known, inputs_at, remember
from shoal_cli.local.steps import Json, Progress, run_step, serve
from shoal_compiler.errors import ModelRefused
from shoal_coordinator.storage.inputs import (
    InputSet,
    InputsRefused,
    InputUnsuitable,
    Shapes,
    scan_inputs,
)
from shoal_planner.advice import advise, in_words, largest
from shoal_planner.cut_tables import table_of
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts, comfortable
from shoal_planner.devices import PoolDevice
from shoal_planner.finer_cuts import divide
from shoal_planner.goal import Goal
from shoal_planner.outcome import Infeasible, Plan, Rejected
from shoal_planner.placement import plan
from shoal_planner.planned_cuts import choose_cut, cut_order, rejected_cut
from shoal_planner.profile import Profile
from shoal_planner.sharing import is_at_once
from shoal_protocol.choices import Objective
from shoal_protocol.durable_files import replace_file
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import (
    Outgrown,
    PartitionDocument,
    TensorSpec,
    document_from_json,
    document_to_json,
)
from shoal_protocol.threads import in_thread

if TYPE_CHECKING:
    from shoal_compiler.cutting import Cut
    from shoal_compiler.profile import Source

_MODULE: Final = "shoal_cli.local.preparation"
_NAMED_FILES: Final = 5
_FEW: Final = 64


class PreparationRefused(Exception):
    """The model cannot be cut as asked; the text says why and what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A partition in the store, whose `partition.json` is `path`. `advice`: what to do where a
    fragment is larger than every budget. `note`: which inputs are larger than it was cut for.
    `files`: the model's, with their digests. `rejected`: other cuts that were weighed. `order` is
    how it was cut."""

    order: CutOrder
    document: PartitionDocument
    path: Path
    advice: str
    note: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()


async def prepare(
    order: CutOrder, store: Path, on_progress: Progress, *, fragments: bool = True
) -> Prepared:
    """Cut a model in a process of its own, unless its fragments are known; without `fragments` only
    `partition.json` is written. Raises `StepRefused` or `StepCrashed`."""
    path = partition_path(store, order.name)
    result: Json | None = await in_thread(find_known, path, order, FragmentStore(store))
    if result is None:
        request = {**dataclasses.asdict(order), "store": store, "keep": fragments}
        result = await run_step("cutting", _MODULE, request, on_progress)
    document = document_from_json(path.read_bytes())
    told = {name: result[name] for name in ("advice", "note", "files")}
    rejected = tuple(Rejected(**each) for each in result["rejected"])
    return Prepared(order=order, document=document, path=path, rejected=rejected, **told)


def partition_path(store: Path, name: str) -> Path:
    return store / "partitions" / name / "partition.json"


def check_model(order: CutOrder) -> None:
    """Raise `PreparationRefused` where there is no file to be cut."""
    if order.path.is_dir():
        raise PreparationRefused(f"Model {order.model}: {order.path} is a folder, not a file")
    if not order.path.is_file():
        raise PreparationRefused(f"Model {order.model}: there is no file {order.path}")


def _work(request: Json, on_progress: Progress) -> Json:
    values = dict(request)
    store, keep = Path(values.pop("store")), values.pop("keep")
    order = _order_from_json(values)
    try:
        return cut_into_store(order, store, on_progress, fragments=keep)
    except OSError as error:
        if error.filename is None:
            raise
        raise PreparationRefused(
            f"{order.name} cannot be cut into {store}: {error.filename}: {error.strerror}"
        ) from error


def _order_from_json(values: Json) -> CutOrder:
    made = {
        "path": Path(values["path"]),
        "sample": None if values["sample"] is None else Path(values["sample"]),
        "shapes": {name: tuple(shape) for name, shape in values["shapes"].items()},
        "tensors": tuple(values["tensors"]),
        "devices": tuple(PoolDevice.from_json(device) for device in values["devices"]),
        "beside": tuple(PoolDevice.from_json(device) for device in values["beside"]),
        "objective": Objective(values["objective"]),
        "outgrown": tuple(Outgrown(**each) for each in values["outgrown"]),
    }
    return CutOrder(**{**values, **made})


def cut_into_store(
    order: CutOrder, store: Path, on_progress: Progress, *, fragments: bool = True
) -> Json:
    """Do what is ordered; whether that was done before, and `Prepared`'s other values."""
    from shoal_compiler.profile import Source  # noqa: PLC0415 - needs onnx

    inputs = None if order.sample is None else inputs_at(order.sample)  # before they are read

    check_model(order)
    model = Source.open(order.path)
    profile = model.profile(order.shapes)
    if order.digest is not None and order.digest != profile.digest:
        raise PreparationRefused(
            f"Model {order.model}: {order.path} is {profile.digest}, not {order.digest} as "
            "spec.source.digest says; it was changed, or is another file"
        )
    suited = _suit_inputs(order, model, profile)
    profile, choices = suited.profile, suited.choices
    path = partition_path(store, order.name)
    source: dict[str, object] = {"model": profile.digest, "cuts": choices, "shapes": suited.shapes}
    source |= {"version": VERSION, "outgrown": list(map(dataclasses.asdict, order.outgrown))}
    if len(choices) > 1 or _is_planned(order):
        source |= {"devices": list(map(dataclasses.asdict, order.devices))}
        source |= {"beside": list(map(dataclasses.asdict, order.beside))}
        source |= {"objective": order.objective, "planned": _is_planned(order)}
    answer: dict[str, object] = {
        "advice": _advice(order, profile, choices[-1]),
        "note": suited.note,
        "files": {str(path): digest for path, digest in model.files.items()},
    }
    lost = path.with_name("rejected.json")
    warm = _is_current(path, FragmentStore(store), source)
    if warm:
        answer["rejected"] = json.loads(lost.read_bytes()) if lost.is_file() else []
    else:
        cut, rejected = _best(order, model, suited)
        if order.outgrown:
            cut = _divided(order, model, profile, cut)
        if fragments:
            cut.write(store, on_progress)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, document_to_json(cut.document).encode())
        replace_file(lost, json.dumps(rejected).encode())
        replace_file(path.with_name("source.json"), json.dumps(source).encode())
        answer["rejected"] = rejected
    remember(path, order, inputs if _depends_on_inputs(order, profile) else None, answer)
    return {"warm": warm, **answer}


def _choices(order: CutOrder, profile: Profile) -> list[tuple[int, ...]]:
    """Where to cut. Left to us: as few fragments as fit every device, else as fit the largest.

    If those are more than there are devices, some device holds several, in blocks or in turn. Then
    there is a choice: it may do better with one larger fragment in blocks.
    """
    fine = _as_asked(order, profile)
    free = not (order.tensors or order.fragments or order.max_bytes or order.pinned)
    if not free or len(fine) < len(order.devices):
        return [fine]
    coarse = choose_cuts(profile, CutRequest(fragments=len(order.devices)))
    return [fine] if isinstance(coarse, Refusal) else [coarse, fine]


def _best(order: CutOrder, model: "Source", suited: "_Suited") -> tuple["Cut", list[Json]]:
    """The cut whose plan costs the least, the planned one only if it is better than the others;
    what its fragments need in blocks, cutting shows. Then the others, as `Rejected`. Beside other
    models that is the best cut for what they leave, where it can be held at once in that."""
    if order.beside:
        cut, rejected, found = _best_on(order.beside, order, model, suited)
        if is_at_once(found or plan(cut.document, order.beside, order.objective)):
            return cut, rejected
    cut, rejected, _ = _best_on(order.devices, order, model, suited)
    return cut, rejected


def _divided(order: CutOrder, model: "Source", profile: Profile, cut: "Cut") -> "Cut":
    """The cut, of which those fragments are divided that took more than a device has."""
    from shoal_compiler.cutting import Cut  # noqa: PLC0415 - needs onnx

    positions = divide(profile, cut.positions, order.outgrown)
    if isinstance(positions, Refusal):
        raise PreparationRefused(f"{order.name}: {positions.reason}")
    return Cut(model, profile, positions)


def _best_on(
    pool: Sequence[PoolDevice], order: CutOrder, model: "Source", suited: "_Suited"
) -> tuple["Cut", list[Json], Plan | Infeasible | None]:
    """With the plan of the best cut, where there was a choice."""
    from shoal_compiler.cutting import Cut  # noqa: PLC0415 - needs onnx

    choices = dict.fromkeys([*suited.choices, *_planned(order, pool, suited.profile)])
    cuts = [Cut(model, suited.profile, each) for each in choices]
    if len(cuts) == 1:
        return cuts[0], [], None
    plans = [plan(each.document, pool, order.objective) for each in cuts]
    best = min(range(len(cuts)), key=lambda place: cut_order(plans[place], order.objective))
    rejected: list[Json] = [
        dataclasses.asdict(rejected_cut(len(cut.document.fragments), lost, plans[best]))
        for place, (cut, lost) in enumerate(zip(cuts, plans, strict=True))
        if place != best
    ]
    return cuts[best], rejected, plans[best]


def _is_planned(order: CutOrder) -> bool:
    """Whether cuts and devices are chosen together: one device has all fragments anyway."""
    return order.planned and len(order.devices) > 1


def _planned(
    order: CutOrder, pool: Sequence[PoolDevice], profile: Profile
) -> Iterator[tuple[int, ...]]:
    """The cut that was chosen together with the devices, where that was asked for."""
    if not _is_planned(order):
        return
    found = choose_cut(table_of(profile), pool, Goal(order.objective))
    if found is None:
        return
    cuts = choose_cuts(profile, CutRequest(tensors=found.tensors)) if found.tensors else ()
    if not isinstance(cuts, Refusal):
        yield cuts


def _as_asked(order: CutOrder, profile: Profile) -> tuple[int, ...]:
    todo = ""
    if order.tensors:
        requests = [CutRequest(tensors=order.tensors)]
    elif order.fragments is not None or order.max_bytes is not None:
        requests = [CutRequest(fragments=order.fragments, max_bytes=order.max_bytes)]
    else:
        budgets = sorted({device.budget_bytes for device in order.devices})
        one = len(order.devices) == 1
        limits = [limit for size in budgets for limit in (comfortable(size), size)]
        requests = [CutRequest(max_bytes=size, one_device=one) for size in limits]
        todo = "; raise the budget"
    while requests:
        request = requests.pop(0)
        cuts = choose_cuts(profile, request)
        if not isinstance(cuts, Refusal):
            return cuts
        refused = cuts
    raise PreparationRefused(f"{order.name}: {refused.reason}{todo}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suited:
    """What is cut: a profile for the `shapes` of the inputs, and where it may be cut."""

    profile: Profile
    shapes: Shapes
    choices: Sequence[tuple[int, ...]]
    note: str = ""


class _Unplaceable(PreparationRefused):
    """The cut that was asked for is on no device."""

    def __init__(self, reason: str, suited: _Suited) -> None:
        super().__init__(reason)
        self.suited = suited


def _suit_inputs(order: CutOrder, model: "Source", profile: Profile) -> _Suited:
    """A cut for every input; where there is none, for as many of the smaller ones as there is one
    for, so that an item that is too large fails by itself."""
    inputs = _sample(order, profile)
    envelopes = () if inputs is None else inputs.envelopes()
    if inputs is None or not envelopes:
        return _Suited(profile=profile, shapes=order.shapes, choices=_choices(order, profile))
    try:
        return _suited(order, model, inputs, envelopes[-1])
    except PreparationRefused as error:
        refusal = error
    covering: tuple[_Suited, Shapes] | None = None
    low, high = 0, len(envelopes) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            covering = _suited(order, model, inputs, envelopes[middle]), envelopes[middle]
            low = middle + 1
        except PreparationRefused as error:
            refusal, high = error, middle
    if covering is None and isinstance(refusal, _Unplaceable):
        return refusal.suited  # the plan says why
    if covering is None:
        raise refusal
    suited, envelope = covering
    return replace(suited, note=_beyond(order, inputs.beyond(envelope), refusal))


def _suited(order: CutOrder, model: "Source", inputs: InputSet, envelope: Shapes) -> _Suited:
    shapes = {**envelope, **order.shapes}
    profile = _with_values(model.profile(shapes), inputs)
    suited = _Suited(profile=profile, shapes=shapes, choices=_choices(order, profile))
    if (problem := _unplaceable(order, model, suited)) is not None:
        raise _Unplaceable(problem, suited)
    return suited


def _with_values(profile: Profile, inputs: InputSet) -> Profile:
    """With what the first item has in inputs that are a few integers, such as a sampling rate:
    fragments are tried with that."""
    few = [
        spec.name
        for spec in profile.inputs
        if spec.dtype in ("int32", "int64")
        and spec.shape is not None
        and prod(each if isinstance(each, int) else _FEW + 1 for each in spec.shape) <= _FEW
    ]
    try:
        item = inputs.read(0, few)
    except (InputUnsuitable, OSError):
        return profile
    known = {
        name: replace(profile.tensors[name], values=tuple(map(int, array.flat)))
        for name, array in item.items()
    }
    return replace(profile, tensors={**profile.tensors, **known})


def _unplaceable(order: CutOrder, model: "Source", suited: _Suited) -> str | None:
    """Why the devices cannot hold the fragments; None if they can."""
    most = max((device.budget_bytes for device in order.devices), default=None)
    if most is None:
        return None
    if len(suited.choices) == 1 and largest(suited.profile, suited.choices[0]) <= most:
        return None
    found = plan(_best(order, model, suited)[0].document, order.devices, order.objective)
    return found.message(order.name, "raise the budget") if isinstance(found, Infeasible) else None


def _beyond(order: CutOrder, files: Sequence[str], refusal: PreparationRefused) -> str:
    named = ", ".join(files[:_NAMED_FILES])
    more = len(files) - _NAMED_FILES
    named += f" and {more} more" if more > 0 else ""
    verb, items = ("are", "their items") if len(files) > 1 else ("is", "its items")
    return (
        f"{order.name}: {named} {verb} larger than the plan covers, so {items} may fail; "
        f"the others run. With the next larger inputs it would not fit: {refusal}"
    )


def _sample(order: CutOrder, profile: Profile) -> InputSet | None:
    """The inputs, where it depends on them what the model needs; None also where they are refused:
    the job says why."""
    if order.sample is None or not _depends_on_inputs(order, profile):
        return None
    try:
        return scan_inputs(order.sample, profile.inputs)
    except InputsRefused:
        return None


def _depends_on_inputs(order: CutOrder, profile: Profile) -> bool:
    return order.sample is not None and not all(
        _is_fixed(spec, order.shapes) for spec in profile.inputs
    )


def _is_fixed(spec: TensorSpec, shapes: Shapes) -> bool:
    known = spec.shape is not None and all(isinstance(size, int) for size in spec.shape)
    return known or spec.name in shapes


def _advice(order: CutOrder, profile: Profile, cuts: tuple[int, ...]) -> str:
    """Where a fragment fits no budget: what would."""
    most = max((device.budget_bytes for device in order.devices), default=0)
    found = advise(profile, cuts, most) if most else None
    return "" if found is None else in_words(found)


def _is_current(path: Path, store: FragmentStore, source: Mapping[str, object]) -> bool:
    """Whether these very fragments are in the store. They are verified: every device would refuse
    a damaged one."""
    try:
        if json.loads(path.with_name("source.json").read_bytes()) != json.loads(json.dumps(source)):
            return False
        document = document_from_json(path.read_bytes())
    except (OSError, ValueError):
        return False
    return all(store.is_sound(fragment.digest) for fragment in document.fragments)


if __name__ == "__main__":
    serve(_work, (ModelRefused, PreparationRefused))
