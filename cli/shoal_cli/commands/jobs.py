"""`shoal devices`, `shoal jobs`, `shoal cancel`, `shoal end`: what a coordinator has."""

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from shoal_cli.commands import options
from shoal_protocol.units import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal_protocol.coordinator_client import CoordinatorClient
    from shoal_protocol.v1 import coordinator_pb2 as pb

DEVICES_EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Of the coordinator that was joined:  shoal devices\n\n"
    "For a program:  shoal devices --coordinator 192.168.1.10:7400 --json"
)
JOBS_EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Of the coordinator that was joined:  shoal jobs\n\n"
    "For a program:  shoal jobs --coordinator 192.168.1.10:7400 --json"
)
CANCEL_EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "One job:  shoal cancel ocr\n\n"
    "Two, with all that is there of them:  shoal cancel --remove ocr-6f1c22ab camera-0d41b7aa"
)
END_EPILOG: Final = "[bold]Example[/bold]\n\nA camera is off:  shoal end camera"


class JobUnclear(Exception):
    """A coordinator has several jobs of this name."""

    def __init__(self, name: str, called: Sequence[str]) -> None:
        super().__init__(f"{len(called)} jobs are called {name}; name one: {', '.join(called)}")


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
JobNames = Annotated[
    list[str],
    typer.Argument(metavar="JOB...", help="Names of jobs.", show_default=False),
]
Remove = Annotated[
    bool, typer.Option("--remove", help="Forget the job too, with its inputs and results there.")
]


def devices(coordinator: Coordinator = None, as_json: options.AsJson = False) -> None:
    """List a coordinator's devices: state, memory against budget, what they hold and did.

    A device that left is listed as lost until the coordinator restarts.
    """
    found = asyncio.run(_asked(coordinator, lambda client: client.devices()))
    _show(
        sorted(found, key=lambda device: device.name),
        "no device has joined",
        _device_table,
        as_json=as_json,
    )


def jobs(coordinator: Coordinator = None, as_json: options.AsJson = False) -> None:
    """List a coordinator's jobs, in the order of their submission.

    A job of `shoal run --coordinator` has the manifest's name and a digest of what it works on, as
    in ocr-6f1c22ab.
    """
    found = asyncio.run(_asked(coordinator, lambda client: client.jobs()))
    _show(found, "no jobs", _job_table, as_json=as_json)


def cancel(names: JobNames, coordinator: Coordinator = None, remove: Remove = False) -> None:
    """Cancel jobs of a coordinator. Results that are written stay.

    The same `shoal run --coordinator` resumes a job that was cancelled, unless it was removed.
    """
    from shoal_protocol.v1 import coordinator_pb2 as pb

    async def ask(client: "CoordinatorClient") -> None:
        for name in await _called(client, names):
            status = await client.cancel(name, "cancelled by `shoal cancel`")
            state = pb.JobStatus.State.Name(status.state).lower()
            if remove:
                await client.remove(name)
            done = f"{status.succeeded} of {counted(status.items, 'item')} done"
            typer.echo(f"{name}: {state}, {done}{', removed' if remove else ''}")

    asyncio.run(_asked(coordinator, ask))


def end(names: JobNames, coordinator: Coordinator = None) -> None:
    """End the following of jobs that take inputs as they come (inputs.follow).

    The files that are there now are the last. A job ends by itself when their items have ended.
    """

    async def ask(client: "CoordinatorClient") -> None:
        for name in await _called(client, names):
            status = await client.end(name)
            typer.echo(f"{name}: {status.succeeded} of {counted(status.items, 'item')} done")

    asyncio.run(_asked(coordinator, ask))


async def _called(client: "CoordinatorClient", names: Sequence[str]) -> list[str]:
    """What the coordinator calls the jobs of these names; one that it does not know it refuses
    itself. Raises `JobUnclear`: what is cancelled or ended has to be the one that is meant."""
    from shoal_cli.live.view import names_called

    there = [status.name for status in await client.jobs()]
    found = list[str]()
    for name in names:
        called = names_called(name, there)
        if len(called) > 1:
            raise JobUnclear(name, called)
        found.append(called[0] if called else name)
    return found


async def _asked(target: str | None, ask: Any) -> Any:
    from shoal_cli.transfer.joined import reach

    async with reach(target).calling() as client:
        return await ask(client)


def _show(found: Sequence[Any], nothing: str, table: Any, *, as_json: bool) -> None:
    from shoal_cli.commands.tables import output
    from shoal_protocol.copying import plain

    if as_json:
        typer.echo(json.dumps([plain(message) for message in found]))
    elif found:
        output().print(table(found))
    else:
        options.note(nothing)


def _device_table(found: Sequence["pb.DeviceStatus"]) -> "RenderableType":
    from shoal_cli.commands.columns import Columns, ColumnTable
    from shoal_cli.commands.tables import format_tiers
    from shoal_cli.local.report import TierHits
    from shoal_protocol.copying import copied
    from shoal_protocol.units import format_bytes
    from shoal_protocol.v1 import coordinator_pb2 as pb

    names: Columns[pb.DeviceStatus] = [
        ("device", lambda device: device.name),
        ("state", lambda device: pb.DeviceStatus.State.Name(device.state).lower()),
    ]
    figures: Columns[pb.DeviceStatus] = [
        ("budget", lambda device: format_bytes(device.budget_bytes)),
        ("now", lambda device: format_bytes(device.used_bytes)),
        ("peak", lambda device: format_bytes(device.peak_bytes)),
        ("fragments", lambda device: f"{len(device.resident)} of {device.cached_fragments}"),
        ("queued", lambda device: str(device.queued)),
        ("tasks", lambda device: str(device.tasks)),
        ("tiers 1-4", lambda device: format_tiers(copied(TierHits, device.tier_hits))),
        ("processor", lambda device: device.architecture),
    ]
    return ColumnTable(
        rows=found,
        names=names,
        columns=figures,
        spare=("processor", "tiers 1-4", "fragments", "queued"),
        texts=("processor",),
    )


def _job_table(found: Sequence["pb.JobStatus"]) -> "RenderableType":
    from shoal_cli.commands.columns import Columns, ColumnTable
    from shoal_cli.commands.tables import format_rate
    from shoal_protocol.v1 import coordinator_pb2 as pb

    names: Columns[pb.JobStatus] = [
        ("job", lambda job: job.name),
        ("state", lambda job: pb.JobStatus.State.Name(job.state).lower()),
    ]
    figures: Columns[pb.JobStatus] = [
        ("items", lambda job: f"{job.succeeded}/{job.items}{'+' if job.following else ''}"),
        ("failed", lambda job: str(job.failed)),
        ("items/s", lambda job: format_rate(job.items_per_second)),
        ("why", lambda job: job.message or "-"),
    ]
    return ColumnTable(
        rows=found,
        names=names,
        columns=figures,
        spare=("why", "items/s"),
        texts=("why",),
        wrap=True,
    )
