"""Residency's decisions as tables: the first row that applies decides, and its text says why.

- `LOADING`: how a fragment could be loaded on a device now, as the tier of the load, or not at all;
- `EVICTION`: whether a resident fragment may go for another one (the claimant's);
- `SPARING`: whether one service can do without a device that another claims;
- `PREEMPTION`: whether a busy device may be emptied for a service that no device serves.

The rules of the last three keep devices from exchanging fragments back and forth, and let no
service starve: a fragment with waiting tasks stays unless its device is preempted; the last copy
goes only for a service that has no device, and only with a reason; two services of equal priority
take turns, each at least four times as long as the last load took, so that loading costs a fifth of
the time at most.

Stages of one job, on a device that is a home of all of them and loads them in turn, need no such
protection: the job's window bounds what waits for each. There a turn ends when nothing waits any
more, whatever time it takes, and the next stage is the one for which a batch of the device's items
waits (`turns`), also where another device serves it: a slow replica would make all the others wait
for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.servers import may_serve
from shoal_coordinator.dispatch.services import can_host, fits_in, size_on
from shoal_coordinator.dispatch.state import Service, StageQueue, State
from shoal_coordinator.dispatch.turns import batch_waits, waiting_for
from shoal_protocol.digests import Digest

Case = TypeVar("Case")
Verdict = TypeVar("Verdict")


@dataclass(frozen=True, slots=True)
class Rule(Generic[Case, Verdict]):
    """One row of a table."""

    reason: str
    applies: Callable[[Case], object]
    verdict: Verdict


def decide(table: tuple[Rule[Case, Verdict], ...], case: Case) -> Rule[Case, Verdict]:
    """The first row that applies; the last row of every table always does."""
    return next(rule for rule in table if rule.applies(case))


def has_starved(state: State, service: Service) -> bool:
    """Whether a service has had work and no device for `patience`."""
    since = service.starving_since
    return since is not None and state.now - since >= state.limits.patience


def turn_is_over(state: State, device: Device) -> bool:
    """Whether a device has served for a turn since its last load."""
    memory = device.memory
    return state.now - memory.loaded_at >= max(state.limits.turn, 4 * memory.load_took)


def users_of(state: State, device: Device) -> list[Service]:
    """The services whose fragments a device has."""
    by_digest = state.by_digest
    return [user for each in device.memory.resident for user in by_digest.get(each, ())]


@dataclass(frozen=True, slots=True)
class Claim:
    """A service whose fragment might be loaded on a device."""

    state: State
    claimant: Service
    device: Device

    @property
    def has_starved(self) -> bool:
        """Whether the claimant has had work and no device for `patience`."""
        return has_starved(self.state, self.claimant)

    def is_of_its_jobs(self, user: Service) -> bool:
        """Whether the user works for no other jobs than the claimant does."""
        jobs = [queue.job for queue in self.claimant.queues]
        return all(queue.job in jobs for queue in user.queues)


# ---- whether one service can do without a device that another claims -----------------------------


@dataclass(frozen=True, slots=True)
class SparingCase(Claim):
    """The fragment of `user` is resident on the claimed device."""

    user: Service

    @property
    def others(self) -> int:
        """How many other devices serve the user, or load its fragment."""
        user = self.user
        return len(user.servers) + len(user.loading) - (user in self.device.listed)

    @property
    def has_settled(self) -> bool:
        """Whether the device has not used the fragment for `settle`."""
        memory, work = self.device.memory, self.device.work
        used_at = work.used_at.get(self.user.digest, memory.loaded_at)
        return self.state.now - used_at >= self.state.limits.settle

    @property
    def is_waited_for(self) -> bool:
        """Whether tasks of the claimant wait for this device, and for no other."""
        return any(self.device in queue.kept for queue in self.claimant.queues)

    @property
    def may_go_elsewhere(self) -> bool:
        """Whether the claimant has a device, or soon will, that may take all its tasks."""
        return not self.claimant.unserved and not self.is_waited_for

    @property
    def batch_waits(self) -> bool:
        """Whether enough of the claimant's items wait for a turn of it."""
        return batch_waits(self.claimant, self.device)

    @property
    def is_next(self) -> bool:
        """Whether a batch of the same job waits for this home of the claimant, for longer with the
        devices that serve it than a load takes."""
        claimant, device = self.claimant, self.device
        if device.name not in claimant.homes or not self.is_of_its_jobs(self.user):
            return False
        if not self.batch_waits:
            return False
        fastest = claimant.fastest
        if fastest is None or self.is_waited_for:
            return True
        waits = fastest.work.times[claimant.digest] * waiting_for(claimant, device)
        return waits > device.memory.load_took


