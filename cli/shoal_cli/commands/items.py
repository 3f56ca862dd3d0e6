"""`shoal items` and `shoal retry`: what became of each item of a job, and those that failed once
more."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_cli.commands import targets
from shoal_protocol.units import counted
from shoal_protocol.visible import visible_line

if TYPE_CHECKING:
    from shoal_protocol.v1 import coordinator_pb2 as pb

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "What failed, and why:  shoal items ocr --failed\n\n"
    "Of an InferenceJob of the cluster, for a program:  "
    "shoal items ocr --namespace reading --output json"
)
RETRY_EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "All that failed:  shoal retry ocr\n\n"
    "Two items of an InferenceJob of the cluster:  shoal retry ocr 17 23 --namespace reading"
)

Failed = Annotated[bool, typer.Option("--failed", help="Only items that have failed.")]
Items = Annotated[
    list[int] | None,
    typer.Argument(
        metavar="[ITEM...]",
        min=0,
        help="Only these of the failed items, by their numbers; the others stay failed. "
        "[dim]Default: all[/dim]",
    ),
]


def items(
    job: targets.Job,
    failed: Failed = False,
    *,
    target: targets.Target,
    output: targets.Output = "text",
) -> None:
    """List the items of a job: state, tries, device, input, and why they failed.

    Items of a job that has ended are listed until it is removed: on a cluster, those of a failed
    InferenceJob until it is deleted.
    """
    found = asyncio.run(_listed(target, job, failed=failed))
    if output == "json":
        typer.echo(json.dumps(list(map(_document, found))))
        return
    for line in item_lines(found):
        typer.echo(line)


def retry(
    job: targets.Job,
    items: Items = None,
    *,
    target: targets.Target,
) -> None:
    """Try the failed items of a job again that has ended, or that follows its inputs.

    Results that exist stay. Of a followed folder the files of these items are taken once more.

    On a cluster this edits spec.retry of the InferenceJob, which runs and ends again.
    """
    from shoal_cli.live.cluster import retry_job

    which = tuple(sorted(set(items or ())))
    if (kubectl := target.kubectl) is not None:
        number = retry_job(kubectl, job, which)
        typer.echo(f"{job}: retry {number} is wanted; kubectl get ij {job} shows how it goes")
        return
    status = asyncio.run(_retried(target, job, which))
    left = status.items - status.succeeded - status.failed
    stays = f", {status.failed} stay failed" if which else ""
    to_do = f"{left} of {counted(status.items, 'item')} to do"
    typer.echo(f"{status.name}: retry {status.retry}, {to_do}{stays}")


async def _listed(target: targets.Target, name: str, *, failed: bool) -> "list[pb.JobItem]":
    from shoal_protocol.v1 import coordinator_pb2 as pb

    states = [pb.JobItem.FAILED] if failed else []
    async with targets.watching(target) as (_, client):
        there = await targets.name_there(client, target, name)
        return [item async for item in client.items(there, states)]


async def _retried(target: targets.Target, name: str, items: Sequence[int]) -> "pb.JobStatus":
    async with targets.watching(target) as (_, client):
        return await client.retry(await targets.name_there(client, target, name), items)


def _document(item: "pb.JobItem") -> dict[str, object]:
    return {
        "item": item.item,
        "state": _state(item),
        "tries": item.tries or None,
        "device": item.device or None,
        "input": item.input,
        "reason": item.reason or None,
    }


def _state(item: "pb.JobItem") -> str:
    from shoal_protocol.v1 import coordinator_pb2 as pb

    return pb.JobItem.State.Name(item.state).capitalize()


def item_lines(found: "Sequence[pb.JobItem]") -> Iterator[str]:
    """Lines of aligned columns; a rich table of so many rows would take a minute."""
    from rich.cells import cell_len, set_cell_size

    if not found:
        yield "no items"
        return
    rows = [("item", "state", "tries", "device", "input", "reason")]
    for item in found:
        tries, why = str(item.tries or "-"), visible_line(" ".join(item.reason.split())) or "-"
        where = item.device or "-", visible_line(item.input)
        rows.append((str(item.item), _state(item), tries, *where, why))
    widths = [max(cell_len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [set_cell_size(cell, width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join((*cells, row[5])).rstrip()
