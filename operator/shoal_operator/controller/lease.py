"""Leader election: one holder of a `coordination.k8s.io` Lease at a time.

Clocks of different machines are not compared. A candidate that has observed the same record for
the whole lease duration, by its own clock, acquires the lease. A leader that could not renew it
before the renew deadline, which is shorter, stops leading by its own clock; so there are never two:

    leader:     renews ......... stops (renew deadline)
    candidate:  observes ................... acquires (lease duration)

The record is written with the resource version that was read, so of two candidates one wins.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from shoal_operator.controller.api import Api, ApiError, Conflict, Json
from shoal_operator.controller.foreign import Raw
from shoal_operator.controller.resources import LEASE

logger = logging.getLogger(__name__)

_RELEASE_TRIES: Final = 3


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


class Lease:
    """One candidate. `clock` counts seconds and never goes back; `now` is the time in RFC 3339."""

    def __init__(
        self,
        api: Api,
        *,
        name: str,
        identity: str,
        times: LeaseTimes,
        clock: Callable[[], float],
        now: Callable[[], str],
    ) -> None:
        self._api = api
        self._name = name
        self._namespace = api.namespace
        self.identity = identity
        self._times = times
        self._clock = clock
        self._now = now
        self._observation = Observation()
        self._leads_until = clock()
        self.answered_at: float = clock()
        self.transitions = 0

    @property
    def leads(self) -> bool:
        """Whether this candidate leads now; the operator checks it before every write."""
        return self._clock() < self._leads_until

    @property
    def holder(self) -> str:
        """Who held it when it was last read."""
        return self._observation.record.holder

    async def run(
        self, started_leading: Callable[[], None], stopped_leading: Callable[[], Awaitable[None]]
    ) -> None:
        """Take part in the election until cancelled, and call these when the leadership changes."""
        led = False
        while True:
            await self._acquire_or_renew()
            if self.leads and not led:
                logger.info("%s leads (transition %d)", self.identity, self.transitions)
                led = True
                started_leading()
            elif led and not self.leads:
                logger.warning("%s leads no more; %s does", self.identity, self.holder or "nobody")
                led = False
                await stopped_leading()
            # A leader that could not renew checks again no later than its deadline.
            left = self._leads_until - self._clock()
            retry = self._times.retry_period
            await asyncio.sleep(min(retry, left) if left > 0 else retry)

    async def release(self) -> None:
        """Let the next candidate lead at once, not after the lease duration. `run` has ended."""
        if not self.leads:
            return
        for _ in range(_RELEASE_TRIES):
            try:
                await self._write_released()
                break
            except Conflict:
                continue  # the last renewal, which `run` did not wait for, came first
            except ApiError as error:
                logger.warning("the lease was not released and expires later: %s", error)
                break
        self._leads_until = self._clock()

    async def _write_released(self) -> None:
        document = await self._api.get(LEASE, self._namespace, self._name)
        if document is None or _record(document).holder != self.identity:
            return
        now = self._now()
        released = replace(RELEASED, acquired=now, renewed=now, transitions=self.transitions)
        await self._api.replace(self._document(released, document))

    async def _acquire_or_renew(self) -> None:
        """Read the lease, and acquire or renew it if allowed; its time starts with the request."""
        asked_at = self._clock()
        longest = self._times.retry_period * 2
        left = self._leads_until - asked_at
        try:
            async with asyncio.timeout(min(longest, left) if left > 0 else longest):
                written = await self._write()
            self._leads_until = asked_at + self._times.renew_deadline if written else asked_at
            self.answered_at = self._clock()
        except Conflict:
            # Somebody else has written first; the next read shows who.
            self.answered_at = self._clock()
        except TimeoutError:
            logger.warning("the API server does not answer about the lease")
        except ApiError as error:
            logger.warning("%s", error)

    async def _write(self) -> bool:
        document = await self._api.get(LEASE, self._namespace, self._name)
        if document is None:
            self._observation.observe(RELEASED, self._clock())
            await self._api.create(self._document(self._acquired(RELEASED), None))
            return True
        record = _record(document)
        self._observation.observe(record, self._clock())
        if not self._observation.may_acquire(self.identity, self._clock()):
            return False
        await self._api.replace(self._document(self._acquired(record), document))
        return True

    def _acquired(self, record: Record) -> Record:
        """The record with this candidate in it."""
        mine = record.holder == self.identity
        self.transitions = record.transitions if mine else record.transitions + 1
        return Record(
            holder=self.identity,
            duration_seconds=self._times.lease_duration,
            acquired=record.acquired if mine else self._now(),
            renewed=self._now(),
            transitions=self.transitions,
        )

    def _document(self, record: Record, before: Json | None) -> Json:
        metadata: Json = {"name": self._name, "namespace": self._namespace}
        if before is not None:
            metadata["resourceVersion"] = Raw(before).table("metadata").text("resourceVersion")
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": metadata,
            "spec": {
                "holderIdentity": record.holder,
                "leaseDurationSeconds": record.duration_seconds,
                "acquireTime": record.acquired,
                "renewTime": record.renewed,
                "leaseTransitions": record.transitions,
            },
        }


def _record(document: Json) -> Record:
    spec = Raw(document).table("spec")
    return Record(
        holder=spec.text("holderIdentity"),
        duration_seconds=spec.number("leaseDurationSeconds") or 1,
        acquired=spec.text("acquireTime"),
        renewed=spec.text("renewTime"),
        transitions=spec.number("leaseTransitions"),
    )
