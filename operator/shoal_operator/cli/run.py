"""`shoal run`."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_operator.api.choices import Mode, Policy, Residency
from shoal_operator.cli.failures import INTERRUPTED
from shoal_operator.cli.options import (
    LogLevel,
    Volumes,
    is_model,
    load_files,
    parse_size,
    parse_volumes,
)
from shoal_operator.shell.local.cgroups import Enforce

if TYPE_CHECKING:
    from shoal_operator.shell.local.orders import Orders
    from shoal_operator.shell.local.report import RunReport
    from shoal_operator.shell.local.runner import RunOptions
    from shoal_operator.shell.manifests import Manifests

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Run the manifests that a cluster would take:  shoal run examples/ocr\n\n"
    "Run a bare model on three devices:  "
    "shoal run model.onnx --inputs in --outputs out --devices 3 --budget 64Mi\n\n"
    "Compare with the whole model, and keep the figures:  "
    "shoal run job.yaml --verify --report report.json\n\n"
    "[bold]Exit status[/bold]\n\n"
    "0: every item succeeded. 1: items failed, --verify found a difference, or a device was "
    "measured over its budget. 2: wrong usage, a manifest or model that is refused, or nothing "
    "fits. 130: interrupted; run the same command again to resume."
)
_BARE: Final = "A bare model"
_HOW: Final = "How to run"
_SHOW: Final = "What to show"


class ProgressKind(StrEnum):
    """What `--progress` takes."""

    AUTO = "auto"
    RICH = "rich"
    PLAIN = "plain"


def run(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Manifests, or folders of manifests ([bold]-[/bold]: standard input), or one "
            "[bold].onnx[/bold] file.",
            show_default=False,
        ),
    ],
    volume: Volumes = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Folder of .npz and .npy files.", rich_help_panel=_BARE),
    ] = None,
    outputs: Annotated[
        Path | None, typer.Option(help="Folder for the results.", rich_help_panel=_BARE)
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="How many devices to pretend. [dim]Default: 3[/dim]",
            rich_help_panel=_BARE,
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Each device's memory above its idle floor; given several times, one device each. "
            "[dim]Default: 64Mi[/dim]",
            rich_help_panel=_BARE,
        ),
    ] = None,
    fragments: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="How many fragments. [dim]Default: as few as fit[/dim]",
            rich_help_panel=_BARE,
        ),
    ] = None,
    mode: Annotated[
        Mode | None,
        typer.Option(
            case_sensitive=False,
            help="Whether an item waits for its own predecessors only, or for whole stages.",
            rich_help_panel=_BARE,
        ),
    ] = None,
    policy: Annotated[
        Policy | None,
        typer.Option(
            case_sensitive=False,
            help="How devices that suit a task equally well are ranked.",
            rich_help_panel=_BARE,
        ),
    ] = None,
    residency: Annotated[
        Residency | None,
        typer.Option(
            case_sensitive=False,
            help="As many fragments on a device as its budget takes, or one at a time.",
            rich_help_panel=_BARE,
        ),
    ] = None,
    enforce: Annotated[
        Enforce,
        typer.Option(
            help="Hold each agent to floor + budget with a cgroup: where possible, in any case, "
            "or only measure.",
            rich_help_panel=_HOW,
        ),
    ] = Enforce.AUTO,
    relay: Annotated[
        bool,
        typer.Option(
            "--relay",
            help="Send activations through the coordinator, not from agent to agent.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads of ONNX Runtime per agent. [dim]Default: the device's share of the "
            "processors[/dim]",
            rich_help_panel=_HOW,
        ),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for fragments, caches and logs. [dim]Default: one under the user's cache "
            "folder for these files, so that a second run is warm[/dim]",
            rich_help_panel=_HOW,
        ),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep/--no-keep",
            help="Leave fragments and caches for the next run, or remove them at the end.",
            rich_help_panel=_HOW,
        ),
    ] = True,
    log_level: Annotated[
        LogLevel, typer.Option(help="Of the logs in the work folder.", rich_help_panel=_HOW)
    ] = LogLevel.INFO,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare every result with the whole model's in ONNX Runtime, run in a process of "
            "its own.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Largest difference that --verify accepts: |difference| / (1 + |whole model's|).",
            rich_help_panel=_SHOW,
        ),
    ] = 1e-4,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write what the summary says as JSON (docs/report.md).",
            rich_help_panel=_SHOW,
        ),
    ] = None,
    progress: Annotated[
        ProgressKind,
        typer.Option(help="A live picture, or plain lines.", rich_help_panel=_SHOW),
    ] = ProgressKind.AUTO,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="No progress and no summary.", rich_help_panel=_SHOW),
    ] = False,
) -> None:
    """Run inference jobs on this machine: a coordinator, and one agent process per device.

    Takes the manifests that a cluster takes (DevicePool.spec.local says which devices this machine
    pretends to be), or a bare ONNX model. The model is cut into fragments that fit the devices'
    budgets, every device keeps within its own, and results are written as they come. Running the
    same command again does what is missing.
    """
    from shoal_operator.shell.local.orders import read_orders
    from shoal_operator.shell.local.runner import RunOptions

    volumes = parse_volumes(volume)
    bare = Bare(
        inputs=inputs,
        outputs=outputs,
        devices=devices,
        budget=budget,
        fragments=fragments,
        mode=mode,
        policy=policy,
        residency=residency,
    )
    manifests = bare.manifests(files[0]) if is_model(files) else bare.refuse_for(files)
    orders = read_orders(manifests, volumes)
    options = RunOptions(
        enforce=enforce,
        relay=relay,
        verify=verify,
        tolerance=tolerance,
        threads=threads,
        log_level=log_level.value,
    )
    show = Show(progress=progress, quiet=quiet, report=report)
    folder = work or _default_work(files)
    try:
        status = execute(orders, folder, options, show)
    finally:
        if not keep:
            for name in ("store", "cache", "state", "logs"):
                shutil.rmtree(folder / name, ignore_errors=True)
    raise typer.Exit(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """The options that go with a bare model; with manifests, those say it all."""

    inputs: Path | None
    outputs: Path | None
    devices: int | None
    budget: list[str] | None
    fragments: int | None
    mode: Mode | None
    policy: Policy | None
    residency: Residency | None

    def manifests(self, model: Path) -> "Manifests":
        """What `shoal run MODEL.onnx` stands for."""
        from shoal_operator.shell.local.orders import bare_manifests

        for name, value in (("--inputs", self.inputs), ("--outputs", self.outputs)):
            if value is None:
                raise typer.BadParameter(f"a bare model needs {name} PATH")
        assert self.inputs is not None
        assert self.outputs is not None
        return bare_manifests(
            model,
            inputs=self.inputs,
            outputs=self.outputs,
            budgets=self._budgets(),
            fragments=self.fragments,
            residency=(self.residency or Residency.ADAPTIVE).value,
            policy=(self.policy or Policy.MABAC).value,
            mode=(self.mode or Mode.STREAMING).value,
        )

    def refuse_for(self, files: Sequence[Path]) -> "Manifests":
        """The manifests; none of these options may be given with them."""
        for each in fields(self):
            if getattr(self, each.name) is not None:
                raise typer.BadParameter(
                    f"--{each.name} goes with a bare .onnx model; manifests say it themselves"
                )
        return load_files(files)

    def _budgets(self) -> list[int]:
        sizes = [parse_size(text, "--budget") for text in self.budget or ["64Mi"]]
        if len(sizes) == 1:
            return sizes * (self.devices or 3)
        if self.devices not in (None, len(sizes)):
            raise typer.BadParameter(
                f"--devices {self.devices}, but --budget is given {len(sizes)} times"
            )
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """What a run shows, and where its report goes."""

    progress: ProgressKind
    quiet: bool
    report: Path | None


def execute(orders: "Orders", folder: Path, options: "RunOptions", show: Show) -> int:
    """Run, print, report; the exit status."""
    from rich.console import Console

    from shoal_operator.cli.progress import choose_progress
    from shoal_operator.cli.tables import print_summary
    from shoal_operator.shell.local.report import write_report
    from shoal_operator.shell.local.runner import run_orders
    from shoal_operator.shell.local.workspace import open_workspace

    if not orders.jobs:
        raise typer.BadParameter(
            "nothing to run: there is no InferenceJob that is not suspended; "
            "`shoal plan` shows placements"
        )
    observer = choose_progress(show.progress.value, quiet=show.quiet, console=Console(stderr=True))
    for note in orders.notes:
        observer.note(note)
    with open_workspace(folder) as workspace:
        report = asyncio.run(run_orders(orders, workspace, options, observer))
    if not show.quiet:
        print_summary(Console(), report)
    if show.report is not None:
        write_report(report, show.report)
    if report.interrupted:
        typer.echo(_resume_line(report), err=True)
        return INTERRUPTED
    if any(job.state == "Failed" and not job.items for job in report.jobs):
        return 2  # its inputs or outputs were refused: not one item was begun
    return 0 if report.succeeded else 1


def _resume_line(report: "RunReport") -> str:
    done = sum(job.succeeded for job in report.jobs)
    total = sum(job.items for job in report.jobs)
    return f"interrupted with {done} of {total} items done; run the same command again to resume"


def _default_work(files: Sequence[Path]) -> Path:
    from shoal_operator.shell.local.workspace import default_work_folder

    return default_work_folder(files[0].resolve().stem or "stdin", files)
