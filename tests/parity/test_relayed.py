"""The same equality where no agent can reach another: activations go through the coordinator."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from pool import Pool, running_pool

from parity_with_whole import TOLERANCE, difference

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relayed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Three devices that listen to nobody."""
    devices = [{"name": name, "memory": "1Gi"} for name in ("one", "two", "three")]
    folder = tmp_path_factory.mktemp("relayed")
    async with running_pool(folder, devices, cgroups=False, relay=True) as running:
        yield running


@pytest.mark.parametrize(
    "name",
    [
        "ppocr_rec",
        pytest.param("silero_vad", marks=pytest.mark.minutes),
        pytest.param("squeezenet1_1", marks=pytest.mark.minutes),
    ],
)
async def test_activations_through_the_coordinator(
    relayed: Pool, tmp_path: Path, name: str
) -> None:
    assert await difference(relayed, name, 3, tmp_path) <= TOLERANCE
    devices = await relayed.devices()
    assert sum(device.tasks for device in devices.values()) >= 6
