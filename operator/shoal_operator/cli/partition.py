"""`shoal partition`."""

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from shoal_operator.cli.options import parse_size

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Three fragments, as even as the graph allows:  shoal partition model.onnx --fragments 3\n\n"
    "As few as possible, none over a size:  shoal partition model.onnx --max-bytes 16Mi\n\n"
    "At tensors that you name, kept in a folder:  "
    "shoal partition model.onnx --cuts layer2,layer3 --out store"
)


def partition(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.")],
    fragments: Annotated[
        int | None, typer.Option(min=1, max=256, help="How many fragments.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The most that a fragment may need, such as 16Mi."),
    ] = None,
    cuts: Annotated[
        str | None, typer.Option(metavar="TENSOR,...", help="Cut where these tensors are made.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT=1,3,48,320",
            help="The shape of an input with dynamic axes, to reckon with. Repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the fragments here, as a fragment store."),
    ] = None,
) -> None:
    """Cut a model into fragments and print what they are: nodes, weights, memory, boundaries."""
    from rich.console import Console

    from shoal_operator.cli.tables import partition_table
    from shoal_operator.shell.local.orders import CutOrder
    from shoal_operator.shell.local.preparation import prepare

    if sum(option is not None for option in (fragments, max_bytes, cuts)) != 1:
        raise typer.BadParameter("give one of --fragments, --max-bytes and --cuts")
    order = CutOrder(
        name=model.stem,
        model=model.stem,
        path=model,
        digest=None,
        shapes=_parse_shapes(shape or []),
        sample=None,
        fragments=fragments,
        max_bytes=None if max_bytes is None else parse_size(max_bytes, "--max-bytes"),
        tensors=tuple(cuts.split(",")) if cuts else (),
        budgets=(),
    )
    with tempfile.TemporaryDirectory(prefix="shoal-partition-") as folder:
        store = out or Path(folder)
        prepared = asyncio.run(prepare(order, store, lambda done, total: None))
        Console().print(partition_table(prepared.document))
    if out is not None:
        typer.echo(f"kept in {prepared.path}")


def _parse_shapes(texts: list[str]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        try:
            shapes[name] = tuple(int(size) for size in sizes.split(","))
        except ValueError:
            raise typer.BadParameter(f"--shape {text}: write INPUT=1,3,48,320") from None
    return shapes
