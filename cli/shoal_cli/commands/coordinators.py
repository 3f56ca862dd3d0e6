"""Which coordinator a command is about: one option, and a client of that coordinator.

def jobs(coordinator: coordinators.Coordinator = None) -> None:
    asyncio.run(_print_jobs(coordinator))

async def _print_jobs(target: str | None) -> None:
    async with coordinators.calling(target) as client:
        for job in await client.jobs(): ...
"""

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal_protocol.coordinator_client import CoordinatorClient

RunCoordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        rich_help_panel="How to run",
        help="Run on the devices of a coordinator that `shoal join` has joined, in the place of "
        "this machine, and bring the results back.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        envvar="SHOAL_COORDINATOR",
        show_envvar=False,
        help="A coordinator that `shoal join` has joined, or unix:/path. [dim]Default: "
        "$SHOAL_COORDINATOR, else the only one that was joined[/dim]",
    ),
]


@contextlib.asynccontextmanager
async def calling(target: str | None) -> AsyncIterator["CoordinatorClient"]:
    """A client of the coordinator that the option names. Raises `joined.NotJoined`,
    `joined.JoinRefused`, `joined.CoordinatorAway`; and `joined.CallRefused` for a call that fails.
    """
    from shoal_cli.transfer.joined import reach

    async with reach(target).calling() as client:
        yield client
