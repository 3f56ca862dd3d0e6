"""The whole coordinator over real gRPC, with scripted devices."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from coordinator.scripted import (
    ScriptedDevice,
    connected,
    put_model,
    submission,
    whole_model,
)
from shoal_operator.api.partition import PartitionDocument
from shoal_operator.shell.coordinator import Coordinator, CoordinatorSettings, serving
from shoal_protocol.channels import open_channel
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub

if TYPE_CHECKING:
    from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorAsyncStub

ENDED = (api.JobStatus.COMPLETE, api.JobStatus.FAILED, api.JobStatus.CANCELLED)


@dataclass
class World:
    """A running coordinator, a client of it, and folders."""

    coordinator: Coordinator
    target: str
    document: PartitionDocument
    stub: "CoordinatorAsyncStub"
    folder: Path

    def device(self, name: str, **options: object) -> ScriptedDevice:
        return ScriptedDevice(self.target, name, self.document, **options)  # type: ignore[arg-type]

    def inputs(self, *rows_of_files: int, size: int = 100) -> np.ndarray:
        """Files with so many rows each; all rows, in order."""
        folder = self.folder / "in"
        folder.mkdir(exist_ok=True)
        total = sum(rows_of_files)
        rows = np.random.default_rng(0).normal(size=(total, 1, size)).astype(np.float32)
        start = 0
        for number, count in enumerate(rows_of_files):
            np.savez(folder / f"{number:03}.npz", x=rows[start : start + count])
            start += count
        return rows

    def request(self, **fields: object) -> api.SubmitJobRequest:
        return submission(self.document, self.folder / "in", self.folder / "out", **fields)

    async def submit(self, **fields: object) -> api.JobStatus:
        return await self.stub.SubmitJob(self.request(**fields), timeout=10)

    async def ended(self, name: str = "job") -> api.JobStatus:
        watch = api.WatchJobRequest(name=name, interval_seconds=0.05)
        statuses = [status async for status in self.stub.WatchJob(watch, timeout=30)]
        assert statuses[-1].state in ENDED
        return statuses[-1]

    async def until(self, ready: Callable[[api.JobStatus], bool], name: str = "job") -> None:
        watch = api.WatchJobRequest(name=name, interval_seconds=0.05)
        call = self.stub.WatchJob(watch, timeout=30)
        async for status in call:
            if ready(status):
                break
        call.cancel()

    def check_results(self, rows: np.ndarray, folder: str = "out") -> None:
        made: list[np.ndarray] = []
        for path in sorted((self.folder / folder).glob("*.npz")):
            with np.load(path) as file:
                np.testing.assert_allclose(file["early"] * -5 + 1, file["y"], atol=1e-5)
                made.extend(file["y"])
        np.testing.assert_allclose(np.stack(made), whole_model(rows)["y"], atol=1e-5)


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
        yield World(coordinator, target, document, CoordinatorStub(channel), tmp_path)


async def test_a_job_streams_through_three_devices(world: World) -> None:
    rows = world.inputs(5, 1, 4)
    devices = [world.device(name, budget=1500) for name in ("a", "b", "c")]
    async with connected(*devices):
        status = await world.submit()
        assert status.items == 10
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    assert (last.succeeded, last.failed, last.resumed) == (10, 0, 0)
    assert last.seconds > 0
    assert last.items_per_second > 0
    assert last.latency.p50_seconds > 0
    assert [stage.finished for stage in last.stages] == [10, 10, 10]
    assert last.stages[0].compute_seconds == pytest.approx(0.001, rel=0.1)
    world.check_results(rows)
    done = [task for device in devices for task in device.executed]
    assert sorted(done) == [(item, stage) for item in range(10) for stage in range(3)]
