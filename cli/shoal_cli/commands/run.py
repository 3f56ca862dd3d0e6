"""`shoal run`."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from shoal_cli.commands import options
from shoal_cli.commands.failures import INTERRUPTED
from shoal_cli.local.cgroups import Enforce
from shoal_protocol.choices import Mode, Policy, Residency

if TYPE_CHECKING:
    from shoal_cli.local.orders import Orders
    from shoal_cli.local.pool import RunOptions
    from shoal_cli.local.report import RunReport

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Run the manifests that a cluster would take:  shoal run examples/ocr\n\n"
    "Run a bare model on three devices:  "
    "shoal run model.onnx --inputs in --outputs out --devices 3 --budget 64Mi\n\n"
    "Compare with the whole model, and keep the figures:  "
    "shoal run job.yaml --verify --report report.json\n\n"
    "[bold]Exit status[/bold]\n\n"
    "0: every item succeeded; a device that was measured over its budget is named, and is "
    "`within_budget: false` in the report. 1: items failed, or --verify found a difference. "
    "2: wrong usage, a manifest or model that is refused, or nothing fits. "
    "130: interrupted; run the same command again to resume."
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
    log_level: options.RunLogLevel = "info",
    metrics_address: options.MetricsAddress = None,
    otlp: options.Otlp = None,
    verify: options.Verify = None,
    tolerance: options.Tolerance = 1e-4,
    report: options.Report = None,
    progress: options.Progress = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Run inference jobs on this machine: a coordinator, and one agent process per device.

    Takes the manifests that a cluster takes (DevicePool.spec.local says which devices this machine
    pretends to be), or a bare ONNX model. The model is cut into fragments that fit the devices'
    budgets, every device keeps within its own, and results are written as they come. Running the
    same command again does what is missing.
    """
    from shoal_cli.local import remote
    from shoal_cli.local.orders import bare_manifests, read_orders
    from shoal_cli.local.pool import RunOptions
    from shoal_cli.local.speeds import machine_speed
    from shoal_cli.local.workspace import default_work_folder

    volumes = options.parse_volumes(volume)
    if options.is_model(files):
        manifests = bare_manifests(
            files[0],
            inputs=_needed(inputs, "--inputs"),
            outputs=_needed(outputs, "--outputs"),
            budgets=options.parse_budgets(budget or ["64Mi"], devices),
            fragments=fragments,
            residency=residency or Residency.ADAPTIVE,
            policy=policy or Policy.MABAC,
            mode=mode or Mode.STREAMING,
        )
    else:
        options.refuse_with_manifests(
            inputs=inputs,
            outputs=outputs,
            devices=devices,
            budget=budget,
            fragments=fragments,
            mode=mode,
            policy=policy,
            residency=residency,
        )
        manifests = options.load_files(files)
    _check_report(report)
    how = RunOptions(
        enforce=enforce,
        relay=relay,
        verify=verify,
        tolerance=tolerance,
        threads=threads,
        task_seconds=task_seconds,
        log_level=log_level,
        metrics=_host_port(metrics_address),
        otlp=_exportable(otlp),
    )
    folder = work or default_work_folder(files[0].resolve().stem or "stdin", files)
    downloaded = asyncio.run(remote.download(manifests, folder, options.note))
    orders = read_orders(downloaded.manifests, volumes, machine_speed())
    with _work_in(folder, keep=keep):
        ran = _execute(orders, folder, how, None if quiet else progress)
        status = _finish(ran, report, quiet=quiet, logs_stay=keep)
        if status != INTERRUPTED:
            asyncio.run(remote.upload(downloaded, options.note))
        raise typer.Exit(status)


@contextlib.contextmanager
def _work_in(folder: Path, *, keep: bool) -> Iterator[None]:
    """Leave what the next run can use, if it is to be kept."""
    try:
        yield
    finally:
        for name in () if keep else ("store", "cache", "state", "logs"):
            shutil.rmtree(folder / name, ignore_errors=True)


def _needed(path: Path | None, option: str) -> Path:
    if path is None:
        raise typer.BadParameter(f"a bare model needs {option} PATH")
    return path


def _host_port(text: str | None) -> tuple[str, int] | None:
    from shoal_protocol.arguments import host_port

    try:
        return None if text is None else host_port(text)
    except ValueError as error:
        raise typer.BadParameter(f"--metrics-address: {error}") from error


def _exportable(url: str | None) -> str | None:
    if url is not None and find_spec("opentelemetry") is None:
        raise typer.BadParameter("--otlp needs OpenTelemetry: pip install 'shoal[otlp]'")
    return url


def _check_report(path: Path | None) -> None:
    """Rather now than after the run. Raises `OSError` where its folder cannot be had."""
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(f"--report {path}: is a folder; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(f"--report {path}: {path.parent} cannot be written")


def _execute(
    orders: "Orders", folder: Path, how: "RunOptions", progress: options.ProgressKind | None
) -> "RunReport":
    from shoal_cli.commands.progress import choose_progress
    from shoal_cli.commands.tables import errors
    from shoal_cli.local.runner import run_orders
    from shoal_cli.local.workspace import open_workspace

    if not orders.jobs:
        raise typer.BadParameter(
            "nothing to run: there is no InferenceJob that is not suspended; "
            "`shoal plan` shows placements"
        )
    observer = choose_progress(progress, errors())
    for note in orders.notes:
        observer.note(note)
    with open_workspace(folder) as workspace:
        return asyncio.run(run_orders(orders, workspace, how, observer))


def _finish(report: "RunReport", path: Path | None, *, quiet: bool, logs_stay: bool) -> int:
    """Print and write what the run did; the exit status."""
    from shoal_cli.commands.tables import output, over_budget_line, print_summary
    from shoal_cli.local.report import write_report

    if not quiet:
        print_summary(output(), report, logs_stay=logs_stay)
    elif not report.within_budget:
        for device in report.devices:
            if not device.within_budget:
                options.note(over_budget_line(device))
    if path is not None:
        write_report(report, path)
    if report.interrupted:
        done = sum(job.succeeded for job in report.jobs)
        total = sum(job.items for job in report.jobs)
        options.note(
            f"interrupted with {done} of {total} items done; run the same command again to resume"
        )
        return INTERRUPTED
    if any(job.state == "Failed" and not job.items for job in report.jobs):
        return 2  # its inputs or outputs were refused: not one item was begun
    return 0 if report.succeeded else 1
