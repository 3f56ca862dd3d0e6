"""What a tiny item takes of the processors, by the parts of the program.

Three stages of next to no work on three devices, as in `item_cost`: one item at a time, and a file
for each item in a flood. The kernel counts what each thread takes. Main threads, which have the
event loops, are sampled by their own processor time, so that a row is its part of the samples times
what the thread has taken. What stands beside an item once a second is in it, too.

    .venv/bin/python bench/item_rows.py [--quick] [--json FILE]
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from asked import Asked
from item_cost import PROCESSES
from measurement import Measurement, Report, run_in_folder
from peers import DEVICES, STAGES, tiny_model
from pool import Pool, cut, running_pool, write_items

_SAMPLING: Final = Path(__file__).with_name("sampling")
WARM: Final = 300
_NATIVE: Final = "threads of gRPC and ONNX Runtime"
_FILES: Final = "files: scanned, read, written, synced"
_RUNS: Final = "ONNX Runtime"
ROWS: Final[Mapping[str, str]] = {
    _FILES: r"shoal_coordinator/storage/|shoal_protocol/durable",
    "the dispatcher": r"shoal_coordinator/dispatch/",
    "grpc.aio in the event loop": r"/grpc/",
    "asyncio": r"/asyncio/|/selectors\.py|shoal_protocol/(eager|pacing|threads)",
    "protobuf and messages": r"/protobuf/|shoal_protocol/v1/|server/(wire|messages)\.py",
    "links, frames and encoding": r"shoal_protocol/",
    _RUNS: r"/onnxruntime/",
    "ledger, memory meter, around a run": r"shoal_agent/(memory|runtime)/",
    "a device's items, tasks, outputs and reports": r"shoal_agent/",
    "the coordinator's sessions, items and metrics": r"shoal_coordinator/",
}
"""By which of the paths of files belong to a row; the first that fits."""


def row_of(path: str) -> str:
    """The row that a sample in this file belongs to."""
    return next(row for row, pattern in ROWS.items() if re.search(pattern, path))


def rows_of(process: str, found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What a process has written, by rows, in seconds."""
    samples, used = found["samples"], found["used"]
    rows: dict[str, float] = defaultdict(float)
    for path, count in samples.items():
        rows[row_of(path)] += used["main"] / 1e9 * count / sum(samples.values())
    rows[_FILES if process == "coordinator" else _RUNS] += used["python"] / 1e9
    rows[_NATIVE] += used["native"] / 1e9
    return rows


async def _taken(asked: Asked, pool: Pool) -> Mapping[str, Mapping[str, float]]:
    """By process and row, since this was last asked."""
    return {name: rows_of(name, found) for name, found in (await asked.take(pool)).items()}


async def measure(report: Report, folder: Path) -> None:
    """Both forms, in one pool."""
    items = 2000 if report.quick else 20_000
    asked = Asked(_SAMPLING, folder / "sampling", PROCESSES)
    item = {"x0": np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)}
    devices = [{"name": name, "memory": "256Mi"} for name in DEVICES]
    running = running_pool(folder / "pool", devices, cgroups=False)
    async with asked.imported(), running as pool:
        document = cut(tiny_model(folder), pool.store, STAGES, {"x0": (1, 64)})
        homes = [[name] for name in DEVICES]
        for name, count, how in (
            ("warm", WARM, {}),
            ("alone", items // 5, {"parallelism": 1}),
            ("a file each", items, {}),
        ):
            inputs = write_items(folder / name, [item] * count)
            await _taken(asked, pool)
            outputs = folder / f"{name}-out"
            await pool.run(name.replace(" ", "-"), document, inputs, outputs, homes=homes, **how)
            taken = await _taken(asked, pool)
            if name != "warm":
                _add(report, name, taken, count)


def _add(report: Report, form: str, taken: Mapping[str, Mapping[str, float]], items: int) -> None:
    """The lines of one form, for an item."""
    agents: dict[str, float] = defaultdict(float)
    for device in DEVICES:
        for row, seconds in taken[device].items():
            agents[row] += seconds
    for side, rows in (("the coordinator", taken["coordinator"]), ("three agents", agents)):
        for row, seconds in sorted(rows.items(), key=lambda each: -each[1]):
            line = Measurement(
                name=f"{form}, {side}: {row}", value=1e6 * seconds / items, unit="us"
            )
            report.add(line)


if __name__ == "__main__":
    run_in_folder(__doc__, measure)
