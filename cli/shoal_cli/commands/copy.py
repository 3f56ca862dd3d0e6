"""`shoal copy`."""

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_cli.commands import options
from shoal_protocol.units import counted, format_bytes

if TYPE_CHECKING:
    from shoal_cli.transfer.addresses import Access
    from shoal_cli.transfer.copying import Copied

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Inputs of a job to its coordinator:  "
    "shoal copy s3://lines/in coordinator://shelf:7400/jobs/ocr/in\n\n"
    "Results back to a claim:  "
    "shoal copy coordinator://shelf:7400/jobs/ocr/out pvc://lines/out --volume lines=/mnt/lines\n\n"
    "[bold]Exit status[/bold]\n\n"
    "0: every file is complete. 1: a network or a disk failed; run it again, and it continues. 2: "
    "what was asked for cannot be. 4: the coordinator's volume has no room now."
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder, a file, pvc://CLAIM/PATH, s3://BUCKET/PREFIX, https://..., oci://..., or "
        "coordinator://HOST:PORT/jobs/JOB/out.",
    ),
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A folder, pvc://CLAIM/PATH, s3://BUCKET/PREFIX, https://HOST/PATH (each file is sent "
        "with PUT), or coordinator://HOST:PORT/jobs/JOB/in.",
    ),
]


New = Annotated[
    bool,
    typer.Option(
        "--new",
        help="Copy only files whose names the target lacks, each once it has stopped changing.",
    ),
]
Follow = Annotated[
    bool,
    typer.Option(
        "--follow", help="The same, and continue with files as they come, until interrupted."
    ),
]
Changed = Annotated[
    bool,
    typer.Option(
        "--changed", help="With --new or --follow: files of another size at the target as well."
    ),
]


def copy(
    source: Source,
    target: Target,
    *,
    new: New = False,
    follow: Follow = False,
    changed: Changed = False,
    volume: options.Volumes = None,
    security: options.Security,
    as_json: options.AsJson = False,
) -> None:
    """Copy the files of a folder: inputs to a coordinator, results from it, or between stores.

    Files pass through in pieces. A file is seen at the target when it is whole; one that exists
    with the same size and checksum is left alone. Sub-folders, and files that begin with a dot, are
    not copied. Credentials are those of `shoal inspect`.
    """
    access = security.access(volume)
    copied = asyncio.run(_copy(source, target, access, new=new, follow=follow, changed=changed))
    files, size = counted(copied.files, "file"), format_bytes(copied.bytes)
    text = f"{files}, {size}; {copied.skipped} complete already"
    typer.echo(json.dumps(asdict(copied)) if as_json else text)


async def _copy(
    source_uri: str, target_uri: str, access: "Access", *, new: bool, follow: bool, changed: bool
) -> "Copied":
    from shoal_cli.commands.transfers import TransferLines
    from shoal_cli.transfer import copying, following

    async with access.source(source_uri) as source, access.target(target_uri) as target:
        if new or follow:
            return await following.copy_new(
                source, target, options.note, follow=follow, changed=changed
            )
        return await copying.copy(source, target, TransferLines("copying").show)
