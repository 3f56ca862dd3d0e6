"""Leader election: one holder of a `coordination.k8s.io` Lease at a time.

Clocks of different machines are not compared. A candidate that has observed the same record for
the whole lease duration, by its own clock, acquires the lease. A leader that could not renew it
before the renew deadline, which is shorter, stops leading by its own clock; so there are never two:

    leader:     renews ......... stops (renew deadline)
    candidate:  observes ................... acquires (lease duration)

The record is written with the resource version that was read, so of two candidates one wins.

Versions of the Lease only grow. Where an older one is read than before, a backup of the cluster was
restored: what the operator remembers is of a time that has not been, newer objects are taken for
old ones, and watches wait for versions that are long to come. `HistoryRewound` ends the operator,
and the one that is started in its place sees what there is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from shoal_operator.controller.api import Api, ApiError, Conflict, Json
from shoal_operator.controller.clock import now_micro_text
from shoal_operator.controller.foreign import Raw, identity_of
from shoal_operator.reconcile.resources import LEASE

logger = logging.getLogger(__name__)

_RELEASE_TRIES: Final = 3


class HistoryRewound(Exception):
    """The API server shows an older state than before; which versions of the Lease it had."""

    def __init__(self, before: int, now: int) -> None:
        super().__init__(
            f"the API server went back from version {before} to {now}, as after the restore of a "
            f"backup: this operator ends, to see what there is now"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """In seconds. The renew deadline keeps two leaders apart, so it is well below the duration."""

    lease_duration: int = 15
    renew_deadline: float = 10.0
    retry_period: float = 2.0

    def __post_init__(self) -> None:
        in_order = self.retry_period < self.renew_deadline < self.lease_duration
        assert in_order, f"{self} lets two lead at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The spec of a Lease; times in RFC 3339."""

    holder: str
    duration_seconds: int
    acquired: str
    renewed: str
    transitions: int


RELEASED: Final = Record(holder="", duration_seconds=1, acquired="", renewed="", transitions=0)


@dataclass(slots=True)
class Observation:
    """The record that was last read, and since when it has not changed, by the own clock."""

    record: Record = RELEASED
    since: float = 0.0

    def observe(self, record: Record, now: float) -> None:
        """A record was read; one that differs restarts the time."""
        if record != self.record:
            self.record = record
            self.since = now

    def may_acquire(self, identity: str, now: float) -> bool:
        """Whether `identity` may write itself in: it is the holder, or there is none, or the lease
        has expired.
        """
        holder = self.record.holder
        return holder in ("", identity) or now - self.since > self.record.duration_seconds


@dataclass(slots=True)
class Lease:
    """One candidate. `clock` counts seconds and never goes back."""

    api: Api
    name: str = field(kw_only=True)
    identity: str = field(kw_only=True)
    times: LeaseTimes = field(kw_only=True)
    clock: Callable[[], float] = field(kw_only=True)
    _observation: Observation = field(default_factory=Observation)
    _leads_until: float = field(init=False)
    _transitions: int = 0
    _version: int = 0
    answered_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._leads_until = self.clock()
        self.answered_at = self.clock()

    @property
    def leads(self) -> bool:
        """Whether this candidate leads now; the operator checks it before every write."""
        return self.clock() < self._leads_until

    async def run(
        self, started_leading: Callable[[], None], stopped_leading: Callable[[], Awaitable[None]]
    ) -> None:
        """Take part in the election until cancelled, and call these when the leadership changes.
        Raises `HistoryRewound`.
        """
        led = False
        while True:
            await self._acquire_or_renew()
            if self.leads and not led:
                logger.info("%s leads (transition %d)", self.identity, self._transitions)
                led = True
                started_leading()
            elif led and not self.leads:
                holder = self._observation.record.holder or "nobody"
                logger.warning("%s leads no more; %s does", self.identity, holder)
                led = False
                await stopped_leading()
            # A leader that could not renew checks again no later than its deadline.
            left = self._leads_until - self.clock()
            retry = self.times.retry_period
            await asyncio.sleep(min(retry, left) if left > 0 else retry)

    async def release(self) -> None:
        """Let the next candidate lead at once, not after the lease duration. `run` has ended."""
        for _ in range(_RELEASE_TRIES if self.leads else 0):
            try:
                document = await self._read()
                if self._observation.record.holder == self.identity:
                    now = now_micro_text()
                    record = replace(RELEASED, acquired=now, renewed=now)
                    await self._write(replace(record, transitions=self._transitions), document)
                break
            except Conflict:
                continue  # the last renewal, which `run` did not wait for, came first
            except ApiError as error:
                logger.warning("the lease was not released and expires later: %s", error)
                break
        self._leads_until = self.clock()

    async def _acquire_or_renew(self) -> None:
        """Read the lease, and acquire or renew it if allowed; its time starts with the request."""
        asked_at = self.clock()
        longest = self.times.retry_period * 2
        left = self._leads_until - asked_at
        try:
            async with asyncio.timeout(min(longest, left) if left > 0 else longest):
                written = await self._try()
            self._leads_until = asked_at + self.times.renew_deadline if written else asked_at
            self.answered_at = self.clock()
        except Conflict:
            # Somebody else has written first; the next read shows who.
            self.answered_at = self.clock()
        except TimeoutError:
            logger.warning("the API server does not answer about the lease")
        except ApiError as error:
            logger.warning("%s", error)

    async def _try(self) -> bool:
        document = await self._read()
        if not self._observation.may_acquire(self.identity, self.clock()):
            return False
        before = self._observation.record
        mine, now = before.holder == self.identity, now_micro_text()
        self._transitions = before.transitions if mine else before.transitions + 1
        record = Record(
            holder=self.identity,
            duration_seconds=self.times.lease_duration,
            acquired=before.acquired if mine else now,
            renewed=now,
            transitions=self._transitions,
        )
        await self._write(record, document)
        return True

    async def _read(self) -> Json | None:
        document = await self.api.get(LEASE, self.api.namespace, self.name)
        record = RELEASED if document is None else _record(document)
        self._observation.observe(record, self.clock())
        if document is not None:
            self._notice(document)
        return document

    def _notice(self, document: Json) -> None:
        """This version of the Lease was seen. Raises `HistoryRewound`."""
        before, self._version = self._version, identity_of(document).version
        if self._version < before:
            raise HistoryRewound(before, self._version)

    async def _write(self, record: Record, before: Json | None) -> None:
        """Create the lease, or replace exactly the one that was read."""
        metadata: Json = {"name": self.name, "namespace": self.api.namespace}
        if before is not None:
            metadata["resourceVersion"] = Raw(before).table("metadata").text("resourceVersion")
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": record.duration_seconds,
            "acquireTime": record.acquired,
            "renewTime": record.renewed,
            "leaseTransitions": record.transitions,
        }
        document = LEASE.manifest(metadata, spec=spec)
        write = self.api.create if before is None else self.api.replace
        self._notice(await write(document))


def _record(document: Json) -> Record:
    spec = Raw(document).table("spec")
    return Record(
        holder=spec.text("holderIdentity"),
        duration_seconds=spec.number("leaseDurationSeconds") or 1,
        acquired=spec.text("acquireTime"),
        renewed=spec.text("renewTime"),
        transitions=spec.number("leaseTransitions"),
    )
