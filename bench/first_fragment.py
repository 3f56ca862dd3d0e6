"""The first fragment on every device that has room, against the plan's devices alone.

CROWDio ("JIT Loading") sends the smallest, first fragment to all workers at the start, since it
has no plan. Here the real planner places random chains on random pools, and the real dispatcher
runs them in virtual time: a load takes its bytes over the device's link (or from its disk), a task
its FLOPs, an activation its bytes over the slower of two links. Compared are the makespans of a
job that is submitted with

- the plan's devices (the reference),
- those, and every device that the plan leaves idle and that has room, for the first fragment,
- those, and every device that has room beside what it serves, for the first fragment,
- no devices at all: the first fragment everywhere, the others just in time.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from statistics import geometric_mean, median

from measurement import Measurement, Report, parse_arguments

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.dispatch.machine import new_state, step
from shoal_planner.costs import Holding
from shoal_planner.devices import ASSUMED_FLOPS_PER_CPU, PoolDevice
from shoal_planner.outcome import Plan
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective
from shoal_protocol.digests import Digest
from shoal_protocol.partition import MODEL, Edge, Fragment, PartitionDocument
from shoal_protocol.units import NANOSECONDS_PER_SECOND as SECOND
from shoal_protocol.units import Bytes, Nanoseconds

MIB = 1 << 20
DISK_BYTES_PER_SECOND = 200 * MIB
TICK = SECOND // 4
Homes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Shelf:
    """Devices, a model in fragments, and the bytes that enter each fragment."""

    pool: tuple[PoolDevice, ...]
    document: PartitionDocument
    crossing: tuple[int, ...]


def random_shelf(chance: random.Random) -> Shelf:
    """Three to eight unequal devices, and a chain of two to five unequal fragments."""
    stages = chance.randint(2, 5)
    crossing = tuple(chance.randint(1, 20) * MIB // 20 for _ in range(stages + 1))
    fragments = tuple(
        Fragment(
            index=index,
            digest=Digest(f"sha256:{index:064x}"),
            nodes=1,
            weight_bytes=resident // 2,
            resident_bytes=resident,
            least_bytes=resident,
            activation_bytes=1,
            flops=chance.randint(1, 10) * SECOND // 4,
            inputs=(),
            outputs=(),
        )
        for index in range(stages)
        for resident in (chance.randint(8, 40) * MIB,)
    )
    ends = (MODEL, *range(stages), MODEL)
    edges = tuple(
        Edge(producer=ends[i], consumer=ends[i + 1], tensors=("t",), bytes_per_item=size)
        for i, size in enumerate(crossing)
    )
    pool = tuple(
        PoolDevice(
            name=f"device-{index}",
            budget_bytes=Bytes(chance.choice((24, 32, 48, 64)) * MIB),
            flops_per_second=int(ASSUMED_FLOPS_PER_CPU * chance.choice((0.2, 0.25, 0.5, 1))),
            link_bytes_per_second=chance.choice((2, 12, 25)) * 1_000_000,
        )
        for index in range(chance.randint(3, 8))
    )
    digest = Digest("sha256:" + "0" * 64)
    document = PartitionDocument(
        model_digest=digest, fragments=fragments, edges=edges, inputs=(), outputs=()
    )
    return Shelf(pool, document, crossing)


@dataclass(slots=True)
class VirtualRun:
    """One job over devices that compute one task, and fetch one fragment, at a time."""

    shelf: Shelf
    homes: Homes
    now: int = 0
    fetched_bytes: int = 0
    computes_until: dict[str, int] = field(default_factory=dict)
    fetches_until: dict[str, int] = field(default_factory=dict)
    cached: set[tuple[str, Digest]] = field(default_factory=set)
    made: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    event_router: list[tuple[int, int, ev.Event]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=count)
    finished: ins.FinishJob | None = None

    def run(self, items: int) -> float:
        """The seconds that the job takes."""
        state, at = new_state(), Nanoseconds(0)
        devices = {device.name: device for device in self.shelf.pool}

        def tell(event: ev.Event) -> None:
            for instruction in step(state, event):
                self._carry_out(instruction, devices)

        for number, device in enumerate(self.shelf.pool):
            budget = Bytes(device.budget_bytes)
            tell(ev.DeviceJoined(at=at, device=device.name, session=number, budget=budget))
        tell(ev.JobSubmitted(at=at, job=self._spec(items)))
        tick = 0
        while self.finished is None:
            if self.event_router and self.event_router[0][0] <= tick:
                self.now, _, event = heappop(self.event_router)
                tell(event)
                continue
            self.now = tick
            tick += TICK
            now = Nanoseconds(self.now)
            for number, device in enumerate(self.shelf.pool):
                tell(ev.ProbeAnswered(at=now, device=device.name, session=number))
            tell(ev.Tick(at=now))
        assert self.finished.failure is None, self.finished.failure
        return self.now / SECOND

    def _spec(self, items: int) -> ev.JobSpec:
        fragments = self.shelf.document.fragments
        stages = tuple(
            ev.Stage(
                digest=each.digest,
                resident_bytes=Bytes(each.resident_bytes),
                least_bytes=Bytes(each.least_bytes),
                predecessors=(each.index - 1,) if each.index else (),
                takes_model_inputs=not each.index,
                gives_results=each.index == len(fragments) - 1,
                homes=self.homes[each.index] if self.homes else (),
                output_bytes=Bytes(self.shelf.crossing[each.index + 1]),
            )
            for each in fragments
        )
        policy = ev.Policy.MABAC
        return ev.JobSpec(name="job", stages=stages, items=items, epoch=1, policy=policy)

    def _carry_out(self, instruction: ins.Instruction, devices: dict[str, PoolDevice]) -> None:
        now = Nanoseconds(self.now)
        match instruction:
            case ins.Load(instruction=number, device=name, digest=digest, granted=granted):
                at = self._fetch(devices[name], digest)
                self._later(ev.FragmentResident(at=at, instruction=number, resident=granted))
            case ins.Prefetch(instruction=number, device=name, digest=digest):
                at = self._fetch(devices[name], digest)
                self._later(ev.FragmentCached(at=at, instruction=number))
            case ins.Unload(instruction=number):
                self._later(ev.FragmentUnloaded(at=now, instruction=number))
            case ins.Forward(instruction=number):
                self._later(ev.ActivationForwarded(at=now, instruction=number))
            case ins.Execute():
                self._later(self._execute(instruction, devices))
            case ins.FinishItem(job=job, item=item):
                self._later(ev.ItemsStored(at=now, job=job, items=(item,)))
            case ins.FinishJob():
                self.finished = instruction
            case _:
                pass  # the others have no answer

    def _fetch(self, device: PoolDevice, digest: Digest) -> Nanoseconds:
        size = {each.digest: each.weight_bytes for each in self.shelf.document.fragments}[digest]
        begin = max(self.now, self.fetches_until.get(device.name, 0))
        if (device.name, digest) in self.cached:
            return Nanoseconds(begin + size * SECOND // DISK_BYTES_PER_SECOND)
        self.cached.add((device.name, digest))
        self.fetched_bytes += size
        end = begin + size * SECOND // (device.link_bytes_per_second or DISK_BYTES_PER_SECOND)
        self.fetches_until[device.name] = end
        return Nanoseconds(end)

    def _execute(self, order: ins.Execute, devices: dict[str, PoolDevice]) -> ev.Event:
        device = devices[order.device]
        begin = max(self.now, self.computes_until.get(device.name, 0))
        if order.stage:
            maker, at = self.made[order.item, order.stage - 1]
            if maker != device.name:
                links = (device.link_bytes_per_second, devices[maker].link_bytes_per_second)
                rate = min(link or DISK_BYTES_PER_SECOND for link in links)
                begin = max(begin, at + self.shelf.crossing[order.stage] * SECOND // rate)
        flops = self.shelf.document.fragments[order.stage].flops or 0
        compute = Nanoseconds(flops * SECOND // device.flops_per_second)
        end = Nanoseconds(begin + compute)
        self.computes_until[device.name] = end
        self.made[order.item, order.stage] = device.name, end
        delivered = tuple(consumer for consumer, _ in order.routes)
        return ev.TaskFinished(
            at=end, instruction=order.instruction, compute=compute, delivered=delivered
        )

    def _later(self, event: ev.Event) -> None:
        heappush(self.event_router, (event.at, next(self.order), event))


def with_first(shelf: Shelf, homes: Homes, *, idle_only: bool) -> Homes:
    """The plan's homes, and for the first fragment whoever has room beside what it serves."""
    fragments = shelf.document.fragments
    serves = {
        device.name: sum(
            each.resident_bytes
            for each, names in zip(fragments, homes, strict=True)
            if device.name in names
        )
        for device in shelf.pool
    }
    more = tuple(
        device.name
        for device in shelf.pool
        if device.name not in homes[0]
        and serves[device.name] + fragments[0].resident_bytes <= device.budget_bytes
        and not (idle_only and serves[device.name])
    )
    return (homes[0] + more, *homes[1:])


