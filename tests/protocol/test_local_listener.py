"""Who listens for local links, and peers that mean no good."""

import asyncio
import os
import resource
import socket
import stat
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protocol.test_bulk import serving
from protocol.test_local_link import Taker, on_the_wire, outbound
from shoal_protocol.assembly import Limits
from shoal_protocol.bulk import local
from shoal_protocol.bulk.link import BulkLink
from shoal_protocol.bulk.local import LocalTransport, connect, listen
from shoal_protocol.bulk.receiving import Intake
from shoal_protocol.frames import Frame, opening
from shoal_protocol.tensors import encode_activation
from shoal_protocol.v1 import tensors_pb2 as pb

LIMITS = Limits(decoded_bytes=16 << 20)


@asynccontextmanager
async def served(
    folder: Path, taker: Taker, *, connections: int = 10, ended: list[str] | None = None
) -> AsyncIterator[str]:
    """A listener whose links go to a taker; the address beside which it listens."""

    async def serve(device: str, transport: LocalTransport) -> str:
        reason = await BulkLink(transport, Intake(taker, LIMITS)).run()
        if ended is not None:
            ended.append(f"{device}: {reason}")
        return f"goodbye, {device}"

    listener = listen(f"unix:{folder}/s", serve, connections=connections)
    assert listener is not None
    try:
        yield f"unix:{folder}/s"
    finally:
        await listener.stop()


async def exchange_with(address: str, *data: bytes) -> bytes:
    """Send bytes to a listener, as a stranger would; what comes back until it hangs up."""
    reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:") + ".bulk")
    for each in data:
        writer.write(each)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_whoever_connects_is_known_by_its_opening_and_learns_why_the_end_came(
    tmp_path: Path,
) -> None:
    taker, ended = Taker(), list[str]()
    async with served(tmp_path, taker, ended=ended) as address:
        transport = connect(address, "pi-4")
        assert transport is not None
        link = BulkLink(transport)
        async with serving(link) as (running,):
            await asyncio.wait_for(link.send(outbound()), 10)
            # A transfer where only acknowledgements belong ends the other side.
            await transport.write([Frame(pb.FrameHeader(transfer=9, offset=4).SerializeToString())])
            await transport.write([Frame(b"\xff\xff")])
            reason = await asyncio.wait_for(running, 10)
    assert "header cannot be parsed" in reason
    assert not ended, "a malformed frame is an error"
    assert len(taker.taken) == 1


async def test_a_link_that_ends_in_order_says_goodbye(tmp_path: Path) -> None:
    async def serve(device: str, transport: LocalTransport) -> str:
        return f"{device} has no session"

    listener = listen(f"unix:{tmp_path}/s", serve, connections=1)
    transport = connect(f"unix:{tmp_path}/s", "pi-4")
    assert listener is not None
    assert transport is not None
    assert await asyncio.wait_for(BulkLink(transport).run(), 10) == "pi-4 has no session"
    await listener.stop()
    assert connect(f"unix:{tmp_path}/s") is None, "its socket is gone"


async def test_the_socket_is_its_owner_s_alone(tmp_path: Path) -> None:
    async with served(tmp_path, Taker()):
        assert stat.S_IMODE((tmp_path / "s.bulk").stat().st_mode) == 0o600


async def test_where_nobody_listens_there_is_no_local_link(tmp_path: Path) -> None:
    async def serve(device: str, transport: LocalTransport) -> str:
        raise AssertionError

    assert connect(f"unix:{tmp_path}/nobody") is None
    assert connect("127.0.0.1:1") is None
    assert connect("unix:/" + "a" * 104) is None
    assert listen("127.0.0.1:1", serve, connections=1) is None
    assert listen("unix:/" + "a" * 104, serve, connections=1) is None


async def test_a_socket_of_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s.bulk"))
    taker = Taker()
    async with served(tmp_path, taker) as address:
        transport = connect(address, "a")
        assert transport is not None
        link = BulkLink(transport)
        async with serving(link):
            await asyncio.wait_for(link.send(outbound()), 10)
    assert len(taker.taken) == 1


