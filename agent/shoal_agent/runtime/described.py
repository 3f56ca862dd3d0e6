"""What the manifest of a fragment says that an agent has to know to run it."""

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np

from shoal_agent.runtime.blocks import Blocks
from shoal_agent.runtime.inputs import InputSpec
from shoal_agent.runtime.table_rows import tables_of
from shoal_protocol.blocks import blocks_from_json, joins_from_json
from shoal_protocol.manifest import (
    BESIDE,
    BLOCKS,
    DEQUANTISES,
    IN_ORDER,
    JOINS,
    MANIFEST,
    FragmentDamaged,
)


def read_blocks(folder: Path) -> Blocks | None:
    """What a fragment's manifest says of its blocks; None: it has none. Raises `FragmentDamaged`,
    `OSError`."""
    if not (folder / BLOCKS).exists():
        return None
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        blocks = blocks_from_json(document["blocks"], (folder / BLOCKS).stat().st_size)
        resident_bytes = int(document["resident_bytes"])
        known = {str(each["name"]) for each in document["inputs"]}
        outputs = tuple(str(each["name"]) for each in document["outputs"])
        joins = joins_from_json(document.get(JOINS))
        gathers = [gathered for block in blocks for gathered in block.gathers]
        tables = tables_of(document, {each.table for each in gathers})
        inputs = _indices_taken(document["inputs"], {each.indices for each in gathers})
    except (ValueError, KeyError, TypeError) as error:
        raise FragmentDamaged(f"{folder / MANIFEST} describes no blocks: {error}") from error
    for index, block in enumerate(blocks):
        if missing := {each.indices for each in block.gathers} - known:
            raise FragmentDamaged(f"block {index} reads rows by {min(missing)!r}, given by nothing")
        known.update(each.rows for each in block.gathers)
        if missing := set(block.takes) - known:
            raise FragmentDamaged(f"block {index} takes {min(missing)!r}, which nothing gives")
        known.update(block.gives)
    known.update(join.output for join in joins if known.issuperset(join.parts))
    if missing := set(outputs) - known:
        raise FragmentDamaged(f"no block gives the output {min(missing)!r}")
    return Blocks(
        folder=folder.resolve(),
        resident_bytes=resident_bytes,
        outputs=outputs,
        blocks=blocks,
        joins=joins,
        tables=tables,
        indices=inputs,
    )


def _indices_taken(inputs: list[dict[str, Any]], names: Set[str]) -> tuple[InputSpec, ...]:
    """Inputs that say what rows of tables are read: no block may take them."""
    return tuple(
        InputSpec(
            name=each["name"],
            dtype=np.dtype({"int32": np.int32, "int64": np.int64}[each["dtype"]]),
            shape=tuple(size if isinstance(size, int) else None for size in each["shape"] or ()),
        )
        for each in inputs
        if each["name"] in names
    )


def runs_in_order(folder: Path) -> bool:
    """Whether a fragment's nodes are to run in the order of the file. Raises `FragmentDamaged`,
    `OSError`."""
    return description(folder).get(IN_ORDER) is True


def dequantises(folder: Path) -> bool:
    """Whether a fragment that is not prepared is opened so that no quantised weights are copied.
    Raises `FragmentDamaged`, `OSError`."""
    return description(folder).get(DEQUANTISES) is True


def beside_bytes_of(folder: Path) -> int:
    """The most that a node of a fragment takes outside of the arena, with the largest inputs that
    are planned for, as far as that is known. Raises `FragmentDamaged`, `OSError`."""
    size = description(folder).get(BESIDE, 0)
    return max(0, size) if isinstance(size, int) else 0


def description(folder: Path) -> dict[str, object]:
    """What a fragment's manifest says of it. Raises `FragmentDamaged`, `OSError`."""
    try:
        description: object = json.loads((folder / MANIFEST).read_bytes())
    except ValueError as error:
        raise FragmentDamaged(f"{folder / MANIFEST} is no manifest: {error}") from error
    return description if isinstance(description, dict) else {}
