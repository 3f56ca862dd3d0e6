"""What the agent does once before its floor is taken, so that the floor holds what every job needs.

What libraries allocate once, at first use, is no use of the fragment that happens to come first.
So one of everything is done that a job will ask for: a model run, an activation encoded under each
codec, sent and received over gRPC, a file fetched and hashed. What that has allocated is there when
the floor is taken. The pages of code that it read are dropped then; the floor has a reserve for
those that return (`process_memory`).

Measured (x86-64, ONNX Runtime 1.31, gRPC 1.85), resident: 79.7 MiB as it starts, 67 rehearsed and
connected, 36 right after library pages were dropped, 44 when an idle agent has those again that it
needs, and 50 to 57 with a model at work, without what that takes itself.

A rehearsal that fails costs accuracy, nothing else: it is logged, and the agent continues.
"""

import asyncio
import hashlib
import io
import secrets
from collections.abc import AsyncIterator
from typing import Final

import grpc
import numpy as np

from shoal_agent.telemetry.logs import log
from shoal_agent.transport.links import PeerLink
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.assembly import ActivationAssembler
from shoal_protocol.bulk.link import OutboundActivation, Undelivered
from shoal_protocol.channels import client_options, server_options
from shoal_protocol.files import FileReceiver, file_frames
from shoal_protocol.frames import acknowledgement
from shoal_protocol.services import FileContext, FrameContext, add_peer_service
from shoal_protocol.tensors import ActivationKey, Array, encode_activation
from shoal_protocol.v1 import tensors_pb2 as pb

_KEY: Final = ActivationKey(job="", epoch=0, item=0, producer=-1, consumer=0)
_CODECS: Final = (pb.NONE, pb.LZ4, pb.ZSTD, pb.ZLIB, pb.FP16)
_TENSOR_BYTES: Final = 256 << 10
_FILE_BYTES: Final = 256 << 10
_SECONDS: Final = 5.0


class _Audience:
    """The other side: takes what is pushed, and has one file."""

    async def push(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        assembler = ActivationAssembler()
        async for message in requests:
            if (received := assembler.feed(message)) is not None:
                await context.write(bytes(acknowledgement(received.transfer)))

    async def fetch_fragment(self, request: pb.FetchFragmentRequest, context: FileContext) -> None:
        for frame in file_frames(io.BytesIO(bytes(_FILE_BYTES)), request, _FILE_BYTES):
            await context.write(frame)


async def rehearse_transfers() -> None:
    """Encode, send, receive, fetch: all of it inside this process."""
    _rehearse_encoding()
    # An abstract socket needs no folder, and its name cannot be known to anybody else in time; what
    # answers there has nothing to give.
    address = f"unix-abstract:shoal-rehearsal-{secrets.token_hex(16)}"
    server = grpc.aio.server(options=server_options())
    add_peer_service(server, _Audience())
    try:
        server.add_insecure_port(address)
        await server.start()
        async with asyncio.timeout(_SECONDS):
            await _perform(grpc.aio.insecure_channel(address, options=client_options()))
    except (OSError, RuntimeError, Undelivered, grpc.RpcError) as error:
        log.warning("the transfers could not be rehearsed, the floor is a little low: %s", error)
    finally:
        # Without this grace, which nothing uses up, the client's half logs that it was cut off.
        await server.stop(_SECONDS)


def _tensors() -> dict[str, Array]:
    return {"x": np.zeros(_TENSOR_BYTES // 4, np.float32)}


def _rehearse_encoding() -> None:
    for codec in _CODECS:
        assembler = ActivationAssembler()
        for frame in encode_activation(_KEY, "", _tensors(), transfer=1, codec=codec):
            assembler.feed(frame)


async def _perform(channel: grpc.aio.Channel) -> None:
    link = PeerLink(channel, Uplink())
    try:
        await link.send(OutboundActivation(key=_KEY, device="", tensors=_tensors()))
        request = pb.FetchFragmentRequest(digest="", file="")
        receiver = FileReceiver(request, _FILE_BYTES)
        digest = hashlib.sha256()
        async for message in link.fetch_fragment(request, _SECONDS):
            digest.update(receiver.feed(message))
    finally:
        await link.close()
