"""A process whose fragments run under one budget after the other; prints what the kernel measured.

    python changing_budgets.py STORE CHANGES DIGEST...

The store is used as the cache. Of all fragments together the blocks fit in the smallest budget. The
report is JSON: for each change the budget, the peak of the runs under it, what was resident after
them, and digests of the outputs.
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
from shoal_agent.runtime.blocks import read_blocks  # noqa: E402
from shoal_agent.runtime.fragments import Fragments  # noqa: E402
from shoal_agent.runtime.onnx_runtime import Runtime  # noqa: E402
from shoal_agent.runtime.process_memory import MemoryMeter  # noqa: E402
from shoal_agent.runtime.processor import Processor  # noqa: E402
from shoal_agent.telemetry.counters import Counters  # noqa: E402
from shoal_protocol.units import Bytes  # noqa: E402

BEYOND_BYTES = 1 << 20
"""What a budget leaves beside the fragments at the least: inputs and outputs of a run."""


async def report(store: Path, changes: int, digests: list[str]) -> dict[str, object]:
    cache = FragmentCache(store, 1 << 30)
    blocks = [read_blocks(cache.path(digest)) for digest in digests]
    least = sum(each.least_bytes for each in blocks if each is not None) + BEYOND_BYTES
    most = sum(each.resident_bytes for each in blocks if each is not None) + BEYOND_BYTES
    budgets = np.random.default_rng(0).integers(least, most, changes, endpoint=True)
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
                assert each is not None
                await fragments.load(digest, each.least_bytes, [])
                await run(fragments, digest)
                await fragments.unload(digest)
        for digest, each in zip(digests, blocks, strict=True):
            assert each is not None
            await fragments.load(digest, each.resident_bytes, [])
        steps = []
        for budget in budgets:
            await fragments.change_budget(int(budget))
            meter.begin_peak()
            outputs = [await run(fragments, digest) for digest in digests]
            peak = meter.peak_since_begin_bytes()
            steps.append((int(budget), peak, meter.used_bytes(), outputs))
        for digest in digests:
            await fragments.unload(digest)
        await fragments.close()
        return {"steps": steps, "evicted": evicted, "left": meter.used_bytes()}


async def run(fragments: Fragments, digest: str) -> str:
    x = np.arange(512, dtype=np.float32).reshape(1, 512) % 7
    output = (await fragments.run(digest, {"x": x})).outputs["y"]
    return hashlib.sha256(output.tobytes()).hexdigest()


async def unlimited(_: int) -> None:
    """A link of any speed."""


if __name__ == "__main__":
    print(json.dumps(asyncio.run(report(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))))
