"""Fragments and the processor's thread in the test's own process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.cache.fetching import Fetcher
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES, MemoryMeter
from shoal_agent.runtime.processor import Processor
from shoal_agent.telemetry.counters import Counters
from shoal_protocol.units import Bytes

MIB = 1 << 20
BUDGET = Bytes(64 * MIB)


async def at_once(_: int) -> None:
    """A link of any speed."""


class Thread(ThreadPoolExecutor):
    """The one thread, and how many calls it was given."""

    given = 0

    def submit(self, *arguments: Any, **options: Any) -> Any:
        self.given += 1
        return super().submit(*arguments, **options)


def make_fragments(
    folder: Path,
    processor: Thread,
    budget: int = BUDGET,
    kind: type[Runtime] = Runtime,
    clock: Callable[[], float] = perf_counter,
    on_evicted: Callable[[str, str], None] = lambda *_: None,
) -> Fragments:
    """Fragments over a cache that holds what the test wrote to the folder. `clock` says how long
    the processor has rested."""
    cache = FragmentCache(folder, 1 << 30)
    meter = MemoryMeter()
    ledger = Ledger(budget=Bytes(budget))
    runtime = processor.submit(
        kind, meter, threads=1, limit_bytes=64 * MIB, held=lambda: ledger.activations
    ).result()
    processor.submit(meter.settle, LIBRARY_RESERVE_BYTES).result()  # as an agent does
    return Fragments(
        ledger=ledger,
        cache=cache,
        fetcher=Fetcher(cache, lambda *_: None, at_once),
        runtime=runtime,
        processor=Processor(runtime, processor, clock=clock),
        counters=Counters(),
        on_evicted=on_evicted,
    )
