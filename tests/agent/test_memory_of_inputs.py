"""Inputs that memory has no room for go to the disk, and take little memory on their way."""

from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from agent.conftest import Joined
from agent.test_running import edge
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20


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
