"""`shoal partition`."""

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_cli.commands import options
from shoal_protocol import partition as partitions
from shoal_protocol.units import counted, format_bytes, parse_whole, shortened

if TYPE_CHECKING:
    from shoal_cli.transfer.addresses import Access

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Three fragments, as even as the graph allows:  shoal partition model.onnx --fragments 3\n\n"
    "As few as possible, none over a size:  shoal partition model.onnx --max-bytes 16Mi\n\n"
    "At tensors that you name, kept in a folder:  "
    "shoal partition model.onnx --cuts layer2,layer3 --out store\n\n"
    "To a pool:  shoal partition s3://models/rec.onnx --max-bytes 16Mi --to shelf:7400"
)

Count = Annotated[int | None, typer.Option(min=1, max=256, help="How many fragments.")]
MaxBytes = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The most that a fragment may need, such as 16Mi."),
]
Cuts = Annotated[
    str | None, typer.Option(metavar="TENSOR,...", help="Cut where these tensors are made.")
]
Cut = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TENSOR",
        help="Cut where this tensor is made, whose name may have commas. Repeatable.",
    ),
]
Outgrown = Annotated[
    str | None,
    typer.Option(
        metavar="FRAGMENT=BYTES,...",
        help="Divide these fragments, one after the other, which were measured to take so much.",
    ),
]
Seen = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TENSOR=1,256,2260",
        help="How large items have a tensor inside the model, where that follows from no shape. "
        "Repeatable.",
    ),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep the fragments here, as a fragment store.")
]
Document = Annotated[
    bool,
    typer.Option(
        "--document", help="Print the partition document as one line of JSON, at the end."
    ),
]
To = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Send the fragments to this coordinator, those that it lacks."
    ),
]


def partition(
    model: options.ModelAddress,
    *,
    fragments: Count = None,
    max_bytes: MaxBytes = None,
    cuts: Cuts = None,
    cut: Cut = None,
    seen: Seen = None,
    outgrown: Outgrown = None,
    shape: options.Shapes = None,
    digest: options.Digest = None,
    volume: options.Volumes = None,
    cache: options.ModelCache = None,
    max_download: options.MaxDownload = "64Gi",
    out: Out = None,
    document: Document = False,
    to: To = None,
    security: options.Security,
) -> None:
    """Cut a model into fragments and print what they are: nodes, weights, memory, boundaries.

    The same model and the same cuts make the same fragments, wherever that is done.
    """
    from shoal_cli.commands.model_tables import partition_table
    from shoal_cli.commands.tables import output, working
    from shoal_cli.commands.transfers import fetch_model
    from shoal_cli.local.cut_orders import CutOrder
    from shoal_cli.local.preparation import prepare

    size = _limit_of(fragments, max_bytes, cuts or cut)
    wanted, shapes = options.parse_digest(digest), options.parse_shapes(shape)
    access = security.access(volume)
    limit = options.parse_size(max_download, "--max-download")
    path = fetch_model(model, access, wanted, cache, limit)
    order = CutOrder(
        name=path.stem,
        model=path.stem,
        path=path,
        digest=wanted,
        shapes=shapes,
        fragments=fragments,
        max_bytes=size,
        tensors=(*(cuts.split(",") if cuts else ()), *(cut or ())),
        seen=options.parse_shapes(seen, "--seen", "TENSOR"),
        outgrown=_outgrown(outgrown),
    )
    with tempfile.TemporaryDirectory(prefix="shoal-partition-") as folder:
        store, kept = out or Path(folder), out is not None or to is not None
        with working(f"cutting {path.name}"):
            prepared = asyncio.run(prepare(order, store, lambda done, total: None, fragments=kept))
        uploaded = to and asyncio.run(_upload(prepared.document, store, to, access))
        written = prepared.path.read_text().strip()
    if document:
        typer.echo(written)  # in one line: what a worker's log is read for
        return
    output().print(partition_table(prepared.document))
    if uploaded:
        typer.echo(uploaded)
    if out is not None:
        typer.echo(f"kept in {prepared.path}")


def _outgrown(text: str | None) -> tuple[partitions.Outgrown, ...]:
    """Fragments with what they were measured to take, such as `3=73400320`."""
    found = []
    for each in text.split(",") if text else ():
        number, _, size = each.partition("=")
        fragment, need = parse_whole(number), parse_whole(size)
        if fragment is None or need is None:
            shown = shortened(each)
            raise typer.BadParameter(f"--outgrown {shown}: give FRAGMENT=BYTES, such as 3=73400320")
        found.append(partitions.Outgrown(fragment=fragment, need_bytes=need))
    return tuple(found)


def _limit_of(fragments: int | None, max_bytes: str | None, cuts: object) -> int | None:
    """What a fragment may need, where that is how the model is cut."""
    if sum(given is not None for given in (fragments, max_bytes, cuts or None)) != 1:
        raise typer.BadParameter("give one of --fragments, --max-bytes and --cuts")
    return None if max_bytes is None else options.parse_size(max_bytes, "--max-bytes")


async def _upload(
    document: partitions.PartitionDocument, store: Path, to: str, access: "Access"
) -> str:
    """Send what the coordinator lacks; what that came to."""
    from shoal_cli.commands.transfers import TransferLines
    from shoal_cli.transfer.coordinators import upload_fragments
    from shoal_protocol.fragment_store import FragmentStore

    digests = [fragment.digest for fragment in document.fragments]
    sizes = FragmentStore(store)
    lines = TransferLines("sending", sum(sizes.size_bytes(each) for each in dict.fromkeys(digests)))
    client = access.coordinator(to)
    try:
        uploaded = await upload_fragments(store, digests, client, to, lines.add)
    finally:
        await client.close()
    return (
        f"{to} has {counted(uploaded.fragments, 'fragment')}; {uploaded.sent_fragments} sent, "
        f"{format_bytes(uploaded.sent_bytes)}"
    )
