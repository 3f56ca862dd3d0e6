"""`shoal run`."""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from shoal_cli.commands import options, written
from shoal_cli.commands.failures import INTERRUPTED
from shoal_cli.commands.option_groups import given
from shoal_cli.commands.run_options import BareModel, Files, HowToRun, WhatToShow
from shoal_protocol.choices import Mode, Policy, Residency

if TYPE_CHECKING:
    from shoal_cli.local.manifests import Manifests
    from shoal_cli.local.orders import Orders
    from shoal_cli.local.pool import RunOptions
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
OF_LOCAL_DEVICES: Final = frozenset(
    {"--devices", "--budget", "--threads", "--relay", "--enforce", "--task-seconds"}
)


@dataclass(frozen=True, slots=True)
class _There:
    """A coordinator that was joined, and its devices that are ready."""

    coordinator: "Reachable"
    devices: "Sequence[pb.DeviceStatus]"


def run(
    files: Files,
    *,
    volume: options.Volumes = None,
    bare: BareModel,
    how: HowToRun,
    show: WhatToShow,
) -> None:
    """Run inference jobs on this machine: a coordinator, and one agent process per device.

    Takes the manifests that a cluster takes (DevicePool.spec.local says which devices this machine
    simulates; with --coordinator those of the coordinator count), or a bare ONNX model. The
    model is cut into fragments that fit the devices' budgets, every device keeps within its own,
    and results are written as they come. Running the same command again runs only what is missing.
    """
    from shoal_cli.commands import tables
    from shoal_cli.local import remote
    from shoal_cli.local.workspace import default_work_folder

    volumes = options.parse_volumes(volume)
    there = _there(how, bare)
    manifests = _manifests(files, bare, there)
    _check_written(show)
    run_options = _run_options(how, show)
    folder = how.work or default_work_folder(files[0].resolve().stem or "stdin", files)
    far = remote.is_far(manifests)
    with tables.fetching(far=far):
        downloaded = asyncio.run(remote.download(manifests, folder, options.note))
    orders = _orders(downloaded.manifests, volumes, there)
    with _work_in(folder, keep=how.keep):
        start = _start(there, run_options, keep=how.keep)
        ran = _execute(orders, folder, start, None if show.quiet else show.progress)
        with contextlib.ExitStack() as last:  # each also where one before it has failed
            last.callback(_print, ran, folder, show, stays=how.keep and there is None)
            last.callback(_write, ran, folder, show)
            if not ran.interrupted:
                with tables.sending(far=far):
                    asyncio.run(remote.upload(downloaded, options.note))
        raise typer.Exit(_status(ran))


def _there(how: HowToRun, bare: BareModel) -> _There | None:
    """The coordinator to run on; None: on this machine."""
    if how.coordinator is None:
        return None
    from shoal_cli.standalone.remote_devices import ready_devices
    from shoal_cli.transfer.joined import reach

    for option in (*given(bare), *given(how)):
        if option in OF_LOCAL_DEVICES:
            raise typer.BadParameter(
                f"{option} is about devices of this machine; those of a --coordinator say it "
                "themselves"
            )
    coordinator = reach(how.coordinator)
    return _There(coordinator, asyncio.run(ready_devices(coordinator)))


def _manifests(files: list[Path], bare: BareModel, there: _There | None) -> "Manifests":
    """What is to be run. Raises `ManifestErrors`."""
    from shoal_cli.local.manifests import load_manifests
    from shoal_cli.local.orders import bare_manifests

    if not options.is_model(files):
        options.refuse_with_manifests(given(bare))
        manifests = load_manifests(files)
    else:
        budgets = [device.budget_bytes for device in there.devices] if there else None
        manifests = bare_manifests(
            files[0],
            inputs=_needed(bare.inputs, "--inputs"),
            outputs=_needed(bare.outputs, "--outputs"),
            budgets=budgets or options.parse_budgets(bare.budget or ["64Mi"], bare.devices),
            fragments=bare.fragments,
            residency=bare.residency or Residency.ADAPTIVE,
            policy=bare.policy or Policy.MABAC,
            mode=bare.mode or Mode.STREAMING,
            batching=bare.batching,
        )
    if there is None:
        return manifests
    from shoal_cli.standalone.remote_devices import on_devices

    return on_devices(manifests, there.devices)


