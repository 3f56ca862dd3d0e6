"""A device as the scheduler sees it: one session, in four parts that each own their counters.

    Device --- memory   which fragments are resident, loading or unloading, against the budget
           --- disk     which fragments are cached, and whether more can be fetched
           --- work     tasks given and reserved, measured times, outputs that it holds
           --- health   signs of life, probes, and the backoff per fragment

What must change together changes in a method of its part.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from shoal_coordinator.dispatch.events import DeviceJoined, Failure, FailureKind, Policy, Telemetry
from shoal_coordinator.dispatch.instructions import Tier
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds

if TYPE_CHECKING:
    from shoal_coordinator.dispatch.state import Job, Loading, Service, Task


_STEPS: Final = 16
Rank: TypeAlias = tuple[int, float, int, float, int, "Device"]
"""The rank of a device for a task or a load of one service: the smallest goes first. The fields:

- tier: 1, the fragment is resident; 2 to 4, what a load would cost (`instructions.Tier`);
- backlog: LeastLoaded: nanoseconds until one task more would end, by measured times; else 0;
- load: tasks given to the device, or reserved for it, and not ended;
- score: Fifo: the number of its last task; Edas, Aras, Mabac: the score, negated; else the load;
- order: in which order the devices joined: no two are equal;
- the device.

Load stands before the score because scores are refreshed at most once a second: without it the best
device would take a second task while the next one idles. `servers.rank` alone builds the value.
"""


Standing: TypeAlias = tuple[Bytes, frozenset[Digest]]
"""What a run of a fragment depends on: a device's budget, and which others are resident."""


@dataclass(slots=True, eq=False)
class Refusals:
    """Of a task whose item is larger than the plan covers: the last failure, and how each device
    stood that has refused it, by name."""

    failure: Failure
    standings: dict[str, Standing] = field(default_factory=dict)

    @property
    def most_bytes(self) -> int:
        """The largest budget that was too little."""
        return max((budget for budget, _ in self.standings.values()), default=0)


@dataclass(slots=True, eq=False)
class Tally:
    """What a device has done over all its sessions, and what is known from these: what each
    fragment was granted there, and by how much it exceeded that. `has_left`: its last session ended
    in order."""

    budget: Bytes
    has_left: bool = False
    granted: dict[Digest, Bytes] = field(default_factory=dict)
    excess: dict[Digest, int] = field(default_factory=dict)
    tasks: int = 0
    loads: int = 0
    evictions: int = 0
    tiers: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    def forget_too_large(self, digests: Iterable[Digest]) -> None:
        """Of these fragments, those that were measured to take more than there is may be tried
        again."""
        for digest in self.excess.keys() & set(digests):
            if self.granted[digest] + self.excess[digest] > self.budget:
                del self.excess[digest]


