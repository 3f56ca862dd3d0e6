"""What this agent offers to its peers: it takes activations, and gives cached fragments."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc

from shoal_agent.shell.cache import FragmentCache
from shoal_agent.shell.counters import Counters
from shoal_agent.shell.intake import Intake
from shoal_agent.shell.manifest import FILES, is_digest
from shoal_agent.shell.shaping import STREAM_ERRORS, Uplink
from shoal_agent.shell.tasks import Tasks
from shoal_protocol.files import file_frames
from shoal_protocol.frames import MAXIMUM_PAYLOAD_BYTES, MalformedFrame, split_frame
from shoal_protocol.services import FileContext, FrameContext
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

_FETCHES_AT_ONCE: Final = 4
_UNSENT_ANSWERS: Final = 1024


class Peers:
    """The implementation of `Peer` (protos/shoal_protocol/v1/session.proto)."""

    def __init__(
        self,
        device: str,
        cache: FragmentCache,
        tasks: Callable[[], Tasks | None],
        uplink: Uplink,
        counters: Counters,
    ) -> None:
        self._device = device
        self._cache = cache
        self._tasks = tasks
        self._uplink = uplink
        self._counters = counters
        self._fetches = asyncio.Semaphore(_FETCHES_AT_ONCE)

    async def push(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        """Take activations until the peer hangs up. A broken frame ends the stream."""
        answers: asyncio.Queue[bytes] = asyncio.Queue(_UNSENT_ANSWERS)
        writer = asyncio.create_task(_write(answers, context), name="answers to a peer")
        intake = Intake(self._device, self._tasks, answers.put_nowait, self._counters)
        try:
            async for message in requests:
                intake.feed(*split_frame(message))
        except MalformedFrame as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.QueueFull:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "answers are not read")
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None:
        """Give a file of a cached fragment, from an offset."""
        if not is_digest(request.digest) or request.file not in FILES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such kind of file")
        found = await asyncio.to_thread(self._cache.open_for_peer, request.digest, request.file)
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.digest} is not cached here")
            return
        path, size = found
        if request.offset > size:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"{request.file} has {size} bytes")
        self._cache.pin(request.digest)
        try:
            async with self._fetches:
                with path.open("rb", buffering=0) as file:
                    frames = file_frames(file, request, size, frame_bytes=MAXIMUM_PAYLOAD_BYTES)
                    while (frame := await asyncio.to_thread(next, frames, None)) is not None:
                        await self._uplink.depart(len(frame))
                        await context.write(frame)
                        self._counters.sent_bytes += len(frame)
        except (OSError, EOFError) as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, f"{request.file}: {error}")
        finally:
            self._cache.unpin(request.digest)


async def _write(answers: asyncio.Queue[bytes], context: FrameContext) -> None:
    try:
        while True:
            await context.write(await answers.get())
    except STREAM_ERRORS:
        return  # the reading side of the stream sees the same, and ends the call
