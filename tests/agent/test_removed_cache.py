"""A cache whose folder somebody has removed, to make room, while the agent runs."""

import shutil
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from agent.conftest import Joined
from agent.fragment_making import dense_model, write_fragment
from agent.scripted_coordinator import ScriptedCoordinator
from agent.test_faults import runs
from agent.test_running import edge
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

MIB = 1 << 20

Join = Callable[..., Awaitable[Joined]]
pytestmark = pytest.mark.forked


async def test_an_agent_whose_cache_was_removed_fetches_again(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    one, other = (write_fragment(coordinator.store, dense_model([64, 64], s)) for s in range(2))
    joined = await join()
    await runs(joined.device, one)
    shutil.rmtree(joined.agent.cache)
    await runs(joined.device, other, 1)
    await joined.device.unload(one.digest)
    await runs(joined.device, one, 2)
    assert len(list((joined.agent.cache / "fragments").iterdir())) == 2


async def test_activations_beyond_memory_are_taken_where_the_cache_was_removed(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([1024, 16]), 14 * MIB)
    joined = await join("pi-4", budget="18Mi")
    await joined.device.load(fragment.digest, 14 * MIB)
    shutil.rmtree(joined.agent.cache)
    x = {"x": np.ones((256, 1024), np.float32)}
    given = [await joined.device.give(edge(-1, 0, item), x) for item in range(6)]
    assert {each.outcome for each in given} == {Acknowledgement.ACCEPTED}, given[-1]
