"""Runs that take next to no time happen in the event loop's thread; one that goes on is ended."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from agent.conftest import Joined
from agent.fragment_making import write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ConnectedDevice, ScriptedCoordinator
from agent.test_running import edge, task
from shoal_agent.runtime import watchdog
from shoal_agent.runtime.watchdog import Watchdog
from shoal_protocol.v1 import session_pb2 as pb

Join = Callable[..., Awaitable[Joined]]
FOR_EVER = 1 << 40


class Looks:
    """When a watchdog's thread looks: its pauses end when the test says so."""

    def __init__(self) -> None:
        self._rests, self._goes_on = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, _: float) -> None:
        self._rests.release()
        assert self._goes_on.acquire(timeout=PATIENCE_SECONDS)

    def look(self) -> None:
        """The thread looks once, and rests again."""
        assert self._rests.acquire(timeout=PATIENCE_SECONDS)
        self._goes_on.release()
        assert self._rests.acquire(timeout=PATIENCE_SECONDS)
        self._rests.release()

    def end(self) -> None:
        """The thread looks once more, and finds no work."""
        self._goes_on.release()


def test_of_much_short_work_none_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each look there is some, and at no two looks the same."""
    looks, stopped = Looks(), threading.Event()
    made = vars(threading) | {"Event": lambda: looks}
    monkeypatch.setattr(watchdog, "threading", SimpleNamespace(**made))
    watched = Watchdog(stopped.set)
    for _ in range(5):
        with watched:
            looks.look()
    assert not stopped.is_set()
    with watched:
        looks.look()
        looks.look()
    assert stopped.is_set()
    looks.end()


def test_work_that_goes_on_is_stopped() -> None:
    stopped = threading.Event()
    watched = Watchdog(stopped.set, long_seconds=0.01)
    for _ in range(2):  # the second time after its thread has ended
        with watched:
            assert stopped.wait(10)
        stopped.clear()
        for thread in threading.enumerate():
            if thread.name == "watchdog":
                thread.join(10)


def counting_model() -> ModelProto:
    """y = 1 + ... + 1, x[0] times: how long it takes is in the data, not in the shape."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["goes_on"]),
            helper.make_node("Add", ["sum", "one"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.INT64, [1]),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.INT64, [1]),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["x", "", "zero"], ["y"], name="turns", body=body)],
        "counting",
        [helper.make_tensor_value_info("x", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [1])],
        [
            numpy_helper.from_array(np.zeros(1, np.int64), "zero"),
            numpy_helper.from_array(np.ones(1, np.int64), "one"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


async def count(
    device: ConnectedDevice, digest: str, item: int, turns: int, seconds: float = PATIENCE_SECONDS
) -> pb.Reply:
    """What comes of an item that may take so many seconds."""
    await device.give(edge(-1, 0, item), {"x": np.array([turns])})
    execute = pb.Execute(
        task=task(0, item),
        digest=digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        results=["y"],
        deadline_seconds=seconds,
    )
    reply = await device.ask("execute", execute)
    if reply.WhichOneof("outcome") == "executed":
        result = await device.result()
        np.testing.assert_array_equal(result.tensors["y"], [turns])
    return reply


@pytest.mark.forked
async def test_a_run_that_was_always_short_still_meets_its_deadline(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, counting_model(), 1 << 20)
    joined = await join()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    for item in range(20):
        assert (await count(joined.device, fragment.digest, item, item)).HasField("executed")
    endless = asyncio.create_task(count(joined.device, fragment.digest, 20, FOR_EVER, 2.0))
    reply = await asyncio.wait_for(endless, PATIENCE_SECONDS)
    assert reply.failure.code == pb.DEADLINE, reply
    said = reply.failure.message
    assert said.startswith(f"stage 0 (fragment {fragment.digest[:19]}) ran for ")
    assert "as long as a task may, and was stopped in its Loop node 'turns'" in said
    after = await count(joined.device, fragment.digest, 21, 3)
    assert after.HasField("executed"), after
