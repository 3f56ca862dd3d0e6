"""A process of a test: `python larger_item_probe.py FOLDER LIMIT COUNT [untried] [granted] [cold]
[disk|memory|looked up]` has a fragment run on an item that is larger than planned, or on the first
when nothing is known of the fragment, then on a small one, and prints how much memory that took,
and whether the first one was stopped. It is opened in what it takes, or within the limit; its
weights may be on the disk when it runs. An item is a number of rows, or so many rows, on the disk
or in memory, or so many indices."""

import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from shoal_agent.runtime.failures import Exceeded, Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter, tune_allocator
from shoal_protocol.page_cache import uncache
from shoal_protocol.tensors import Array

ARENA_BYTES = 64 << 20
WIDTH = 1024
Items: TypeAlias = Callable[[int], dict[str, Array]]


def number_of(rows: int) -> dict[str, Array]:
    return {"count": np.array([rows, WIDTH])}


def in_memory(rows: int) -> dict[str, Array]:
    return {"x": np.ones((rows, WIDTH), np.float32)}


def on_disk(rows: int) -> dict[str, Array]:
    """As the agent keeps what memory has no room for."""
    size = rows * WIDTH * 4
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return {"x": np.frombuffer(mapping, np.uint8).view(np.float32).reshape(rows, WIDTH)}


def looked_up(rows: int) -> dict[str, Array]:
    """Rows of a table that lie far from one another."""
    return {"x": np.arange(rows) * 32}


KINDS: Final[dict[str, Items]] = {"memory": in_memory, "disk": on_disk, "looked up": looked_up}


def main(  # noqa: PLR0913 - how it is to be done
    folder: Path,
    limit_bytes: int,
    count: int,
    items: Items,
    *,
    untried: bool,
    granted: bool,
    cold: bool,
) -> None:
    tune_allocator()
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=ARENA_BYTES)
    runtime.rehearse()
    meter.settle()
    runtime.open("f", folder, limit_bytes if granted else None)
    item = items(count)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if cold:
                runtime.drop_weights("f")
                uncache(file.fileno())
    try:
        result = runtime.run(
            "f",
            item,
            Stopper(),
            limit_bytes,
            is_known=not untried,
            is_tried=not untried,
            is_larger=not untried,
        )
        found = {"stopped": "", "peak": result.peak_bytes}
        del result
    except Exceeded as error:
        found = {"stopped": str(error), "peak": meter.peak_bytes()}
    small = runtime.run("f", items(1), Stopper())
    print(json.dumps(found | {"next_peak": small.peak_bytes}))


if __name__ == "__main__":
    _, fragment, limit, rows, *how = sys.argv
    (kind,) = [KINDS[each] for each in how if each in KINDS] or [number_of]
    within = {name: name in how for name in ("untried", "granted", "cold")}
    main(Path(fragment), int(limit), int(rows), kind, **within)
