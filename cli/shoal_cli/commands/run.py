"""`shoal run`."""

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from shoal_cli.commands import options, written
from shoal_cli.commands.coordinators import RunCoordinator
from shoal_cli.commands.failures import INTERRUPTED
from shoal_cli.local.cgroups import Enforce
from shoal_protocol.choices import Mode, Policy, Residency

if TYPE_CHECKING:
    from shoal_cli.local.manifests import Manifests
    from shoal_cli.local.orders import Orders
    from shoal_cli.local.report import RunReport
    from shoal_cli.transfer.joined import Reachable
    from shoal_protocol.v1 import coordinator_pb2 as pb

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


TASK_SECONDS: Final = 540.0


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
    coordinator: RunCoordinator = None,
    enforce: options.Enforce = Enforce.AUTO,
    relay: options.RelayAlways = False,
    threads: options.Threads = None,
    task_seconds: options.TaskSeconds = TASK_SECONDS,
    work: options.RunWork = None,
    keep: options.Keep = True,
    log_level: options.RunLogLevel = "info",
    metrics_address: options.MetricsAddress = None,
    otlp: options.Otlp = None,
    verify: options.Verify = None,
    tolerance: options.Tolerance = 1e-4,
    report: options.Report = None,
    html: written.Html = None,
    progress: options.Progress = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Run inference jobs on this machine: a coordinator, and one agent process per device.

    Takes the manifests that a cluster takes (DevicePool.spec.local says which devices this machine
    pretends to be; with --coordinator those of the coordinator count), or a bare ONNX model. The
    model is cut into fragments that fit the devices' budgets, every device keeps within its own,
    and results are written as they come. Running the same command again does what is missing.
    """
    from shoal_cli.local import remote
    from shoal_cli.local.orders import read_orders
    from shoal_cli.local.pool import RunOptions
    from shoal_cli.local.runner import run_orders
    from shoal_cli.local.speeds import machine_speed
    from shoal_cli.local.workspace import default_work_folder
    from shoal_cli.standalone.submission import as_measured, on_devices, run_on_coordinator

    volumes = options.parse_volumes(volume)
    local = {
        **{"devices": devices, "budget": budget, "threads": threads, "relay": relay or None},
        "enforce": None if enforce is Enforce.AUTO else enforce,
        "task-seconds": None if task_seconds == TASK_SECONDS else task_seconds,
    }
    there, devices_there = _there(coordinator, local)
    bare = {
        **{"inputs": inputs, "outputs": outputs, "devices": devices, "budget": budget},
        **{"fragments": fragments, "mode": mode, "policy": policy, "residency": residency},
    }
    manifests = _manifests(files, bare, [device.budget_bytes for device in devices_there])
    if there is not None:
        manifests = on_devices(manifests, devices_there)
    _check_written(report, html)
    folder = work or default_work_folder(files[0].resolve().stem or "stdin", files)
    downloaded = asyncio.run(remote.download(manifests, folder, options.note))
    if there is None:
        orders = read_orders(downloaded.manifests, volumes, machine_speed())
    else:
        orders = as_measured(read_orders(downloaded.manifests, volumes), devices_there)
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
    with _work_in(folder, keep=keep):
        start = partial(run_orders, options=how)
        if there is not None:
            start = partial(run_on_coordinator, coordinator=there, options=how, keep=keep)
        ran = _execute(orders, folder, start, None if quiet else progress)
        status = _finish(ran, quiet=quiet, logs_stay=keep and there is None)
        _write(ran, folder, report, html)
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


def _manifests(files: list[Path], bare: Mapping[str, Any], there: list[int]) -> "Manifests":
    """What is to be run; `bare` are the options of a bare model, `there` the budgets of devices
    that there are already."""
    from shoal_cli.local.orders import bare_manifests

    if not options.is_model(files):
        options.refuse_with_manifests(**bare)
        return options.load_files(files)
    return bare_manifests(
        files[0],
        inputs=_needed(bare["inputs"], "--inputs"),
        outputs=_needed(bare["outputs"], "--outputs"),
        budgets=there or options.parse_budgets(bare["budget"] or ["64Mi"], bare["devices"]),
        fragments=bare["fragments"],
        residency=bare["residency"] or Residency.ADAPTIVE,
        policy=bare["policy"] or Policy.MABAC,
        mode=bare["mode"] or Mode.STREAMING,
    )


def _there(
    coordinator: str | None, local: Mapping[str, object]
) -> tuple["Reachable | None", Sequence["pb.DeviceStatus"]]:
    """The coordinator to run on, and its devices; `local` are the options of local devices."""
    from shoal_cli.standalone.submission import ready_devices
    from shoal_cli.transfer.joined import reach

    if coordinator is None:
        return None, ()
    for name, value in local.items():
        if value is not None:
            raise typer.BadParameter(
                f"--{name} is about devices of this machine; those of a --coordinator say it "
                "themselves"
            )
    reached = reach(coordinator)
    return reached, asyncio.run(ready_devices(reached))


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


def _execute(
    orders: "Orders",
    folder: Path,
    start: Callable[..., Coroutine[None, None, "RunReport"]],
    progress: options.ProgressKind | None,
) -> "RunReport":
    from shoal_cli.commands.progress import choose_progress
    from shoal_cli.commands.tables import errors
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
        return asyncio.run(start(orders=orders, workspace=workspace, observer=observer))


def _check_written(report: Path | None, html: Path | None) -> None:
    """Rather now than after the run."""
    from shoal_cli.drawing.svg import check_drawing

    if report is not None:
        written.check("--report", report)
    if html is not None:
        written.check("--html", html)
        check_drawing()


def _write(ran: "RunReport", folder: Path, report: Path | None, html: Path | None) -> None:
    """Write what the run did where it was asked for, and for `shoal report` in the work folder."""
    from shoal_cli.local.report import REPORT_NAME, write_report
    from shoal_cli.page.writing import write_page

    if ran.devices:
        write_report(ran, folder / REPORT_NAME)
    if report is not None:
        write_report(ran, report)
    if html is not None:
        write_page(ran, html)


def _finish(report: "RunReport", *, quiet: bool, logs_stay: bool) -> int:
    """Print what the run did; the exit status."""
    from shoal_cli.commands.tables import output, over_budget_line, print_summary

    if not quiet:
        print_summary(output(), report, logs_stay=logs_stay)
    elif not report.within_budget:
        for device in report.devices:
            if not device.within_budget:
                options.note(over_budget_line(device))
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
