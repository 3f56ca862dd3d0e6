"""What it takes to prepare a fragment, on disk too, and to adopt another grant. Then budgets that
change and models that alternate, hundreds of times in a row, in one process.

First both models are resident, and the budget changes to any that holds their blocks; then they are
loaded and unloaded in turn, in a budget that holds only one. After each step the models that are
resident run: their outputs are those of the first run, the most that was in use is at most the
budget, and in the end no more is in use than in the beginning.

    python bench/memory_changes.py STEPS    # JSON: the fields of `Steps`; prints `Outcome` as JSON
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from measurement import VALUE, Measurement, Report, measured
from memory_items import SUBJECTS
from memory_subjects import Bench, model_of, names, opened
from memory_ways import in_child

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.cache.fetching import Fetcher
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import (
    LIBRARY_RESERVE_BYTES,
    MemoryMeter,
    drop_library_pages,
    tune_allocator,
)
from shoal_agent.runtime.processor import Processor
from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.logs import log
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_protocol.units import Bytes

MIB = 1 << 20
_BEYOND_BYTES = 4 * MIB
"""What budgets leave beside the fragments: inputs and outputs of a run."""
_TOLERANCE = 1e-4
_LEFT_MIB = 4
ADAPTED_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two models, how often their budget changes, and how often they alternate."""

    models: tuple[str, str]
    changes: int
    switches: int


