"""From a model's file to a partition in the store: check, profile, cut. A step (see `steps`); where
it is cut, `cut_search` finds out.

The fragments of an order are reused when the order, the model's bytes and the cuts to choose
from are those of last time (`source.json` beside `partition.json`). Where nothing at all has
changed, no process is started to find that out (`known_cuts`).
"""

import dataclasses
import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from shoal_cli.local.covered_inputs import suit_inputs
from shoal_cli.local.cut_orders import CutOrder, are_counted, count_items
from shoal_cli.local.cut_search import (
    PreparationRefused,
    Suited,
    find_cut,
    is_planned,
    many_fragments,
)
from shoal_cli.local.known_cuts import VERSION, find_base, find_known, inputs_at, remember
from shoal_cli.local.sampled_inputs import depends_on_inputs
from shoal_cli.local.steps import Json, Progress, run_step, serve
from shoal_compiler.errors import ModelRefused
from shoal_planner.advice import advise, in_words, largest
from shoal_planner.devices import PoolDevice
from shoal_planner.outcome import Plan, Rejected
from shoal_planner.placement import plan_without_alternatives
from shoal_protocol.choices import Objective
from shoal_protocol.durable_files import replace_file
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import (
    Outgrown,
    PartitionDocument,
    document_from_json,
    document_to_json,
)
from shoal_protocol.threads import in_thread

_MODULE: Final = "shoal_cli.local.preparation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A partition in the store, whose `partition.json` is `path`. `advice`: what to do where a
    fragment is larger than every budget. `note`: which inputs are larger than it was cut for;
    `rest`: they are run afterwards, in another cut. `files`: the model's, with their digests.
    `rejected`: other cuts that were weighed. `order` is how it was cut."""

    order: CutOrder
    document: PartitionDocument
    path: Path
    advice: str
    note: str = ""
    rest: bool = False
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
    noted = {name: result[name] for name in ("advice", "note", "rest", "files")}
    rejected = tuple(Rejected(**each) for each in result["rejected"])
    return Prepared(order=order, document=document, path=path, rejected=rejected, **noted)


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
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # nothing else is written to
        if error.filename is None and not is_full:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        room = "; make room there, or give the run another folder with --work DIR"
        raise PreparationRefused(
            f"{order.name} cannot be cut into {store}: {where}{error.strerror}{room * is_full}"
        ) from error


def _order_from_json(values: Json) -> CutOrder:
    made = {
        "path": Path(values["path"]),
        "sample": None if values["sample"] is None else Path(values["sample"]),
        "shapes": {name: tuple(shape) for name, shape in values["shapes"].items()},
        "seen": {name: tuple(sizes) for name, sizes in values["seen"].items()},
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
    asked = order

    check_model(order)
    model = Source.open(order.path)
    files = {str(path): digest for path, digest in model.files.items()}
    path = partition_path(store, order.name)
    base = find_base(path, asked, files)
    shapes = order.shapes if base is None else base.shapes
    model = model.fitted(shapes, order.seen)
    if base is not None:
        model = model.sliced(base.slicing)
    _, digest = model.digests
    if order.digest is not None and order.digest != digest:
        raise PreparationRefused(
            f"Model {order.model}: {order.path} is {digest}, not {order.digest} as "
            "spec.source.digest says; it was changed, or is another file"
        )
    inputs_of_model = model.inputs(order.shapes)
    order = replace(order, items=count_items(order, inputs_of_model))
    suited = suit_inputs(order, model, base)
    source = _source(order, suited)
    answer: dict[str, object] = {
        "files": files,
        "rest": suited.rest,
    }
    lost = path.with_name("rejected.json")
    warm = _is_current(path, FragmentStore(store), source)
    if warm:
        answer["rejected"] = json.loads(lost.read_bytes()) if lost.is_file() else []
    else:
        cut, base = find_cut(order, suited, base)
        if fragments:
            cut.write(store, on_progress)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, document_to_json(cut.document).encode())
        replace_file(lost, json.dumps(base.rejected).encode())
        replace_file(path.with_name("source.json"), json.dumps(source).encode())
        answer["rejected"] = base.rejected
    document = document_from_json(path.read_bytes())
    answer["advice"] = _advice(order, suited, document)
    many = many_fragments(order, suited, len(document.fragments))
    answer["note"] = "; ".join(filter(None, (suited.note, many)))
    depends = depends_on_inputs(order, inputs_of_model) or are_counted(asked)
    remember(path, asked, inputs if depends else None, answer, base)
    return {"warm": warm, **answer}


def _source(order: CutOrder, suited: Suited) -> Json:
    """All that the fragments of an order depend on."""
    outgrown = list(map(dataclasses.asdict, order.outgrown))
    source: dict[str, object] = {"model": suited.profile.digest, "cuts": suited.choices}
    source |= {"shapes": suited.shapes, "version": VERSION, "outgrown": outgrown}
    source |= {"slicing": suited.model.slicing, "seen": order.seen}
    if len(suited.choices) > 1 or is_planned(order):
        source |= {"devices": list(map(dataclasses.asdict, order.devices))}
        source |= {"beside": list(map(dataclasses.asdict, order.beside))}
        source |= {"objective": order.objective, "planned": is_planned(order)}
        source |= {"items": order.items}
    return source


def _advice(order: CutOrder, suited: Suited, document: PartitionDocument) -> str:
    """What would fit, where a fragment fits no budget, and devices cannot hold it otherwise. It
    takes a search to know."""
    profile, cuts = suited.profile, suited.choices[-1]
    most = max((device.budget_bytes for device in order.devices), default=None)
    if most is None or largest(profile, cuts) <= most:
        return ""
    if isinstance(plan_without_alternatives(document, order.devices, order.goal), Plan):
        return ""
    found = advise(profile, cuts, most)
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


def main() -> None:
    """As a step."""
    serve(_work, (ModelRefused, PreparationRefused))