def _needed(path: Path | None, option: str) -> Path:
    if path is None:
        raise typer.BadParameter(f"a bare model needs {option} PATH")
    return path


def _run_options(how: HowToRun, show: WhatToShow) -> "RunOptions":
    from shoal_cli.local.pool import RunOptions

    return RunOptions(
        enforce=how.enforce,
        relay=how.relay,
        verify=show.verify,
        tolerance=show.tolerance,
        threads=how.threads,
        task_seconds=how.task_seconds,
        log_level=how.log_level,
        metrics=_host_port(how.metrics_address),
        otlp=_exportable(how.otlp),
    )


def _orders(manifests: "Manifests", volumes: Mapping[str, Path], there: _There | None) -> "Orders":
    from shoal_cli.commands import tables
    from shoal_cli.local.orders import read_orders
    from shoal_cli.local.speeds import machine_speed

    if there is None:
        return read_orders(manifests, volumes, machine_speed(waiting=tables.measuring))
    from shoal_cli.standalone.remote_devices import as_measured

    return as_measured(read_orders(manifests, volumes), there.devices)


def _start(
    there: _There | None, run_options: "RunOptions", *, keep: bool
) -> Callable[..., Coroutine[None, None, "RunReport"]]:
    """What runs orders, here or there."""
    if there is None:
        from shoal_cli.local.runner import run_orders

        return partial(run_orders, options=run_options)
    from shoal_cli.standalone.submission import run_on_coordinator

    return partial(
        run_on_coordinator, coordinator=there.coordinator, options=run_options, keep=keep
    )


@contextlib.contextmanager
def _work_in(folder: Path, *, keep: bool) -> Iterator[None]:
    """Leave what the next run can use, if it is to be kept."""
    try:
        yield
    finally:
        for name in () if keep else ("store", "cache", "state", "logs"):
            shutil.rmtree(folder / name, ignore_errors=True)


def _host_port(text: str | None) -> tuple[str, int] | None:
    from shoal_protocol.arguments import host_port

    try:
        return None if text is None else host_port(text)
    except ValueError as error:
        raise typer.BadParameter(f"--metrics-address: {error}") from error


def _exportable(url: str | None) -> str | None:
    from shoal_protocol.arguments import collector_url

    if url is not None and find_spec("opentelemetry") is None:
        install = f"{sys.executable} -m pip install 'shoal[otlp]'"
        raise typer.BadParameter(f"--otlp needs OpenTelemetry: {install}")
    try:
        return None if url is None else collector_url(url)
    except ValueError as error:
        raise typer.BadParameter(f"--otlp: {error}") from error


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


def _check_written(show: WhatToShow) -> None:
    """Rather now than after the run."""
    from shoal_cli.drawing.svg import check_drawing

    if show.report is not None:
        written.check("--report", show.report)
    if show.html is not None:
        written.check("--html", show.html)
        check_drawing()


def _write(ran: "RunReport", folder: Path, show: WhatToShow) -> None:
    """Write what the run did where it was asked for, and for `shoal report` in the work folder."""
    from shoal_cli.local.report import REPORT_NAME, write_report
    from shoal_cli.page.writing import write_page

    if ran.devices:
        write_report(ran, folder / REPORT_NAME)
    if show.report is not None:
        write_report(ran, show.report)
    if show.html is not None:
        write_page(ran, show.html)


def _print(report: "RunReport", folder: Path, show: WhatToShow, *, stays: bool) -> None:
    """Print what the run did. `stays`: the work folder keeps what it has."""
    from shoal_cli.commands import tables
    from shoal_cli.commands.tables import interrupted_line, output
    from shoal_cli.local.workspace import kept_bytes

    if not show.quiet:
        # Where nobody reads any more, the console ends the program: the run has its own status.
        with contextlib.suppress(SystemExit):
            tables.print_summary(output(), report, logs_stay=stays)
            tables.print_kept(output(), report.work, kept_bytes(folder) if stays else 0)
    else:
        for line in tables.trouble_lines(report):
            options.note(line)
    if report.interrupted:
        options.note(interrupted_line(report))


def _status(report: "RunReport") -> int:
    if report.interrupted:
        return INTERRUPTED
    if any(job.refused for job in report.jobs):
        return 2
    return 0 if report.succeeded else 1
