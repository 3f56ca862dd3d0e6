"""One hop between two processes: Peer.Push against a bare gRPC stream of raw bytes.

The receiver is a process of its own that serves both. A hop is over when the acknowledgement is
back: for `Peer.Push` the receiver then has the tensor as a checked numpy array; the bare
stream has handed the bytes to its handler, which looks at nothing and answers one byte. The bare
stream sends large tensors as one message or in messages of 1 MiB, whichever is faster for it.

Ours is measured three times: the protocol alone; with what an agent has around it on both sides
(its `PeerLink` and `Peers`: turns, deadlines, answers from a queue, counters), up to the tasks; and
the same over the local link, which agents of one host use. The first two go over mutual TLS, as
between two hosts, and so does the bare stream that they are compared with. The local link is
compared with a bare stream over a Unix socket, which is the faster one; and so is a bare socket of
asyncio, whose receiver looks at nothing either: nothing in an event loop of Python is faster.

Each side of a comparison has a sender and a receiver of its own: ours have the allocator's settings
of an agent, which give large blocks back at once, the peer's have the allocator as it comes.
"""

import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import grpc
import numpy as np
from hop_receiver import (
    BARE,
    KEY,
    LAST,
    NAME,
    SIZE_BYTES,
    TICKET_KEY,
    UNLIMITED,
    credentials_in,
    pem,
    receiver,
    started,
    take_arguments,
)
from measurement import RATIO, Measurement, alternate, compared

from shoal_agent.transport.links import PeerLink
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.bulk.link import OutboundActivation
from shoal_protocol.channels import open_channel
from shoal_protocol.frames import split_frame
from shoal_protocol.services import FrameStream, PeerClient
from shoal_protocol.tensors import Array, encode_activation
from shoal_protocol.tickets import make_ticket
from shoal_protocol.units import format_bytes
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

SIZES: Final = (4 << 10, 384 << 10, 8 << 20)
_BARE_KINDS: Final = ("secured", "plain")
_PIECE_BYTES: Final = 1 << 20
_RECEIVERS: Final = 4
_TICKET: Final = make_ticket(TICKET_KEY, KEY)

Hop = Callable[[str, int], float]
"""Sends a tensor of a size in one of the ways: the seconds that it took."""


def hops(
    *, quick: bool, sizes: Sequence[int] = SIZES, receivers: int = _RECEIVERS
) -> Iterator[Measurement]:
    """Measure tensors of each size (in bytes) between this process and new ones.

    Several receivers, as where the system happens to put a process's memory and threads moves a
    ratio by a tenth.
    """
    samples: dict[int, dict[str, list[float]]] = {size: {} for size in sizes}
    for _ in range(receivers):
        with (
            sender(of_agent=True) as ours,
            sender(of_agent=False) as peer,
        ):
            for size, collected in samples.items():
                turns = (20 if size > _PIECE_BYTES else 200) * (1 if quick else 5)
                for name, times in _hop(ours, peer, size, turns).items():
                    collected.setdefault(name, []).extend(times)
    for size, collected in samples.items():
        agent, push = collected.pop("agent"), collected.pop("push")
        local, socket = collected.pop("local"), collected.pop("socket")
        secured, plain = (
            min((times for way, times in collected.items() if way.startswith(kind)), key=median)
            for kind in _BARE_KINDS
        )
        name = f"hop of {format_bytes(size)}"
        yield compared(f"{name}, protocol", push, secured, unit="s", goal=RATIO <= 1.25)
        yield compared(f"{name}, agent to agent", agent, secured, unit="s", goal=RATIO <= 1.25)
        yield compared(f"{name}, local link", local, plain, unit="s", goal=RATIO <= 0.5)
        yield compared(f"{name}, bare socket", socket, plain, unit="s")


async def bare_messages_per_second(seconds: float, *, streams: int = 8) -> float:
    """Small messages that bare gRPC streams carry between two processes, each answered by one.

    Several streams at once, so that both processes always have something to do.
    """
    with (
        tempfile.TemporaryDirectory(prefix="shoal-hop-") as folder,
        receiver(folder, of_agent=False),
    ):
        return await _exchange(f"unix:{folder}/bare.sock", seconds, streams)


async def _exchange(target: str, seconds: float, streams: int) -> float:
    async with grpc.aio.insecure_channel(target, options=UNLIMITED) as channel:
        until = time.perf_counter() + seconds

        async def converse() -> int:
            call: FrameStream = channel.stream_stream(f"/{BARE}/Push")()
            exchanged = 0
            while time.perf_counter() < until:
                await call.write(bytes((LAST,)) + bytes(300))
                assert await call.read() == b"."
                exchanged += 2
            await call.done_writing()
            return exchanged

        began = time.perf_counter()
        counts = await asyncio.gather(*(converse() for _ in range(streams)))
        return sum(counts) / (time.perf_counter() - began)


def _hop(ours: Hop, peer: Hop, size: int, turns: int) -> dict[str, list[float]]:
    """Seconds of each way to send a tensor of a size."""
    subjects = {way: partial(ours, way, size) for way in ("agent", "local", "push", "socket")}
    for way in ("whole", "pieces") if size > _PIECE_BYTES else ("whole",):
        subjects |= {f"{kind} {way}": partial(peer, f"{kind} {way}", size) for kind in _BARE_KINDS}
    alternate(subjects, turns=10)
    return alternate(subjects, turns=turns, limit_seconds=10)


async def timed(action: Awaitable[None]) -> float:
    """Seconds, measured within the event loop: entering it costs a fifth of a small hop."""
    started = time.perf_counter()
    await action
    return time.perf_counter() - started


