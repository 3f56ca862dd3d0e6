"""`shoal logs`."""

import os
import shutil
from pathlib import Path
from typing import Annotated, Final

import typer

from shoal_cli.commands import targets

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "The coordinator of the active run here, as it writes:  shoal logs --follow\n\n"
    "A device of a run that is over:  shoal logs pi-4 --work DIR\n\n"
    "The agent on a node of the cluster:  shoal logs pi-4 --pool shelf"
)
_COORDINATOR: Final = "coordinator"

Process = Annotated[str, typer.Argument(metavar="DEVICE|coordinator", help="Whose logs.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on as more is written.")]
Tail = Annotated[int, typer.Option(min=1, max=1_000_000, help="So many lines of the end.")]


class NoLogs(Exception):
    """There are no logs of that process; says which there are."""


def logs(
    process: Process = _COORDINATOR,
    *,
    target: targets.Target,
    follow: Follow = False,
    tail: Tail = 100,
) -> None:
    """Print the logs of a coordinator or of a device's agent.

    Those of a run on this machine are in its work folder, and stay there after its end; so are
    those of `shoal coordinator`, in its folder. On a cluster kubectl prints them. Devices without
    Kubernetes have theirs in their own journal.
    """
    command = _command(target, process, tail, follow)
    os.execv(command[0], command)  # noqa: S606 - it takes our place


def _command(target: targets.Target, process: str, tail: int, follow: bool) -> list[str]:
    """What prints them: kubectl, or tail."""
    if (kubectl := target.kubectl) is not None:
        from shoal_cli.live.cluster import find_pool

        device = None if process == _COORDINATOR else process
        component = _COORDINATOR if device is None else "agent"
        command = find_pool(kubectl, target.pool).logs(component, device)
        return [*command, f"--tail={tail}", *["--follow"] * follow]
    program = shutil.which("tail") or "/usr/bin/tail"
    return [program, "-n", str(tail), *["-F"] * follow, str(_log_file(target, process))]


def _log_file(target: targets.Target, process: str) -> Path:
    """The log of a process of a local run. Raises `NoLogs`."""
    folder = _logs_folder(target)
    file = folder / f"{process}.log"
    if file.is_file():
        return file
    known = ", ".join(sorted(path.stem for path in folder.glob("*.log"))) or "none"
    raise NoLogs(f"{folder} has no logs of {process}; there are: {known}")


def _logs_folder(target: targets.Target) -> Path:
    from shoal_cli.local.workspace import running_pools

    if target.work is not None:
        return target.work / "logs"
    if target.coordinator is None and (pool := targets.local_pool(None)) is not None:
        return pool.work / "logs"
    for running in running_pools():
        if running.target == target.coordinator:
            return running.work / "logs"
    raise NoLogs(
        "name the run with --work DIR. The logs of a coordinator at an address are on its machine, "
        "where `shoal logs --work ~/.local/state/shoal/coordinator` prints them; those of its "
        "devices are on theirs: journalctl --unit shoal-agent"
    )
