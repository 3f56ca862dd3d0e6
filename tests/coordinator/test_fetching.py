"""Fragments fetched from the coordinator: in turns per caller, and only while it reads."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from certificates import Pki
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_protocol.channels import open_channel
from shoal_protocol.services import FileStream, SessionClient
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

STALL_SECONDS = 3.0
PATIENCE_SECONDS = 60.0
FILE_BYTES = 8 << 20


@dataclass
class Shelf:
    """A coordinator over TLS, and a file of its store."""

    pki: Pki
    port: int
    request: FetchFragmentRequest

    def channel(self, name: str) -> grpc.aio.Channel:
        return open_channel(f"localhost:{self.port}", self.pki.issue(name))

    def fetch(self, channel: grpc.aio.Channel) -> FileStream:
        return SessionClient(channel).fetch_fragment(self.request, timeout=PATIENCE_SECONDS)


def put_fragment(store: Path) -> str:
    """Write a fragment that is larger than what gRPC takes from a stream that nobody reads."""
    content = bytes(FILE_BYTES)
    file = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    text = json.dumps({"version": 1, "files": {"model.onnx": file}}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    folder = store / "fragments" / digest
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(content)
    (folder / "fragment.json").write_text(text)
    return f"sha256:{digest}"


@pytest.fixture
async def shelf(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Shelf]:
    """Callers stall after the parameter's seconds, if there is one."""
    pki = Pki(tmp_path / "pki")
    settings = CoordinatorSettings(
        listen="localhost:0",
        store=tmp_path / "store",
        state=tmp_path / "state",
        credentials=pki.issue("shelf-coordinator"),
        stall_seconds=getattr(request, "param", 3 * PATIENCE_SECONDS),
    )
    wanted = FetchFragmentRequest(digest=put_fragment(tmp_path / "store"), file="model.onnx")
    async with serving(settings) as coordinator:
        yield Shelf(pki, coordinator.port, wanted)


async def read(stream: FileStream) -> int:
    return sum([len(frame) async for frame in stream])


async def test_64_unread_streams_of_one_device_do_not_hold_up_another(shelf: Shelf) -> None:
    async with shelf.channel("jetson") as idle, shelf.channel("pi-4") as other:
        unread = [shelf.fetch(idle) for _ in range(70)]
        firsts = [asyncio.create_task(stream.read()) for stream in unread]
        errors: list[BaseException] = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(errors) < 6:
                await asyncio.sleep(0.05)
                ended = [first for first in firsts if first.done()]
                errors = [error for first in ended if (error := first.exception())]
        assert len(errors) == 6  # 8 are served, 56 wait
        for error in errors:
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.details() == "jetson has 64 calls of this kind open; wait for one to end"
        assert await read(shelf.fetch(other)) > FILE_BYTES
        for first in firsts:
            first.cancel()
        await asyncio.gather(*firsts, return_exceptions=True)


@pytest.mark.parametrize("shelf", [STALL_SECONDS], indirect=True)
async def test_streams_that_are_not_read_are_given_up_in_favour_of_others(shelf: Shelf) -> None:
    idle = [shelf.channel(f"idle-{number}") for number in range(9)]
    unread = [shelf.fetch(channel) for channel in idle for _ in range(8)]
    async with asyncio.timeout(PATIENCE_SECONDS), shelf.channel("pi-4") as other:
        await asyncio.gather(*(stream.initial_metadata() for stream in unread[:64]))
        assert await read(shelf.fetch(other)) > FILE_BYTES
        for stream in unread:  # they end, although their callers still do not read
            stream.cancel()
        for channel in idle:
            await channel.close()


@pytest.mark.parametrize("shelf", [STALL_SECONDS], indirect=True)
async def test_a_device_that_reads_slowly_but_steadily_gets_its_file(shelf: Shelf) -> None:
    own = shelf.pki.issue("pi-4")
    credentials = grpc.ssl_channel_credentials(
        own.ca.read_bytes(), own.key.read_bytes(), own.certificate.read_bytes()
    )
    # As over a slow link, gRPC asks for little at a time.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10)]
    target = f"localhost:{shelf.port}"
    async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
        total = 0
        async for frame in shelf.fetch(channel):
            total += len(frame)
            await asyncio.sleep(STALL_SECONDS / 50)  # of 64 frames
        assert total > FILE_BYTES
