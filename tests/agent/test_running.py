"""A real agent under a scripted coordinator: loads, tasks, routes, results."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import onnxruntime
import pytest

from agent.conftest import Joined
from agent.fragment_making import cut, dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ScriptedCoordinator
from shoal_protocol.tensors import ActivationKey
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

Join = Callable[..., Awaitable[Joined]]


def edge(producer: int, consumer: int, item: int = 0, epoch: int = 1) -> ActivationKey:
    return ActivationKey(job="j", epoch=epoch, item=item, producer=producer, consumer=consumer)


def task(stage: int, item: int = 0, epoch: int = 1) -> pb.Task:
    return pb.Task(job="j", epoch=epoch, item=item, stage=stage)


@pytest.mark.forked
async def test_a_pipeline_over_two_agents_gives_what_the_whole_model_gives(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    model = dense_model([64, 128, 96, 10])
    first, second = (write_fragment(coordinator.store, piece) for piece in cut(model, 2))
    front, back = await join("pi-4"), await join("jetson")
    for device, fragment in ((front.device, first), (back.device, second)):
        reply = await device.load(fragment.digest, fragment.resident_bytes)
        assert reply.loaded.fetched_bytes > 0, reply
        assert reply.loaded.processor_seconds > 0, reply
    for item in range(3):
        x = np.random.default_rng(item).standard_normal((item + 1, 64), dtype=np.float32)
        running = back.device.begin(
            "execute",
            pb.Execute(
                task=task(1, item),
                digest=second.digest,
                inputs=[pb.InputSource(producer=0, tensors=second.inputs)],
                results=second.outputs,
            ),
        )
        answer = await front.device.give(edge(-1, 0, item), {"x": x})
        assert answer.outcome == Acknowledgement.ACCEPTED, answer
        reply = await front.device.ask(
            "execute",
            pb.Execute(
                task=task(0, item),
                digest=first.digest,
                inputs=[pb.InputSource(producer=-1, tensors=["x"])],
                routes=[
                    pb.Route(
                        consumer=1,
                        device="jetson",
                        address=back.device.hello.address,
                        tensors=second.inputs,
                    )
                ],
            ),
        )
        assert list(reply.executed.delivered) == [1], reply
        result = await back.device.result()
        executed = (await asyncio.wait_for(running, PATIENCE_SECONDS)).executed
        assert min(executed.compute_seconds, executed.processor_seconds) > 0
        whole = onnxruntime.InferenceSession(model.SerializeToString())
        (expected,) = whole.run(None, {"x": x})
        np.testing.assert_allclose(result.tensors["y"], expected, atol=1e-5)
        assert result.key == edge(1, -1, item)
