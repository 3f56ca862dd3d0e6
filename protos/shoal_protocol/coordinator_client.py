"""The client of a coordinator: for the command line, the operator and benches.

Every call has a deadline; a file's bytes have none, but must come at a minimum rate (`transfers`).
All calls raise `CallFailed`.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

import grpc

from shoal_protocol.channels import STATUS_LOST
from shoal_protocol.limits import Stalled
from shoal_protocol.transfers import stall_watch, watched
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1 import files_pb2 as files
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub
from shoal_protocol.v1.files_pb2_grpc import FilesStub

if TYPE_CHECKING:  # known to type checkers only
    from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorAsyncStub
    from shoal_protocol.v1.files_pb2_grpc import FilesAsyncStub

    _Put = grpc.aio.StreamStreamCall[files.PutRequest, files.PutAnswer]

CALL_SECONDS: Final = 15.0
LIST_SECONDS: Final = 60.0
READ_SECONDS: Final = 600.0
"""For an answer that takes reading a whole file there, or waiting for another upload of it."""
REACH_SECONDS: Final = 10.0
"""How long the first call about files waits for a connection: a network with policies may let a new
pod through only some seconds after it has begun, and a coordinator may just be starting."""
_REFUSAL_SECONDS: Final = (0.0, 0.02, 0.1, 0.5, 2.0)
"""How long each try of an upload waits for a refusal before it writes: a refusal that comes while
something is written may be lost (`STATUS_LOST`)."""
MOST_LISTED_BYTES: Final = 64 << 20
"""Of jobs: a thousand have a few; of devices: a thousand have some forty at most. Who asks many
coordinators keeps what they answer."""
_MOST_PARTS: Final = 64
"""Of an answer that comes in parts, whatever they hold."""
SENT_BYTES: Final = 256 << 10
"""Of one message: a gRPC message is held whole on both sides."""

Request = TypeVar("Request")
Answer = TypeVar("Answer")
_UNREACHABLE: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
)
_REFUSED: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.ABORTED,
    }
)
_FINAL: Final = _REFUSED | {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
}
ENDED: Final = frozenset({pb.JobStatus.COMPLETE, pb.JobStatus.FAILED, pb.JobStatus.CANCELLED})


class CallFailed(Exception):
    """A call that failed: which method, gRPC's code, and what the coordinator or gRPC says."""

    def __init__(self, method: str, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason or code.name)
        self.method = method
        self.code = code
        self.reason = reason or code.name

    @property
    def unreachable(self) -> bool:
        """Whether the coordinator did not answer, and may later."""
        return self.code in _UNREACHABLE

    @property
    def refused(self) -> bool:
        """Whether the coordinator refuses the request as it is."""
        return self.code in _REFUSED

    @property
    def other_way(self) -> bool:
        """Whether a job is refused since it runs in another way to the same results, such as with
        other fragments: when it was cancelled, it may go on in this one."""
        return self.code is grpc.StatusCode.ABORTED

    @property
    def missing(self) -> bool:
        """Whether the coordinator does not know what the call is about."""
        return self.code is grpc.StatusCode.NOT_FOUND

    @property
    def full(self) -> bool:
        """Whether the coordinator has no room for it now."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED

    @property
    def final(self) -> bool:
        """Whether the same call would fail again."""
        return self.code in _FINAL


class CoordinatorClient:
    """Calls to one coordinator, which take at most `seconds` where nothing else is said.

    With `wait`, a call waits for a coordinator that is not there yet, as long as it may take.
    `on_call` receives the method and code of each call that has ended.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        seconds: float = CALL_SECONDS,
        wait: bool = False,
        on_call: Callable[[str, grpc.StatusCode], None] = lambda method, code: None,
    ) -> None:
        self._channel = channel
        self._seconds = seconds
        self._wait = wait
        self._on_call = on_call
        # The stubs are one class for synchronous and asynchronous channels.
        self._jobs: CoordinatorAsyncStub = CoordinatorStub(channel)
        self._files: FilesAsyncStub = FilesStub(channel)
        self._reached = False

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(0)

    # ---- jobs ------------------------------------------------------------------------------------

    async def submit(self, request: pb.SubmitJobRequest) -> pb.JobStatus:
        """Give the coordinator a job, or another plan or priority of one that it has."""
        return await self._ask("SubmitJob", self._jobs.SubmitJob, request)

    async def cancel(self, name: str, reason: str, *, seconds: float | None = None) -> pb.JobStatus:
        """Cancel a job."""
        request = pb.CancelJobRequest(name=name, reason=reason)
        return await self._ask("CancelJob", self._jobs.CancelJob, request, seconds)

    async def end(self, name: str) -> pb.JobStatus:
        """Have a job that follows its inputs take no further ones."""
        return await self._ask("EndJob", self._jobs.EndJob, pb.EndJobRequest(name=name))

    async def retry(self, name: str, items: Sequence[int]) -> pb.JobStatus:
        """Run a job that has ended once more: what failed, or these items of it."""
        request = pb.RetryJobRequest(name=name, items=items)
        return await self._ask("RetryJob", self._jobs.RetryJob, request)

    async def place(self, request: pb.PlaceFragmentsRequest) -> pb.PlacedFragments:
        """Have devices fetch and load fragments before there is a job; for a while, unless it is
        said again."""
        return await self._ask("PlaceFragments", self._jobs.PlaceFragments, request)

    async def items(
        self, name: str, states: Sequence[pb.JobItem.State]
    ) -> AsyncIterator[pb.JobItem]:
        """A job's items in these states, in their order; of none: all items."""
        request = pb.ListItemsRequest(name=name, states=states)
        with self._call("ListItems"):
            async for page in self._jobs.ListItems(request, timeout=LIST_SECONDS):
                for item in page.items:
                    yield item

    async def remove(self, name: str) -> None:
        """Forget a job that has ended, with its files."""
        await self._ask("RemoveJob", self._jobs.RemoveJob, pb.RemoveJobRequest(name=name))

    async def watch(
        self, name: str, interval_seconds: float, *, seconds: float
    ) -> AsyncIterator[pb.JobStatus]:
        """The statuses of a job, at most one per interval, until it has ended or `seconds` have
        passed."""
        request = pb.WatchJobRequest(name=name, interval_seconds=interval_seconds)
        call = self._jobs.WatchJob(request, timeout=seconds, wait_for_ready=self._wait)
        try:
            with self._call("WatchJob"):
                async for status in call:
                    yield status
        except CallFailed as error:
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        finally:
            call.cancel()

    async def jobs(self, *, seconds: float | None = None) -> list[pb.JobStatus]:
        """All jobs."""
        with self._call("ListJobs"):
            stream = self._jobs.ListJobs(pb.ListJobsRequest(), timeout=seconds or self._seconds)
            statuses, size = list[pb.JobStatus](), 0
            async for status in stream:
                statuses.append(status)
                size += status.ByteSize()
                if size > MOST_LISTED_BYTES:
                    stream.cancel()
                    reason = f"it tells of more than {MOST_LISTED_BYTES >> 20} MiB of jobs"
                    raise CallFailed("ListJobs", grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
            return statuses

    async def devices(self, *, seconds: float | None = None) -> Sequence[pb.DeviceStatus]:
        """The devices that have or had a session, by name; `seconds` for each part of them."""
        found, size, after = list[pb.DeviceStatus](), 0, ""
        for _ in range(_MOST_PARTS):
            request = pb.ListDevicesRequest(after=after)
            answer = await self._ask("ListDevices", self._jobs.ListDevices, request, seconds)
            size += answer.ByteSize()
            if size > MOST_LISTED_BYTES:
                break
            found.extend(answer.devices)
            if not (answer.more and answer.devices):
                return found
            after = answer.devices[-1].name
        reason = f"it tells of more devices than {MOST_LISTED_BYTES >> 20} MiB hold"
        raise CallFailed("ListDevices", grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    async def timeline(self) -> pb.Timeline:
        """What the devices did over time."""
        return await self._ask("GetTimeline", self._jobs.GetTimeline, pb.GetTimelineRequest())

    async def export_traces(self) -> pb.ExportedTraces:
        """Have spans sent that wait; what became of all of them."""
        request = pb.ExportTracesRequest()
        return await self._ask("ExportTraces", self._jobs.ExportTraces, request)

    async def fragments(self, *, seconds: float | None = None) -> pb.ListFragmentsResponse:
        """The digests of the fragments in its store, and what that has room for."""
        request = pb.ListFragmentsRequest()
        return await self._ask("ListFragments", self._jobs.ListFragments, request, seconds)

    async def overview(self, job: str = "") -> pb.Overview:
        """Devices and jobs in detail; of the job with this name more than of others."""
        request = pb.GetOverviewRequest(job=job)
        return await self._ask("GetOverview", self._jobs.GetOverview, request)

    # ---- files -----------------------------------------------------------------------------------

    async def list_files(self, folder: str) -> list[files.FileDescription]:
        """The files of a folder, by name."""
        await self._reach()
        with self._call("ListFiles"):
            request = files.ListFilesRequest(folder=folder)
            return [each async for each in self._files.ListFiles(request, timeout=LIST_SECONDS)]

    async def describe_file(self, path: str) -> files.FileDescription:
        """A file with its checksum, for which it is read there."""
        request = files.DescribeFileRequest(path=path)
        return await self._ask("DescribeFile", self._files.DescribeFile, request, READ_SECONDS)

    async def fetch_file(self, path: str, offset: int) -> AsyncGenerator[bytes]:
        """A file's bytes from an offset on."""

        async def pieces() -> AsyncGenerator[bytes]:
            call = self._files.Fetch(files.FetchFileRequest(path=path, offset=offset))
            try:
                async for message in call:
                    yield message.piece
            finally:
                call.cancel()

        with self._call("Fetch"):
            async with contextlib.aclosing(watched(pieces())) as found:
                async for piece in found:
                    yield piece

    async def put_file(
        self,
        header: files.PutHeader,
        read: Callable[[int], AsyncIterator[bytes]],
        on_bytes: Callable[[int], None],
    ) -> bool:
        """Upload a file, from where an earlier upload of it broke off: `read(offset)` gives its
        bytes from there on. Whether anything had to be sent. `on_bytes` gets how many are there
        since it was called last; fewer than none where an upload begins again."""
        await self._reach()
        for patience in _REFUSAL_SECONDS[:-1]:
            counted = 0

            def count(size: int) -> None:
                nonlocal counted
                counted += size
                on_bytes(size)

            try:
                return await self._put_once(header, read, count, patience)
            except CallFailed as error:
                if error.reason != STATUS_LOST:
                    raise
                on_bytes(-counted)
        return await self._put_once(header, read, on_bytes, _REFUSAL_SECONDS[-1])

    async def _put_once(
        self,
        header: files.PutHeader,
        read: Callable[[int], AsyncIterator[bytes]],
        on_bytes: Callable[[int], None],
        patience: float,
    ) -> bool:
        call = self._files.Put()
        try:
            with self._call("Put"):
                try:
                    await self._await_refusal(call, patience)
                    return await self._put(call, header, read, on_bytes)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._fail(call)  # a write only knows that it failed, the call why
        finally:
            call.cancel()

    async def _put(
        self,
        call: "_Put",
        header: files.PutHeader,
        read: Callable[[int], AsyncIterator[bytes]],
        on_bytes: Callable[[int], None],
    ) -> bool:
        watch = stall_watch()
        await watch.wait(call.write(files.PutRequest(header=header)))
        answer = await self._answer(call)
        sent: bool = answer.WhichOneof("message") == "offset"
        if sent:
            on_bytes(answer.offset)
            found = hashlib.sha256()
            async for piece in read(answer.offset):
                for start in range(0, len(piece), SENT_BYTES):
                    part = piece[start : start + SENT_BYTES]
                    await watch.wait(call.write(files.PutRequest(piece=part)))
                    watch.progress(len(part))
                    on_bytes(len(part))
                if not header.sha256:
                    await asyncio.to_thread(found.update, piece)
            # Of a file that was sent in parts, nobody here has seen the whole.
            learnt = "" if header.sha256 or answer.offset else found.hexdigest()
            await watch.wait(call.write(files.PutRequest(end=files.PutEnd(sha256=learnt))))
            answer = await self._answer(call)
        else:
            on_bytes(header.bytes)
        uploaded = answer.WhichOneof("message") == "stored"
        if not uploaded or answer.stored.bytes != header.bytes:
            reason = f"{header.path} is not there as it was sent"
            raise CallFailed("Put", grpc.StatusCode.DATA_LOSS, reason)
        return sent

    async def _answer(self, call: "_Put") -> files.PutAnswer:
        async with asyncio.timeout(READ_SECONDS):
            answer = await call.read()
        if not isinstance(answer, files.PutAnswer):
            await self._fail(call)
        return answer

    async def _await_refusal(self, call: "_Put", seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await call.code()
        if call.done():
            await self._fail(call)

    async def _fail(self, call: "_Put") -> NoReturn:
        raise CallFailed("Put", await call.code(), await call.details() or "")

    async def _ask(
        self,
        method: str,
        call: "grpc.aio.UnaryUnaryMultiCallable[Request, Answer]",
        request: Request,
        seconds: float | None = None,
    ) -> Answer:
        with self._call(method):
            timeout = seconds or self._seconds
            return await call(request, timeout=timeout, wait_for_ready=self._wait)

    async def _reach(self) -> None:
        """Wait for a connection, for a while and once; why there is none, a call says."""
        if not self._reached:
            self._reached = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REACH_SECONDS):
                    await self._channel.channel_ready()

    @contextlib.contextmanager
    def _call(self, method: str) -> Iterator[None]:
        """Turn what ends a call into `CallFailed`, and report its code."""
        code = grpc.StatusCode.CANCELLED
        try:
            yield
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
            raise CallFailed(method, code, error.details() or "") from error
        except (Stalled, TimeoutError) as error:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise CallFailed(method, code, str(error)) from error
        except CallFailed as error:
            code = error.code
            raise
        finally:
            self._on_call(method, code)
