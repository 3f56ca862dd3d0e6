"""`shoal run`."""

import asyncio
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from shoal_cli.commands import options
from shoal_cli.commands.failures import INTERRUPTED
from shoal_cli.local.cgroups import Enforce
from shoal_protocol.choices import Mode, Policy, Residency

if TYPE_CHECKING:
    from shoal_cli.local.manifests import Manifests
    from shoal_cli.local.orders import Orders
    from shoal_cli.local.report import RunReport
    from shoal_cli.local.runner import RunOptions

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


def run(
    files: options.RunFiles,
    volume: options.Volumes = None,
    inputs: options.Inputs = None,
    outputs: options.Outputs = None,
    devices: options.Devices = None,
    budget: options.Budgets = None,
    fragments: options.Fragments = None,
    mode: options.Mode = None,
    policy: options.Policy = None,
    residency: options.Residency = None,
    enforce: options.Enforce = Enforce.AUTO,
    relay: options.RelayAlways = False,
    threads: options.Threads = None,
    task_seconds: options.TaskSeconds = 540.0,
    work: options.RunWork = None,
    keep: options.Keep = True,
    log_level: options.RunLogLevel = options.LogLevel.INFO,
    verify: options.Verify = False,
    tolerance: options.Tolerance = 1e-4,
    report: options.Report = None,
    progress: options.Progress = options.ProgressKind.AUTO,
    quiet: options.Quiet = False,
) -> None:
    """Run inference jobs on this machine: a coordinator, and one agent process per device.

    Takes the manifests that a cluster takes (DevicePool.spec.local says which devices this machine
    pretends to be), or a bare ONNX model. The model is cut into fragments that fit the devices'
    budgets, every device keeps within its own, and results are written as they come. Running the
    same command again does what is missing.
    """
    volumes = options.parse_volumes(volume)
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
    how = How(
        enforce=enforce,
        relay=relay,
        threads=threads,
        task_seconds=task_seconds,
        work=work,
        keep=keep,
        log_level=log_level,
        verify=verify,
        tolerance=tolerance,
    )
    show = Show(progress=progress, quiet=quiet, report=report)
    manifests = bare.manifests(files[0]) if options.is_model(files) else bare.refuse_for(files)
    raise typer.Exit(run_manifests(manifests, volumes, files, how, show))


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
        from shoal_cli.local.orders import bare_manifests

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
        return options.load_files(files)

    def _budgets(self) -> list[int]:
        sizes = [_budget(text) for text in self.budget or ["64Mi"]]
        if len(sizes) == 1:
            return sizes * (self.devices or 3)
        if self.devices not in (None, len(sizes)):
            raise typer.BadParameter(
                f"--devices {self.devices}, but --budget is given {len(sizes)} times"
            )
        return sizes


def _budget(text: str) -> int:
    """What a device of a manifest may have as `memory`."""
    size = options.parse_size(text, "--budget")
    if not 1 << 20 <= size <= 16 << 40:
        raise typer.BadParameter(f"--budget {text}: a device has from 1Mi to 16Ti")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How to run, and in which folder; None is the default one."""

    enforce: Enforce
    relay: bool
    threads: int | None
    task_seconds: float
    work: Path | None
    keep: bool
    log_level: options.LogLevel
    verify: bool
    tolerance: float

    def run_options(self) -> "RunOptions":
        from shoal_cli.local.runner import RunOptions

        return RunOptions(
            enforce=self.enforce,
            relay=self.relay,
            verify=self.verify,
            tolerance=self.tolerance,
            threads=self.threads,
            task_seconds=self.task_seconds,
            log_level=self.log_level.value,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """What a run shows, and where its report goes."""

    progress: options.ProgressKind
    quiet: bool
    report: Path | None


def run_manifests(
    manifests: "Manifests", volumes: dict[str, Path], files: Sequence[Path], how: How, show: Show
) -> int:
    """Run what the manifests ask for, in a work folder that is kept or not; the exit status."""
    from shoal_cli.local import remote
    from shoal_cli.local.orders import read_orders
    from shoal_cli.local.workspace import default_work_folder

    if show.report is not None:
        _check_report(show.report)
    folder = how.work or default_work_folder(files[0].resolve().stem or "stdin", files)
    brought = asyncio.run(remote.bring(manifests, folder, _say))
    orders = read_orders(brought.manifests, volumes)
    try:
        status = execute(orders, folder, how, show)
        if status != INTERRUPTED:
            asyncio.run(remote.deliver(brought, _say))
        return status
    finally:
        if not how.keep:
            for name in ("store", "cache", "state", "logs"):
                shutil.rmtree(folder / name, ignore_errors=True)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _check_report(path: Path) -> None:
    """Rather now than after the run. Raises `OSError` where its folder cannot be had."""
    if path.is_dir():
        raise typer.BadParameter(f"--report {path}: is a folder; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(f"--report {path}: {path.parent} cannot be written")


def execute(orders: "Orders", folder: Path, how: How, show: Show) -> int:
    """Run, print, report; the exit status."""
    from rich.console import Console

    from shoal_cli.commands.progress import choose_progress
    from shoal_cli.commands.tables import output, print_summary
    from shoal_cli.local.report import write_report
    from shoal_cli.local.runner import run_orders
    from shoal_cli.local.workspace import open_workspace

    if not orders.jobs:
        raise typer.BadParameter(
            "nothing to run: there is no InferenceJob that is not suspended; "
            "`shoal plan` shows placements"
        )
    observer = choose_progress(show.progress.value, quiet=show.quiet, console=Console(stderr=True))
    for note in orders.notes:
        observer.note(note)
    with open_workspace(folder) as workspace:
        report = asyncio.run(run_orders(orders, workspace, how.run_options(), observer))
    if not show.quiet:
        print_summary(output(), report, logs_stay=how.keep)
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
