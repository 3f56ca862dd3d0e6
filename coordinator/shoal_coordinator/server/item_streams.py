"""`Infer`: items that a client sends over a call, and their results over the same call.

    requests --> reader --> StreamRun --> dispatcher
    answers  <-- queue  <-----------------/

An answer is written where it is given, as far as the stream takes it; what it does not take waits
in the queue. An item counts as unanswered from its arrival until its answer is written, and the
reader waits while there are too many of them, by number or by the bytes of their inputs. So the
queue is bounded, and a client that is slow to take answers holds up itself and nobody else.

The job lives as long as the call, so it has no record, and is none of the jobs' machine.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import deepcopy
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import views
from shoal_coordinator.jobs.values import Refusal
from shoal_coordinator.server import admission, wire
from shoal_coordinator.server.call_memory import CallMemory
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.refusals import CallRefused, JobRefused
from shoal_coordinator.server.stream_runs import Item, StreamRun
from shoal_protocol import eager
from shoal_protocol.assembly import Limits
from shoal_protocol.called_items import ItemFrame, ItemReader, frames_of, number_in
from shoal_protocol.digests import Digest
from shoal_protocol.frames import Frame, TransferError
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Activation, FrameHeader, Layout

MAXIMUM_STREAMS: Final = 64
UNANSWERED_ITEMS: Final = 64
UNANSWERED_BYTES: Final = 256 << 20
"""Above this no further item is read; one alone may be larger."""

Requests = AsyncIterator[pb.InferRequest | ItemFrame]
Write = Callable[[pb.InferAnswer | Frame], Awaitable[None]]


class ItemStreams:
    """The open calls, by the name of their jobs."""

    def __init__(self, driver: Driver, memory: CallMemory) -> None:
        self._driver = driver
        self._memory = memory
        driver.on_job_ended.append(self._ended)
        driver.on_job_broken.append(self._broke)
        self._open: dict[str, _ItemStream] = {}

    def fragments_in_use(self) -> frozenset[Digest]:
        """The fragments of the open calls; called from other threads."""
        streams = tuple(self._open.values())
        return frozenset(f.digest for stream in streams for f in stream.document.fragments)

    def _ended(self, name: str) -> None:
        if (stream := self._open.get(name)) is not None:
            view = views.job(self._driver.state, name)
            stream.end(None if view is None else view.failure)

    def _broke(self, name: str, message: str) -> None:
        if (stream := self._open.get(name)) is not None:
            text = f"the coordinator failed while it processed this call: {message}"
            stream.end(ev.Failure(kind=ev.FailureKind.RUNTIME, message=text))

    async def serve(
        self,
        request: pb.SubmitJobRequest,
        document: PartitionDocument,
        requests: Requests,
        write: Write,
    ) -> None:
        """Answer items until the client has sent all of them and has all answers, or the job
        cannot continue. Raises `CallRefused`."""
        if len(self._open) >= MAXIMUM_STREAMS:
            reason = f"{MAXIMUM_STREAMS} clients stream items already; close one of them"
            raise JobRefused(reason, Refusal.FULL)
        start = deepcopy(request)
        start.name, start.mode = f"{request.name[:200]}.{secrets.token_hex(4)}", pb.STREAMING
        stream = _ItemStream(start.name, document, self._driver, self._memory, batch=start.batch)
        spec = wire.job_spec(start, document, items=0, epoch=1, deadline=None, open_ended=True)
        self._open[start.name] = stream
        self._driver.runs[start.name] = stream.run
        try:
            self._driver.submit(spec, frozenset(), {})
            await write(pb.InferAnswer(started=start.name))
            await stream.exchange(requests, write)
        finally:
            del self._open[start.name]
            self._driver.withdraw(start.name, "the client has gone")
            del self._driver.runs[start.name]

    def close(self) -> None:
        """End all calls: the coordinator stops."""
        for stream in self._open.values():
            stream.end(None)


class _ItemStream:
    """One call."""

    def __init__(
        self,
        name: str,
        document: PartitionDocument,
        driver: Driver,
        memory: CallMemory,
        *,
        batch: int,
    ) -> None:
        self.document = document
        self._memory = memory
        self._taken_bytes = self._coming_bytes = 0
        """Of the memory: by all that is unanswered, and the part of an item that is on its way."""
        self._answers: deque[Item | ev.Failure | None] = deque()
        """None: the end."""
        self._write: Write | None = None
        self._writing: asyncio.Task[None] | None = None
        self._written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The end is written, or nothing can be."""
        self.run = StreamRun(name, document, driver.feed, self._give, batch=batch)
        self._inputs = {spec.name: spec for spec in document.inputs}
        self._unanswered = 0
        self._unanswered_bytes = 0
        self._answered = asyncio.Event()

    def end(self, failure: ev.Failure | None) -> None:
        """Nothing more is computed."""
        self._give(failure)

    async def exchange(self, requests: Requests, write: Write) -> None:
        """Take items and give answers, until one side has ended. Raises `CallRefused`."""
        self._write = write
        self._write_now()
        reading = asyncio.create_task(self._read(requests))
        try:
            await asyncio.wait({reading, self._written}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not self._written.done():
                reading.result()
                self.end(None)
                await self._written
        finally:
            self._write = None
            tasks = [task for task in (reading, self._writing) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._give_back(self._taken_bytes)
        if self._written.done():
            self._written.result()

    # ---- items -----------------------------------------------------------------------------------

    async def _read(self, requests: Requests) -> None:
        """Until the client has sent its last item, and has all answers."""
        reader = ItemReader(self._check, Limits(decoded_bytes=self._memory.item_bytes))
        number = 0
        async for request in requests:
            await self._room(UNANSWERED_ITEMS - 1, UNANSWERED_BYTES)
            if not isinstance(request, ItemFrame):
                raise CallRefused("a message that holds no frame of an item")
            header, payload = request
            if (begun := number_in(header)) is not None:
                number = begun
                await self._take(_size_of(header, payload))
            try:
                called = reader.add(header, payload)
            except TransferError as error:
                await self._take(0)
                failure = ev.Failure(kind=ev.FailureKind.INVALID_INPUT, message=error.reason)
                self._unanswered += 1
                self._give(Item(number, {}, failure=failure))
                continue
            if called is not None:
                self._unanswered += 1
                self._unanswered_bytes += called.size
                self._give_back(self._coming_bytes - called.size)
                self._coming_bytes = 0  # it is given back with the answer
                self.run.add(called)
        await self._room(0, 0)

    def _check(self, tensors: Activation | Layout) -> None:
        """Raise `TransferError` for what are not the model's inputs."""
        admission.check_tensors(
            tensors, self._inputs, self._inputs, most_bytes=self._memory.item_bytes
        )

    async def _take(self, size: int) -> None:
        """An item begins; what one took that was never whole is given back. One that is too large
        is refused, and takes nothing. Raises `CallRefused`."""
        self._give_back(self._coming_bytes)
        self._coming_bytes = 0
        if 0 < size <= self._memory.item_bytes:
            while self._unanswered and self._memory.lacks(size):  # its own may take minutes
                self._answered.clear()
                await self._answered.wait()
            await self._memory.take(size)
            self._taken_bytes += size
            self._coming_bytes = size

    def _give_back(self, size: int) -> None:
        self._memory.give_back(size)
        self._taken_bytes -= size

    async def _room(self, items: int, size: int) -> None:
        """Wait until no more than these are unanswered."""
        while self._unanswered > items or self._unanswered_bytes > size:
            self._answered.clear()
            await self._answered.wait()

    # ---- answers ---------------------------------------------------------------------------------

    def _give(self, answer: Item | ev.Failure | None) -> None:
        self._answers.append(answer)
        self._write_now()

    def _write_now(self) -> None:
        """Write what waits, unless that is being written."""
        if self._write is not None and (self._writing is None or self._writing.done()):
            self._writing = eager.begin(self._write_all(self._write))

    async def _write_all(self, write: Write) -> None:
        try:
            while self._answers and not self._written.done():
                answer = self._answers.popleft()
                if isinstance(answer, Item):
                    await self._write_answer(write, answer)
                    continue
                if answer is not None:
                    await write(pb.InferAnswer(failure=_failure(answer)))
                self._written.set_result(None)
        except Exception as error:
            self._written.set_exception(error)
            self._written.exception()  # seen, also where something else ends the call

    async def _write_answer(self, write: Write, answer: Item) -> None:
        if answer.failure is None:
            for frame in frames_of(answer.number, answer.results, whole=answer.whole):
                await write(frame)
        else:
            failure = _failure(answer.failure)
            failure.item = answer.number
            await write(pb.InferAnswer(failure=failure))
        self._unanswered -= 1
        self._unanswered_bytes -= answer.input_bytes
        self._give_back(answer.input_bytes)
        self._answered.set()


def _size_of(header: FrameHeader, payload: memoryview) -> int:
    """What the item takes that begins with a frame."""
    if header.WhichOneof("kind") == "items":
        return len(payload)
    return sum(tensor.decoded_bytes for tensor in header.activation.tensors)


def _failure(failure: ev.Failure) -> pb.InferFailure:
    return pb.InferFailure(
        kind=failure.kind.value,
        message=failure.message,
        need_bytes=failure.need,
        have_bytes=failure.have,
        device=failure.device,
    )
