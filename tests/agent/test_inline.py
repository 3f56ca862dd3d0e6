"""Tasks whose inputs come with them, results that go with the reply, messages sent as one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from agent.conftest import Joined
from agent.fragment_making import MadeFragment, dense_model, write_fragment
from agent.scripted_coordinator import ConnectedDevice, ScriptedCoordinator
from agent.test_running import edge, task
from shoal_protocol.assembly import ActivationAssembler
from shoal_protocol.pacing import BATCHED_MESSAGES
from shoal_protocol.tensors import Array, encode_activation
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20
pytestmark = pytest.mark.forked


@pytest.fixture
def fragment(coordinator: ScriptedCoordinator) -> MadeFragment:
    return write_fragment(coordinator.store, dense_model([64, 512, 64]))


def framed(x: Array, item: int = 0, device: str = "pi-4") -> bytes:
    (frame,) = encode_activation(edge(-1, 0, item), device, {"x": x}, transfer=0)
    return frame


def execute(fragment: MadeFragment, item: int = 0, **more: Any) -> pb.Execute:
    return pb.Execute(
        task=task(0, item),
        digest=fragment.digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        results=["y"],
        **more,
    )


async def test_inputs_come_with_the_task_and_results_go_with_the_reply(
    join: Join, fragment: MadeFragment
) -> None:
    device = (await join()).device
    await device.load(fragment.digest, fragment.resident_bytes)
    x = np.random.default_rng(0).standard_normal((1, 64), dtype=np.float32)
    whole = execute(fragment, 0, input_frame=framed(x), reply_bytes=4 * 64)
    reply = await device.ask("execute", whole)
    received = ActivationAssembler().feed(reply.executed.result_frame)
    assert received is not None
    assert received.key == edge(0, -1)
    # One byte more than the coordinator wants there goes the other way.
    large = execute(fragment, 1, input_frame=framed(x, 1), reply_bytes=4 * 64 - 1)
    reply = await device.ask("execute", large)
    assert reply.HasField("executed")
    assert reply.executed.result_frame == b""
    np.testing.assert_array_equal((await device.result()).tensors["y"], received.tensors["y"])
    assert device.results.empty()


async def test_inputs_that_are_refused_fail_their_task_with_the_reason(
    join: Join, fragment: MadeFragment
) -> None:
    device = (await join()).device
    await device.load(fragment.digest, fragment.resident_bytes)
    good = framed(np.ones((1, 64), np.float32))
    for number, (frame, reason) in enumerate(
        (
            (good[:-1], "bytes where"),
            (b"nonsense", "does not start with a header"),
            (framed(np.ones((1, 64), np.float32), device="jetson"), "it is for 'jetson'"),
        )
    ):
        reply = await device.ask("execute", execute(fragment, number, input_frame=frame))
        assert reply.failure.code == pb.INVALID_INPUT
        assert reason in reply.failure.message
    device.send(cancel=pb.Cancel(job="j", epoch=7))
    reply = await device.ask("execute", execute(fragment, 9, input_frame=good))
    assert reply.failure.code == pb.CANCELLED


INPUT = np.ones((256, 1024), np.float32)


async def full(
    coordinator: ScriptedCoordinator, join: Join
) -> tuple[ConnectedDevice, MadeFragment]:
    """A device that has inputs of six items, and no room for more; its fragment."""
    fragment = write_fragment(coordinator.store, dense_model([1024, 16]), 14 * MIB)
    device = (await join("pi-4", "--cache-size", "24Mi", budget="16Mi")).device
    await device.load(fragment.digest, 14 * MIB)
    given = [await device.give(edge(-1, 0, item), {"x": INPUT}) for item in range(7)]
    assert given[-1].outcome == Acknowledgement.BUSY, "the device is full"
    return device, fragment


async def test_a_task_waits_where_there_is_no_room_for_what_came_with_it(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    device, fragment = await full(coordinator, join)
    small = framed(np.ones((240, 1024), np.float32), 10)
    waiting = device.begin("execute", execute(fragment, 10, input_frame=small))
    in_vain = device.begin(
        "execute", execute(fragment, 11, input_frame=framed(INPUT, 11), deadline_seconds=0.3)
    )
    assert (await asyncio.wait_for(in_vain, 20)).failure.code == pb.DEADLINE
    assert not waiting.done()
    for item in range(6):
        assert (await device.ask("execute", execute(fragment, item))).HasField("executed")
    assert (await asyncio.wait_for(waiting, 20)).HasField("executed")


async def test_a_task_whose_inputs_find_no_room_is_given_back_as_what_waits_may_be_in_the_way(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    device, fragment = await full(coordinator, join)
    order = execute(fragment, 10, input_frame=framed(np.ones((240, 1024), np.float32), 10))
    reply = await device.ask("execute", order)
    assert reply.failure.code == pb.DISK_FULL
    assert "no room for the inputs" in reply.failure.message


async def test_replies_that_wait_go_together_within_the_bound(join: Join) -> None:
    device = (await join()).device
    # Each is answered at once: the fragment is not resident.
    tasks = [pb.Execute(task=task(0, item), digest=f"sha256:{item:064}") for item in range(300)]
    for number, each in enumerate(tasks):
        each.instruction = number + 1000
        device.replies[each.instruction] = asyncio.get_running_loop().create_future()
    answers = [device.replies[each.instruction] for each in tasks]
    messages = [pb.CoordinatorMessage(execute=each) for each in tasks]
    device.send(batch=pb.CoordinatorBatch(messages=messages))
    replies = await asyncio.wait_for(asyncio.gather(*answers), 20)
    assert [reply.instruction for reply in replies] == list(range(1000, 1300))
    assert {reply.failure.code for reply in replies} == {pb.NOT_RESIDENT}
    assert max(device.batches) == BATCHED_MESSAGES
