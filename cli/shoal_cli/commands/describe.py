"""`shoal describe`."""

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_cli.commands import targets

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal_cli.live.view import DeviceView, JobView

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Every job and device of the active run here:  shoal describe\n\n"
    "One device of a pool of the cluster:  shoal describe pi-4 --pool shelf"
)

Name = Annotated[
    str | None,
    typer.Argument(metavar="JOB|DEVICE", help="One of them. [dim]Default: all[/dim]"),
]


def describe(
    name: Name = None,
    *,
    target: targets.Target,
    output: targets.Output = "text",
) -> None:
    """Show all that a coordinator knows of a job or a device: plan, fragments, memory, links."""
    from rich.text import Text

    from shoal_cli.commands import live_tables
    from shoal_cli.commands.tables import output as standard_output

    jobs, devices = asyncio.run(_find(target, name))
    if output == "json":
        found = {"jobs": list(map(asdict, jobs)), "devices": list(map(asdict, devices))}
        typer.echo(json.dumps(found))
        return
    parts: list[RenderableType] = [live_tables.job_description(job) for job in jobs]
    parts += [live_tables.device_description(device) for device in devices]
    console = standard_output()
    for part in parts:
        console.print(part, Text())


async def _find(
    target: targets.Target, name: str | None
) -> "tuple[tuple[JobView, ...], tuple[DeviceView, ...]]":
    from shoal_cli.live.view import view_of

    async with targets.watching(target) as (_, client):
        view = view_of(await targets.overview(client))
    if name is None:
        return view.jobs, view.devices
    jobs = view.jobs_called(name)
    devices = tuple(device for device in view.devices if device.name == name)
    if not jobs and not devices:
        raise targets.Unknown(name, view, on_cluster=target.kubectl is not None)
    return jobs, devices