class _Answered(asyncio.Protocol):
    """The sender's end of the bare socket."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.answered.set()


class Streams:
    """The open streams to the receiver."""

    def __init__(
        self,
        channels: list[grpc.aio.Channel],
        link: PeerLink,
        local: PeerLink,
        push: FrameStream,
        bare: Sequence[FrameStream],
        socket: tuple[asyncio.Transport, _Answered],
    ) -> None:
        """`bare` are the streams over TLS and over a Unix socket, `socket` that of asyncio."""
        self._channels = channels
        self._link = link
        self._local = local
        self._push = push
        self._bare, self._plain = bare
        self._socket, self._answers = socket
        self._transfers = itertools.count(1)

    @classmethod
    async def open(cls, folder: str, ports: Sequence[str]) -> "Streams":
        credentials = credentials_in(Path(folder))
        ours, agent = (
            open_channel(f"127.0.0.1:{port}", credentials, server_name=NAME) for port in ports[:2]
        )
        secured = grpc.aio.secure_channel(
            f"127.0.0.1:{ports[2]}",
            grpc.ssl_channel_credentials(*pem(credentials)),
            options=[*UNLIMITED, ("grpc.ssl_target_name_override", NAME)],
        )
        plain = grpc.aio.insecure_channel(f"unix:{folder}/bare.sock", options=UNLIMITED)
        address = f"unix:{folder}/agent.sock"
        link = PeerLink(agent, Uplink())
        local = PeerLink(open_channel(address), Uplink(), address=address)
        bare: list[FrameStream] = [
            each.stream_stream(f"/{BARE}/Push")() for each in (secured, plain)
        ]
        loop = asyncio.get_running_loop()
        socket = await loop.create_unix_connection(_Answered, f"{folder}/socket.sock")
        return cls([ours, secured, plain], link, local, PeerClient(ours).push(), bare, socket)

    async def agent(self, tensor: Array) -> None:
        """Ours as agents do it."""
        await self._link.send(_outbound(tensor))

    async def local(self, tensor: Array) -> None:
        """Ours as agents of one host do it."""
        await self._local.send(_outbound(tensor))

    async def push(self, tensor: Array) -> None:
        """Ours: encode, stream, wait for the acknowledgement."""
        transfer = next(self._transfers)
        for frame in encode_activation(KEY, "receiver", {"x": tensor}, transfer=transfer):
            await self._push.write(frame)
        message = await self._push.read()
        assert isinstance(message, bytes)
        header, _ = split_frame(message)
        assert header.transfer == transfer
        assert header.acknowledgement.outcome == Acknowledgement.ACCEPTED

    async def bare(self, messages: list[bytes]) -> None:
        """The peer: stream over TLS, wait for one byte."""
        await _exchanged(self._bare, messages)

    async def plain(self, messages: list[bytes]) -> None:
        """The same over a Unix socket."""
        await _exchanged(self._plain, messages)

    async def socket(self, message: bytes) -> None:
        """The least there is: write to a socket, wait for one byte."""
        self._answers.answered.clear()
        self._socket.write(message)
        await self._answers.answered.wait()

    async def close(self) -> None:
        self._socket.close()
        await self._link.close()
        await self._local.close()
        for call in (self._push, self._bare, self._plain):
            await call.done_writing()
        for channel in self._channels:
            await channel.close()


async def _exchanged(call: FrameStream, messages: list[bytes]) -> None:
    for message in messages:
        await call.write(message)
    assert await call.read() == b"."


def _outbound(tensor: Array) -> OutboundActivation:
    return OutboundActivation(key=KEY, device="receiver", tensors={"x": tensor}, ticket=_TICKET)


@contextlib.contextmanager
def sender(*, of_agent: bool) -> Iterator[Hop]:
    """A sending process and its receiver, with an agent's allocator or as it comes."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-hop-") as folder,
        receiver(folder, of_agent=of_agent) as ports,
        started(Path(__file__), folder, *ports, of_agent=of_agent) as process,
    ):
        answers, orders = process.stdout, process.stdin
        assert answers is not None
        assert orders is not None

        def hop(way: str, size: int) -> float:
            orders.write(f"{size} {way}\n")
            orders.flush()
            return float(answers.readline())

        yield hop


def _send(folder: str, ports: Sequence[str]) -> None:
    """Do what is asked on standard input."""
    with asyncio.Runner() as runner:
        streams = runner.run(Streams.open(folder, ports))
        ways: dict[str, Callable[[], Awaitable[None]]] = {}
        made = 0
        for line in sys.stdin:
            number, way = line.rstrip().split(maxsplit=1)
            if (size := int(number)) != made:
                ways, made = _ways(streams, size), size
            print(runner.run(timed(ways[way]())), flush=True)
        runner.run(streams.close())


def _ways(streams: Streams, size: int) -> dict[str, Callable[[], Awaitable[None]]]:
    tensor = np.arange(size // 4, dtype=np.float32).reshape(1, -1, 64)
    whole = bytes((LAST,)) + bytes(size - 1)
    pieces = [bytes(_PIECE_BYTES)] * (size // _PIECE_BYTES - 1) + [whole[:_PIECE_BYTES]]
    return {
        "agent": partial(streams.agent, tensor),
        "local": partial(streams.local, tensor),
        "push": partial(streams.push, tensor),
        "socket": partial(streams.socket, size.to_bytes(SIZE_BYTES) + bytes(size - SIZE_BYTES)),
        "secured whole": partial(streams.bare, [whole]),
        "plain whole": partial(streams.plain, [whole]),
        "secured pieces": partial(streams.bare, pieces),
        "plain pieces": partial(streams.plain, pieces),
    }


if __name__ == "__main__":
    its_folder, *its_ports = take_arguments()
    _send(its_folder, its_ports)
