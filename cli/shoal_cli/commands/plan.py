"""`shoal plan`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from shoal_cli.commands import layer_plans, options
from shoal_protocol.choices import Objective, Residency

if TYPE_CHECKING:
    from shoal_cli.local.orders import PlanOrder
    from shoal_protocol.partition import PartitionDocument

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "What manifests ask for:  shoal plan examples/ocr\n\n"
    "A bare model:  shoal plan model.onnx --devices 3 --budget 64Mi\n\n"
    "Measured layers:  shoal plan --profile vgg16.json --devices devices.json\n\n"
    "Placements and jobs are planned as `shoal run` would; nothing runs. Times are predictions."
)


def plan(
    files: options.PlanFiles = None,
    volume: options.Volumes = None,
    inputs: options.PlanInputs = None,
    shape: options.BareShapes = None,
    devices: layer_plans.PlanDevices = None,
    budget: options.Budgets = None,
    fragments: options.Fragments = None,
    residency: options.Residency = None,
    profile: layer_plans.Profile = None,
    objective: layer_plans.Objective = None,
    items: layer_plans.Items = None,
    work: options.PlanWork = None,
) -> None:
    """Print which devices would serve which fragments, and why the alternatives lost.

    Then the smallest budget that works, with these fragments, and what other budgets would give.
    With --profile: which devices would run which layers, with cuts and devices chosen together.
    """
    if profile is not None:
        _of_profile(files, profile, devices, objective, items)
        return
    if not files:
        raise typer.BadParameter("nothing to plan: give manifests, a model or --profile")
    if objective is not None or items is not None:
        raise typer.BadParameter("--objective and --items go with --profile")
    from shoal_cli.local.workspace import default_work_folder

    folder = work or default_work_folder(files[0].resolve().stem or "stdin", files)
    if options.is_model(files):
        count = layer_plans.parse_device_count(devices)
        budgets = options.parse_budgets(budget or ["64Mi"], count)
        shapes = options.parse_shapes(shape)
        order = _of_model(files[0], budgets, fragments, residency or Residency.ADAPTIVE, shapes)
        if inputs is not None:
            order = _shaped_by(order, inputs)
        _print([(f"{files[0].name} on {_count(len(budgets))}", order)], folder)
        return
    options.refuse_with_manifests(
        inputs=inputs,
        shape=shape,
        devices=devices,
        budget=budget,
        fragments=fragments,
        residency=residency,
    )
    _print(_of_manifests(files, options.parse_volumes(volume), folder), folder)


def _of_profile(
    files: Sequence[Path] | None,
    profile: Path,
    devices: str | None,
    objective: Objective | None,
    items: int | None,
) -> None:
    if files:
        raise typer.BadParameter("a profile, or manifests or a model, not both")
    layer_plans.print_layer_plan(profile, devices, objective or Objective.THROUGHPUT, items or 100)


def _of_model(
    model: Path,
    budgets: Sequence[int],
    fragments: int | None,
    residency: Residency,
    shapes: Mapping[str, tuple[int, ...]],
) -> "PlanOrder":
    from shoal_cli.local.orders import bare_placement, read_orders
    from shoal_cli.local.speeds import machine_speed

    made = bare_placement(
        model, budgets=budgets, fragments=fragments, residency=residency, shapes=shapes
    )
    ((_, order),) = read_orders(made, {}, machine_speed()).placements
    return order


def _shaped_by(order: "PlanOrder", inputs: Path) -> "PlanOrder":
    """With shapes that cover the items in a folder."""
    if not inputs.is_dir():
        raise typer.BadParameter(f"--inputs {inputs}: there is no such folder")
    return replace(order, cut=replace(order.cut, sample=inputs))


def _of_manifests(
    files: Sequence[Path], volumes: Mapping[str, Path], folder: Path
) -> "list[tuple[str, PlanOrder]]":
    from shoal_cli.local import remote
    from shoal_cli.local.orders import read_orders
    from shoal_cli.local.speeds import machine_speed

    downloaded = asyncio.run(remote.download(options.load_files(files), folder, options.note))
    orders = read_orders(downloaded.manifests, volumes, machine_speed())
    wanted = [(f"Placement {name}", order) for name, order in orders.placements]
    wanted += [(f"InferenceJob {order.name}", order.plan) for order in orders.jobs]
    if not wanted:
        raise typer.BadParameter("nothing to plan: there is no Placement and no InferenceJob")
    return wanted


def _print(wanted: "Sequence[tuple[str, PlanOrder]]", folder: Path) -> None:
    """Cut what is to be planned, plan it, and print the plans."""
    from shoal_cli.commands.progress import choose_progress
    from shoal_cli.commands.tables import errors, explained_table, output, plan_table
    from shoal_cli.local.runner import plan_on_pool, prepare_all
    from shoal_cli.local.workspace import open_workspace
    from shoal_planner.budgets import with_other_budgets
    from shoal_planner.speeds import devices_table

    console = output()
    observer = choose_progress("auto", errors())
    with open_workspace(folder) as workspace:
        try:
            cuts = [order.cut for _, order in wanted]
            prepared = asyncio.run(prepare_all(cuts, workspace, observer))
        finally:
            observer.ended()
    for name, order in wanted:
        document = prepared[order.cut.name].document
        if any(fragment.flops is None for fragment in document.fragments):
            options.note(f"{name}: {_unknown(document)}")
        console.print(explained_table(devices_table(order.cut.devices)))
        console.print(plan_table(name, plan_on_pool(order, prepared[order.cut.name]), document))
        others = with_other_budgets(document, order.cut.devices, order.objective)
        console.print(explained_table(others))


def _unknown(document: "PartitionDocument") -> str:
    """Why times cannot be predicted, and what to give."""
    free = []
    for spec in document.inputs:
        axes = ["?" if axis is None else str(axis) for axis in spec.shape or (None,)]
        if not all(axis.isdigit() for axis in axes):
            free.append(f"{spec.name} [{', '.join(axes)}]")
    if not free:
        return "some shapes are unknown, so times are not predicted"
    return (
        "shapes are unknown, so times are not predicted and no fragment has blocks; give a folder "
        f"of inputs, or the shapes of {', '.join(free)}"
    )


def _count(devices: int) -> str:
    return f"{devices} device{'s' * (devices != 1)}"