WAYS: dict[str, Callable[[Shelf, Homes], Homes]] = {
    "on idle devices too": lambda shelf, homes: with_first(shelf, homes, idle_only=True),
    "wherever there is room": lambda shelf, homes: with_first(shelf, homes, idle_only=False),
    "everywhere, without a plan": lambda shelf, homes: (),
}


def compare(shelves: int, items: int) -> Iterator[Measurement]:
    """Makespans and bytes fetched, as ratios to those with the plan's homes."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    fetched: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(shelves):
        shelf = random_shelf(random.Random(seed))  # noqa: S311 - nothing secret
        placed = plan(shelf.document, shelf.pool, Objective.THROUGHPUT)
        if not isinstance(placed, Plan) or any(
            stage.held(Holding.RELOADED) for stage in placed.stages
        ):
            continue
        homes = placed.homes()
        reference = VirtualRun(shelf, homes)
        seconds = reference.run(items)
        for way, change in WAYS.items():
            changed = change(shelf, homes)
            if changed != homes:
                run = VirtualRun(shelf, changed)
                times[way].append(run.run(items) / seconds)
                fetched[way].append(run.fetched_bytes / reference.fetched_bytes)
    for way, ratios in times.items():
        yield from _told(f"{items} items, first fragment {way}", ratios, fetched[way])


def _told(name: str, ratios: Sequence[float], fetched: Sequence[float]) -> Iterator[Measurement]:
    of = f"of the plan's ({len(ratios)} pools)"
    faster = sum(ratio < 0.99 for ratio in ratios) / len(ratios)
    slower = sum(ratio > 1.01 for ratio in ratios) / len(ratios)
    yield Measurement(name=f"{name}: makespan", value=geometric_mean(ratios), unit=of)
    yield Measurement(name=f"{name}: median makespan", value=median(ratios), unit=of)
    yield Measurement(name=f"{name}: faster by 1 %", value=faster, unit="share of pools")
    yield Measurement(name=f"{name}: slower by 1 %", value=slower, unit="share of pools")
    yield Measurement(name=f"{name}: bytes fetched", value=geometric_mean(fetched), unit=of)


def main() -> None:
    """Run over so many random pools."""
    report = Report(parse_arguments(__doc__))
    for items in (5, 100):
        for measurement in compare(60 if report.quick else 400, items):
            report.add(measurement)
    report.finish()


if __name__ == "__main__":
    main()
