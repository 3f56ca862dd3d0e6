"""A process whose fragments run under one budget after the other, and are loaded and unloaded in
between; prints what the kernel measured.

    python changing_budgets.py STORE CHANGES SWITCHES DIGEST...

The store is used as the cache. Of all fragments together the blocks fit in the smallest budget. The
report is JSON: for each change the budget, the peak of the runs under it, what was resident after
them, and digests of the outputs; peak and outputs for each switch; how much more anonymous memory
there is in the end than in the beginning, and how much is mapped of the store.
"""

import asyncio
import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shoal_agent.runtime.process_memory import drop_library_pages, tune_allocator

tune_allocator()

from shoal_agent.cache.disk import FragmentCache  # noqa: E402 - after the allocator was tuned
from shoal_agent.cache.fetching import Fetcher  # noqa: E402
from shoal_agent.memory.residency import Ledger  # noqa: E402
from shoal_agent.runtime.blocks import Blocks  # noqa: E402
from shoal_agent.runtime.described import read_blocks  # noqa: E402
from shoal_agent.runtime.fragments import Fragments  # noqa: E402
from shoal_agent.runtime.mapped_pages import mapped_ranges, size_of  # noqa: E402
from shoal_agent.runtime.onnx_runtime import Runtime  # noqa: E402
from shoal_agent.runtime.process_memory import MemoryMeter  # noqa: E402
from shoal_agent.runtime.processor import Processor  # noqa: E402
from shoal_agent.telemetry.counters import Counters  # noqa: E402
from shoal_protocol.units import Bytes  # noqa: E402

BEYOND_BYTES = 1 << 20
"""What a budget leaves beside the fragments at the least: inputs and outputs of a run."""


async def report(store: Path, changes: int, switches: int, digests: list[str]) -> dict[str, object]:
    cache = FragmentCache(store, 1 << 30)
    blocks = [each for digest in digests if (each := read_blocks(cache.path(digest))) is not None]
    least = sum(each.least_bytes for each in blocks) + BEYOND_BYTES
    most = sum(each.resident_bytes for each in blocks) + BEYOND_BYTES
    budgets = np.random.default_rng(0).integers(least, most, changes, endpoint=True)
    # Drawn here: the library's pages, 0.9 MiB, would return after the floor was taken.
    choices = np.random.default_rng(1).random((switches, 2)).tolist()
    with ThreadPoolExecutor(1) as processor:
        meter = MemoryMeter()
        runtime = processor.submit(Runtime, meter, threads=1, limit_bytes=most).result()
        drop_library_pages()
        processor.submit(runtime.rehearse).result()
        evicted: list[str] = []
        fragments = Fragments(
            ledger=Ledger(budget=Bytes(most)),
            cache=cache,
            fetcher=Fetcher(cache, lambda *_: None, unlimited),
            runtime=runtime,
            processor=Processor(runtime, processor),
            counters=Counters(),
            on_evicted=lambda *why: evicted.append(str(why)),
        )
        for _ in range(2):  # what the first round needs in libraries is part of the floor
            meter.settle()
            for digest, each in zip(digests, blocks, strict=True):
                await fragments.load(digest, each.least_bytes, [])
                await run(fragments, digest)
                await fragments.unload(digest)
        anonymous = anonymous_bytes()
        for digest, each in zip(digests, blocks, strict=True):
            await fragments.load(digest, each.resident_bytes, [])
        steps = []
        for budget in budgets:
            await fragments.change_budget(int(budget))
            meter.begin_peak()
            outputs = [await run(fragments, digest) for digest in digests]
            peak = meter.peak_since_begin_bytes()
            steps.append((int(budget), peak, meter.used_bytes(), outputs))
        budget = (least + most) // 2
        await fragments.change_budget(budget)
        switched = await switch(fragments, meter, dict(zip(digests, blocks, strict=True)), choices)
        for digest in list(fragments.ledger.resident):
            await fragments.unload(digest)
        await fragments.close()
        return {
            "steps": steps,
            "budget": budget,
            "switched": switched,
            "evicted": evicted,
            "left": anonymous_bytes() - anonymous,
            "mapped": size_of(mapped_ranges(store.resolve())),
        }


def anonymous_bytes() -> int:
    """In memory: library pages, which any error brings in, are none of it."""
    with open("/proc/self/status", encoding="ascii") as lines:
        (line,) = (each for each in lines if each.startswith("RssAnon"))
    return int(line.split()[1]) << 10


async def switch(
    fragments: Fragments,
    meter: MemoryMeter,
    blocks: dict[str, Blocks],
    choices: list[tuple[float, float]],
) -> list[tuple[int, dict[str, str]]]:
    """Load fragments that are not resident, with what can be had at the most or less, and unload
    those that are; run all that are there."""
    least = sum(each.least_bytes for each in blocks.values())
    steps = []
    for choice, share in choices:
        digest, each = list(blocks.items())[int(choice * len(blocks))]
        meter.begin_peak()
        if digest in fragments.ledger.resident:
            await fragments.unload(digest)
        else:
            # There is no reserve here: what the process itself has grown by is no fragment's.
            beyond = fragments.ledger.budget - fragments.ledger.grown - BEYOND_BYTES - least
            most = min(each.resident_bytes, each.least_bytes + beyond)
            need = each.least_bytes + int(share * (most - each.least_bytes))
            await fragments.load(digest, need, [])
        outputs = {key: await run(fragments, key) for key in fragments.ledger.resident}
        steps.append((meter.peak_since_begin_bytes(), outputs))
    return steps


async def run(fragments: Fragments, digest: str) -> str:
    x = np.arange(512, dtype=np.float32).reshape(1, 512) % 7
    output = (await fragments.run(digest, {"x": x})).outputs["y"]
    return hashlib.sha256(output.tobytes()).hexdigest()


async def unlimited(_: int) -> None:
    """A link of any speed."""


if __name__ == "__main__":
    store, changes, switches, *digests = sys.argv[1:]
    print(json.dumps(asyncio.run(report(Path(store), int(changes), int(switches), digests))))
