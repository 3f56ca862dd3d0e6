"""The real dispatcher in virtual time, over devices that take what the planner's model says of each
step: a fetch its bytes over the device's link, a load its preparation and its weights, a task its
FLOPs, an activation its bytes over the links of both ends. What becomes of the steps together is
the dispatcher's.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.dispatch.machine import new_state, step
from shoal_planner.devices import ASSUMED_FLOPS_PER_CPU, PoolDevice
from shoal_planner.loads import fetched, from_cache, prepared, time_of
from shoal_protocol.digests import Digest
from shoal_protocol.partition import MODEL, Edge, Fragment, PartitionDocument
from shoal_protocol.units import NANOSECONDS_PER_SECOND as SECOND
from shoal_protocol.units import Bytes, Nanoseconds

MIB = 1 << 20
TICK = SECOND // 4
Homes = tuple[tuple[str, ...], ...]


class Lane(Enum):
    """What of a device does one thing at a time."""

    PROCESSOR = auto()
    FETCHES = auto()
    RECEIVES = auto()
    SENDS = auto()


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


@dataclass(slots=True, repr=False)
class VirtualRun:
    """One job over devices that compute or load one thing at a time, fetch one fragment at a time,
    and send and receive one activation at a time."""

    shelf: Shelf
    homes: Homes
    now: int = 0
    fetched_bytes: int = 0
    until: dict[tuple[str, Lane], int] = field(default_factory=dict)
    there: dict[tuple[str, Digest], int] = field(default_factory=dict)
    prepared: set[tuple[str, Digest]] = field(default_factory=set)
    made: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    events: list[tuple[int, int, ev.Event]] = field(default_factory=list)
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
            joined = ev.DeviceJoined(at=at, device=device.name, session=number, budget=budget)
            tell(replace(joined, single=device.single))
        tell(ev.JobSubmitted(at=at, job=self._spec(items)))
        tick = 0
        while self.finished is None:
            if self.events and self.events[0][0] <= tick:
                self.now, _, event = heappop(self.events)
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
                at = self._load(devices[name], digest)
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
        """When the device has it on its disk."""
        fragment, key = self._fragment(digest), (device.name, digest)
        if key not in self.there:
            self.fetched_bytes += fragment.weight_bytes
            self.there[key] = self._occupy(device.name, Lane.FETCHES, fetched(fragment, device))
        return Nanoseconds(max(self.now, self.there[key]))

    def _load(self, device: PoolDevice, digest: Digest) -> Nanoseconds:
        """When the device has it in memory."""
        fragment, key = self._fragment(digest), (device.name, digest)
        took = from_cache(fragment, device)
        if key not in self.prepared:
            self.prepared.add(key)
            took += prepared(fragment, device)
        begin = self._fetch(device, digest)
        return Nanoseconds(self._occupy(device.name, Lane.PROCESSOR, took, begin))

    def _execute(self, order: ins.Execute, devices: dict[str, PoolDevice]) -> ev.Event:
        device, last = devices[order.device], len(self.shelf.document.fragments) - 1
        name = device.name
        maker, at = self.made[order.item, order.stage - 1] if order.stage else ("", self.now)
        if maker != name:
            sent = self._carry(devices[maker], Lane.SENDS, order.stage, at) if maker else at
            at = max(sent, self._carry(device, Lane.RECEIVES, order.stage, at))
        flops = self.shelf.document.fragments[order.stage].flops or 0
        compute = Nanoseconds(time_of(flops, device.flops_per_second))
        end = self._occupy(name, Lane.PROCESSOR, compute, at)
        self.made[order.item, order.stage] = name, end
        if order.stage == last:
            end = self._carry(device, Lane.SENDS, last + 1, end)
        return ev.TaskFinished(
            at=Nanoseconds(end),
            instruction=order.instruction,
            compute=compute,
            delivered=tuple(consumer for consumer, _ in order.routes),
        )

    def _fragment(self, digest: Digest) -> Fragment:
        return next(each for each in self.shelf.document.fragments if each.digest == digest)

    def _carry(self, device: PoolDevice, lane: Lane, place: int, begin: int) -> int:
        """When what enters a fragment has gone over one end's link. It takes the other end's as
        well, each as long as that needs: a fast end serves several slow ones at once."""
        rate = device.link_bytes_per_second
        duration = time_of(self.shelf.crossing[place], rate) if rate else 0
        return self._occupy(device.name, lane, duration, begin)

    def _occupy(self, device: str, lane: Lane, duration: int, begin: int = 0) -> int:
        """When something ends that takes a lane from when it is free."""
        end = max(self.now, begin, self.until.get((device, lane), 0)) + duration
        self.until[device, lane] = end
        return end

    def _later(self, event: ev.Event) -> None:
        heappush(self.events, (event.at, next(self.order), event))
