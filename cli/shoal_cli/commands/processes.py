"""`shoal agent`, `shoal coordinator`, `shoal operator`: processes with options of their own."""

import os
import sys
from importlib.util import find_spec

import typer


def agent(context: typer.Context) -> None:
    """Run one agent (shoal agent --help shows the agent's own options)."""
    _become("shoal_agent", context)


def coordinator(context: typer.Context) -> None:
    """Run a coordinator (shoal coordinator --help shows its own options)."""
    _become("shoal_coordinator", context)


def operator(context: typer.Context) -> None:
    """Run the operator of a cluster (shoal operator --help shows its own options)."""
    _become("shoal_operator", context)


def _become(package: str, context: typer.Context) -> None:
    """The process takes this one's place."""
    if find_spec(package) is None:
        raise typer.BadParameter(f"{context.info_name} is not installed here: no {package}")
    command = [sys.executable, "-m", package, *context.args]
    os.execv(sys.executable, command)  # noqa: S606 - see above