def header(**fields: object) -> Frame:
    return Frame(pb.FrameHeader(**fields).SerializeToString())  # type: ignore[arg-type] # any field


RUBBISH = {
    "no opening": (on_the_wire(header(transfer=1, last=True)), b"is no opening"),
    "a header of 4 GiB": (struct.pack("<II", 0xFFFFFFFF, 0), b"a header of 4294967295 bytes"),
    "a payload of 4 GiB": (
        on_the_wire(opening("a")) + struct.pack("<II", 1, 0xFFFFFFFF),
        b"4294967295 of payload",
    ),
    "a payload that nobody announced": (
        on_the_wire(opening("a")) + on_the_wire(Frame(b"\x08\x01", (b"abc",), 3)),
        b"",
    ),
    "an opening twice": (2 * on_the_wire(opening("a")), b""),
    "bytes": (b"GET / HTTP/1.1\r\n\r\n", b"bytes, "),
}


@pytest.mark.parametrize("name", RUBBISH)
async def test_rubbish_ends_its_own_stream_and_no_other(tmp_path: Path, name: str) -> None:
    data, reason = RUBBISH[name]
    taker = Taker()
    async with served(tmp_path, taker) as address:
        transport = connect(address, "honest")
        assert transport is not None
        link = BulkLink(transport)
        async with serving(link):
            if reason:
                assert reason in await exchange_with(address, data)
            else:  # refused, as over gRPC: the stream continues
                path = address.removeprefix("unix:") + ".bulk"
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(data)
                assert await asyncio.wait_for(reader.read(1), 10)
                writer.close()
            await asyncio.wait_for(link.send(outbound()), 10)
    assert len(taker.taken) == 1


async def test_lies_about_sizes_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    taker = Taker()
    lie = encode_activation(outbound().key, "b", outbound().tensors, transfer=1)
    lie.header.activation.tensors[0].decoded_bytes = 1 << 40
    lie.header.activation.tensors[0].encoded_bytes = 1 << 40
    async with served(tmp_path, taker) as address:
        path = address.removeprefix("unix:") + ".bulk"
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(on_the_wire(opening("a")) + b"".join(map(on_the_wire, lie.frames())))
        lengths = await asyncio.wait_for(reader.readexactly(8), 10)
        answer = pb.FrameHeader.FromString(
            await reader.readexactly(struct.unpack("<II", lengths)[0])
        )
        writer.close()
    assert answer.acknowledgement.outcome == pb.Acknowledgement.REFUSED
    assert not taker.buffers


async def test_a_peer_that_does_not_say_who_it_is_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "OPENING_SECONDS", 0.1)
    async with served(tmp_path, Taker()) as address:
        for data in (b"", on_the_wire(opening("a"))[:-1]):
            assert b"no opening came within" in await exchange_with(address, data)


async def test_more_connections_than_allowed_are_closed_at_once(tmp_path: Path) -> None:
    taker = Taker()
    async with served(tmp_path, taker, connections=2) as address:
        links = [BulkLink(transport) for _ in range(2) if (transport := connect(address, "a"))]
        async with serving(*links):
            for link in links:
                await asyncio.wait_for(link.send(outbound()), 10)
            assert await exchange_with(address) == b""
            await asyncio.wait_for(links[0].send(outbound()), 10)
    assert len(taker.taken) == 3


async def test_a_listener_without_descriptors_accepts_when_there_are_some_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "_ACCEPT_PAUSE_SECONDS", 0.05)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with served(tmp_path, Taker()) as address:
        with socket.socket(socket.AF_UNIX) as client:
            spare = os.dup(client.fileno())
            os.close(spare)
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare, before[1]))
            try:
                client.connect(address.removeprefix("unix:") + ".bulk")
                async with asyncio.timeout(10):
                    while caplog.text.count("cannot accept") < 2:
                        await asyncio.sleep(0.01)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            assert await exchange_with(address, b"\xff" * 64)
