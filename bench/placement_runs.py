"""Runs placements on the agents of one environment, and says what each took and was to take.

    python bench/placement_runs.py REQUEST      # JSON; it prints one line of JSON for each run

A process of its own, since it lives in the network of the coordinator (`placements.py`). A
placement is loaded without quotas on processor time, since loading is not what is measured: jobs
run until all devices have what they are to serve, which takes a minute over the slowest link. Then
the agents get their quotas again, and the items in the middle of a job are timed. Before all that,
one job runs under the quotas while the devices have nothing: it is timed as a whole.
"""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
from pool import cut, write_items
from processor_time import used_seconds

from shoal_cli.local.cgroups import DeviceGroup
from shoal_cli.standalone.remote_devices import planned_for
from shoal_cli.transfer.coordinators import JobFolder, upload_fragments
from shoal_cli.transfer.copying import copy
from shoal_cli.transfer.folders import Folder
from shoal_cli.transfer.joined import reach
from shoal_planner.costs import Costs, Division, Span
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_planner.heuristics import Divisions, by_memory, evenly
from shoal_planner.outcome import Plan
from shoal_planner.placement import plan, stage_plans
from shoal_planner.speeds import refined
from shoal_protocol.choices import Objective
from shoal_protocol.coordinator_client import ENDED, CoordinatorClient
from shoal_protocol.partition import PartitionDocument, document_to_json
from shoal_protocol.turns import MOST_ITEMS
from shoal_protocol.units import Bytes, Nanoseconds, seconds
from shoal_protocol.v1 import coordinator_pb2 as pb

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from real_models import MODELS, find

CHOSEN: Final = "chosen"
REFINED: Final = "chosen when tasks have run"
COLD: Final = "chosen, from nothing"
COLD_ITEMS: Final = 16
WATCH_SECONDS: Final = 0.02
LONGEST_SECONDS: Final = 300.0
LEAST_ITEMS: Final = 16
"""Enough that their middle is longer than the pipeline takes to fill."""
_ITEMS_BEFORE: Final = 2 * MOST_ITEMS
_LEAST_IN_TURN: Final = 12 * MOST_ITEMS
"""Where fragments are loaded in turn, items end in batches, one for each device: of two batches in
the middle one may be counted for none of the time that it took."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device of an environment: its quota, and the folders of its group."""

    name: str
    cpus: str
    version: int
    memory: str
    cpu: str

    @property
    def group(self) -> DeviceGroup:
        return DeviceGroup(version=self.version, memory=Path(self.memory), cpu=Path(self.cpu))

    def limit(self, *, on: bool) -> None:
        self.group.limit_processors(Decimal(self.cpus if on else "2"))

    def processor_seconds(self) -> float:
        """That its processes have used."""
        return sum(map(used_seconds, self.group.processes()))


@dataclass(frozen=True, kw_only=True)
class Request:
    """An environment, and what to run there. `seconds` is how long the items of a run take."""

    target: str
    folder: str
    devices: tuple[Device, ...]
    models: tuple[str, ...]
    fragments: int
    seconds: float

    @classmethod
    def read(cls, text: str) -> "Request":
        fields = json.loads(text)
        fields["devices"] = tuple(Device(**each) for each in fields["devices"])
        return cls(**fields)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One placement: seconds from one item to the next, as predicted by rates alone, as predicted
    when tasks have run, and as measured."""

    model: str
    placement: str
    described: str
    by_rates: float
    predicted: float
    measured: float
    detail: Mapping[str, Any]


def main() -> None:
    request = Request.read(sys.argv[1])
    asyncio.run(run_all(request))


async def run_all(request: Request) -> None:
    reachable = reach(request.target)
    numbers = count(1)
    async with reachable.calling() as client:
        await _ready(client, [each.name for each in request.devices])
        for name in request.models:
            model = MODELS[name]
            items = [dict(model.inputs(seed)) for seed in range(4)]
            store = Path(request.folder) / "store"
            document = cut(find(name), store, request.fragments, model.shapes())
            digests = [each.digest for each in document.fragments]
            await upload_fragments(store, digests, client, request.target, lambda size: None)
            runner = _Runner(request, client, document, items, name, numbers)
            await runner.run()


def placements(
    document: PartitionDocument, pool: Sequence[PoolDevice]
) -> Iterator[tuple[str, Divisions]]:
    """What is run, by name: the plan's, and what one would think of first."""
    costs, whole = Costs(document), Span(0, len(document.fragments))
    best = plan(document, pool, Objective.THROUGHPUT)
    assert isinstance(best, Plan), best
    devices = {each.name: each for each in pool}
    yield (
        CHOSEN,
        tuple(
            Division(
                Span(stage.fragments[0], stage.fragments[-1] + 1),
                tuple(devices[name] for name in stage.devices),
            )
            for stage in best.stages
        ),
    )
    yield "even split", evenly(costs, pool)
    yield "split by memory", by_memory(costs, pool)
    alone = [(Division(whole, (each,)),) for each in pool if costs.holding(whole, each)]
    if alone:
        yield "single best device", min(alone, key=costs.totals)
    able = tuple(each for each in pool if costs.at_once(whole, each))
    if len(able) > 1:
        yield "replication", (Division(whole, able),)


