"""Work on a slow disk holds up those who asked for it, and nobody else."""

import asyncio
from collections.abc import Callable, Coroutine
from threading import Event

import pytest

from coordinator.world import World
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.v1 import coordinator_pb2 as api

PATIENCE_SECONDS = 3.0


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
