"""What a batch saves: processor time of an item where eight may run at once, and where one does.

The time is that of all processes of a pool, coordinator and agents. It is what other load of the
machine disturbs least; how long a call takes is not measured here.

    .venv/bin/python bench/batching.py [--quick] [--json FILE]
"""

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from layered_model import save_layers
from measurement import Arguments, Report, alternate, compared, parse_arguments
from processor_time import used_seconds

import shoal

BATCH: Final = 8
ITEMS: Final = 128
DEVICES: Final = 2
SHAPES: Final = ((1, 256), (1, 1024), (32, 1024))
"""Of an item: the width of the layers makes weights of 3 or 48 MiB in all."""


def main() -> None:
    """Measure both ways, in turns."""
    arguments = parse_arguments(__doc__)
    report = Report(arguments)
    with tempfile.TemporaryDirectory(prefix="shoal-batching-") as folder:
        for shape in SHAPES:
            _measure(report, arguments, Path(folder) / f"{shape[0]}-{shape[1]}.onnx", shape)
    report.finish()


def _measure(report: Report, arguments: Arguments, path: Path, shape: tuple[int, int]) -> None:
    save_layers(path, "rows", shape[1])
    items = np.random.default_rng(0).standard_normal((ITEMS, *shape)).astype(np.float32)
    with ExitStack() as pools:
        subjects = {
            name: partial(_seconds_per_item, *_start(pools, path, shape, batching), items)
            for name, batching in (("alone", 1), ("batched", BATCH))
        }
        for subject in subjects.values():  # the first runs measure what fragments take
            subject()
        samples = alternate(subjects, turns=5 if arguments.quick else 20)
    name = f"items of {shape[0]} x {shape[1]}, up to {BATCH} at once"
    report.add(compared(name, samples["batched"], samples["alone"], unit="s"))


def _start(
    pools: ExitStack, path: Path, shape: tuple[int, int], batching: int
) -> tuple[shoal.Model, set[int]]:
    """The model, and the processes of its pool: coordinator and agents."""
    others = _children()
    pool = pools.enter_context(shoal.pool(devices=DEVICES, budget="96Mi", enforce="none"))
    model = pool.load(path, shapes={"x": shape}, fragments=DEVICES, batching=batching)
    return model, _children() - others


def _children() -> set[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for each in tasks for pid in each.read_text().split()}


def _seconds_per_item(model: shoal.Model, pids: set[int], items: np.ndarray) -> float:
    before = sum(map(used_seconds, pids))
    for _ in model.map(({"x": x} for x in items), look_ahead=ITEMS):
        pass
    return (sum(map(used_seconds, pids)) - before) / ITEMS


if __name__ == "__main__":
    main()
