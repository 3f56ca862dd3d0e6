"""`shoal partition`."""

import asyncio
import tempfile
from pathlib import Path
from typing import Final

import typer

from shoal_operator.cli import options

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Three fragments, as even as the graph allows:  shoal partition model.onnx --fragments 3\n\n"
    "As few as possible, none over a size:  shoal partition model.onnx --max-bytes 16Mi\n\n"
    "At tensors that you name, kept in a folder:  "
    "shoal partition model.onnx --cuts layer2,layer3 --out store"
)


def partition(
    model: options.ModelFile,
    fragments: options.Count = None,
    max_bytes: options.MaxBytes = None,
    cuts: options.Cuts = None,
    shape: options.Shapes = None,
    out: options.Out = None,
) -> None:
    """Cut a model into fragments and print what they are: nodes, weights, memory, boundaries."""
    from rich.console import Console

    from shoal_operator.cli.tables import partition_table
    from shoal_operator.shell.local.orders import CutOrder
    from shoal_operator.shell.local.preparation import prepare

    if sum(given is not None for given in (fragments, max_bytes, cuts)) != 1:
        raise typer.BadParameter("give one of --fragments, --max-bytes and --cuts")
    order = CutOrder(
        name=model.stem,
        model=model.stem,
        path=model,
        digest=None,
        shapes=_parse_shapes(shape or []),
        sample=None,
        fragments=fragments,
        max_bytes=None if max_bytes is None else options.parse_size(max_bytes, "--max-bytes"),
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
