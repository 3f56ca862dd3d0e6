"""The service for clients: jobs, devices and fragments (`v1/coordinator.proto`)."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from typing import Any, Final

import grpc

from shoal_coordinator.jobs.values import Refusal
from shoal_coordinator.server import wire
from shoal_coordinator.server.item_lists import items_of, pages, require_failed
from shoal_coordinator.server.item_streams import ItemStreams, Requests, Write
from shoal_coordinator.server.jobs import Jobs
from shoal_coordinator.server.lives import Life
from shoal_coordinator.server.overview import Overviews
from shoal_coordinator.server.placements import Placements, submission_of
from shoal_coordinator.server.refusals import CallRefused, JobRefused, abort, aborting
from shoal_coordinator.server.roles import Role, Roles
from shoal_coordinator.server.wire import Malformed
from shoal_coordinator.storage.volume import Volume
from shoal_protocol.bulk.local import LocalTransport
from shoal_protocol.bulk.transport import TransportBroken
from shoal_protocol.called_items import ItemFrame, LocalCall, item_frame
from shoal_protocol.control import MessageTooLarge
from shoal_protocol.frames import Frame, MalformedFrame
from shoal_protocol.partition import DocumentRefused
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorServicer

PREPARE_SECONDS: Final = 5.0
"""How long a submission waits until the job runs, or its folders are refused."""
CANCEL_SECONDS: Final = 5.0
SHORTEST_INTERVAL_SECONDS: Final = 0.05
LONGEST_INTERVAL_SECONDS: Final = 60.0
WATCHERS: Final = 1024
ABANDONED_SECONDS: Final = 1.0
"""How often a local stream of items is looked at."""

_Context = grpc.aio.ServicerContext[Any, Any]


class CoordinatorService(CoordinatorServicer):
    """The calls of clients, and of nobody else (see `roles`)."""

    def __init__(
        self,
        jobs: Jobs,
        streams: ItemStreams,
        overviews: Overviews,
        placements: Placements,
        volume: Volume,
        roles: Roles,
    ) -> None:
        self._jobs = jobs
        self._streams = streams
        self._overviews = overviews
        self._placements = placements
        self._volume = volume
        self._roles = roles
        self._watchers = 0

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: _Context) -> pb.JobStatus:
        async with self._call(context, Role.CLIENT):
            await self._roles.require_folders(context, request.inputs_uri, request.outputs_uri)
            job = await self._jobs.submit(request)
        await job.settled.within(PREPARE_SECONDS)
        return job.status()

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: _Context
    ) -> AsyncIterator[pb.JobStatus]:
        async with self._call(context, Role.CLIENT):
            job = self._jobs.get(request.name)
            if self._watchers >= WATCHERS:
                raise JobRefused("too many watch already", Refusal.FULL)
        self._watchers += 1
        try:
            async for status in self._statuses(job, _interval(request.interval_seconds)):
                yield status
        finally:
            self._watchers -= 1
        if not job.has_ended:
            gone = "the coordinator stops" if self._jobs.closed else "the job was not recorded"
            await abort(context, grpc.StatusCode.UNAVAILABLE, gone)

    async def CancelJob(self, request: pb.CancelJobRequest, context: _Context) -> pb.JobStatus:
        async with self._call(context, Role.CLIENT):
            job = self._jobs.get(request.name)
        if not job.has_ended:
            self._jobs.cancel(request.name, request.reason)
            await job.done.within(CANCEL_SECONDS)
        return job.status()

    async def EndJob(self, request: pb.EndJobRequest, context: _Context) -> pb.JobStatus:
        async with self._call(context, Role.CLIENT):
            job = self._jobs.get(request.name)
            if not job.has_ended:
                if not job.submitted().follow:
                    text = f"job {request.name} does not follow its inputs: it ends by itself"
                    raise JobRefused(text, Refusal.LACKING)
                job = await self._jobs.end(request.name)
        return job.status()

    async def RetryJob(self, request: pb.RetryJobRequest, context: _Context) -> pb.JobStatus:
        async with self._call(context, Role.CLIENT):
            if len(request.items) > wire.MOST_RETRIED:
                most = f"at most {wire.MOST_RETRIED}; name none for all"
                raise JobRefused(f"{len(request.items)} items, {most}")
            await self._require_failed(self._jobs.get(request.name), request.items)
            job = await self._jobs.retry(request.name, request.items)
        with suppress(TimeoutError):
            async with asyncio.timeout(PREPARE_SECONDS):
                await job.settled.wait()
                if job.run is not None:
                    await job.run.amended.wait()
        return job.status()

    async def ListItems(
        self, request: pb.ListItemsRequest, context: _Context
    ) -> AsyncIterator[pb.ItemPage]:
        async with self._call(context, Role.CLIENT, Role.VIEWER):
            life = self._jobs.get(request.name)
            try:
                items, active = await items_of(life)
                async for page in pages(items, active, frozenset(request.states)):
                    yield page
            except OSError as error:
                reason = f"the items of job {request.name} cannot be read now: {error}"
                raise CallRefused(reason, grpc.StatusCode.UNAVAILABLE) from error

    # gRPC takes a coroutine that writes its answers as well; its stubs know generators only.
    async def Infer(  # type: ignore[override]
        self, requests: AsyncIterator[pb.InferRequest], context: _Context
    ) -> None:
        async def write(answer: pb.InferAnswer | Frame) -> None:
            if isinstance(answer, Frame):
                answer = pb.InferAnswer(frame=bytes(answer))
            await context.write(answer)

        async with self._call(context, Role.CLIENT):
            await self._infer((item_frame(each) async for each in requests), write)

    async def infer_locally(self, _: str, transport: LocalTransport) -> str:
        """Serve `Infer` over a local stream; why it ended. Raises `TransportBroken`,
        `MalformedFrame`."""
        stream: LocalCall[pb.InferAnswer, pb.InferRequest] = LocalCall(
            transport, pb.InferRequest.FromString
        )
        serving = asyncio.create_task(self._infer(_until_gone(stream), stream.write))
        try:
            # While too many items have no answer, nobody reads that their client has gone.
            while not (await asyncio.wait({serving}, timeout=ABANDONED_SECONDS))[0]:
                if transport.is_abandoned:
                    raise TransportBroken("the client has gone")
            serving.result()
        except (CallRefused, MessageTooLarge) as error:
            return str(error)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        return "the call has ended"

    async def _infer(self, requests: Requests, write: Write) -> None:
        """Raises `CallRefused`, `TransportBroken`."""
        try:
            first = await anext(requests, pb.InferRequest())
            if isinstance(first, ItemFrame):
                raise CallRefused("the first message does not begin a call")
            document, missing = await asyncio.to_thread(self._jobs.checked, first.start)
            if missing:
                raise JobRefused(missing, Refusal.LACKING)
            await self._streams.serve(first.start, document, requests, write)
        except (DocumentRefused, Malformed, MalformedFrame) as error:
            raise CallRefused(str(error)) from error
        except TransportBroken:
            raise
        except OSError as error:
            raise CallRefused(str(error), grpc.StatusCode.UNAVAILABLE) from error
        if self._jobs.closed:
            raise JobRefused("the coordinator stops", Refusal.STOPPING)

    async def PlaceFragments(
        self, request: pb.PlaceFragmentsRequest, context: _Context
    ) -> pb.PlacedFragments:
        async with self._call(context, Role.CLIENT):
            document, missing = await self._jobs.checked_now(submission_of(request))
            if missing and request.stages:
                raise JobRefused(missing, Refusal.LACKING)
            return self._placements.place(request, document)

    async def ListDevices(
        self, request: pb.ListDevicesRequest, context: _Context
    ) -> pb.ListDevicesResponse:
        await self._roles.require(context, Role.CLIENT)
        after = request.after if request.HasField("after") else None
        return self._overviews.devices(after)

    async def ListJobs(
        self, request: pb.ListJobsRequest, context: _Context
    ) -> AsyncIterator[pb.JobStatus]:
        await self._roles.require(context, Role.CLIENT)
        for job in self._jobs.all():
            yield job.status()

    async def RemoveJob(
        self, request: pb.RemoveJobRequest, context: _Context
    ) -> pb.RemoveJobResponse:
        async with self._call(context, Role.CLIENT):
            await self._jobs.remove(request.name)
        return pb.RemoveJobResponse()

    async def ListFragments(
        self, request: pb.ListFragmentsRequest, context: _Context
    ) -> pb.ListFragmentsResponse:
        await self._roles.require(context, Role.CLIENT)
        room = await asyncio.to_thread(self._volume.room)
        return pb.ListFragmentsResponse(
            digests=room.fragments,
            unused=[place for place, each in enumerate(room.fragments) if each in room.unused],
            free_bytes=room.free_bytes,
            removable_bytes=room.removable_bytes,
            size_bytes=room.size_bytes,
            unsubmitted=[job for job in room.jobs if self._jobs.find(job) is None],
        )

    async def GetOverview(self, request: pb.GetOverviewRequest, context: _Context) -> pb.Overview:
        await self._roles.require(context, Role.CLIENT, Role.VIEWER)
        return self._overviews.get(request.job)

    async def GetTimeline(self, request: pb.GetTimelineRequest, context: _Context) -> pb.Timeline:
        await self._roles.require(context, Role.CLIENT)
        return self._overviews.timeline()

    async def ExportTraces(
        self, request: pb.ExportTracesRequest, context: _Context
    ) -> pb.ExportedTraces:
        await self._roles.require(context, Role.CLIENT)
        delivered, lost = await asyncio.to_thread(self._overviews.driver.traces.flush)
        return pb.ExportedTraces(delivered=delivered, lost=lost)

    async def _require_failed(self, life: Life, named: Sequence[int]) -> None:
        """Raises `JobRefused`."""
        live = not life.has_ended and life.job.submission.takes_more
        if live or (named and life.has_ended):
            items, _ = await items_of(life)
            await asyncio.to_thread(require_failed, life.job.name, items, named)

    @asynccontextmanager
    async def _call(self, context: _Context, *roles: Role) -> AsyncIterator[None]:
        """Abort a call of others than these, and one that is refused."""
        await self._roles.require(context, *roles)
        async with aborting(context):
            yield

    async def _statuses(self, job: Life, interval: float) -> AsyncIterator[pb.JobStatus]:
        sent: pb.JobStatus | None = None
        while True:
            ended = job.has_ended
            status = job.status()
            if sent is None or ended or _differs(status, sent):
                yield status
                sent = status
            if ended or self._jobs.closed or job not in self._jobs.all():
                return
            await job.done.within(interval)


async def _until_gone(
    stream: LocalCall[pb.InferAnswer, pb.InferRequest],
) -> Requests:
    """The messages of a local stream, whose client ends it when it needs no more answers. Raises
    `TransportBroken`, `MalformedFrame`."""
    async for message in stream.received():
        yield message
    raise TransportBroken("the client has gone")


def _differs(status: pb.JobStatus, sent: pb.JobStatus) -> bool:
    """Whether more than time has passed."""
    before = deepcopy(sent)
    before.seconds, before.items_per_second = status.seconds, status.items_per_second
    return status != before


def _interval(wanted: float) -> float:
    if not math.isfinite(wanted) or wanted <= 0:
        return 1.0
    return min(max(wanted, SHORTEST_INTERVAL_SECONDS), LONGEST_INTERVAL_SECONDS)
