"""What a tiny item costs: processor time of each process, and of the coordinator's threads.

Three stages of next to no work on three devices, as in `peers`: fifty items in a file, a file for
each item, and one item at a time. Processor time is the kernel's count of each process, so that it
says less about what else the machine does than time does.

    .venv/bin/python bench/item_cost.py [--quick] [--json FILE]
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from measurement import Measurement, Report, run_in_folder
from peers import DEVICES, STACKED, STAGES, tiny_model
from pool import Pool, cut, running_pool, write_items
from processor_time import loop_seconds, used_seconds

from shoal_protocol.partition import PartitionDocument

PROCESSES = ("coordinator", *DEVICES)


def _used(pool: Pool) -> Mapping[str, float]:
    """Of each process, and of the coordinator's event loop."""
    used = {name: used_seconds(pool.process_id(name)) for name in PROCESSES}
    return {**used, "its event loop": loop_seconds(pool.process_id("coordinator"))}


async def _measure(
    report: Report, pool: Pool, document: PartitionDocument, name: str, inputs: Path, items: int
) -> None:
    """One job, whose lines say what an item of it took."""
    before = _used(pool)
    outputs = inputs.with_name(f"{inputs.name}-out")
    how = {"parallelism": 1} if name == "alone" else {}
    homes: Sequence[Sequence[str]] = [[device] for device in DEVICES]
    await pool.run(inputs.name, document, inputs, outputs, homes=homes, **how)
    used = {each: seconds - before[each] for each, seconds in _used(pool).items()}
    agents = sum(used[device] for device in DEVICES) / len(DEVICES)
    loop = min(used["its event loop"], used["coordinator"])
    lines = {
        "all processes": used["coordinator"] + len(DEVICES) * agents,
        "an agent": agents,
        "the coordinator's event loop": loop,
        "its threads that read, write and wait for the disk": used["coordinator"] - loop,
    }
    for each, seconds in lines.items():
        report.add(Measurement(name=f"{name}: {each}", value=1e6 * seconds / items, unit="us"))


async def measure(report: Report, folder: Path) -> None:
    """The three forms, in one pool."""
    items = 2000 if report.quick else 20_000
    item = {"x0": np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)}
    stack = {name: np.stack([value] * STACKED) for name, value in item.items()}
    devices = [{"name": name, "memory": "256Mi"} for name in DEVICES]
    async with running_pool(folder / "pool", devices, cgroups=False) as pool:
        document = cut(tiny_model(folder), pool.store, STAGES, {"x0": (1, 64)})
        homes = [[name] for name in DEVICES]
        warm = write_items(folder / "warm", [item] * 50)
        await pool.run("warm", document, warm, folder / "warm-out", homes=homes)
        stacked = write_items(folder / "stacked", [stack] * (items // STACKED))
        await _measure(report, pool, document, f"{STACKED} items in a file", stacked, items)
        files = write_items(folder / "files", [item] * (items // 4))
        await _measure(report, pool, document, "a file each", files, items // 4)
        few = write_items(folder / "alone", [item] * (items // 20))
        await _measure(report, pool, document, "alone", few, items // 20)


if __name__ == "__main__":
    run_in_folder(__doc__, measure)
