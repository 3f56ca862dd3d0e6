"""What the coordinator offers to those who give it work (`v1/coordinator.proto`)."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from typing import Final, NoReturn

import grpc

from shoal_operator.dispatch import views
from shoal_operator.shell.coordinator.driver import Driver
from shoal_operator.shell.coordinator.jobs import Job, JobRefused, Jobs, Refusal
from shoal_operator.shell.coordinator.sessions import Sessions
from shoal_operator.shell.coordinator.statuses import device_status
from shoal_operator.shell.store import FragmentStore
from shoal_protocol.channels import peer_name
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorServicer

logger = logging.getLogger(__name__)

PREPARE_SECONDS: Final = 5.0
"""How long a submission waits to hear whether inputs and outputs will do."""
CANCEL_SECONDS: Final = 5.0
SHORTEST_INTERVAL_SECONDS: Final = 0.05
LONGEST_INTERVAL_SECONDS: Final = 60.0
WATCHERS: Final = 1024

_CODES: Final = {
    Refusal.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Refusal.KNOWN: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.STOPPING: grpc.StatusCode.UNAVAILABLE,
}

_Submit = grpc.aio.ServicerContext[pb.SubmitJobRequest, pb.JobStatus]
_Watch = grpc.aio.ServicerContext[pb.WatchJobRequest, pb.JobStatus]
_Cancel = grpc.aio.ServicerContext[pb.CancelJobRequest, pb.JobStatus]
_List = grpc.aio.ServicerContext[pb.ListDevicesRequest, pb.ListDevicesResponse]


class CoordinatorService(CoordinatorServicer):
    """The four calls."""

    def __init__(
        self,
        jobs: Jobs,
        driver: Driver,
        sessions: Sessions,
        store: FragmentStore,
        *,
        tls: bool,
        clients: frozenset[str],
    ) -> None:
        """Under `tls`, only `clients` (common names) may call: a device's certificate does not
        entitle it to read and write the coordinator's folders."""
        self._jobs = jobs
        self._driver = driver
        self._sessions = sessions
        self._store = store
        self._tls = tls
        self._clients = clients
        self._watchers = 0

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: _Submit) -> pb.JobStatus:
        await self._allow(context.peer(), peer_name(context), context)
        try:
            job = self._jobs.submit(request)
        except JobRefused as error:
            await _abort(context, _CODES[error.refusal], str(error))
        await _within(job.prepared, PREPARE_SECONDS)
        return self._jobs.status(job)

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: _Watch
    ) -> AsyncIterator[pb.JobStatus]:
        await self._allow(context.peer(), peer_name(context), context)
        job = self._jobs.find(request.name)
        if job is None:
            await _abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.name))
        if self._watchers >= WATCHERS:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch already")
        self._watchers += 1
        try:
            async for status in self._statuses(job, _interval(request.interval_seconds)):
                yield status
        finally:
            self._watchers -= 1
        if not job.ended.is_set():
            await _abort(context, grpc.StatusCode.UNAVAILABLE, "the coordinator stops")

    async def CancelJob(self, request: pb.CancelJobRequest, context: _Cancel) -> pb.JobStatus:
        await self._allow(context.peer(), peer_name(context), context)
        job = self._jobs.find(request.name)
        if job is None:
            await _abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.name))
        if not job.ended.is_set():
            self._jobs.cancel(job, request.reason)
            await _within(job.ended, CANCEL_SECONDS)
        return self._jobs.status(job)

    async def ListDevices(
        self, request: pb.ListDevicesRequest, context: _List
    ) -> pb.ListDevicesResponse:
        await self._allow(context.peer(), peer_name(context), context)
        return pb.ListDevicesResponse(
            devices=[
                device_status(view, self._sessions.last.get(view.name), self._store.size_bytes)
                for view in views.devices(self._driver.state)
            ]
        )

    async def _statuses(self, job: Job, interval: float) -> AsyncIterator[pb.JobStatus]:
        """The status now, whenever it changed, and the last one."""
        told: pb.JobStatus | None = None
        while True:
            ended = job.ended.is_set()
            status = self._jobs.status(job)
            if told is None or ended or _differs(status, told):
                yield status
                told = status
            if ended or self._jobs.closed:
                return
            await _within(job.stirred, interval)

    async def _allow(
        self, peer: str, name: str | None, context: "_Submit | _Watch | _Cancel | _List"
    ) -> None:
        if self._tls and not peer.startswith("unix:") and name not in self._clients:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"{name!r} may not give work to this coordinator"
            )


async def _abort(
    context: "_Submit | _Watch | _Cancel", code: grpc.StatusCode, reason: str
) -> NoReturn:
    await context.abort(code, reason)
    raise AssertionError("abort always raises")


async def _within(event: asyncio.Event, timeout_seconds: float) -> None:
    try:
        async with asyncio.timeout(timeout_seconds):
            await event.wait()
    except TimeoutError:
        pass


def _differs(status: pb.JobStatus, told: pb.JobStatus) -> bool:
    """Whether more than time has passed."""
    now, before = pb.JobStatus(), pb.JobStatus()
    for target, source in ((now, status), (before, told)):
        target.CopyFrom(source)
        target.seconds = target.items_per_second = 0
    return now != before


def _interval(wanted: float) -> float:
    if not math.isfinite(wanted) or wanted <= 0:
        return 1.0
    return min(max(wanted, SHORTEST_INTERVAL_SECONDS), LONGEST_INTERVAL_SECONDS)


def _unknown(name: str) -> str:
    return f"there is no job {name[:80]!r} here"