@dataclass(slots=True, eq=False, kw_only=True)
class DeviceMemory:
    """The ledger of fragments in memory.

    Invariant: `resident_bytes` and what is loading are within the budget, and with `single` at most
    one fragment is resident or loading. A fragment counts from the moment when Load is given until
    Unload is answered: `resident` still contains what is in `unloading`. `next_load` is the service
    whose fragment is loaded once every Unload is answered. `granted` is what a fragment got when it
    was loaded last, `excess` what it took beyond that when it was measured; both are its tally's.
    `loaded_as` is the tier of a load until the first task after it is given.
    """

    budget: Bytes
    single: bool = False
    resident: dict[Digest, Bytes] = field(default_factory=dict)
    resident_bytes: int = 0
    loading: "Loading | None" = None
    unloading: dict[Digest, None] = field(default_factory=dict)
    next_load: "Service | None" = None
    granted: dict[Digest, Bytes] = field(default_factory=dict)
    excess: dict[Digest, int] = field(default_factory=dict)
    loaded_as: dict[Digest, Tier] = field(default_factory=dict)
    loaded_at: Nanoseconds = Nanoseconds(0)
    load_took: Nanoseconds = Nanoseconds(0)

    @property
    def moving(self) -> bool:
        return self.loading is not None or bool(self.unloading)

    @property
    def room(self) -> int:
        """What another fragment can get."""
        return 0 if self.single and self.resident else self.budget - self.resident_bytes

    def standing(self, digest: Digest) -> Standing:
        """How the device stands for a run of a fragment."""
        return self.budget, frozenset(self.resident.keys() - {digest})

    def learn(self, digest: Digest, taken: int) -> bool:
        """A fragment took so much, or would have: whether that is more than was known. What was
        known already grows by no less than a part of the budget, so that this ends."""
        granted, known = self.granted.get(digest, taken), self.excess.get(digest, 0)
        excess = taken - granted
        if excess <= known:
            return False
        further = min(known + self.budget // _STEPS, self.budget - granted) if known else 0
        self.excess[digest] = max(excess, further)
        return True

    def add(self, loading: "Loading", size: Bytes, now: Nanoseconds) -> None:
        """The fragment that was loading is resident."""
        self.resident[loading.digest] = size
        self.resident_bytes += size
        self.loaded_as[loading.digest] = loading.tier
        self.loaded_at = now
        self.load_took = Nanoseconds(now - loading.since)

    def grow(self, digest: Digest, size: int) -> None:
        """A run has measured that a fragment takes so much, and found room for it. It counts that
        much from now on, as far as there is room by what is known here."""
        if (known := self.resident.get(digest, size)) >= size:
            return
        excess = size - self.granted.get(digest, size)
        if excess > self.excess.get(digest, 0):
            self.excess[digest] = excess
        reserved = 0 if self.loading is None else self.loading.size
        further = max(0, min(size - known, self.budget - self.resident_bytes - reserved))
        self.resident[digest] = Bytes(known + further)
        self.resident_bytes += further

    def change_budget(self, budget: Bytes, resident: Mapping[Digest, Bytes]) -> list[Digest]:
        """What is resident counts so much in another budget, and what is loading no more than there
        is then. Which fragments are not among it."""
        self.budget = budget
        for digest in self.resident.keys() & resident.keys():
            self.resident_bytes += resident[digest] - self.resident[digest]
            self.resident[digest] = resident[digest]
        gone = [digest for digest in self.resident if digest not in resident]
        if (loading := self.loading) is not None:
            held = self.resident_bytes - sum(self.resident[digest] for digest in gone)
            loading.size = Bytes(max(0, min(loading.size, budget - held)))
        return gone

    def drop(self, digest: Digest) -> bool:
        """The fragment is not resident any more; whether it was."""
        self.loaded_as.pop(digest, None)
        size = self.resident.pop(digest, None)
        if size is None:
            return False
        self.resident_bytes -= size
        return True


@dataclass(slots=True, eq=False)
class DeviceDisk:
    """The fragments in the device's cache on disk. `State.holders` is the index the other way."""

    cached: dict[Digest, None] = field(default_factory=dict)
    prefetching: Digest | None = None
    full_until: Nanoseconds = Nanoseconds(0)
    prefetch_after: Nanoseconds = Nanoseconds(0)

    def can_provide(self, digest: Digest, now: Nanoseconds) -> bool:
        """Whether a load finds the fragment here, or room on disk to fetch it."""
        return digest in self.cached or self.full_until <= now


@dataclass(slots=True, eq=False, kw_only=True)
class DeviceWork:
    """Tasks of a device.

    Invariants: `queued` (given, not ended; at most `slots` when a task is given) and `travelling`
    (those of items that travel) are the sum of `in_use`, which counts by fragment; `load` is
    `queued` plus the reservations: tasks that a route names this device for, and that are not given
    yet. `servers` alone changes the four. `served` says how far each job has come here, in tasks;
    `turn`, how far those had come that were given one (see `serve`).
    """

    slots: int
    queued: int = 0
    travelling: int = 0
    load: int = 0
    in_use: dict[Digest, int] = field(default_factory=dict)
    used_at: dict[Digest, Nanoseconds] = field(default_factory=dict)
    last_given: int = 0
    served: dict["Job", int] = field(default_factory=dict)
    turn: int = 0
    times: dict[Digest, int] = field(default_factory=dict)
    """Measured nanoseconds of a task, by fragment, smoothed."""
    outputs: dict["Task", None] = field(default_factory=dict)
    """Finished tasks whose output the device holds for their consumers."""

    @property
    def idle(self) -> bool:
        return not self.queued and not self.travelling

    @property
    def has_slot(self) -> bool:
        return self.queued < self.slots

    def serve(self, job: "Job", tasks: int = 1) -> None:
        """A job is given so many tasks. One that is new, or had nothing to do, counts from where
        the others are: it does not make up for what it missed (start-time fair queueing). They
        are no further than by tasks given: after `overrun` a job may be given one out of turn."""
        begun = max(self.turn, self.served.get(job, 0))
        self.turn = min(begun, self.turn + tasks)
        self.served[job] = begun + tasks

    def reach(self, job: "Job") -> None:
        """Of those for which tasks wait, the job has been served least: all have come so far."""
        self.turn = max(self.turn, self.served.get(job, 0))

    def overrun(self, job: "Job", tasks: int) -> None:
        """A job has taken the time of so many tasks: the others may have as many first."""
        self.served[job] = max(self.served.get(job, 0), self.turn + tasks)


@dataclass(slots=True, eq=False)
class Backoff:
    """A device failed with a fragment `failures_in_a_row` times: not again before `until`."""

    until: Nanoseconds
    failures_in_a_row: int
    failure: Failure


@dataclass(slots=True, eq=False, kw_only=True)
class DeviceHealth:
    """Signs of life, and fragments that the device fails with.

    Since `unchanged_since` it is there with its budget, which became smaller at `shrunk_at`, if it
    ever did. `probed_at` is set while the device is silent. `fetched` counts the bytes of fragments
    that ever came to it, `fetched_at` is when that last grew.
    """

    unchanged_since: Nanoseconds
    seen_at: Nanoseconds
    shrunk_at: Nanoseconds | None = None
    probed_at: Nanoseconds | None = None
    fetched: int = 0
    fetched_at: Nanoseconds = Nanoseconds(0)
    backoffs: dict[Digest, Backoff] = field(default_factory=dict)

    def forget(self, kind: FailureKind) -> None:
        """The reason of these failures is gone."""
        known = self.backoffs.items()
        self.backoffs = {key: each for key, each in known if each.failure.kind is not kind}

    def backs_off(self, digest: Digest, now: Nanoseconds) -> bool:
        backoff = self.backoffs.get(digest)
        return backoff is not None and backoff.until > now


@dataclass(slots=True, eq=False, kw_only=True)
class Device:
    """One session of one device. `listed` are the services that it serves, with its rank in each;
    `preempted_by` is the service that it empties itself for.
    """

    name: str
    session: int
    incarnation: int
    order: int
    tally: Tally
    memory: DeviceMemory
    work: DeviceWork
    health: DeviceHealth
    disk: DeviceDisk = field(default_factory=DeviceDisk)
    draining: bool = False
    lost: bool = False
    telemetry: Telemetry = field(default_factory=Telemetry)
    scores: dict[Policy, float] = field(default_factory=dict)
    listed: dict["Service", Rank] = field(default_factory=dict)
    preempted_by: "Service | None" = None


def new_device(event: DeviceJoined, *, order: int, tally: Tally, slots: int) -> Device:
    """A device as it joins: what it has resident counts, what it was doing does not."""
    return Device(
        name=event.device,
        session=event.session,
        incarnation=event.incarnation,
        order=order,
        tally=tally,
        memory=DeviceMemory(
            budget=event.budget,
            single=event.single,
            resident=dict(event.resident),
            resident_bytes=sum(event.resident.values()),
            granted=tally.granted,
            excess=tally.excess,
            loaded_at=event.at,
        ),
        work=DeviceWork(slots=slots),
        health=DeviceHealth(unchanged_since=event.at, seen_at=event.at),
    )


class Loss(NamedTuple):
    """A device's process that was lost `loading` a fragment, or else at its first task."""

    device: str
    incarnation: int
    loading: bool


@dataclass(slots=True, eq=False)
class Crashes:
    """Losses in a row of devices that loaded a fragment, or ran it for the first time."""

    losses: list[Loss] = field(default_factory=list)
    counted_at: Nanoseconds = Nanoseconds(-1)
