"""Devices that hold a valid session, and send what is not theirs or not what was declared."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest

from coordinator.scripted import Arrays, ScriptedDevice, Stage, connected
from coordinator.world import World
from shoal_coordinator.server.admission import DYNAMIC_TENSOR_BYTES, check_tensors
from shoal_protocol.frames import MalformedFrame
from shoal_protocol.partition import MODEL, TensorSpec
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import tensors_pb2 as pb


def key(item: int, producer: int, consumer: int, epoch: int = 1) -> ActivationKey:
    return ActivationKey(job="job", epoch=epoch, item=item, producer=producer, consumer=consumer)


@contextlib.asynccontextmanager
async def a_job_in_the_hands_of(
    world: World, honest: ScriptedDevice, thief: ScriptedDevice, gate: asyncio.Semaphore
) -> AsyncIterator[int]:
    """Every task is given to `honest`, which waits for permits; `thief` has a session alone. The
    epoch; the job ends with the block."""
    async with connected(honest, thief):
        placements = [api.StagePlacement(devices=[honest.name])] * 3
        await world.submit(stages=placements)
        await world.until(lambda status: any(stage.running for stage in status.stages))
        yield world.coordinator.driver.runs["job"].epoch
        for _ in range(1000):
            gate.release()
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message


async def test_results_of_a_task_are_taken_only_from_the_device_that_it_was_given(
    world: World,
) -> None:
    rows, gate = world.inputs(3), asyncio.Semaphore(0)
    honest, thief = world.device("a", gate=gate, budget=1500), world.device("b", budget=1)
    async with a_job_in_the_hands_of(world, honest, thief, gate) as epoch:
        for item in range(3):
            for stage, name in ((0, "early"), (2, "y")):
                forged = {name: np.full((1, 100), 666, np.float32)}
                answer = await thief.send_as(key(item, stage, MODEL, epoch), "", forged)
                assert answer.outcome == pb.Acknowledgement.STALE
                assert answer.message == f"item {item} of job was not given to this device"
    assert not thief.executed
    world.check_results(rows)


async def test_activations_are_relayed_only_along_the_routes_of_their_sender(world: World) -> None:
    rows, gate = world.inputs(2), asyncio.Semaphore(0)
    honest, thief = world.device("a", gate=gate, budget=1500), world.device("b", budget=1)
    async with a_job_in_the_hands_of(world, honest, thief, gate) as epoch:
        for item in range(2):
            forged = {"a": np.full((1, 100), 666, np.float32)}
            for consumer in (1, 2):
                answer = await thief.send_as(key(item, 0, consumer, epoch), "a", forged)
                assert answer.outcome == pb.Acknowledgement.STALE
                assert "is not this device's to send to a" in answer.message
    world.check_results(rows)


def spoiled(spoil: Stage) -> tuple[Stage, ...]:
    """The model's stages, where the last one does not give what is declared."""
    return (
        lambda t: {"a": 2 * t["x"], "early": -t["x"]},
        lambda t: {"b": t["a"] + 1},
        lambda t: spoil({"y": t["a"] + t["b"] + t["x"]}),
    )


def doubled(made: Arrays) -> Arrays:
    return {"y": made["y"].astype(np.float64)}


def flat(made: Arrays) -> Arrays:
    return {"y": made["y"][0]}


def two_rows(made: Arrays) -> Arrays:
    return {"y": np.concatenate([made["y"], made["y"]])}


@pytest.mark.parametrize("size", [100, 30_000])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (doubled, "tensor y: type float64 is not float32"),
        (flat, "does not fit [1,n]"),
        (two_rows, "does not fit [1,n]"),
    ],
)
async def test_a_result_that_is_not_as_declared_is_not_stored(
    world: World, spoil: Stage, reason: str, size: int
) -> None:
    """Small results go with the reply, large ones on the bulk stream."""
    world.inputs(1, size=size)
    async with connected(world.device("a", stages=spoiled(spoil))):
        await world.submit()
        last = await world.ended()
    assert (last.state, last.failed) == (api.JobStatus.FAILED, 1)
    assert "Runtime" in last.failures[0].reason
    if size == 100:
        assert reason in last.failures[0].reason


async def test_a_small_result_that_decodes_to_a_large_one_is_refused_by_its_header(
    world: World,
) -> None:
    rows, gate = world.inputs(1), asyncio.Semaphore(1)
    device = world.device("a", gate=gate)
    async with connected(device):
        await world.submit()
        await world.until(lambda status: status.stages[0].finished > 0)
        epoch = world.coordinator.driver.runs["job"].epoch
        gate.release()
        await world.until(lambda status: status.stages[2].running > 0)
        bomb = np.zeros((1, DYNAMIC_TENSOR_BYTES // 4 + 1), np.float32)
        answer = await device.send_as(key(0, 2, MODEL, epoch), "", {"y": bomb}, codec=pb.ZSTD)
        assert answer.outcome == pb.Acknowledgement.REFUSED
        assert "128 MiB are taken then" in answer.message
        gate.release()
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    world.check_results(rows)


def described(**tensors: np.ndarray) -> pb.Activation:
    return encode_activation(key(0, 0, 1), "", tensors, transfer=1).header.activation


def test_a_shape_that_is_declared_whole_may_be_as_large_as_it_says() -> None:
    fixed = {"a": TensorSpec(name="a", dtype="float", shape=(1, 50))}
    open_ended = {"a": TensorSpec(name="a", dtype="float", shape=(1, "n"))}
    unknown = {"a": TensorSpec(name="a", dtype="undefined", shape=None)}
    activation = described(a=np.zeros((1, 50), np.float32))
    check_tensors(activation, ["a"], fixed, most_bytes=100)
    for specs in (open_ended, unknown):
        check_tensors(activation, ["a"], specs, most_bytes=200)
        with pytest.raises(MalformedFrame, match="200 B where its declared shape is dynamic"):
            check_tensors(activation, ["a"], specs, most_bytes=199)


def test_the_tensors_must_be_those_of_the_edge_and_no_others() -> None:
    specs = {name: TensorSpec(name=name, dtype="float", shape=None) for name in "ab"}
    both = described(a=np.zeros(1, np.float32), b=np.zeros(1, np.float32))
    check_tensors(both, ["b", "a"], specs)
    for wanted in (["a"], [], ["a", "b", "c"]):
        with pytest.raises(MalformedFrame, match="tensors a, b where"):
            check_tensors(both, wanted, specs)