def brings_work(queue: StageQueue) -> bool:
    """Whether tasks of the stages before are under way, so that this stage has work soon. Each is
    asked once: there are many ways through stages that skip others."""
    queues = queue.job.queues
    seen: set[int] = set()
    pending = list(queue.predecessors)
    while pending:
        producer = pending.pop()
        if producer in seen:
            continue
        seen.add(producer)
        before = queues[producer]
        if before.running or (before.waiting and before.service.servers):
            return True
        pending.extend(before.predecessors)
    return False


SPARING: Final[tuple[Rule[SparingCase, bool], ...]] = (
    Rule(
        "its own tasks wait, at no lower priority",
        lambda c: waiting_for(c.user, c.device) and c.user.priority >= c.claimant.priority,
        False,
    ),
    Rule("a batch of the same job waits", lambda c: c.is_next, True),
    Rule("others serve it, the claimant starves", lambda c: c.others and c.claimant.unserved, True),
    Rule("others serve it, idle here for `settle`", lambda c: c.others and c.has_settled, True),
    Rule("others serve it, used here lately", lambda c: c.others, False),
    Rule("the last, the claimant has a device", lambda c: c.may_go_elsewhere, False),
    Rule("the last, at a lower priority", lambda c: c.claimant.priority > c.user.priority, True),
    Rule("the last, a batch waits", lambda c: c.batch_waits, True),
    Rule("the last, starved for `patience`", lambda c: c.has_starved, True),
    Rule("the last, work comes", lambda c: any(map(brings_work, c.user.queues)), False),
    Rule("the last, nothing brings it work", lambda _: True, True),
)


# ---- whether a resident fragment may go ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvictionCase(Claim):
    """A fragment resident on the claimed device: may it go?"""

    digest: Digest

    @property
    def is_unused(self) -> bool:
        """Whether no service has a use for it on this device: what is held is so on its homes."""
        users = self.state.by_digest.get(self.digest, ())
        return all(user.held and self.device.name not in user.homes for user in users)

    @property
    def is_missed(self) -> bool:
        """Whether a service that the device may serve cannot spare it."""
        state, claimant, device = self.state, self.claimant, self.device
        return any(
            not decide(SPARING, SparingCase(state, claimant, device, user)).verdict
            for user in state.by_digest[self.digest]
            if may_serve(user, device)
        )


EVICTION: Final[tuple[Rule[EvictionCase, bool], ...]] = (
    Rule("the device has tasks for it", lambda c: c.digest in c.device.work.in_use, False),
    Rule("no job uses it there", lambda c: c.is_unused, True),
    Rule("the device is preempted", lambda c: c.device.preempted_by is c.claimant, True),
    Rule(
        "the claimant's tasks do not wait yet",
        lambda c: not waiting_for(c.claimant, c.device),
        False,
    ),
    Rule("a service cannot spare it", lambda c: c.is_missed, False),
    Rule("every service can spare it", lambda _: True, True),
)


