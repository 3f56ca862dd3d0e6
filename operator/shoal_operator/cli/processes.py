"""`shoal agent` and `shoal coordinator`: what a pool is made of, each a process of its own."""

import os
import sys
from typing import Final

import typer

COORDINATOR_EPILOG: Final = (
    "[bold]Example[/bold]\n\n"
    "shoal coordinator --listen unix:/run/shoal/coordinator.sock --store /var/lib/shoal"
)


def agent(context: typer.Context) -> None:
    """Run one agent (shoal agent --help shows the agent's own options)."""
    command = [sys.executable, "-m", "shoal_agent", *context.args]
    os.execv(sys.executable, command)  # noqa: S606 - the agent takes this process's place


def coordinator() -> None:
    """Run a coordinator."""
    raise NotImplementedError
