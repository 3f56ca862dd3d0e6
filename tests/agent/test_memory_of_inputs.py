"""Inputs that memory has no room for go to the disk, and take little memory on their way, as
fragments do."""

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from agent.conftest import Joined
from agent.fragment_making import MadeFragment, dense_model, write_fragment
from agent.scripted_coordinator import ScriptedCoordinator
from agent.test_memory_of_fragments import peak_bytes
from agent.test_running import edge
from shoal_protocol.frame_sizes import FETCH_BYTES
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all of these tests: none of them changes a file of it."""
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize("size", [4, 13])
async def test_inputs_are_received_within_the_budget(join: Join, size: int) -> None:
    joined = await join(budget="16Mi")
    array = np.random.default_rng(0).random((size, MIB // 4), np.float32)
    for item in range(5):
        answer = await joined.device.give(edge(-1, 0, item), {"x": array})
        assert answer.outcome == Acknowledgement.ACCEPTED
        while not joined.device.telemetry.empty():
            joined.device.telemetry.get_nowait()
        peak = (await joined.device.telemetry.get()).peak_bytes
        assert peak <= 16 * MIB, f"{peak / MIB:.1f} MiB with {item + 1} inputs of {size} MiB"


@functools.cache
def large(store: Path) -> MadeFragment:
    """Of 96 MiB; a device that cannot run it fetches it all the same."""
    return write_fragment(store, dense_model([2048, 4096, 4096]), 8 * MIB)


@pytest.mark.parametrize("budget", ["8Mi", "1Gi"])
async def test_a_fragment_is_fetched_in_what_is_reckoned_for_that(
    coordinator: ScriptedCoordinator, join: Join, budget: str
) -> None:
    made = large(coordinator.store)
    joined = await join(budget=budget)
    reply = await joined.device.ask("prefetch", pb.Prefetch(digest=made.digest))
    assert reply.prefetched.fetched_bytes > 64 * MIB
    assert await peak_bytes(joined.device) < FETCH_BYTES