FEW = Pair(models=("mobilenet_v2", "squeezenet1_1"), changes=20, switches=6)
MANY = Pair(models=("mobilenet_v2", "distilbert_sst2"), changes=500, switches=200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    digest: str
    least_bytes: int
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What is to be done, to two models in a cache."""

    cache: str
    models: tuple[Model, Model]
    changes: int
    switches: int


@dataclass(slots=True)
class Outcome:
    """`worst_share`: the most of a budget that was in use. `left_bytes`: when all was done."""

    changes: int = 0
    switches: int = 0
    worst_share: float = 0.0
    different: int = 0
    slowest_change_seconds: float = 0.0
    left_bytes: int = 0
    evicted: list[str] = field(default_factory=list)


def changes(report: Report, options: Namespace) -> None:
    """The figures of each model; then hundreds of changes of two of them."""
    for name in names(report, options):
        with opened(report, name, options) as bench:
            _preparation(bench)
            _adaptation(bench)
    pair = FEW if report.quick else MANY
    with tempfile.TemporaryDirectory(prefix="shoal-changes-") as folder:
        _add(report, " and ".join(pair.models), alternate_budgets_and_models(pair, Path(folder)))


def alternate_budgets_and_models(pair: Pair, folder: Path) -> "Outcome":
    """In a process of its own, with fragments that are made in a folder."""
    one, two = (_model(name, folder) for name in pair.models)
    return carry_out(
        Steps(cache=str(folder), models=(one, two), changes=pair.changes, switches=pair.switches)
    )


def _preparation(bench: Bench) -> None:
    ((seconds, prepared, own),) = in_child(bench.granted(bench.fragment.least_bytes, "prepare"))
    add, name = bench.report.add, bench.name
    add(Measurement(name=f"{name}: preparation", value=seconds, unit="s"))
    add(
        Measurement(
            name=f"{name}: prepared form on disk, beside the fragment",
            value=prepared / MIB,
            unit="MiB",
            peer=own / MIB,
            ratio=prepared / own,
        )
    )


def _adaptation(bench: Bench) -> None:
    if bench.fragment.least_bytes == bench.fragment.resident_bytes:
        bench.report.note(f"{bench.name}: has no blocks, so its grant does not change")
        return
    titles = (
        "another grant for blocks",
        "from blocks to whole, while no item can run",
        "items while the whole is opened",
        "from whole to blocks",
    )
    found = in_child(bench.granted(bench.fragment.least_bytes, "adapt"))
    for title, seconds in zip(titles, found, strict=True):
        goal = None if title == titles[2] else VALUE <= ADAPTED_SECONDS
        if seconds:  # a small whole may be open before an item has run
            bench.report.add(measured(f"{bench.name}: {title}", seconds, unit="s", goal=goal))


def _add(report: Report, name: str, outcome: "Outcome") -> None:
    report.note(
        f"{name}: {outcome.changes} budgets and {outcome.switches} switches, "
        f"{len(outcome.evicted)} evictions"
    )
    share, different, left = 100 * outcome.worst_share, outcome.different, outcome.left_bytes / MIB
    for what, value, unit, goal in (
        ("most of a budget in use", share, "%", VALUE <= 100),
        ("runs whose outputs differ", different, "runs", VALUE <= 0),
        ("left in use in the end", left, "MiB", VALUE <= _LEFT_MIB),
        ("slowest change of a budget", outcome.slowest_change_seconds, "s", None),
    ):
        report.add(Measurement(name=f"{name}: {what}", value=value, unit=unit, goal=goal))


def _model(name: str, store: Path) -> "Model":
    path = model_of(name)
    shapes = {key: each.shape for key, each in SUBJECTS[name].inputs().items()}
    (fragment,) = cut_model(path, profile_model(path, shapes), (), store).fragments
    return Model(
        name=name,
        digest=fragment.digest,
        least_bytes=fragment.least_bytes,
        resident_bytes=fragment.resident_bytes,
    )


def carry_out(steps: Steps) -> Outcome:
    """In a process of its own."""
    command = [sys.executable, __file__, json.dumps(asdict(steps))]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Outcome(**json.loads(made.stdout.splitlines()[-1]))


# ---- in a child process --------------------------------------------------------------------------


class _Device:
    """Fragments under a budget, as in an agent."""

    def __init__(self, steps: Steps, processor: ThreadPoolExecutor) -> None:
        self._models = steps.models
        self.outcome = Outcome()
        self.least = _BEYOND_BYTES + sum(each.least_bytes for each in steps.models)
        self.most = _BEYOND_BYTES + sum(each.resident_bytes for each in steps.models)
        self.meter = MemoryMeter()
        runtime = processor.submit(Runtime, self.meter, threads=1, limit_bytes=self.most).result()
        drop_library_pages()
        processor.submit(runtime.rehearse).result()
        cache = FragmentCache(Path(steps.cache), 1 << 40)
        self.fragments = Fragments(
            ledger=Ledger(budget=Bytes(self.most)),
            cache=cache,
            fetcher=Fetcher(cache, lambda *_: None, _unlimited),
            runtime=runtime,
            processor=Processor(runtime, processor),
            counters=Counters(),
            on_evicted=lambda *why: self.outcome.evicted.append(str(why)),
        )
        self._first: dict[str, list[np.ndarray]] = {}

    async def begin(self) -> None:
        """Take the floor when each model has run: what that needs of libraries belongs to it."""
        for _ in range(2):
            self.meter.settle(LIBRARY_RESERVE_BYTES)
            for each in self._models:
                await self.fragments.load(each.digest, each.least_bytes, [])
                await self.run(each, self.most)
                await self.fragments.unload(each.digest)

    async def run(self, each: Model, budget_bytes: int) -> None:
        """One item, compared with the first run's outputs; in use at most the budget."""
        self.meter.begin_peak()
        result = await self.fragments.run(each.digest, SUBJECTS[each.name].inputs())
        share = self.meter.peak_since_begin_bytes() / budget_bytes
        self.outcome.worst_share = max(self.outcome.worst_share, share)
        outputs = list(result.outputs.values())
        first = self._first.setdefault(each.name, outputs)
        same = all(
            np.allclose(one, two, rtol=_TOLERANCE, atol=_TOLERANCE)
            for one, two in zip(outputs, first, strict=True)
        )
        self.outcome.different += not same

    async def change(self, budgets: Sequence[int]) -> None:
        """Both models are resident; each budget is adopted, then both run."""
        for each in self._models:
            await self.fragments.load(each.digest, each.resident_bytes, [])
        for budget in budgets:
            clock = asyncio.get_running_loop().time
            started = clock()
            await self.fragments.change_budget(budget)
            self.outcome.slowest_change_seconds = max(
                self.outcome.slowest_change_seconds, clock() - started
            )
            for each in self._models:
                await self.run(each, budget)
            self.outcome.changes += 1
        for each in self._models:
            await self.fragments.unload(each.digest)

    async def switch(self, count: int, budgets: Sequence[int]) -> None:
        """One model after the other, each in what the budget of that step grants."""
        for number in range(count):
            each = self._models[number % 2]
            budget = min(budgets[number], _BEYOND_BYTES + each.resident_bytes)
            budget = max(budget, _BEYOND_BYTES + each.least_bytes)
            await self.fragments.change_budget(budget)
            await self.fragments.load(each.digest, budget - _BEYOND_BYTES, [])
            await self.run(each, budget)
            await self.fragments.unload(each.digest)
            self.outcome.switches += 1


async def _carry_out(steps: Steps) -> Outcome:
    chance = np.random.default_rng(0)
    with ThreadPoolExecutor(1) as processor:
        device = _Device(steps, processor)
        await device.begin()
        budgets = chance.integers(device.least, device.most, steps.changes, endpoint=True)
        await device.change([int(each) for each in budgets])
        budgets = chance.integers(_BEYOND_BYTES, device.most, max(1, steps.switches))
        await device.switch(steps.switches, [int(each) for each in budgets])
        await device.fragments.close()
        device.outcome.left_bytes = device.meter.used_bytes()
        return device.outcome


async def _unlimited(_: int) -> None:
    """A link of any speed."""


def main() -> None:
    tune_allocator()
    log.setLevel("ERROR")  # each change would be a line
    given = json.loads(sys.argv[1])
    one, two = (Model(**each) for each in given.pop("models"))
    outcome = asyncio.run(_carry_out(Steps(**given, models=(one, two))))
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
