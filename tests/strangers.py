"""Connections of every kind that mean no call: what anybody in the network can open at a port."""

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal_protocol.channels import Credentials

_SECONDS = 10.0
_PATIENCE_SECONDS = 60.0
"""For a handshake: where many shake hands at once, each waits for all before it."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_PING = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + b"stranger"
_TROUBLE = (OSError, TimeoutError, asyncio.IncompleteReadError)  # of ssl too: SSLError is one

Kind = Callable[[int, ssl.SSLContext], Awaitable[asyncio.StreamWriter]]


async def _silent(port: int, _: ssl.SSLContext) -> asyncio.StreamWriter:
    return (await asyncio.open_connection("127.0.0.1", port))[1]


async def _half_a_handshake(port: int, context: ssl.SSLContext) -> asyncio.StreamWriter:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    writer = await _silent(port, context)
    writer.write(outgoing.read())
    await writer.drain()
    return writer


async def _whole_handshake(port: int, context: ssl.SSLContext) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="localhost"
    )
    return writer


async def _reset(port: int, context: ssl.SSLContext) -> asyncio.StreamWriter:
    writer = await _half_a_handshake(port, context)
    plain: socket.socket = writer.get_extra_info("socket")
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return writer


async def _never_reading(port: int, context: ssl.SSLContext) -> asyncio.StreamWriter:
    writer = await _whole_handshake(port, context)
    writer.transport.pause_reading()  # type: ignore[attr-defined] # a read transport, also over TLS
    writer.write(_PREFACE + 500 * _PING)
    await writer.drain()
    return writer


async def _rubbish(port: int, context: ssl.SSLContext) -> asyncio.StreamWriter:
    writer = await _silent(port, context)
    writer.write(os.urandom(1000))
    await writer.drain()
    return writer


KINDS: tuple[Kind, ...] = (
    _silent,
    _half_a_handshake,
    _whole_handshake,
    _reset,
    _never_reading,
    _rubbish,
)


def context_of(credentials: Credentials | None, ca: Path) -> ssl.SSLContext:
    """A client's side of TLS as gRPC speaks it, with a certificate if there is one."""
    context = ssl.create_default_context(cafile=ca)
    if credentials is not None:
        context.load_cert_chain(credentials.certificate, credentials.key)
    context.set_alpn_protocols(["h2"])
    return context


async def crowd(port: int, context: ssl.SSLContext, connections: int, at_once: int = 300) -> int:
    """Open so many connections, all kinds mixed, in waves that are held for a moment; how many
    of them were opened as they were meant to be.
    """
    opened = 0
    for start in range(0, connections, at_once):
        wave = range(start, min(start + at_once, connections))
        attempts = [
            asyncio.wait_for(KINDS[number % len(KINDS)](port, context), _SECONDS) for number in wave
        ]
        found = await asyncio.gather(*attempts, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, _TROUBLE):
                raise each
        writers = [each for each in found if isinstance(each, asyncio.StreamWriter)]
        opened += len(writers)
        await asyncio.sleep(0.3)
        for writer in writers:
            writer.transport.abort()
    return opened


async def handshakes(port: int, context: ssl.SSLContext, each: int, threads: int = 32) -> int:
    """So many threads that shake hands at the same time, each so many times; how many succeeded."""

    def shake() -> int:
        done = 0
        for _ in range(each):
            with (
                contextlib.suppress(OSError),
                # Wrapped before it connects: a socket that is reset between the two is closed too.
                context.wrap_socket(socket.socket(), server_hostname="localhost") as shaking,
            ):
                shaking.settimeout(_PATIENCE_SECONDS)
                shaking.connect(("127.0.0.1", port))
                done += 1
        return done

    with ThreadPoolExecutor(threads) as pool:
        loop = asyncio.get_running_loop()
        return sum(
            await asyncio.gather(*(loop.run_in_executor(pool, shake) for _ in range(threads)))
        )


def descriptors(process: int) -> int:
    """How many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{process}/fd"))


async def settled(process: int, most: int) -> int:
    """The descriptors of a process once they are no more than `most`, or after a while."""
    for _ in range(200):
        if descriptors(process) <= most:
            break
        await asyncio.sleep(0.1)
    return descriptors(process)
