"""Items of calls take no more of the coordinator's memory than there is for them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from coordinator.scripted import connected
from coordinator.test_item_streams import SECONDS, Client, check_ended, row
from coordinator.world import World, running_world
from shoal_coordinator.server import server
from shoal_coordinator.server.call_memory import CallMemory
from shoal_coordinator.server.refusals import CallRefused
from shoal_protocol.called_items import frames_of
from shoal_protocol.v1 import coordinator_pb2 as pb

MIB = 1 << 20
LARGE = 200_000
"""Numbers of an item of 0.8 MiB: there is room for one, beside small ones."""


async def test_who_has_no_room_waits_until_others_have_given_theirs_back() -> None:
    memory, order = CallMemory(10), list[str]()
    await memory.take(8)

    async def wait_for_room() -> None:
        await memory.take(5)
        order.append("taken")

    waiting = asyncio.create_task(wait_for_room())
    await asyncio.sleep(0)
    await memory.take(2)  # what fits does not wait for what does not
    order.append("given back")
    memory.give_back(8)
    await waiting
    assert order == ["given back", "taken"]


async def test_nobody_waits_for_ever_for_those_who_give_nothing_back() -> None:
    memory = CallMemory(10 * MIB, wait_seconds=0.05)
    await memory.take(8 * MIB)
    with pytest.raises(CallRefused, match=r"an item of 5 MiB.* have 8 MiB of 10 MiB") as caught:
        await memory.take(5 * MIB)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    memory.give_back(8 * MIB)
    await memory.take(10 * MIB)


@pytest.fixture
async def memory(monkeypatch: pytest.MonkeyPatch) -> CallMemory:
    memory = CallMemory(MIB)
    monkeypatch.setattr(server, "CallMemory", lambda: memory)
    return memory


@pytest.fixture
async def little(memory: CallMemory, tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator that has 1 MiB for items of calls."""
    assert memory.most_bytes == MIB
    async with running_world(tmp_path) as world:
        yield world


async def test_an_item_that_is_larger_than_all_there_is_fails_alone(little: World) -> None:
    client = Client(little)
    async with connected(little.device("a")):
        name = await client.open()
        await client.send(1, {"x": row(1, 2 * LARGE)})
        number, failure = await client.answer()
        assert number == 1
        assert isinstance(failure, pb.InferFailure)
        assert "1 MiB are allowed" in failure.message
        await client.send(2, {"x": row(2)})
        assert (await client.answer())[0] == 2
        assert await client.end() is grpc.StatusCode.OK
        await check_ended(little, name)


async def send_three(client: Client) -> None:
    for number in range(3):
        await client.send(number, {"x": row(number, LARGE)})


async def test_large_items_of_two_clients_are_answered_one_after_the_other(
    little: World, memory: CallMemory
) -> None:
    clients = [Client(little), Client(little)]
    async with connected(little.device("a")):
        for client in clients:
            await client.open()
        sent = [asyncio.create_task(send_three(client)) for client in clients]
        for client in clients:
            answers = [await client.answer() for _ in range(3)]
            assert {number for number, _ in answers} == {0, 1, 2}
            assert all(isinstance(made, dict) for _, made in answers)
        await asyncio.gather(*sent)
        for client in clients:
            assert await client.end() is grpc.StatusCode.OK
    assert memory._taken_bytes == 0


async def test_a_client_whose_own_items_take_long_waits_for_these(
    little: World, memory: CallMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On small devices an item may take minutes: then the next one is not refused."""
    monkeypatch.setattr(memory, "_wait_seconds", 0.01)
    client, gate = Client(little), asyncio.Semaphore(0)
    async with connected(little.device("a", gate=gate)):
        await client.open()
        sending = asyncio.create_task(send_three(client))
        for _ in range(20):
            await asyncio.sleep(0.01)
        for _ in range(9):
            gate.release()
        answers = [await client.answer() for _ in range(3)]
        assert [number for number, _ in answers] == [0, 1, 2]
        assert all(isinstance(made, dict) for _, made in answers)
        await sending
        assert await client.end() is grpc.StatusCode.OK


async def test_an_item_that_never_comes_whole_holds_nothing_when_its_client_has_gone(
    little: World, memory: CallMemory
) -> None:
    client = Client(little)
    name = await client.open()
    begin, *_ = frames_of(1, {"x": row(1, LARGE)})
    for _ in range(3):  # each gives back what the one before has taken
        await client._call.write(pb.InferRequest(frame=bytes(begin)))
    async with asyncio.timeout(SECONDS):
        while memory._taken_bytes == 0:
            await asyncio.sleep(0.01)
    assert memory._taken_bytes == np.zeros(LARGE, np.float32).nbytes
    client.cancel()
    await check_ended(little, name)
    assert memory._taken_bytes == 0
