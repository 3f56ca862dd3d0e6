"""A simulated coordinator: its calls are real, its devices and what they run are not.

For benches of the operator, which is to see hundreds of devices and thousands of jobs. So many jobs
run at once, in the order in which they came; each has the same number of items, and ends when its
time is up. Progress comes from the clock, as nothing else happens here.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from shoal_coordinator.server.messages import as_submitted, submission_as
from shoal_protocol.channels import server_options
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.coordinator_pb2_grpc import (
    CoordinatorServicer,
    add_CoordinatorServicer_to_server,
)

MIB = 1 << 20
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class _Run:
    """One job; `started` is 0 until its turn."""

    request: pb.SubmitJobRequest
    started: float = 0.0
    cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every job is: its items, for how long it runs, and how many run at once."""

    items: int = 8
    seconds: float = 3.0
    at_once: int = 20


@dataclass
class SimulatedCoordinator(CoordinatorServicer):
    """`devices` are READY unless they are in `silent`; the store has all of `fragments`. `begun`
    counts how often each job was begun anew.
    """

    devices: tuple[str, ...]
    fragments: tuple[str, ...]
    budget_bytes: int
    work: Work
    silent: set[str] = field(default_factory=set)
    begun: Counter[str] = field(default_factory=Counter)
    _runs: dict[str, _Run] = field(default_factory=dict)

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: _Context) -> pb.JobStatus:
        """Take a job, or continue one by another plan."""
        if request.name not in self._runs:
            self.begun[request.name] += 1
        run = self._runs.setdefault(request.name, _Run(request))
        run.request, run.cancelled = request, False
        return self._status(request.name, run)

    async def CancelJob(self, request: pb.CancelJobRequest, context: _Context) -> pb.JobStatus:
        """Stop a job."""
        run = self._runs.get(request.name)
        if run is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no job {request.name}")
        run.cancelled = True
        return self._status(request.name, run)

    async def EndJob(self, request: pb.EndJobRequest, context: _Context) -> pb.JobStatus:
        raise NotImplementedError

    async def RemoveJob(
        self, request: pb.RemoveJobRequest, context: _Context
    ) -> pb.RemoveJobResponse:
        """Forget a job."""
        self._runs.pop(request.name, None)
        return pb.RemoveJobResponse()

    async def PlaceFragments(
        self, request: pb.PlaceFragmentsRequest, context: _Context
    ) -> pb.PlacedFragments:
        """Nothing is placed before a job."""
        return pb.PlacedFragments()

    async def RetryJob(self, request: pb.RetryJobRequest, context: _Context) -> pb.JobStatus:
        """No item fails here."""
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no item has failed")

    async def ListItems(
        self, request: pb.ListItemsRequest, context: _Context
    ) -> AsyncIterator[pb.ItemPage]:
        """Nothing of any item."""
        yield pb.ItemPage()

    async def ListJobs(
        self, request: pb.ListJobsRequest, context: _Context
    ) -> AsyncIterator[pb.JobStatus]:
        """All jobs, in the order in which they came."""
        self._begin()
        for name, run in tuple(self._runs.items()):
            yield self._status(name, run)

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: _Context
    ) -> AsyncIterator[pb.JobStatus]:
        """The job's status now; nobody here waits for more."""
        yield self._status(request.name, self._runs[request.name])

    async def ListDevices(
        self, request: pb.ListDevicesRequest, context: _Context
    ) -> pb.ListDevicesResponse:
        """All devices."""
        state = pb.DeviceStatus
        return pb.ListDevicesResponse(
            devices=[
                pb.DeviceStatus(
                    name=name,
                    state=state.SILENT if name in self.silent else state.READY,
                    architecture="amd64",
                    budget_bytes=self.budget_bytes,
                    floor_bytes=80 * MIB,
                    cached_fragments=len(self.fragments),
                    cached_bytes=8 * MIB,
                    silent_seconds=15.0 if name in self.silent else 0.1,
                )
                for name in self.devices
            ]
        )

    async def GetOverview(self, request: pb.GetOverviewRequest, context: _Context) -> pb.Overview:
        """Nothing in detail."""
        return pb.Overview()

    async def ListFragments(
        self, request: pb.ListFragmentsRequest, context: _Context
    ) -> pb.ListFragmentsResponse:
        """The fragments in the store."""
        return pb.ListFragmentsResponse(digests=sorted(self.fragments))

    async def GetTimeline(self, request: pb.GetTimelineRequest, context: _Context) -> pb.Timeline:
        """Nothing is recorded here."""
        return pb.Timeline()

    async def ExportTraces(
        self, request: pb.ExportTracesRequest, context: _Context
    ) -> pb.ExportedTraces:
        """No traces are made here."""
        return pb.ExportedTraces()

    async def Infer(
        self, requests: AsyncIterator[pb.InferRequest], context: _Context
    ) -> AsyncIterator[pb.InferAnswer]:
        """Nobody here streams items."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no items are streamed here")
        yield pb.InferAnswer()

    def _begin(self) -> None:
        """Start those whose turn it is."""
        now = asyncio.get_running_loop().time()
        free = self.work.at_once
        for run in self._runs.values():
            if run.cancelled or (run.started and now - run.started >= self.work.seconds):
                continue
            if free == 0:
                return
            free -= 1
            run.started = run.started or now

    def _status(self, name: str, run: _Run) -> pb.JobStatus:
        work, now = self.work, asyncio.get_running_loop().time()
        seconds = min(now - run.started, work.seconds) if run.started else 0.0
        done = int(work.items * seconds / work.seconds)
        state = pb.JobStatus.RUNNING if run.started else pb.JobStatus.PENDING
        if run.cancelled:
            state = pb.JobStatus.CANCELLED
        elif done == work.items:
            state = pb.JobStatus.COMPLETE
        status = pb.JobStatus(
            name=name,
            state=state,
            epoch=run.request.epoch,
            items=work.items,
            active=min(4, work.items - done) if state == pb.JobStatus.RUNNING else 0,
            succeeded=done,
            seconds=seconds,
            items_per_second=done / seconds if seconds else 0.0,
            latency=pb.Latency(p50_seconds=0.5),
            tier_hits=pb.TierHits(resident=done),
        )
        submission = submission_as("", run.request)
        return as_submitted(status, submission)


@contextlib.asynccontextmanager
async def serving(coordinator: SimulatedCoordinator, socket: Path) -> AsyncIterator[str]:
    """Listen at a Unix socket; gives the target to dial."""
    server = grpc.aio.server(options=server_options())
    add_CoordinatorServicer_to_server(coordinator, server)
    target = f"unix:{socket}"
    server.add_insecure_port(target)
    await server.start()
    try:
        yield target
    finally:
        await server.stop(0)
