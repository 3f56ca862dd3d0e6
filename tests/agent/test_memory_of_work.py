"""What an agent's memory does with the number of jobs and links: it does not grow with them."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from agent.conftest import Joined
from agent.fragment_making import MadeFragment, cut, dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ScriptedCoordinator
from shoal_protocol.tensors import ActivationKey
from shoal_protocol.v1 import session_pb2 as pb

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20
JOBS, LINKS = 200, 50


async def test_two_hundred_jobs_leave_memory_flat(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 256, 64]))
    joined = await join()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    readings = []
    for number in range(JOBS):
        job = f"job-{number}"
        for item in range(2):
            key = ActivationKey(job=job, epoch=1, item=item, producer=-1, consumer=0)
            await joined.device.give(key, {"x": np.ones((64, 64), np.float32)})
            execute = pb.Execute(
                task=pb.Task(job=job, epoch=1, item=item, stage=0),
                digest=fragment.digest,
                inputs=[pb.InputSource(producer=-1, tensors=["x"])],
                results=["y"],
            )
            assert (await joined.device.ask("execute", execute)).HasField("executed")
            await joined.device.result()
        readings.append(joined.agent.without_libraries())
    grown = max(readings[-20:]) - max(readings[20:40])
    assert grown < MIB, f"{grown / MIB:.2f} MiB in {JOBS - 40} jobs"


async def open_link(
    front: Joined, address: Path, number: int, halves: Sequence[MadeFragment]
) -> None:
    """Run an item whose activation goes to a peer's address."""
    job = f"job-{number}"
    key = ActivationKey(job=job, epoch=1, item=0, producer=-1, consumer=0)
    await front.device.give(key, {"x": np.ones((1, 64), np.float32)})
    execute = pb.Execute(
        task=pb.Task(job=job, epoch=1, item=0, stage=0),
        digest=halves[0].digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        routes=[
            pb.Route(
                consumer=1, device="jetson", address=f"unix:{address}", tensors=halves[1].inputs
            )
        ],
    )
    reply = await front.device.ask("execute", execute)
    assert list(reply.executed.delivered) == [1], reply


async def test_links_take_little_memory_and_those_that_are_idle_are_closed(
    coordinator: ScriptedCoordinator, join: Join, folder: Path
) -> None:
    halves = [write_fragment(coordinator.store, m) for m in cut(dense_model([64, 96, 64]), 2)]
    front, back = await join("pi-4"), await join("jetson")
    await front.device.load(halves[0].digest, halves[0].resident_bytes)
    descriptors = Path(f"/proc/{front.agent.process.pid}/fd")
    before, taken = len(list(descriptors.iterdir())), []
    idle = front.agent.without_libraries()
    numbers = itertools.count()
    for _ in range(4):
        async with asyncio.timeout(PATIENCE_SECONDS):
            # Where the machine is busy, an agent may have nothing to do between two of them.
            while len(list(descriptors.iterdir())) < before + LINKS:
                for number in itertools.islice(numbers, LINKS):
                    address = folder / f"{number}.sock"
                    for suffix in ("", ".bulk"):
                        address.with_name(address.name + suffix).symlink_to(
                            back.device.hello.address.removeprefix("unix:") + suffix
                        )
                    await open_link(front, address, number, halves)
        taken.append(front.agent.without_libraries())
        # An agent that has nothing to do hangs up.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(list(descriptors.iterdir())) > before + 2:
                await asyncio.sleep(0.1)
    assert taken[0] < idle + LINKS * (128 << 10), taken
    assert max(taken[2:]) - taken[1] < MIB, taken
