"""`shoal coordinator`, and who may join it: `shoal invite`, `shoal forget`, `shoal join`."""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_cli.commands import options
from shoal_protocol.interpreter import module_command
from shoal_protocol.join_lines import DEFAULT_PORT, check_host

if TYPE_CHECKING:
    from shoal_cli.standalone.folders import Folder
    from shoal_cli.standalone.invitations import Kind

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "On one machine:  shoal coordinator\n\n"
    "Under another address:  shoal coordinator --host shelf.local --port 7500\n\n"
    "The bare process, with certificates of your own:  "
    "shoal coordinator --listen 0.0.0.0:7400 --store DIR --tls-ca ca.pem ...  "
    "(python -m shoal_coordinator --help)\n\n"
    "[bold]Exit status[/bold]\n\n"
    "0: ended by SIGTERM or Ctrl-C; running jobs resume with the next start. 2: it cannot run here."
)

INVITE_EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Three more devices:  shoal invite --count 3\n\n"
    "A machine to send jobs from:  shoal invite --client"
)
FORGET_EPILOG: Final = "[bold]Example[/bold]\n\nA device that was sold:  shoal forget pi-4"
JOIN_EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "With a line that `shoal invite --client` printed:  "
    "shoal join shoal://192.168.1.10:7400/d90b39f3.../xb-4TvTS...\n\n"
    "With that line in a file:  shoal join line.txt"
)

CoordinatorFolder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        help="What the coordinator keeps is there. "
        "[dim]Default: ~/.local/state/shoal/coordinator[/dim]",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        metavar="HOST",
        help="The name or address by which others reach this machine. "
        "[dim]Default: its address[/dim]",
    ),
]
Port = Annotated[
    int, typer.Option(min=1, max=65534, help="Port of the coordinator; enrolment has the next one.")
]
Minutes = Annotated[
    int, typer.Option(min=1, max=7 * 24 * 60, help="How long a join line is good for.")
]
Client = Annotated[bool, typer.Option("--client", help="For `shoal join`, not for a device.")]
InvitationCount = Annotated[int, typer.Option("--count", min=1, max=100, help="How many lines.")]
DeviceName = Annotated[str, typer.Argument(metavar="DEVICE", show_default=False)]
Line = Annotated[
    str,
    typer.Argument(
        metavar="JOIN", help="A line of `shoal invite --client`, or a file.", show_default=False
    ),
]


class DeviceUnknown(Exception):
    """A name that no device has joined with."""


def coordinator(
    context: typer.Context,
    folder: CoordinatorFolder = None,
    host: Host = None,
    port: Port = DEFAULT_PORT,
    minutes: Minutes = 60,
) -> None:
    """Run a coordinator for devices without Kubernetes, and print the lines that they join with.

    Each line works once. `shoal agent LINE` on a device, `shoal join LINE` where jobs are sent
    from: both get certificates of this coordinator's own authority, and renew them.

    More options are the coordinator process's own, such as --task-seconds and --metrics-address.
    With --listen it is that process alone, which needs --store and certificates.
    """
    if any(each.partition("=")[0] == "--listen" for each in context.args):
        command = [*module_command("shoal_coordinator"), *context.args]
        os.execv(sys.executable, command)  # noqa: S606 - it takes this one's place
    from shoal_cli.standalone.invitations import Kind
    from shoal_cli.standalone.serving import Standalone, serve, this_host

    place = _folder(folder)
    shown = host or this_host()
    colons = shown.count(":")
    if colons > 1 and not shown.startswith("["):
        shown = f"[{shown}]"
    try:
        check_host(shown)
    except ValueError as error:
        hint = "; the port is said with --port" * (colons == 1)
        raise typer.BadParameter(f"--host: {error}{hint}") from error
    standalone = Standalone(folder=place, host=shown, port=port, arguments=tuple(context.args))

    def ready() -> None:
        typer.echo(f"coordinator at {shown}:{port}, kept in {place.root}")
        for kind, what in ((Kind.DEVICE, "on a device"), (Kind.CLIENT, "where jobs are sent from")):
            if kind is Kind.CLIENT or not place.invitations.devices():
                typer.echo(f"{what}:\n  {_invited(place, kind, minutes)}")
        typer.echo(f"each line works once, within {minutes} minutes; `shoal invite` makes more")

    asyncio.run(serve(standalone, ready, options.note))


def invite(
    client: Client = False,
    count: InvitationCount = 1,
    minutes: Minutes = 60,
    folder: CoordinatorFolder = None,
) -> None:
    """Print lines that devices, or clients, join this machine's coordinator with.

    Each line works once, and proves which coordinator it is. To be used on the machine of
    `shoal coordinator`, by the same user.
    """
    from shoal_cli.standalone.invitations import Kind

    kind = Kind.CLIENT if client else Kind.DEVICE
    for _ in range(count):
        typer.echo(_invited(_folder(folder), kind, minutes))


def forget(device: DeviceName, folder: CoordinatorFolder = None) -> None:
    """Forget a device: its certificate is not renewed, and its name is free.

    For a device that was lost, or set up anew. Its last certificate ends within a day. To be used
    on the machine of `shoal coordinator`, by the same user.
    """
    place = _folder(folder)
    if not place.invitations.forget(device):
        known = ", ".join(place.invitations.devices()) or "none"
        raise DeviceUnknown(
            f"{device} has not joined the coordinator of {place.root}; known: {known}"
        )
    typer.echo(f"{device} is forgotten")


def join(line: Line) -> None:
    """Get a certificate for sending jobs to a coordinator.

    It is kept in ~/.local/state/shoal, and renewed when it is used. After that, commands know the
    coordinator by its address.
    """
    from shoal_cli.transfer import joined
    from shoal_protocol.join_lines import read_join_line

    try:
        parsed = read_join_line(line)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    joined.join(parsed)
    typer.echo(f"joined {parsed.target}; try: shoal devices --coordinator {parsed.target}")


def _folder(chosen: Path | None) -> "Folder":
    from shoal_cli.standalone.folders import Folder, default_folder

    return Folder((chosen or default_folder()).absolute())


def _invited(folder: "Folder", kind: "Kind", minutes: int) -> str:
    """The command to type where somebody is to join."""
    from datetime import UTC, datetime, timedelta

    folder.check_used()
    token = folder.invitations.add(kind, datetime.now(UTC), timedelta(minutes=minutes))
    command = "agent" if kind == "device" else "join"
    return f"shoal {command} {folder.line(token)}"
