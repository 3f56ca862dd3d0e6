"""`shoal plan`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from shoal_cli.commands import options, plan_options
from shoal_cli.commands.option_groups import given
from shoal_cli.commands.written import check_picture
from shoal_planner.goal import ASSUMED_ITEMS
from shoal_protocol.choices import Objective, Residency
from shoal_protocol.units import counted

if TYPE_CHECKING:
    from shoal_cli.commands.planned import Planned
    from shoal_cli.local.cut_orders import CutOrder
    from shoal_cli.local.orders import PlanOrder
    from shoal_cli.local.preparation import Prepared
    from shoal_protocol.partition import PartitionDocument

_JOB: Final = "InferenceJob "
EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "What manifests ask for:  shoal plan examples/ocr\n\n"
    "A bare model:  shoal plan model.onnx --devices 3 --budget 64Mi\n\n"
    "Measured layers:  shoal plan --profile vgg16.json --devices devices.json\n\n"
    "A makespan of so many items:  shoal plan job.yaml --items 500\n\n"
    "For programs, and drawn:  shoal plan examples/ocr --output json --svg plan.svg\n\n"
    "Placements and jobs are planned as `shoal run` would; nothing runs. Times are predictions."
)


def plan(
    files: plan_options.PlanFiles = None,
    *,
    volume: options.Volumes = None,
    bare: plan_options.BareModel,
    layers: plan_options.LayerProfile,
    items: plan_options.PlanItems = None,
    work: plan_options.PlanWork = None,
    form: plan_options.Output = plan_options.Format.TEXT,
    svg: plan_options.PlanPicture = None,
) -> None:
    """Print which devices would serve which fragments, and why the alternatives lost.

    Then the smallest budget that works, with these fragments, and what other budgets would give.
    With --profile: which devices would run which layers, with cuts and devices chosen together.
    """
    from shoal_cli.commands.planned import plan_layers, show
    from shoal_cli.local.planning import NoPlan

    picture = None if svg is None else check_picture("--svg", svg)
    if layers.profile is None:
        planned = _plan(*_wanted(files, volume, bare, layers, items, work))
    elif files:
        raise typer.BadParameter("a profile, or manifests or a model, not both")
    else:
        goal = layers.objective or Objective.THROUGHPUT
        planned = [plan_layers(layers.profile, bare.devices, goal, items or ASSUMED_ITEMS)]
    show(planned, form, picture)
    for each in planned:
        if each.refusal is not None:
            raise NoPlan(each.refusal.problem)


def _wanted(
    files: list[Path] | None,
    volume: list[str] | None,
    bare: plan_options.BareModel,
    layers: plan_options.LayerProfile,
    items: int | None,
    work: Path | None,
) -> "tuple[list[tuple[str, PlanOrder]], Path]":
    """What is to be planned, and the folder to do it in."""
    from shoal_cli.local.workspace import default_work_folder

    if not files:
        raise typer.BadParameter("nothing to plan: give manifests, a model or --profile")
    if layers.objective is not None:
        raise typer.BadParameter("--objective goes with --profile; manifests have their own")
    folder = work or default_work_folder(files[0].resolve().stem or "stdin", files)
    if options.is_model(files):
        budgets = options.parse_budgets(bare.budget or ["64Mi"], bare.device_count)
        on = counted(len(budgets), "device")
        wanted = [(f"{files[0].name} on {on}", _of_model(files[0], budgets, bare))]
    else:
        options.refuse_with_manifests(given(bare))
        wanted = _of_manifests(files, options.parse_volumes(volume), folder)
    if items is not None:
        wanted = [(name, _for_items(order, items)) for name, order in wanted]
        if not any(order.cut.goal.cold for _, order in wanted):
            raise typer.BadParameter("--items is for the objective Makespan, which nothing has")
    return wanted, folder


def _for_items(order: "PlanOrder", items: int) -> "PlanOrder":
    return replace(order, cut=replace(order.cut, items=items))


def _of_model(model: Path, budgets: Sequence[int], bare: plan_options.BareModel) -> "PlanOrder":
    from shoal_cli.commands.tables import measuring
    from shoal_cli.local.orders import bare_placement, read_orders
    from shoal_cli.local.speeds import machine_speed

    made = bare_placement(
        model,
        budgets=budgets,
        fragments=bare.fragments,
        residency=bare.residency or Residency.ADAPTIVE,
        shapes=options.parse_shapes(bare.shape),
    )
    ((_, order),) = read_orders(made, {}, machine_speed(waiting=measuring)).placements
    if bare.inputs is None:
        return order
    if not bare.inputs.is_dir():
        raise typer.BadParameter(f"--inputs {bare.inputs}: there is no such folder")
    return replace(order, cut=replace(order.cut, sample=bare.inputs, smaller_first=True))


def _of_manifests(
    files: Sequence[Path], volumes: Mapping[str, Path], folder: Path
) -> "list[tuple[str, PlanOrder]]":
    from shoal_cli.commands.tables import fetching, measuring
    from shoal_cli.local import remote
    from shoal_cli.local.manifests import load_manifests
    from shoal_cli.local.orders import read_orders
    from shoal_cli.local.speeds import machine_speed

    manifests = load_manifests(files)
    with fetching(far=remote.is_far(manifests)):
        downloaded = asyncio.run(remote.download(manifests, folder, options.note))
    orders = read_orders(downloaded.manifests, volumes, machine_speed(waiting=measuring))
    for note in orders.notes:
        options.note(note)
    wanted = [(f"Placement {name}", order) for name, order in orders.placements]
    wanted += [(f"{_JOB}{order.name}", order.plan) for order in orders.jobs]
    if not wanted:
        raise typer.BadParameter(
            "nothing to plan: there is no Placement and no InferenceJob that is not suspended"
        )
    return wanted


def _plan(wanted: "Sequence[tuple[str, PlanOrder]]", folder: Path) -> "list[Planned]":
    """Cut what is to be planned, and plan it."""
    from shoal_cli.commands.planned import of_order
    from shoal_cli.commands.progress import choose_progress
    from shoal_cli.commands.tables import errors
    from shoal_cli.local.planned_jobs import with_items
    from shoal_cli.local.planning import cut_beside, find_plan, plans_beside, prepare_once
    from shoal_cli.local.workspace import open_workspace
    from shoal_planner.outcome import Plan

    observer = choose_progress("auto", errors())
    prepared: dict[str, Prepared] = {}
    planned = []
    running: list[tuple[PlanOrder, Plan]] = []
    with open_workspace(folder) as workspace:
        try:
            for name, order in wanted:
                others = plans_beside(order, running)
                cut = cut_beside(order, others)
                found = asyncio.run(prepare_once(cut, prepared, workspace, observer))
                order = with_items(order, found)  # noqa: PLW2901
                if any(fragment.flops is None for fragment in found.document.fragments):
                    _refuse_unusable(name, found.document, cut)
                    options.note(f"{name}: {_unknown(found.document, cut)}")
                answer = find_plan(order, found, others)
                planned.append(of_order(name, order, found, answer))
                if name.startswith(_JOB) and isinstance(answer, Plan):
                    running.append((order, answer))
        finally:
            observer.ended()
    return planned


def _refuse_unusable(name: str, document: "PartitionDocument", order: "CutOrder") -> None:
    """Of a bare model, whose inputs are there now or never. Those of a job may come later, or the
    job says why they cannot."""
    from shoal_coordinator.storage.inputs import InputsRefused, scan_inputs

    if order.sample is None or name.startswith(_JOB):
        return
    try:
        inputs = scan_inputs(order.sample, document.inputs, fixed=document.fixed)
    except InputsRefused as error:
        raise typer.BadParameter(f"--{error}") from error
    if not inputs.envelopes():
        first = inputs.files[0]
        raise typer.BadParameter(
            f"--inputs {order.sample}: no item can run; {first.name}: {first.contents.problem}"
        )


def _unknown(document: "PartitionDocument", order: "CutOrder") -> str:
    """Why times cannot be predicted, and what to give."""
    from shoal_cli.local.sizes import shown_shape

    free = [f"{spec.name} {shown_shape(spec)}" for spec in order.open_inputs(document.inputs)]
    if order.sample is not None or not free:
        return (
            "some sizes follow from what the inputs hold, so times are not predicted and these "
            "fragments have no blocks"
        )
    return (
        "shapes are unknown, so times are not predicted and no fragment has blocks; give a folder "
        f"of inputs, or the shapes of {', '.join(free)}"
    )
