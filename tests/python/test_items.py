"""The items of a model between a program and a real coordinator, with simulated devices."""

import asyncio
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import shoal
from coordinator.scripted import ScriptedDevice, connected, put_model, submission, whole_model
from shoal import calls, items
from shoal.items import Items
from shoal_coordinator.server import CoordinatorSettings, service, serving
from shoal_protocol.assembly import Limits
from shoal_protocol.bulk.local import LocalTransport
from shoal_protocol.called_items import ItemReader, LocalCall, frames_of
from shoal_protocol.channels import open_channel
from shoal_protocol.control import MessageTooLarge
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import split_frame
from shoal_protocol.v1 import coordinator_pb2 as pb

X = np.ones((1, 4), np.float32)


class Bench:
    """A store with a model, and the coordinator's settings."""

    def __init__(self, folder: Path, *, local: bool) -> None:
        """`local`: items go over a local stream, where there is one."""
        self.folder = folder
        self.local = local
        self.target = f"unix:{folder}/s"
        self.document = put_model(folder / "store")
        self.settings = CoordinatorSettings(
            listen=self.target, store=folder / "store", state=folder / "state"
        )

    def items(self) -> Items:
        start = submission(self.document, self.folder, self.folder, name="model")
        # Another address for the same socket: else gRPC has the devices share its connection, with
        # the pauses that it makes while the coordinator is away.
        channel = open_channel(f"unix:{self.folder}/./s")
        return Items(channel, self.target if self.local else "", start)

    def device(self, budget: int = 10_000, gate: asyncio.Semaphore | None = None) -> ScriptedDevice:
        return ScriptedDevice(self.target, "a", self.document, budget=budget, gate=gate)


