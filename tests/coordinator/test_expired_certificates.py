"""Where sessions expire, none outlives the certificate that it was opened with, and no connection
serves longer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from certificates import Pki
from shoal_coordinator.server import Coordinator, CoordinatorSettings, serving
from shoal_protocol import PROTOCOL
from shoal_protocol.channels import Credentials, open_channel
from shoal_protocol.services import SessionClient
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

PATIENCE_SECONDS = 60.0
SOON = timedelta(seconds=10)


@asynccontextmanager
async def secured(pki: Pki, folder: Path, *, expire: bool) -> AsyncIterator[Coordinator]:
    settings = CoordinatorSettings(
        listen="localhost:0",
        store=folder / "store",
        state=folder / "state",
        credentials=pki.issue("shelf-coordinator"),
        silence_seconds=600,
        sessions_expire=expire,
    )
    async with serving(settings) as coordinator:
        yield coordinator


@asynccontextmanager
async def session(
    coordinator: Coordinator, device: str, mine: Credentials
) -> AsyncIterator[SessionClient]:
    """A session of a device that says nothing more."""
    async with open_channel(f"localhost:{coordinator.port}", mine) as channel:
        client = SessionClient(channel)
        stream = client.connect()
        hello = pb.Hello(protocol=PROTOCOL, device=device, budget_bytes=1 << 20)
        await stream.write(pb.AgentMessage(hello=hello))
        assert isinstance(await stream.read(), pb.CoordinatorMessage)
        yield client


async def fetched(client: SessionClient) -> grpc.StatusCode:
    request = FetchFragmentRequest(digest="sha256:" + "0" * 64, file="model.onnx")
    return await client.fetch_fragment(request, timeout=PATIENCE_SECONDS).code()


@pytest.mark.parametrize("expire", [True, False])
async def test_a_session_ends_with_its_certificate_where_sessions_expire(
    tmp_path: Path, expire: bool
) -> None:
    pki = Pki(tmp_path / "pki")
    async with (
        secured(pki, tmp_path, expire=expire) as coordinator,
        session(coordinator, "pi-4", pki.issue("pi-4")),
        session(coordinator, "pi-5", short := pki.issue("pi-5", SOON)) as stays,
    ):
        assert await fetched(stays) == grpc.StatusCode.NOT_FOUND
        there = coordinator.sessions.by_device
        assert set(there) == {"pi-4", "pi-5"}
        if not expire:
            await asyncio.sleep(SOON.total_seconds() + 2)
            assert set(there) == {"pi-4", "pi-5"}
            assert await fetched(stays) == grpc.StatusCode.NOT_FOUND
            return
        ended = there["pi-5"].ended
        assert await asyncio.wait_for(ended, PATIENCE_SECONDS) == (
            "the certificate that it was opened with has expired"
        )
        assert set(there) == {"pi-4"}
        assert await fetched(stays) == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError):
            async with session(coordinator, "pi-5", short):
                raise AssertionError("it is let in with a certificate that has expired")
