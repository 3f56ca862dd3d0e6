"""The receiving process of a hop: what it serves, how it is started, and the keys of both sides.

It serves the protocol alone, an agent's side of it, and a bare gRPC stream that looks at nothing.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import grpc

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.process_memory import MAPPED_FROM_BYTES, trim, tune_allocator
from shoal_agent.telemetry.counters import Counters
from shoal_agent.transport.activations import ActivationStore, StoreBuffer
from shoal_agent.transport.buffers import Buffers
from shoal_agent.transport.serving import Peers
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.assembly import ActivationAssembler, ReceivedActivation
from shoal_protocol.bulk.handlers import ItemHandler
from shoal_protocol.bulk.local import listen
from shoal_protocol.channels import Credentials, server_options
from shoal_protocol.frames import acknowledgement
from shoal_protocol.pki.authority import Authority, Use
from shoal_protocol.services import FileContext, FrameContext, add_peer_service
from shoal_protocol.tensors import ActivationKey
from shoal_protocol.units import Bytes
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

BARE: Final = "bench.Bare"
LAST: Final = 1
"""First byte of the bare message that is to be answered."""
SIZE_BYTES: Final = 8
"""What a message to the bare socket begins with: its size, this included."""
UNLIMITED: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
NAME: Final = "receiver"
KEY: Final = ActivationKey(job="bench", epoch=1, item=1, producer=0, consumer=1)
TICKET_KEY: Final = bytes(range(32))
_BUDGET: Final = Bytes(256 << 20)
_AT_ONCE_BYTES: Final = 1 << 20
_PIPE: Final = subprocess.PIPE


@contextlib.contextmanager
def receiver(folder: str, *, of_agent: bool = True) -> Iterator[list[str]]:
    """Start it, with an agent's allocator or as it comes; the ports of its servers over TLS: the
    protocol alone, an agent, the bare one."""
    _issue(Path(folder))
    with started(Path(__file__), folder, of_agent=of_agent) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()


@contextlib.contextmanager
def started(script: Path, *arguments: str, of_agent: bool) -> Iterator[subprocess.Popen[str]]:
    """A process of a hop, whose script begins with `take_arguments`."""
    command = [sys.executable, str(script), "agent" if of_agent else "bare", *arguments]
    with subprocess.Popen(command, stdin=_PIPE, stdout=_PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def take_arguments() -> list[str]:
    """What `started` has given this process, which then has an agent's allocator where it is to."""
    whose, *arguments = sys.argv[1:]
    if whose == "agent":
        tune_allocator(_BUDGET)
    return arguments


def _issue(folder: Path) -> None:
    """An authority, and a certificate that both sides use."""
    now = datetime.now(UTC)
    authority = Authority.make("bench", now)
    issued = authority.issue(NAME, now, hosts=[NAME], use=Use.BOTH)
    files = credentials_in(folder)
    for path, content in (
        (files.ca, authority.certificate),
        (files.certificate, issued.certificate),
        (files.key, issued.key),
    ):
        path.write_bytes(content)


def credentials_in(folder: Path) -> Credentials:
    """Of both sides."""
    ca, certificate, key = (folder / name for name in ("ca.pem", "our.pem", "our.key"))
    return Credentials(ca=ca, certificate=certificate, key=key)


def pem(credentials: Credentials) -> tuple[bytes, bytes, bytes]:
    """Authority, key and certificate, as gRPC's clients take them."""
    files = (credentials.ca, credentials.key, credentials.certificate)
    ca, key, certificate = (file.read_bytes() for file in files)
    return ca, key, certificate


class _Peer:
    async def push(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        assembler = ActivationAssembler()
        async for message in requests:
            received = assembler.feed(message)
            if received is not None:
                await context.write(bytes(acknowledgement(received.transfer)))

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None:
        raise NotImplementedError


class _Space:
    """A budget that always has room, as `Fragments` has it."""

    def __init__(self) -> None:
        self._ledger = Ledger(budget=_BUDGET)
        self.buffers = Buffers(self._ledger, MAPPED_FROM_BYTES, trim)
        self.request_space = self.buffers.request_space
        self.return_space = self._ledger.return_space
        self.begin_move = self._ledger.begin_move
        self.request_move = self.buffers.request_move
        self.end_move = self.buffers.end_move

    def arrive(self, size: int) -> None:
        self._ledger.arrive(size)


class _Accepting:
    """Stands for an agent's `Tasks`: takes everything, and lets it go when the next has come."""

    ticket_key = TICKET_KEY

    def __init__(self, folder: Path) -> None:
        space = _Space()
        self._store = ActivationStore(folder, 0, space, space.buffers)

    @property
    def itineraries(self) -> ItemHandler:
        raise AssertionError("no items come here")

    def stale(self, job: str, epoch: int) -> bool:
        return False

    def has_room(self, size: int) -> bool:
        return True

    def open_buffer(self, memory_bytes: int, scratch_bytes: int, text_bytes: int) -> StoreBuffer:
        return self._store.open_buffer(memory_bytes, scratch_bytes, text_bytes)

    def take(self, received: ReceivedActivation, buffer: StoreBuffer) -> bool:
        self._store.receive(KEY, received.tensors, buffer)
        return True


def _agent(folder: str) -> Peers:
    receiver = _Accepting(Path(folder))
    cache = FragmentCache(Path(folder), limit_bytes=0)
    return Peers("receiver", cache, lambda: receiver, Uplink(), Counters())


async def _bare(requests: AsyncIterator[bytes], context: FrameContext) -> None:
    async for message in requests:
        if message[0] == LAST:
            await context.write(b".")


class _Counting(asyncio.BufferedProtocol):
    """A socket that looks at nothing: each message is its size and so many bytes, answered by one.
    They come into memory that is there, as much at a time as the socket gives."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_AT_ONCE_BYTES))
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        if not self._missing:
            self._missing = int.from_bytes(self._memory[:SIZE_BYTES])
        self._missing -= nbytes
        if not self._missing:
            self._transport.write(b".")


async def _receive(folder: str) -> None:
    ours = grpc.aio.server(options=server_options())
    add_peer_service(ours, _Peer())
    agent = grpc.aio.server(options=server_options())
    peers = _agent(folder)
    add_peer_service(agent, peers)
    bare = grpc.aio.server(options=UNLIMITED)
    # gRPC's types know handlers of the threaded server only.
    behaviour: Any = _bare
    handler: Any = grpc.stream_stream_rpc_method_handler(behaviour)
    bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BARE, {"Push": handler}),))
    bare.add_insecure_port(f"unix:{folder}/bare.sock")
    ca, key, certificate = pem(credentials_in(Path(folder)))
    secured = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    servers = (ours, agent, bare)
    ports = [server.add_secure_port("127.0.0.1:0", secured) for server in servers]
    for server in servers:
        await server.start()
    await asyncio.get_running_loop().create_unix_server(_Counting, f"{folder}/socket.sock")
    assert listen(f"unix:{folder}/agent.sock", peers.receive, connections=10) is not None
    print(*ports, flush=True)
    await ours.wait_for_termination()


if __name__ == "__main__":
    (its_folder,) = take_arguments()
    asyncio.run(_receive(its_folder))
