"""The coordinator that the tests of this folder talk to."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.world import World, running_world
from folders_in_memory import tmp_path

__all__ = ["tmp_path"]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    waits = {"silence_seconds": 0.5, "patience_seconds": 0.5}
    async with running_world(tmp_path, metrics="127.0.0.1:0", **waits) as world:
        yield world
