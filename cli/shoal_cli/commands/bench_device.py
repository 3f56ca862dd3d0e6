"""`shoal bench-device`."""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_cli.commands import options
from shoal_cli.commands.written import check_picture
from shoal_cli.drawing.svg import NothingDraws, can_draw
from shoal_cli.local.cgroups import Enforce

if TYPE_CHECKING:
    from shoal_cli.local.device_bench import BenchOrder, Needs
    from shoal_cli.local.device_figures import DeviceFigures
    from shoal_cli.local.made_items import Array
    from shoal_protocol.partition import TensorSpec

CURVE: Final = 6
_MIB: Final = 1 << 20
_SPARE: Final = 16
"""What a run that keeps all in memory is given beyond that, one part in so many: items come in."""
EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "A model in less memory than it needs:  shoal bench-device model.onnx --budget 64Mi\n\n"
    "Time against memory, six budgets:  shoal bench-device model.onnx --budgets ample..least\n\n"
    "With sizes for its dynamic axes:  shoal bench-device rec.onnx --shape x=1,3,48,320\n\n"
    "[bold]Exit status[/bold]\n\n"
    "0: within every budget. 1: a device was measured over its budget, or failed; or ONNX Runtime "
    "does not end the model's run within --task-seconds. 2: wrong usage, "
    "a model that is refused, or a budget in which it cannot run."
)

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        metavar="SIZE",
        help="The device's memory above its idle floor; given several times, one after the other. "
        "[dim]Default: 64Mi[/dim]",
    ),
]
BudgetRange = Annotated[
    str | None,
    typer.Option(
        metavar="FROM..TO",
        help="Six budgets from one to the other. Each end is a size, [bold]ample[/bold] (all that "
        "the model needs) or [bold]least[/bold] (the smallest that it runs in).",
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(help="Folder of inputs; the first item is run. [dim]Default: one is made[/dim]"),
]
Turns = Annotated[int, typer.Option(min=2, max=1000, help="How many items, and runs of each peer.")]
Peers = Annotated[
    bool, typer.Option("--peers/--no-peers", help="Run the whole model in ONNX Runtime as well.")
]
Picture = Annotated[
    Path | None,
    options.show(
        metavar="FILE", help="Where the picture goes. [dim]Default: MODEL.memory.svg[/dim]"
    ),
]


def bench_device(
    model: Model,
    budget: Budgets = None,
    budgets: BudgetRange = None,
    shape: options.Shapes = None,
    inputs: Inputs = None,
    turns: Turns = 25,
    peers: Peers = True,
    enforce: options.Enforce = Enforce.AUTO,
    threads: options.Threads = None,
    task_seconds: options.TaskSeconds = 540.0,
    picture: Picture = None,
    work: options.RunWork = None,
    as_json: options.AsJson = False,
    progress: options.Progress = "auto",
) -> None:
    """Run a whole model as one device of a budget, and measure memory and time.

    A coordinator and one agent run on this machine, as for `shoal run MODEL --devices 1`. Where the
    budget is less than the model needs, it runs in blocks, and weights leave memory when their
    block has run. ONNX Runtime runs the whole model in turns with it, as it comes, and with its
    weights mapped from a file. A picture shows what was resident when.
    """
    from shoal_cli.local.device_bench import BenchOrder

    choose = _chosen(budget, budgets)
    target = None
    if picture or can_draw():
        target = check_picture("--picture", picture or Path(f"{model.stem}.memory.svg"))
    made = BenchOrder(
        model=model,
        item=_item(model, inputs, options.parse_shapes(shape)),
        budgets=choose,
        turns=turns,
        threads=threads or os.cpu_count() or 1,
        task_seconds=task_seconds,
        enforce=enforce,
        peers=peers,
    )
    figures = _measure(made, work, None if as_json else progress)
    _show(figures, target, as_json=as_json)
    raise typer.Exit(0 if all(each.within_budget for each in figures.budgets) else 1)


def _chosen(budget: list[str] | None, budgets: str | None) -> "Callable[[Needs], Sequence[int]]":
    """The budgets to measure, once the model's needs are known."""
    if budget and budgets:
        raise typer.BadParameter("give --budget, once or several times, or --budgets, not both")
    if budgets is None:
        sizes = [options.parse_budget(text) for text in budget or ["64Mi"]]
        return lambda needs: sizes
    first, separator, last = budgets.partition("..")
    if not separator:
        raise typer.BadParameter(f"--budgets {budgets}: write FROM..TO, such as ample..least")
    ends = [_end(text) for text in (first, last)]

    def spread(needs: "Needs") -> list[int]:
        most, least = sorted((end(needs) for end in ends), reverse=True)
        steps = (most * (least / most) ** (step / (CURVE - 1)) for step in range(CURVE))
        # Whole MiB, and never below the least.
        return list(dict.fromkeys(-(-round(size) // _MIB) * _MIB for size in steps))

    return spread


def _end(text: str) -> "Callable[[Needs], int]":
    match text:
        case "ample":
            return lambda needs: needs.resident_bytes * (_SPARE + 1) // _SPARE
        case "least":
            return lambda needs: needs.least_bytes
        case _:
            size = options.parse_budget(text, "--budgets")
            return lambda needs: size


def _item(
    model: Path, inputs: Path | None, shapes: Mapping[str, tuple[int, ...]]
) -> "Mapping[str, Array]":
    """The first of the items that were given, or one that is made."""
    from shoal_cli.commands.tables import working
    from shoal_cli.local.cut_search import PreparationRefused
    from shoal_cli.local.made_items import make_item
    from shoal_compiler.profile import Source

    if not model.is_file():
        problem = "is a folder, not a file" if model.is_dir() else "there is no such file"
        raise PreparationRefused(f"{model}: {problem}")
    with working(f"reading {model.name}"):
        source = Source.open(model)
        specs = source.profile(shapes or None).inputs
    if inputs is None:
        return make_item(specs, shapes)
    return _first_item(inputs, specs, source.graph.fixed)


def _first_item(
    folder: Path, specs: "tuple[TensorSpec, ...]", fixed: tuple[str, ...]
) -> "Mapping[str, Array]":
    from shoal_cli.local.orders import JobRefused
    from shoal_coordinator.storage.inputs import InputsRefused, InputUnsuitable, scan_inputs

    try:
        return scan_inputs(folder, specs, fixed=fixed).read(0)
    except (InputsRefused, InputUnsuitable) as error:
        raise JobRefused(str(error)) from error


def _measure(
    order: "BenchOrder", work: Path | None, progress: options.ProgressKind | None
) -> "DeviceFigures":
    from shoal_cli.commands.progress import choose_progress
    from shoal_cli.commands.tables import errors
    from shoal_cli.local.device_bench import bench_device as measure
    from shoal_cli.local.workspace import default_work_folder, open_workspace

    observer = choose_progress(progress, errors())
    folder = work or default_work_folder(f"bench-{order.model.stem}", [order.model, Path("bench")])
    try:
        with open_workspace(folder) as workspace:
            return asyncio.run(measure(order, workspace, observer))
    finally:
        observer.ended()


def _show(figures: "DeviceFigures", target: Path | None, *, as_json: bool) -> None:
    from shoal_cli.commands.device_pictures import picture
    from shoal_cli.commands.device_tables import device_tables
    from shoal_cli.commands.tables import output
    from shoal_cli.local.device_figures import to_json
    from shoal_protocol.durable_files import write_named

    shown, unwritten = target or f"none; {NothingDraws()}", None
    if target is not None:
        try:
            write_named(target, picture(figures).encode())
        except OSError as error:  # what was measured is shown all the same
            shown = f"none; {target} cannot be written: {error.strerror}"
            unwritten = OSError(error.errno, error.strerror, str(target))
    if as_json:
        drawn = None if unwritten or target is None else str(target)
        typer.echo(json.dumps({**to_json(figures), "picture": drawn}))
    else:
        console = output()
        console.print(device_tables(figures))
        console.print(f"\npicture: {shown}", soft_wrap=True, highlight=False, markup=False)
    if unwritten is not None:
        raise unwritten