# ---- how a fragment could be loaded --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadCase(Claim):
    """How could the claimant's fragment be loaded on the device?"""

    @property
    def hides_a_crash(self) -> bool:
        """Whether a suspect would be tried together with another fragment (see `crashes`)."""
        crashes, work = self.state.crashes, self.device.work
        if not crashes:
            return False
        tried = [digest for digest in work.in_use if digest not in work.times]
        suspects = (crashes.get(digest) for digest in (self.claimant.digest, *tried))
        return bool(tried) and any(each is not None and len(each.losses) > 1 for each in suspects)

    @property
    def must_fetch_to_full_disk(self) -> bool:
        """Whether the fragment is not on the device's disk, and cannot be fetched."""
        return not self.device.disk.can_provide(self.claimant.digest, self.state.now)

    @property
    def is_cached(self) -> bool:
        return self.claimant.digest in self.device.disk.cached

    @property
    def has_room(self) -> bool:
        return size_on(self.device, self.claimant) <= self.device.memory.room

    @property
    def has_room_in_blocks(self) -> bool:
        """Whether it can run in the room that is left, on a device that it counts on."""
        device, claimant = self.device, self.claimant
        counts = device.name in claimant.homes or claimant.unserved
        return counts and fits_in(device, claimant, device.memory.room)

    @property
    def unused_make_room(self) -> bool:
        """Whether it has room once fragments that no job uses are gone."""
        used, resident = self.state.by_digest.keys(), self.device.memory.resident.keys()
        victims = None if resident <= used else self.victims
        return victims is not None and used.isdisjoint(victims)

    @property
    def victims(self) -> list[Digest] | None:
        """Fragments to unload for it, least recently used first; None: too few may go."""
        state, device = self.state, self.device
        memory, work = device.memory, device.work
        candidates = [
            digest
            for digest in memory.resident
            if decide(EVICTION, EvictionCase(state, self.claimant, device, digest)).verdict
        ]
        if memory.single:
            return candidates if len(candidates) == len(memory.resident) else None
        candidates.sort(key=lambda digest: (digest in state.by_digest, work.used_at.get(digest, 0)))
        size, room = size_on(device, self.claimant), memory.budget - memory.resident_bytes
        chosen: list[Digest] = []
        for digest in candidates:
            if room >= size:
                break
            room += memory.resident[digest]
            chosen.append(digest)
        return chosen if chosen and fits_in(device, self.claimant, room) else None


LOADING: Final[tuple[Rule[LoadCase, Tier | None], ...]] = (
    Rule("it is resident", lambda c: c.claimant.digest in c.device.memory.resident, None),
    Rule("another fragment moves in or out", lambda c: c.device.memory.moving, None),
    Rule("preempted", lambda c: c.device.preempted_by not in {None, c.claimant}, None),
    Rule("it cannot run there", lambda c: not can_host(c.state, c.claimant, c.device), None),
    Rule("a suspect is tried alone", lambda c: c.hides_a_crash, None),
    Rule("the disk is full", lambda c: c.must_fetch_to_full_disk, None),
    Rule("room, and on disk", lambda c: c.has_room and c.is_cached, Tier.CACHED),
    Rule("room", lambda c: c.has_room, Tier.IDLE),
    Rule("unused fragments can go", lambda c: c.unused_make_room, Tier.EVICT),
    Rule(
        "room in blocks, and on disk", lambda c: c.has_room_in_blocks and c.is_cached, Tier.CACHED
    ),
    Rule("room in blocks", lambda c: c.has_room_in_blocks, Tier.IDLE),
    Rule("other fragments can go", lambda c: c.victims is not None, Tier.EVICT),
    Rule("no room", lambda _: True, None),
)


# ---- whether a busy device may be emptied --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreemptionCase(Claim):
    """No device serves the claimant, and others use this one."""

    @property
    def priority(self) -> int:
        return max((user.priority for user in self.users), default=self.claimant.priority)

    @property
    def users(self) -> list[Service]:
        """The services whose fragments the device has."""
        return users_of(self.state, self.device)

    @property
    def is_the_same_job(self) -> bool:
        """Whether the device has fragments of the claimant's jobs alone."""
        return bool(self.users) and all(map(self.is_of_its_jobs, self.users))

    @property
    def turn_is_over(self) -> bool:
        """Whether the device has served for a turn since its last load."""
        return turn_is_over(self.state, self.device)


PREEMPTION: Final[tuple[Rule[PreemptionCase, bool], ...]] = (
    Rule("a higher priority", lambda c: c.claimant.priority > c.priority, True),
    Rule("a lower priority", lambda c: c.claimant.priority < c.priority, False),
    Rule("stages of one job take turns", lambda c: c.is_the_same_job, False),
    Rule("not starved for `patience` yet", lambda c: not c.has_starved, False),
    Rule("the turn is over", lambda c: c.turn_is_over, True),
    Rule("the turn lasts", lambda _: True, False),
)
