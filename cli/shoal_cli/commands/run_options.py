"""The options of `shoal run`, in the groups that its help shows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shoal_cli.commands import options, written
from shoal_cli.local.cgroups import Enforce
from shoal_protocol import choices

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Manifests, or folders of manifests ([bold]-[/bold]: standard input), or one "
        "[bold].onnx[/bold] file.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BareModel:
    """What manifests say, for a model without them."""

    inputs: Annotated[
        Path | None,
        options.bare(
            help="Folder of .npz and .npy files. A file is one item. It is an item for each row if "
            "its array has one more axis than the model's input, or several rows where the model's "
            "first axis is fixed to 1."
        ),
    ] = None
    outputs: Annotated[Path | None, options.bare(help="Folder for the results.")] = None
    devices: Annotated[
        int | None,
        options.bare(min=1, max=64, help="How many devices to simulate. [dim]Default: 3[/dim]"),
    ] = None
    budget: options.Budgets = None
    fragments: options.Fragments = None
    mode: Annotated[
        choices.Mode | None,
        options.bare(
            case_sensitive=False,
            help="Whether an item waits for its own predecessors only, or for whole stages.",
        ),
    ] = None
    policy: Annotated[
        choices.Policy | None,
        options.bare(
            case_sensitive=False, help="How devices that suit a task equally well are ranked."
        ),
    ] = None
    residency: options.Residency = None
    batching: Annotated[
        int | None,
        options.bare(min=1, max=choices.LARGEST_BATCH, help="How many items may run at once."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HowToRun:
    """Where a run takes place, within which limits, and what stays of it."""

    coordinator: Annotated[
        str | None,
        options.how(
            "--coordinator",
            metavar="HOST:PORT",
            help="Run on the devices of a coordinator that `shoal join` has joined, in the place "
            "of this machine, and bring the results back.",
        ),
    ] = None
    enforce: options.Enforce = Enforce.AUTO
    relay: Annotated[
        bool,
        options.how(
            "--relay", help="Send activations through the coordinator, not from agent to agent."
        ),
    ] = False
    threads: options.Threads = None
    task_seconds: options.TaskSeconds = 540.0
    work: options.RunWork = None
    keep: Annotated[
        bool,
        options.how(
            "--keep/--no-keep",
            help="Leave fragments and caches for the next run, or remove them at the end.",
        ),
    ] = True
    log_level: Annotated[
        options.LogLevel, options.how(help="Level of the logs in the work folder.")
    ] = "info"
    metrics_address: Annotated[
        str | None,
        options.how(
            metavar="HOST:PORT", help="Serve the metrics of all processes there (docs/metrics.md)."
        ),
    ] = None
    otlp: Annotated[
        str | None,
        options.how(metavar="URL", help="Export a trace of each item to a collector there."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatToShow:
    """What is compared, printed and written."""

    verify: Annotated[
        int | None,
        options.show(
            min=0,
            metavar="[=N]",
            help="Compare every result, or N of them evenly spread, with the whole model's.",
        ),
    ] = None
    tolerance: Annotated[
        float,
        options.show(
            min=0.0,
            callback=options.a_number,
            help="Largest difference that --verify accepts: |difference| / (1 + |whole model's|).",
        ),
    ] = 1e-4
    report: Annotated[
        Path | None,
        options.show(metavar="FILE", help="Write what the summary says as JSON (docs/report.md)."),
    ] = None
    html: written.Html = None
    progress: options.Progress = "auto"
    quiet: Annotated[bool, options.show("--quiet", "-q", help="No progress and no summary.")] = (
        False
    )
