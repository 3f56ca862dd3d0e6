"""A running coordinator with a client and folders, as tests see it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from coordinator.scripted import ScriptedDevice, put_model, submission, whole_model
from shoal_coordinator.server import Coordinator, CoordinatorSettings, serving
from shoal_protocol.channels import open_channel
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub

if TYPE_CHECKING:
    from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorAsyncStub

ENDED = (api.JobStatus.COMPLETE, api.JobStatus.FAILED, api.JobStatus.CANCELLED)

SILENCE_SECONDS = 120.0


@dataclass
class World:
    """A running coordinator, a client of it, and folders."""

    coordinator: Coordinator
    target: str
    document: PartitionDocument
    stub: "CoordinatorAsyncStub"
    channel: grpc.aio.Channel
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
        return await self.stub.SubmitJob(self.request(**fields), timeout=60)

    async def ended(self, name: str = "job") -> api.JobStatus:
        watch = api.WatchJobRequest(name=name, interval_seconds=0.05)
        statuses = [status async for status in self.stub.WatchJob(watch, timeout=60)]
        assert statuses[-1].state in ENDED
        return statuses[-1]

    async def until(self, ready: Callable[[api.JobStatus], bool], name: str = "job") -> None:
        watch = api.WatchJobRequest(name=name, interval_seconds=0.05)
        call = self.stub.WatchJob(watch, timeout=60)
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


@asynccontextmanager
async def running_world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    """A coordinator in this process with the fragments of a model, and these settings. A busy
    machine holds the whole process up, its devices too: for that, none of them is lost."""
    document = put_model(folder / "store")
    target = f"unix:{folder}/s"
    store, state = folder / "store", folder / "state"
    patient = {"silence_seconds": SILENCE_SECONDS} | settings
    made = CoordinatorSettings(listen=target, store=store, state=state, **patient)
    async with serving(made) as coordinator, open_channel(target) as channel:
        yield World(coordinator, target, document, CoordinatorStub(channel), channel, folder)


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""