@pytest.fixture(params=["local", "gRPC"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Bench:
    return Bench(tmp_path, local=request.param == "local")


async def test_items_wait_for_a_coordinator_that_comes_back(bench: Bench) -> None:
    sent = bench.items()
    gate = asyncio.Semaphore(0)
    async with serving(bench.settings), connected(bench.device(gate=gate)):
        answer = asyncio.create_task(sent.compute(0, {"x": X}))
        await asyncio.sleep(0.5)
        assert not answer.done()
    async with serving(bench.settings), connected(bench.device()):
        result = await asyncio.wait_for(answer, 20)
    np.testing.assert_allclose(result["y"], whole_model(X)["y"])
    await sent.close()


async def test_a_model_that_no_device_can_run_fails_every_call(bench: Bench) -> None:
    async with serving(bench.settings), connected(bench.device(budget=500)):
        sent = bench.items()
        for _ in range(2):
            with pytest.raises(shoal.ModelFailed, match="model: ") as caught:
                await asyncio.wait_for(sent.compute(0, {"x": X}), 20)
            assert (caught.value.need, caught.value.have) == (1000, 500)
        await sent.close()


async def test_an_item_that_fails_carries_its_place_and_its_device(bench: Bench) -> None:
    device = bench.device()
    device.spoil = lambda frame: b"nonsense" if frame else frame
    async with serving(bench.settings), connected(device):
        sent = bench.items()
        with pytest.raises(shoal.ItemFailed, match="item 7: ") as caught:
            await asyncio.wait_for(sent.compute(7, {"x": X}), 20)
        assert (caught.value.item, caught.value.device) == (7, "a")
        await sent.close()


async def test_a_coordinator_that_stays_away_fails_the_items(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "GIVE_UP_SECONDS", 0.1)
    sent = bench.items()
    with pytest.raises(shoal.PoolFailed, match=r"no coordinator for 0\.1 s: "):
        await asyncio.wait_for(sent.compute(0, {"x": X}), 20)
    await sent.close()


async def test_a_coordinator_that_refuses_says_why(bench: Bench) -> None:
    for folder in (bench.folder / "store" / "fragments").iterdir():
        (folder / "fragment.json").unlink()
    sent = bench.items()
    async with serving(bench.settings):
        with pytest.raises(shoal.PoolFailed, match="the fragment store lacks fragment 0"):
            await asyncio.wait_for(sent.compute(0, {"x": X}), 20)
    await sent.close()


@pytest.mark.parametrize(("item", "given"), [([X], "list"), (None, "NoneType"), ({1: X}, "int")])
def test_what_is_no_item_is_named(item: Any, given: str) -> None:
    with pytest.raises(TypeError, match=f"by the names of the model's inputs, not .*{given}"):
        items.own_arrays(item)


@pytest.mark.parametrize("kind", [object, str, np.dtypes.StringDType()], ids=["O", "U", "T"])
def test_text_is_taken_in_each_of_the_forms_that_numpy_has(kind: Any) -> None:
    inputs = items.own_arrays({"x": np.array([["a", "é"], ["", "long" * 20]], kind)})
    reader = ItemReader(lambda _: None, Limits())
    called = [reader.add(*split_frame(bytes(frame))) for frame in frames_of(0, inputs)][-1]
    assert called is not None
    assert called.tensors["x"].tolist() == [["a", "é"], ["", "long" * 20]]


async def test_items_go_over_a_local_stream_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, local=True)
    start = submission(bench.document, tmp_path, tmp_path, name="model")
    async with serving(bench.settings) as coordinator, connected(bench.device()):
        sent = Items(open_channel(f"unix:{tmp_path}/nobody"), bench.target, start)
        result = await asyncio.wait_for(sent.compute(0, {"x": X}), 20)
        np.testing.assert_allclose(result["y"], whole_model(X)["y"])
        assert coordinator.driver.runs
        await sent.close()
        async with asyncio.timeout(60):
            while coordinator.driver.runs or coordinator.driver.state.jobs:
                await asyncio.sleep(0.01)


async def test_a_model_that_a_local_stream_cannot_begin_with_goes_over_grpc(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LOCAL_MESSAGE_BYTES", 0)
    async with serving(bench.settings), connected(bench.device()):
        sent = bench.items()
        result = await asyncio.wait_for(sent.compute(0, {"x": X}), 20)
        await sent.close()
    np.testing.assert_allclose(result["y"], whole_model(X)["y"])


@pytest.mark.parametrize("side", [calls, service], ids=["program", "coordinator"])
async def test_a_message_that_a_local_stream_cannot_carry_goes_over_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: ModuleType
) -> None:
    monkeypatch.setattr(side, "LocalCall", Narrow)
    bench = Bench(tmp_path, local=True)
    async with serving(bench.settings), connected(bench.device()):
        sent = bench.items()
        result = await asyncio.wait_for(sent.compute(0, {"x": X}), 20)
        await sent.close()
    np.testing.assert_allclose(result["y"], whole_model(X)["y"])


class Narrow(LocalCall[Any, Any]):
    async def write(self, message: Any) -> None:
        raise MessageTooLarge(f"{message} does not fit")


async def test_a_message_beyond_a_frame_is_refused_before_it_is_written() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        stream: LocalCall[pb.InferRequest, pb.InferAnswer] = LocalCall(
            LocalTransport(ours), pb.InferAnswer.FromString
        )
        with pytest.raises(MessageTooLarge, match=r"a message of 10485\d\d bytes"):
            await stream.write(pb.InferRequest(frame=bytes(MAXIMUM_PAYLOAD_BYTES)))
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


@pytest.mark.parametrize("item", [0, 1])
def test_a_mask_of_0_and_255_that_is_viewed_as_truth_values_is_taken(item: int) -> None:
    masks = np.array([[0, 255, 1], [0, 2, 0]], np.uint8).view(bool)
    inputs = items.own_arrays({"mask": masks[:, item:], "x": np.zeros(1)})
    reader = ItemReader(lambda _: None, Limits())
    (frame,) = frames_of(0, inputs)
    called = reader.add(*split_frame(bytes(frame)))
    assert called is not None
    expected = np.array([[0, 255, 1], [0, 2, 0]])[:, item:] != 0
    np.testing.assert_array_equal(called.tensors["mask"], expected)
