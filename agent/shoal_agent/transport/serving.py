"""What this agent offers to its peers: it receives activations, and serves cached fragments.

Over TLS only devices and coordinators may call; clients and workers are refused by the common name
of their certificates, and so is whoever calls over a connection that has outlived its certificate.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, Final

import grpc

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.telemetry.counters import Counters
from shoal_agent.transport.intake import MAXIMUM_DECODED_BYTES, Inbox, Items, open_intake
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.bulk.link import BulkLink
from shoal_protocol.bulk.transport import GrpcTransport, Transport
from shoal_protocol.channels import has_expired, is_secured, peer_name
from shoal_protocol.digests import is_digest
from shoal_protocol.files import file_frames
from shoal_protocol.fragment_store import FragmentMissing
from shoal_protocol.frames import MalformedFrame
from shoal_protocol.identities import RESERVED
from shoal_protocol.limits import CallLimiter, Stalled, StallWatch, TooManyCalls, end_stalled
from shoal_protocol.manifest import is_file_name
from shoal_protocol.page_cache import PASSING_BYTES, cache_in_small_pages, uncache
from shoal_protocol.services import FileContext, FrameContext
from shoal_protocol.threads import in_thread, open_in_thread
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

_FETCHES: Final = 4
_FETCHES_EACH: Final = 2
_FETCHES_WAITING: Final = 14


class Peers:
    """The implementation of `Peer` (protos/shoal_protocol/v1/session.proto)."""

    def __init__(
        self,
        device: str,
        cache: FragmentCache,
        inbox: Callable[[], Inbox | None],
        uplink: Uplink,
        counters: Counters,
        *,
        limit_bytes: int = MAXIMUM_DECODED_BYTES,
    ) -> None:
        """`limit_bytes` of one activation, decoded."""
        self._limit_bytes = limit_bytes
        self._device = device
        self._cache = cache
        self._inbox = inbox
        self._uplink = uplink
        self._counters = counters
        self._fetches = CallLimiter(total=_FETCHES, each=_FETCHES_EACH, waiting=_FETCHES_WAITING)

    async def push(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        """Receive activations until the peer hangs up. A broken frame ends the stream."""
        await _require_device(context)
        try:
            await self.receive("", GrpcTransport(requests, context.write))
        except MalformedFrame as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def receive(self, _: str, transport: Transport) -> str:
        """Receive activations from any peer until it hangs up; why it did. Raises
        `MalformedFrame`."""
        intake = open_intake(
            self._device,
            self._inbox,
            self._counters,
            limit_bytes=self._limit_bytes,
            from_peer=True,
        )
        try:
            items, traffic = Items(self._inbox), self._counters.traffic
            return await BulkLink(transport, intake, traffic=traffic, items=items).run()
        finally:
            intake.close()

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None:
        """Send a file of a cached fragment, from an offset on. A peer that takes next to nothing is
        given up."""
        await _require_device(context)
        if not is_digest(request.digest) or not is_file_name(request.file):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such kind of file")
        try:
            async with self._fetches.turn(peer_name(context)):
                await self._send_file(request, context)
        except TooManyCalls as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except FragmentMissing as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except Stalled as error:
            await end_stalled(context, error)
        except (OSError, EOFError) as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, f"{request.file}: {error}")

    async def _send_file(self, request: FetchFragmentRequest, context: FileContext) -> None:
        opened = partial(self._cache.open, request.digest, request.file)
        async with open_in_thread(opened) as (file, size):
            if request.offset > size:
                reason = f"{request.file} has {size} bytes"
                await context.abort(grpc.StatusCode.OUT_OF_RANGE, reason)
            watch, frames = StallWatch(), _uncached(file, file_frames(file, request, size))
            while (frame := await in_thread(next, frames, None)) is not None:
                await self._uplink.depart(len(frame))
                await watch.wait(context.write(frame))
                watch.progress(len(frame))
                self._counters.sent_bytes += len(frame)


def _uncached(file: BinaryIO, frames: Iterator[bytes]) -> Iterator[bytes]:
    """Frames that are read of a file, which take no memory of this device then."""
    cache_in_small_pages(file)
    for frame in frames:
        end = file.tell()
        start = max(0, end - PASSING_BYTES)  # large pages go when all of them has been sent
        uncache(file.fileno(), start, end - start)
        yield frame


async def _require_device(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Abort the call of anyone who is neither a device nor a coordinator."""
    if not is_secured(context):
        return
    if has_expired(context):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate has expired")
    name = peer_name(context)
    if name is None or name in RESERVED:
        who = "a certificate without exactly one common name" if name is None else repr(name)
        reason = f"{who} is no device here, and may not exchange data with agents"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
