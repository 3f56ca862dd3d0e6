"""Which coordinator a command is about: one option, and a client of that coordinator.

def jobs(coordinator: coordinators.Coordinator = None) -> None:
    asyncio.run(_print_jobs(coordinator))

async def _print_jobs(target: str | None) -> None:
    async with coordinators.calling(target) as client:
        for job in await client.jobs(): ...
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal_protocol.coordinator_client import CoordinatorClient

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
    `joined.JoinRefused`, `joined.CoordinatorAway`; and `CallRefused` for a call that fails."""
    from shoal_cli.transfer.joined import reach

    reached = reach(target)
    client = reached.client()
    try:
        with explained(reached.target):
            yield client
    finally:
        await client.close()


@contextlib.contextmanager
def explained(coordinator: str) -> Iterator[None]:
    """Have a call that fails raise `joined.CoordinatorAway` or `CallRefused`, which name it."""
    from shoal_cli.transfer.joined import CoordinatorAway
    from shoal_protocol.coordinator_client import CallFailed

    try:
        yield
    except CallFailed as error:
        kind = CoordinatorAway if error.unreachable else CallRefused
        raise kind(f"{coordinator}: {error}") from error


class CallRefused(Exception):
    """The coordinator refuses what it was asked; the text says why."""
