"""Who leads: one holder of a `coordination.k8s.io` Lease at a time.

Clocks of different machines are not compared. A candidate that has seen the same record for the
lease's whole duration, by its own clock, takes it. A leader that has not renewed for
`give_up_seconds`, which is shorter, stops leading by its own clock; so there are never two:

    leader:     renewed ......... stops (give_up)
    candidate:  seen ........................ takes (duration)

The record is written with the version that was read, so that of two candidates one wins.
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
    """In seconds; `give_up` is what keeps two leaders apart, so it is well below `duration`."""

    duration: int = 15
    renew: float = 2.0
    give_up: float = 10.0

    def __post_init__(self) -> None:
        assert self.renew < self.give_up < self.duration, f"{self} lets two lead at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a Lease says."""

    holder: str
    duration_seconds: int
    acquired: str
    renewed: str
    transitions: int


FREE: Final = Record(holder="", duration_seconds=1, acquired="", renewed="", transitions=0)


@dataclass(slots=True)
class Observation:
    """What was last read, and when it was first seen so, by the own clock."""

    record: Record = FREE
    since: float = 0.0

    def see(self, record: Record, now: float) -> None:
        """Another record starts the time anew."""
        if record != self.record:
            self.record = record
            self.since = now

    def is_free(self, identity: str, now: float) -> bool:
        """Whether `identity` may write itself in: nobody holds it, it does, or it has run out."""
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
        self._led_until = clock()
        self.heard_at: float = clock()
        self.transitions = 0

    @property
    def leads(self) -> bool:
        """Whether this candidate leads at this moment; asked before every write."""
        return self._clock() < self._led_until

    @property
    def holder(self) -> str:
        """Who held it when it was last read."""
        return self._observation.record.holder

    async def run(self, won: Callable[[], None], lost: Callable[[], Awaitable[None]]) -> None:
        """Take part until cancelled: `won` when it starts leading, `lost` when it has stopped."""
        led = False
        while True:
            await self._try_once()
            if self.leads and not led:
                logger.info("%s leads (transition %d)", self.identity, self.transitions)
                led = True
                won()
            elif led and not self.leads:
                logger.warning("%s leads no more; %s does", self.identity, self.holder or "nobody")
                led = False
                await lost()
            # A leader that could not renew looks again before its time is over.
            left = self._led_until - self._clock()
            await asyncio.sleep(min(self._times.renew, left) if left > 0 else self._times.renew)

    async def release(self) -> None:
        """Let the next one in at once, instead of after the lease's duration. `run` has ended."""
        if not self.leads:
            return
        for _ in range(_RELEASE_TRIES):
            try:
                await self._write_free()
                break
            except Conflict:
                continue  # the last renewal, which `run` did not wait for, came in between
            except ApiError as error:
                logger.warning("the lease runs out by itself: %s", error)
                break
        self._led_until = self._clock()

    async def _write_free(self) -> None:
        document = await self._api.get(LEASE, self._namespace, self._name)
        if document is None or _record(document).holder != self.identity:
            return
        now = self._now()
        free = replace(FREE, acquired=now, renewed=now, transitions=self.transitions)
        await self._api.replace(self._document(free, document))

    async def _try_once(self) -> None:
        """Read, and write when it is ours to write. Counts as renewed from before the request."""
        asked_at = self._clock()
        longest = self._times.renew * 2
        left = self._led_until - asked_at
        try:
            async with asyncio.timeout(min(longest, left) if left > 0 else longest):
                written = await self._write()
            self._led_until = asked_at + self._times.give_up if written else asked_at
            self.heard_at = self._clock()
        except Conflict:
            # Somebody has written in between; the next look says who.
            self.heard_at = self._clock()
        except TimeoutError:
            logger.warning("the API server does not answer about the lease")
        except ApiError as error:
            logger.warning("%s", error)

    async def _write(self) -> bool:
        document = await self._api.get(LEASE, self._namespace, self._name)
        if document is None:
            self._observation.see(FREE, self._clock())
            await self._api.create(self._document(self._taken(FREE), None))
            return True
        record = _record(document)
        self._observation.see(record, self._clock())
        if not self._observation.is_free(self.identity, self._clock()):
            return False
        await self._api.replace(self._document(self._taken(record), document))
        return True

    def _taken(self, record: Record) -> Record:
        """The record with this candidate in it."""
        mine = record.holder == self.identity
        self.transitions = record.transitions if mine else record.transitions + 1
        return Record(
            holder=self.identity,
            duration_seconds=self._times.duration,
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
