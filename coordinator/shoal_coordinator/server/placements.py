"""Fragments that devices are to have before there is a job: `PlaceFragments`.

Each placement is a job of the dispatcher without items, which holds its fragments. It is a lease:
whoever wants it says so again and again, so nothing has to be recorded, and nothing is left of
whoever has gone.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import monotonic, monotonic_ns
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import views
from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.jobs.values import Refusal
from shoal_coordinator.server import wire
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.refusals import JobRefused
from shoal_protocol.digests import Digest
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Nanoseconds
from shoal_protocol.v1 import coordinator_pb2 as pb

LEASE_SECONDS: Final = 180.0
MOST: Final = 256
_PRIORITY: Final = -1001
"""Below that of every job."""
_EXPIRY_SECONDS: Final = 5.0


@dataclass(slots=True)
class _Placement:
    spec: ev.JobSpec
    document: PartitionDocument
    renewed_at: float


class Placements:
    """Those whose lease lasts, by name."""

    def __init__(self, driver: Driver, clock: Callable[[], float] = monotonic) -> None:
        self._driver = driver
        self._clock = clock
        self._all: dict[str, _Placement] = {}

    def place(
        self, request: pb.PlaceFragmentsRequest, document: PartitionDocument
    ) -> pb.PlacedFragments:
        """Begin, renew, replace or end a placement. Raises `JobRefused`."""
        name = _job_of(request.name)
        known = self._all.get(name)
        if not request.stages:
            self._end(name)
            return pb.PlacedFragments()
        spec = _spec(request, document)
        if known is None or known.spec != spec:
            if known is None and len(self._all) >= MOST:
                reason = f"{MOST} placements are prefetched already"
                raise JobRefused(reason, Refusal.FULL)
            self._end(name)
            self._begin(spec)
        elif name not in self._driver.state.jobs and not self._is_unsound(name):
            self._begin(spec)  # it could not continue: perhaps it can now
        self._all[name] = _Placement(spec, document, self._clock())
        return self._placed(spec)

    def fragments_in_use(self) -> frozenset[Digest]:
        """Called from other threads."""
        placements = tuple(self._all.values())
        return frozenset(f.digest for each in placements for f in each.document.fragments)

    async def expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_SECONDS)
            self.end_expired()

    def end_expired(self) -> None:
        oldest = self._clock() - LEASE_SECONDS
        for name in [name for name, each in self._all.items() if each.renewed_at < oldest]:
            self._end(name)

    def _is_unsound(self, name: str) -> bool:
        """Whether a fragment of a placement cannot run: to try it again could end its devices."""
        view = views.job(self._driver.state, name)
        failure = None if view is None else view.failure
        return failure is not None and failure.kind is ev.FailureKind.RUNTIME

    def _begin(self, spec: ev.JobSpec) -> None:
        self._driver.feed(ev.JobSubmitted(at=Nanoseconds(monotonic_ns()), job=spec))

    def _end(self, name: str) -> None:
        if self._all.pop(name, None) is not None:
            self._driver.withdraw(name, "it is not wanted any more")

    def _placed(self, spec: ev.JobSpec) -> pb.PlacedFragments:
        view, devices = views.job(self._driver.state, spec.name), self._driver.state.devices
        failure = None if view is None else view.failure
        return pb.PlacedFragments(
            fragments=list(_fragments(spec, devices)),
            problem="" if failure is None else wire.failure_text(failure),
        )


def _fragments(spec: ev.JobSpec, devices: dict[str, Device]) -> Iterator[pb.PlacedFragment]:
    for index, stage in enumerate(spec.stages):
        for name in stage.homes:
            state, device = pb.PlacedFragment.ABSENT, devices.get(name)
            if device is not None and stage.digest in device.memory.resident:
                state = pb.PlacedFragment.RESIDENT
            elif device is not None and stage.digest in device.disk.cached:
                state = pb.PlacedFragment.CACHED
            yield pb.PlacedFragment(fragment=index, device=name, state=state)


def submission_of(request: pb.PlaceFragmentsRequest) -> pb.SubmitJobRequest:
    """A submission of the same plan, to be checked as one."""
    return pb.SubmitJobRequest(
        name=request.name, partition=request.partition, stages=request.stages
    )


def _spec(request: pb.PlaceFragmentsRequest, document: PartitionDocument) -> ev.JobSpec:
    spec = wire.job_spec(
        submission_of(request), document, items=0, epoch=1, deadline=None, open_ended=True
    )
    return replace(spec, name=_job_of(request.name), priority=_PRIORITY, holds=True)


def _job_of(name: str) -> str:
    """No job of a client can be called so."""
    return f"placement/{name}"
