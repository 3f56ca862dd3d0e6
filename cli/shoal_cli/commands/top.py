"""`shoal top`."""

import asyncio
import contextlib
import json
import sys
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_cli.commands import options, targets

if TYPE_CHECKING:
    from rich.live import Live

    from shoal_cli.live.view import View

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "The active run here:  shoal top\n\n"
    "A pool of the cluster:  shoal top --pool shelf --namespace reading\n\n"
    "Once, for a program:  shoal top --output json | jq '.devices[].used_bytes'\n\n"
    "Control-C ends it. Where standard output is no terminal, or a dumb one, it prints once."
)
RECONNECT_SECONDS: Final = 10.0
"""How long a coordinator that is gone is looked for: it may be starting anew."""

Interval = Annotated[
    float,
    typer.Option(
        min=0.1,
        max=60,
        callback=options.a_number,
        help="Seconds between two updates, and of each rate.",
    ),
]


def top(
    target: targets.Target,
    interval: Interval = 1.0,
    output: targets.Output = "text",
) -> None:
    """Watch a coordinator: its jobs with their stages, its devices with memory, queues and links.

    Without options it watches the active run on this machine. It changes nothing there.
    """
    if output == "json" or not _can_redraw():
        asyncio.run(_print(target, interval, output))
        return
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(target, interval))


def _can_redraw() -> bool:
    """Whether standard output is a terminal that moves its cursor (a dumb one shows what comes)."""
    from shoal_cli.commands.tables import output

    return sys.stdout.isatty() and not output().is_dumb_terminal


async def _print(target: targets.Target, interval: float, output: targets.OutputKind) -> None:
    """One picture, with the rates of an interval."""
    from shoal_cli.commands.live_tables import picture
    from shoal_cli.commands.tables import output as standard_output
    from shoal_cli.live.view import view_of

    async with targets.watching(target) as (title, client):
        before = await targets.overview(client)
        await asyncio.sleep(interval)
        view = view_of(await targets.overview(client), before)
    if output == "json":
        typer.echo(json.dumps(asdict(view)))
    else:
        standard_output().print(picture(title, view))


async def _watch(target: targets.Target, interval: float) -> None:
    """Pictures until the user has seen enough, or the coordinator stays away."""
    from rich.live import Live

    from shoal_cli.commands.tables import output
    from shoal_cli.live.view import view_of
    from shoal_cli.transfer.joined import CoordinatorAway

    seen: tuple[float, str, View] | None = None
    with Live(console=output(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                async with targets.watching(target) as (title, client):
                    before = None
                    while True:
                        now = await targets.overview(client)
                        seen = monotonic(), title, view_of(now, before)
                        _show(live, title, seen[2])
                        before = now
                        await asyncio.sleep(interval)
            except (CoordinatorAway, targets.NoCoordinator):
                if seen is None or (away := monotonic() - seen[0]) > RECONNECT_SECONDS:
                    raise
                _show(live, f"{seen[1]}, no answer for {away:.0f} s", seen[2])
            await asyncio.sleep(interval)


def _show(live: "Live", title: str, view: "View") -> None:
    from shoal_cli.commands.screens import filled

    live.update(filled(live.console, title, view), refresh=True)
