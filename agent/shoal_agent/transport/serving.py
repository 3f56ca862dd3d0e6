"""What this agent offers to its peers: it takes activations, and gives cached fragments."""

from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.telemetry.counters import Counters
from shoal_agent.transport.intake import MAXIMUM_DECODED_BYTES, Intake, Receiver
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.channels import peer_name
from shoal_protocol.digests import is_digest
from shoal_protocol.fragment_store import FragmentMissing
from shoal_protocol.frames import MalformedFrame, frames_in, join_frames, split_frame
from shoal_protocol.manifest import FILES
from shoal_protocol.services import FileContext, FrameContext
from shoal_protocol.transfers import Turns, in_thread, send_fragment_file
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

_FETCHES_AT_ONCE: Final = 4
_FETCHES_OF_ONE: Final = 2
"""Of those, for one peer."""


class Peers:
    """The implementation of `Peer` (protos/shoal_protocol/v1/session.proto)."""

    def __init__(
        self,
        device: str,
        cache: FragmentCache,
        receiver: Callable[[], Receiver | None],
        uplink: Uplink,
        counters: Counters,
        *,
        limit_bytes: int = MAXIMUM_DECODED_BYTES,
    ) -> None:
        """`limit_bytes` of one activation, decoded."""
        self._limit_bytes = limit_bytes
        self._device = device
        self._cache = cache
        self._receiver = receiver
        self._uplink = uplink
        self._counters = counters
        self._fetches = Turns(each=_FETCHES_OF_ONE, total=_FETCHES_AT_ONCE)

    async def push(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        """Take activations until the peer hangs up. A broken frame ends the stream."""
        intake = Intake(self._device, self._receiver, self._counters, self._limit_bytes)
        try:
            async for message in requests:
                # A peer that does not read its answers is not read from either: its own harm.
                answers = (intake.feed(*split_frame(frame)) for frame in frames_in(message))
                if told := [answer for answer in answers if answer is not None]:
                    await context.write(join_frames(told))
        except MalformedFrame as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            intake.close()

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None:
        """Give a file of a cached fragment, from an offset."""
        if not is_digest(request.digest) or request.file not in FILES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such kind of file")
        async with self._fetches.of(peer_name(context)):
            try:
                file, size = await in_thread(self._cache.open, request.digest, request.file)
            except FragmentMissing as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            except OSError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            with file:
                await send_fragment_file(file, size, request, context, self._depart)

    async def _depart(self, count: int) -> None:
        await self._uplink.depart(count)
        self._counters.sent_bytes += count
