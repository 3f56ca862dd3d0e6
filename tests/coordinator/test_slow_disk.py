"""Work on a slow disk holds up those who asked for it, and nobody else."""

import asyncio
from collections.abc import Callable, Coroutine
from threading import Event

import pytest

from coordinator.world import World
from shoal_coordinator.storage.volume import Volume
from shoal_coordinator.storage.volume_paths import FragmentPath, JobPath, parse_path
from shoal_coordinator.storage.volume_values import StoredFile
from shoal_protocol.digests import hexadecimal
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import files_pb2 as pb
from shoal_protocol.v1.files_pb2_grpc import FilesStub

PATIENCE_SECONDS = 30.0
"""An event loop that the disk holds up answers nobody, however long it is waited for."""
MORE_THAN_THREADS = 40
"""The event loop's own executor has 32 at most."""


async def submit(world: World) -> None:
    await world.submit()


async def place(world: World) -> None:
    request = world.request()
    stages = [api.StagePlacement(devices=["a"]) for _ in world.document.fragments]
    placement = api.PlaceFragmentsRequest(name="m", partition=request.partition, stages=stages)
    await world.stub.PlaceFragments(placement, timeout=60)


async def call(world: World) -> None:
    stream = world.stub.Infer(timeout=60)
    await stream.write(api.InferRequest(start=world.request(inputs_uri="", outputs_uri="")))
    answer = await stream.read()
    assert isinstance(answer, api.InferAnswer)
    assert answer.started
    stream.cancel()


@pytest.mark.parametrize("ask", [submit, place, call])
async def test_others_are_answered_while_fragments_are_searched_on_a_slow_disk(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[World], Coroutine[None, None, None]],
) -> None:
    world.inputs(2)
    searched, answered = Event(), Event()
    in_time: list[bool] = []
    has = FragmentStore.has

    def slowly(store: FragmentStore, digest: object) -> bool:
        searched.set()
        in_time.append(answered.wait(PATIENCE_SECONDS))
        return has(store, digest)  # type: ignore[arg-type]

    monkeypatch.setattr(FragmentStore, "has", slowly)
    asking = asyncio.create_task(ask(world))
    assert await asyncio.to_thread(searched.wait, 60)
    await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
    answered.set()
    await asking
    assert in_time == [True] * len(world.document.fragments)


async def test_short_work_does_not_wait_for_many_files_that_are_read_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = Event()
    asked: list[str] = []
    describe = Volume.describe

    def slowly(volume: Volume, path: FragmentPath | JobPath) -> StoredFile:
        answered.wait(60)
        return describe(volume, path)

    def parsed(path: str) -> FragmentPath | JobPath:
        asked.append(path)
        return parse_path(path)

    monkeypatch.setattr(Volume, "describe", slowly)
    monkeypatch.setattr("shoal_coordinator.server.files.parse_path", parsed)
    digests = [fragment.digest for fragment in world.document.fragments]
    path = f"fragments/{hexadecimal(digests[0])}/model.onnx"
    files = FilesStub(world.channel)
    reading = [
        asyncio.ensure_future(files.DescribeFile(pb.DescribeFileRequest(path=path), timeout=60))
        for _ in range(MORE_THAN_THREADS)
    ]
    try:
        async with asyncio.timeout(60):
            while len(asked) < MORE_THAN_THREADS:
                await asyncio.sleep(0.01)
        found = await world.stub.ListFragments(api.ListFragmentsRequest(), timeout=10)
    finally:
        answered.set()
        described = await asyncio.gather(*reading)
    assert found.digests == sorted(digests)
    assert {each.name for each in described} == {"model.onnx"}