class _Runner:
    """Runs placements of one model."""

    def __init__(
        self,
        request: Request,
        client: CoordinatorClient,
        document: PartitionDocument,
        items: Sequence[Mapping[str, np.ndarray]],
        model: str,
        numbers: Iterator[int],
    ) -> None:
        self._request, self._client, self._document = request, client, document
        self._items, self._model, self._numbers = items, model, numbers
        self._costs = Costs(document)

    async def run(self) -> None:
        """What planning finds by rates, and what it finds when tasks have run."""
        seen: dict[Divisions, str] = {}
        found = list(placements(self._document, await self._pool()))
        await self._run_cold(found[0][1])
        for name, divisions in found:
            await self._run(name, divisions, seen)
        _, divisions = next(placements(self._document, await self._pool()))
        await self._run(REFINED, divisions, seen)

    async def _run(self, name: str, divisions: Divisions, seen: dict[Divisions, str]) -> None:
        where = _named(divisions)
        fits = all(self._costs.holding(d.span, each) for d in divisions for each in d.devices)
        if where in seen or not fits:
            same = seen.get(where)
            print(json.dumps({"model": self._model, "placement": name, "same": same}))
            return
        seen[where] = name
        print(json.dumps(asdict(await self._measured(name, divisions))), flush=True)

    async def _run_cold(self, divisions: Divisions) -> None:
        """A job on devices that have nothing of the model yet, from its submission to its end."""
        goal = Goal(Objective.MAKESPAN, COLD_ITEMS)
        costs = Costs(self._document, goal.loading_items)
        _, took, _ = await self._job(divisions, goal.items)
        run = {
            "model": self._model,
            "placement": COLD,
            "described": _in_words(divisions),
            "predicted": seconds(Nanoseconds(goal.value(*costs.totals(divisions)))),
            "measured": took,
        }
        print(json.dumps(run), flush=True)

    async def _pool(self) -> tuple[PoolDevice, ...]:
        """The devices, corrected by the tasks that have run."""
        found = await _ready(self._client, [each.name for each in self._request.devices])
        return refined(self._document, planned_for(found))

    async def _measured(self, name: str, divisions: Divisions) -> Run:
        by_rates = tuple(
            Division(each.span, tuple(map(_by_rates, each.devices))) for each in divisions
        )
        await self._load(divisions)
        least = LEAST_ITEMS
        if not all(self._costs.at_once(d.span, each) for d in divisions for each in d.devices):
            await self._job(divisions, _ITEMS_BEFORE)  # what loads take under quotas is measured
            least = _LEAST_IN_TURN
        known = {each.name: each for each in await self._pool()}
        divisions = tuple(
            Division(each.span, tuple(known[device.name] for device in each.devices))
            for each in divisions
        )
        period = seconds(self._costs.totals(divisions)[0])
        wanted = max(least, round(self._request.seconds / period))
        before, loads = self._processor_seconds(), await self._loads()
        taken, _, status = await self._job(divisions, wanted)
        used, loaded = self._processor_seconds(), await self._loads()
        return Run(
            model=self._model,
            placement=name,
            described=_in_words(divisions),
            by_rates=seconds(self._costs.totals(by_rates)[0]),
            predicted=period,
            measured=taken,
            detail={
                "stages": [
                    asdict(self._costs.on(division.span, device)) | {"device": device.name}
                    for division in divisions
                    for device in division.devices
                ],
                "tasks": [
                    (stage.index, time.device, time.predicted_seconds, time.measured_seconds)
                    for stage in status.stages
                    for time in stage.times
                ],
                "items": wanted,
                "loads": {name: (loaded[name] - loads[name]) / wanted for name in loaded},
                "processor_seconds": {name: (used[name] - before[name]) / wanted for name in used},
            },
        )

    async def _loads(self) -> dict[str, int]:
        """Fragments that were made resident so far."""
        return {each.name: each.loads for each in await self._client.devices()}

    def _processor_seconds(self) -> dict[str, float]:
        return {each.name: each.processor_seconds() for each in self._request.devices}

    async def _load(self, divisions: Divisions) -> None:
        """Have the fragments resident in their places, except where they are loaded in turn."""
        for device in self._request.devices:
            device.limit(on=False)
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                items = 3 * len(self._request.devices)
                await self._job(divisions, items)
                while not await self._is_loaded(divisions):
                    items *= 2  # a job that ends sooner than a replica has loaded goes without it
                    await self._job(divisions, items)
        finally:
            for device in self._request.devices:
                device.limit(on=True)

    async def _is_loaded(self, divisions: Divisions) -> bool:
        resident = {each.name: set(each.resident) for each in await self._client.devices()}
        return all(
            self._document.fragments[index].digest in resident[device.name]
            for each in divisions
            for device in each.devices
            if self._costs.at_once(each.span, device)
            for index in each.span.fragments
        )

    async def _job(self, divisions: Divisions, items: int) -> tuple[float, float, pb.JobStatus]:
        """Seconds from item to item, in the middle of the job; from its submission to its end, with
        the loads before its first task; and its last status."""
        number = next(self._numbers)
        folder = Path(self._request.folder) / str(number)
        distinct = [self._items[each % len(self._items)] for each in range(items)]
        inputs = Folder(str(folder), write_items(folder, distinct))
        place = f"jobs/run-{number}/in"
        await copy(inputs, JobFolder(place, self._client, place), lambda progress: None)
        shutil.rmtree(folder)
        stages = stage_plans(self._costs, divisions, predictable=True)
        request = pb.SubmitJobRequest(
            name=f"run-{number}",
            partition=document_to_json(self._document).encode(),
            stages=[
                pb.StagePlacement(
                    devices=stage.devices,
                    granted_bytes=stage.grants(fragment),
                    predicted_seconds=[seconds(share.predicted[place]) for share in stage.shares],
                )
                for stage in stages
                for place, fragment in enumerate(stage.fragments)
            ],
            epoch=1,
            backoff_limit=1,
        )
        began = time.perf_counter()
        await self._client.submit(request)
        seen, status = [(0.0, 0)], pb.JobStatus()
        watching = self._client.watch(request.name, WATCH_SECONDS, seconds=LONGEST_SECONDS)
        async for status in watching:
            if status.succeeded > seen[-1][1]:
                seen.append((time.perf_counter(), status.succeeded))
            if status.state in ENDED:
                break
        took = time.perf_counter() - began
        assert status.state == pb.JobStatus.COMPLETE, status.message
        await self._client.remove(request.name)
        return _between(seen, items), took, status


