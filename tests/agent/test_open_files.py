"""Files that an agent has open, where each process may open few unless it asks for more."""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np

from agent.conftest import environment
from agent.fragment_making import dense_model, write_fragment
from agent.scripted_coordinator import ScriptedCoordinator
from agent.test_running import edge
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

MIB = 1 << 20
ITEMS = 200


async def test_more_activations_wait_on_the_disk_than_a_process_has_files_open_by_default(
    coordinator: ScriptedCoordinator, folder: Path
) -> None:
    made = write_fragment(coordinator.store, dense_model([64, 512, 64]))
    agent = await asyncio.create_subprocess_exec(
        *("sh", "-c", 'ulimit -S -n 128 && exec "$@"', "sh"),
        *(sys.executable, "-OO", "-m", "shoal_agent", "--name", "pi-4", "--budget", "24Mi"),
        *("--coordinator", f"unix:{folder}/c.sock", "--cache", str(folder / "cache")),
        *("--speed", os.devnull, "--exit-with-parent"),
        env=environment(),
    )
    try:
        device = await coordinator.device()
        loaded = await device.load(made.digest, 24 * MIB - 200_000)
        assert loaded.HasField("loaded"), loaded
        x = {"x": np.ones((64, 64), np.float32)}
        given = [await device.give(edge(-1, 0, item), x) for item in range(ITEMS)]
    finally:
        agent.kill()
        await agent.wait()
    assert {each.outcome for each in given} == {Acknowledgement.ACCEPTED}, given[-1]
