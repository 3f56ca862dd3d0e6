"""`Infer`: items that a client sends over a call, and their results over the same call.

    requests --> reader --> StreamRun --> dispatcher
    answers  <-- writer <-- queue     <--/

An item counts as unanswered from its arrival until its answer is written, and the reader waits
while there are too many of them, by number or by the bytes of their inputs. So the queue is
bounded, and a client that is slow to take answers holds up itself and nobody else.

The job lives as long as the call, so it has no record, and is none of the jobs' machine.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import views
from shoal_coordinator.server import admission, wire
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.stream_runs import Item, StreamRun
from shoal_protocol.assembly import ActivationAssembler, Limits
from shoal_protocol.digests import Digest
from shoal_protocol.frames import MalformedFrame, TransferError, split_frame
from shoal_protocol.partition import MODEL, PartitionDocument
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Activation

MAXIMUM_STREAMS: Final = 64
UNANSWERED_ITEMS: Final = 64
UNANSWERED_BYTES: Final = 256 << 20
"""Above this no further item is read; one alone may be larger."""
ITEM_BYTES: Final = 1 << 30

Write = Callable[[pb.InferAnswer], Awaitable[None]]


class StreamRefused(Exception):
    """A call that cannot begin, or whose messages make no sense."""


class TooManyStreams(Exception):
    """So many calls are open already."""

    def __init__(self) -> None:
        super().__init__(f"{MAXIMUM_STREAMS} clients stream items already; close one of them")


class ItemStreams:
    """The open calls, by the name of their jobs."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
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
        requests: AsyncIterator[pb.InferRequest],
        write: Write,
    ) -> None:
        """Answer items until the client has sent all of them and has all answers, or the job
        cannot continue. Raises `StreamRefused`."""
        if len(self._open) >= MAXIMUM_STREAMS:
            raise TooManyStreams
        start = pb.SubmitJobRequest()
        start.CopyFrom(request)
        start.name, start.mode = f"{request.name[:200]}.{secrets.token_hex(4)}", pb.STREAMING
        stream = _ItemStream(start.name, document, self._driver)
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

    def __init__(self, name: str, document: PartitionDocument, driver: Driver) -> None:
        self.document = document
        self._answers: asyncio.Queue[Item | ev.Failure | None] = asyncio.Queue()
        """None: the end."""
        self.run = StreamRun(name, document, driver.feed, self._answers.put_nowait)
        self._inputs = {spec.name: spec for spec in document.inputs}
        self._unanswered = 0
        self._unanswered_bytes = 0
        self._answered = asyncio.Event()

    def end(self, failure: ev.Failure | None) -> None:
        """Nothing more is computed."""
        self._answers.put_nowait(failure)

    async def exchange(self, requests: AsyncIterator[pb.InferRequest], write: Write) -> None:
        """Take items and give answers, until one side has ended. Raises `StreamRefused`."""
        reading = asyncio.create_task(self._read(requests))
        writing = asyncio.create_task(self._write(write))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not writing.done():
                reading.result()
                self._answers.put_nowait(None)
                await writing
        finally:
            for task in (reading, writing):
                task.cancel()
            _, written = await asyncio.gather(reading, writing, return_exceptions=True)
        if isinstance(written, Exception):
            raise written

    # ---- items -----------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[pb.InferRequest]) -> None:
        """Until the client has sent its last item, and has all answers."""
        assembler = ActivationAssembler(Limits(decoded_bytes=ITEM_BYTES), self._admit)
        number = 0
        async for request in requests:
            await self._room(UNANSWERED_ITEMS - 1, UNANSWERED_BYTES)
            try:
                header, payload = split_frame(request.frame)
            except MalformedFrame as error:
                raise StreamRefused(str(error)) from error
            if header.WhichOneof("kind") == "activation":
                number = header.activation.key.item
            try:
                received = assembler.add(header, payload)
            except TransferError as error:
                failure = ev.Failure(kind=ev.FailureKind.INVALID_INPUT, message=error.reason)
                self._unanswered += 1
                self._answers.put_nowait(Item(number, {}, failure=failure))
                continue
            if received is not None:
                self._unanswered += 1
                self._unanswered_bytes += received.decoded_bytes
                self.run.add(number, received)
        await self._room(0, 0)

    def _admit(self, activation: Activation, _: int) -> None:
        """Raise `TransferError` for what are not the model's inputs."""
        admission.check_tensors(activation, self._inputs, self._inputs, most_bytes=ITEM_BYTES)

    async def _room(self, items: int, size: int) -> None:
        """Wait until no more than these are unanswered."""
        while self._unanswered > items or self._unanswered_bytes > size:
            self._answered.clear()
            await self._answered.wait()

    # ---- answers ---------------------------------------------------------------------------------

    async def _write(self, write: Write) -> None:
        while isinstance(answer := await self._answers.get(), Item):
            if answer.failure is None:
                for frame in _frames(answer):
                    await write(pb.InferAnswer(frame=frame))
            else:
                failure = _failure(answer.failure)
                failure.item = answer.number
                await write(pb.InferAnswer(failure=failure))
            self._unanswered -= 1
            self._unanswered_bytes -= answer.input_bytes
            self._answered.set()
        if answer is not None:
            await write(pb.InferAnswer(failure=_failure(answer)))


def _frames(item: Item) -> Iterable[bytes]:
    key = ActivationKey(job="", epoch=0, item=item.number, producer=MODEL, consumer=MODEL)
    return encode_activation(key, "", item.results, transfer=1)


def _failure(failure: ev.Failure) -> pb.InferFailure:
    return pb.InferFailure(
        kind=failure.kind.value,
        message=failure.message,
        need_bytes=failure.need,
        have_bytes=failure.have,
        device=failure.device,
    )