def _in_words(divisions: Divisions) -> str:
    return "; ".join(
        f"{each.span.start}-{each.span.end - 1} on {','.join(_names(each))}" for each in divisions
    )


def _by_rates(device: PoolDevice) -> PoolDevice:
    """As if no task had run there."""
    return replace(device, ratios=(), load_ratios=())


def _named(divisions: Divisions) -> Divisions:
    """The same with devices of which nothing is known but the name, in one order."""
    return tuple(
        Division(
            each.span,
            tuple(PoolDevice(name=name, budget_bytes=Bytes(0)) for name in sorted(_names(each))),
        )
        for each in divisions
    )


def _names(division: Division) -> list[str]:
    return [device.name for device in division.devices]


def _between(seen: Sequence[tuple[float, int]], items: int) -> float:
    """Seconds from one item to the next, without the pipeline's filling and emptying."""
    middle = [each for each in seen[1:] if items * 0.2 <= each[1] <= items * 0.9]
    middle = middle if len(middle) > 1 else list(seen[1:])
    (began, first), (ended, last) = middle[0], middle[-1]
    return (ended - began) / max(1, last - first)


async def _ready(client: CoordinatorClient, names: Sequence[str]) -> list[pb.DeviceStatus]:
    async with asyncio.timeout(LONGEST_SECONDS):
        while True:
            found = [d for d in await client.devices() if d.state == pb.DeviceStatus.READY]
            if {each.name for each in found} >= set(names):
                return sorted(found, key=lambda device: device.name)
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
