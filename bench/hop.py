"""One hop between two processes: Peer.Push against a bare gRPC stream of raw bytes.

The receiver is a process of its own that serves both. A hop is over when the acknowledgement is
back: for `Peer.Push` the tensor then stands in the receiver as a checked numpy array; the bare
stream has handed the bytes to its handler, which looks at nothing and answers one byte. The bare
stream sends large tensors in whichever way is faster for it, as one message or in messages of 1
MiB.
"""

import asyncio
import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, Final

import grpc
import numpy as np
from measurement import RATIO, Measurement, alternate, compared

from shoal_protocol.assembly import ActivationAssembler
from shoal_protocol.channels import add_port, open_channel, server_options
from shoal_protocol.frames import acknowledgement, split_frame
from shoal_protocol.services import (
    FileContext,
    FrameContext,
    FrameStream,
    PeerClient,
    add_peer_service,
)
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.units import format_bytes
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, FetchFragmentRequest

SIZES: Final = (4 << 10, 384 << 10, 8 << 20)
_BARE: Final = "bench.Bare"
_PIECE_BYTES: Final = 1 << 20
_UNLIMITED: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
_LAST: Final = 1
"""First byte of the bare message that is to be answered."""


def hops(*, quick: bool) -> Iterator[Measurement]:
    """Measure each size, in this process and a new one."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-hop-") as folder,
        _receiver(folder),
        asyncio.Runner() as runner,
    ):
        streams = runner.run(_Streams.open(folder))
        for size in SIZES:
            turns = 100 if size > _PIECE_BYTES else 1000
            yield _hop(runner, streams, size, turns if quick else 4 * turns)
        runner.run(streams.close())


def _hop(runner: asyncio.Runner, streams: "_Streams", size: int, turns: int) -> Measurement:
    tensor = np.arange(size // 4, dtype=np.float32).reshape(1, -1, 64)
    whole = bytes((_LAST,)) + bytes(size - 1)
    pieces = [bytes(_PIECE_BYTES)] * (size // _PIECE_BYTES - 1) + [whole[:_PIECE_BYTES]]

    subjects = {
        "push": lambda: runner.run(_timed(streams.push(tensor))),
        "whole": lambda: runner.run(_timed(streams.bare([whole]))),
    }
    if size > _PIECE_BYTES:
        subjects["pieces"] = lambda: runner.run(_timed(streams.bare(pieces)))
    alternate(subjects, turns=10)
    samples = alternate(subjects, turns=turns, limit_seconds=20)
    pushed = samples.pop("push")
    peer = min(samples.values(), key=lambda times: sorted(times)[len(times) // 2])
    name = f"hop of {format_bytes(size)}"
    return compared(name, pushed, peer, unit="s", goal=RATIO <= 1.3)


async def _timed(action: Awaitable[None]) -> float:
    """Seconds, measured within the event loop: entering it costs a fifth of a small hop."""
    started = time.perf_counter()
    await action
    return time.perf_counter() - started


class _Streams:
    """The open streams to the receiver."""

    def __init__(
        self, channels: list[grpc.aio.Channel], push: FrameStream, bare: FrameStream
    ) -> None:
        self._channels = channels
        self._push = push
        self._bare = bare
        self._transfers = itertools.count(1)

    @classmethod
    async def open(cls, folder: str) -> "_Streams":
        ours = open_channel(f"unix:{folder}/shoal.sock")
        bare = grpc.aio.insecure_channel(f"unix:{folder}/bare.sock", options=_UNLIMITED)
        return cls([ours, bare], PeerClient(ours).push(), bare.stream_stream(f"/{_BARE}/Push")())

    async def push(self, tensor: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> None:
        """Ours: encode, stream, wait for the acknowledgement."""
        key = ActivationKey(job="bench", epoch=1, item=1, producer=0, consumer=1)
        transfer = next(self._transfers)
        for frame in encode_activation(key, "receiver", {"x": tensor}, transfer=transfer):
            await self._push.write(frame)
        message = await self._push.read()
        assert isinstance(message, bytes)
        header, _ = split_frame(message)
        assert header.transfer == transfer
        assert header.acknowledgement.outcome == Acknowledgement.ACCEPTED

    async def bare(self, messages: list[bytes]) -> None:
        """The peer: stream, wait for one byte."""
        for message in messages:
            await self._bare.write(message)
        assert await self._bare.read() == b"."

    async def close(self) -> None:
        for call in (self._push, self._bare):
            await call.done_writing()
        for channel in self._channels:
            await channel.close()


# ---- the receiving process -----------------------------------------------------------------------


@contextlib.contextmanager
def _receiver(folder: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.wait(timeout=10)


class _Peer:
    async def push(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        assembler = ActivationAssembler()
        async for message in requests:
            received = assembler.feed(message)
            if received is not None:
                await context.write(acknowledgement(received.transfer))

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None:
        raise NotImplementedError


async def _bare(requests: AsyncIterator[bytes], context: FrameContext) -> None:
    async for message in requests:
        if message[0] == _LAST:
            await context.write(b".")


async def _receive(folder: str) -> None:
    ours = grpc.aio.server(options=server_options())
    add_peer_service(ours, _Peer())
    add_port(ours, f"unix:{folder}/shoal.sock")
    bare = grpc.aio.server(options=_UNLIMITED)
    # gRPC's types know handlers of the threaded server only.
    behaviour: Any = _bare
    handler: Any = grpc.stream_stream_rpc_method_handler(behaviour)
    bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_BARE, {"Push": handler}),))
    bare.add_insecure_port(f"unix:{folder}/bare.sock")
    await ours.start()
    await bare.start()
    print("ready", flush=True)
    await ours.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_receive(sys.argv[1]))
