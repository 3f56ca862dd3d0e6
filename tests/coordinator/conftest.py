"""The coordinator that the tests of this folder talk to."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.scripted import put_model
from coordinator.world import World
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_protocol.channels import open_channel
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    document = put_model(tmp_path / "store")
    target = f"unix:{tmp_path}/s"
    settings = CoordinatorSettings(
        listen=target,
        store=tmp_path / "store",
        state=tmp_path / "state",
        metrics="127.0.0.1:0",
        silence_seconds=0.5,
        patience_seconds=0.5,
    )
    async with serving(settings) as coordinator, open_channel(target) as channel:
        yield World(coordinator, target, document, CoordinatorStub(channel), channel, tmp_path)
