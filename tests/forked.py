"""Our programs, forked from one process that has imported them.

An operator takes a second and a half of a processor to import what it needs, and `shoal` half a
second, which is more than most of them work in a test. Not for coordinators, and for
agents otherwise (`agent.forking`): tests measure their memory.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Literal

Program = Literal["shoal", "operator"]

_CONTEXT = multiprocessing.get_context("forkserver")
# Nothing here starts a thread or opens a channel when it is imported.
_CONTEXT.set_forkserver_preload(
    [
        "shoal_operator.command",
        "shoal_cli.commands.app",
        "shoal_cli.commands.partition",
        "shoal_cli.commands.progress",
        "shoal_cli.commands.transfers",
        "shoal_cli.local.device_bench",
        "shoal_cli.local.runner",
        "shoal_cli.transfer.addresses",
        "shoal_cli.transfer.coordinators",
        "shoal_cli.transfer.copying",
        "shoal_cli.transfer.folders",
        "shoal_cli.transfer.following",
        "pydantic",  # typer asks for it when it reads arguments
    ]
)


def start(
    program: Program,
    arguments: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    *,
    errors: Path | None = None,
    folder: Path | None = None,
) -> ForkServerProcess:
    """`PROGRAM ARGUMENTS` with this environment, in `folder`. What it prints is written to
    `output`, and its errors to `errors`, if given."""
    process = _CONTEXT.Process(
        target=_run,
        args=(program, list(arguments), (output, errors), dict(environment), folder or Path()),
    )
    process.start()
    return process


def _run(
    program: Program,
    arguments: list[str],
    outputs: tuple[Path, Path | None],
    environment: dict[str, str],
    folder: Path,
) -> None:
    """In the child."""
    output, errors = outputs
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if errors is not None:
        with errors.open("wb") as file:
            os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [program, *arguments]
    if program == "operator":
        from shoal_operator.command import main  # noqa: PLC0415 - of its program only

        sys.exit(main())
    from shoal_cli import main as shoal  # noqa: PLC0415

    shoal()
