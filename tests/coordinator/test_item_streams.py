"""`Infer`: items over a call, and their results over the same call."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import grpc
import numpy as np
import pytest

from coordinator.dispatch.invariants import violations
from coordinator.scripted import connected, put_model, submission, whole_model
from coordinator.world import World, refusal
from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.server import CoordinatorSettings, item_streams, serving
from shoal_coordinator.server.stream_runs import Item, StreamRun
from shoal_protocol.assembly import Limits
from shoal_protocol.bulk.local import INFER, connect
from shoal_protocol.called_items import CalledItem, ItemReader, frames_of
from shoal_protocol.channels import open_channel
from shoal_protocol.control import LocalControl
from shoal_protocol.frames import split_frame
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub

SECONDS = 60.0


class Client:
    """One call, from its first message on."""

    def __init__(self, world: World, **start: object) -> None:
        self._call = world.stub.Infer(timeout=60)
        self._start = world.request(name="calls", **start)
        self._reader = ItemReader(lambda _: None, Limits())
        self.whole: dict[int, bool] = {}
        """How each item was answered."""

    async def open(self) -> str:
        await self._call.write(pb.InferRequest(start=self._start))
        return (await self._read()).started

    async def send(
        self, number: int, arrays: Mapping[str, np.ndarray], *, whole: bool = True
    ) -> None:
        for frame in frames_of(number, arrays, whole=whole):
            await self._call.write(pb.InferRequest(frame=bytes(frame)))

    async def answer(self) -> tuple[int | None, Mapping[str, np.ndarray] | pb.InferFailure]:
        while True:
            message = await self._read()
            if message.WhichOneof("message") == "failure":
                failure = message.failure
                return (failure.item if failure.HasField("item") else None), failure
            if (item := self._reader.add(*split_frame(message.frame))) is not None:
                self.whole[item.number] = item.whole
                return item.number, item.tensors

    async def end(self) -> grpc.StatusCode:
        await self._call.done_writing()
        return await self._call.code()

    def cancel(self) -> None:
        self._call.cancel()

    async def _read(self) -> pb.InferAnswer:
        async with asyncio.timeout(SECONDS):
            message = await self._call.read()
        assert message is not grpc.aio.EOF, await self._call.details()
        return cast(pb.InferAnswer, message)


def row(number: int, size: int = 8) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(1, size)).astype(np.float32)


async def check_ended(world: World, name: str) -> None:
    """Wait until nothing is left of a call, and the dispatcher is sound."""
    driver = world.coordinator.driver
    async with asyncio.timeout(SECONDS):
        while name in driver.state.jobs or name in driver.runs:
            await asyncio.sleep(0.01)
    assert violations(driver.state) == []


@pytest.mark.parametrize(("size", "frame_bytes"), [(8, 256), (100_000, 1 << 16)])
async def test_each_item_is_answered_once_with_its_own_results(
    world: World, size: int, frame_bytes: int
) -> None:
    client, numbers = Client(world), [7, 3, 100, 5]
    devices = [world.device(name, frame_bytes=frame_bytes) for name in ("a", "b")]
    async with connected(*devices):
        name = await client.open()
        for number in numbers:
            await client.send(number, {"x": row(number, size)}, whole=number > 4)
        answers = [await client.answer() for _ in numbers]
        assert await client.end() is grpc.StatusCode.OK
        await check_ended(world, name)
    assert sorted(number for number, _ in answers if number is not None) == sorted(numbers)
    assert client.whole == {number: number > 4 and size == 8 for number in numbers}
    for key, made in answers:
        assert key is not None
        assert isinstance(made, dict)
        for output, expected in whole_model(row(key, size)).items():
            np.testing.assert_allclose(made[output], expected, atol=1e-5)


async def test_one_call_answers_items_that_come_one_after_the_other(world: World) -> None:
    client = Client(world)
    async with connected(world.device("a")):
        await client.open()
        for number in range(3):
            await client.send(number, {"x": row(number)})
            assert (await client.answer())[0] == number
        assert await client.end() is grpc.StatusCode.OK


async def test_answers_leave_before_the_dispatcher_learns_of_them(tmp_path: Path) -> None:
    events: list[ev.Event] = []
    answered: list[Item] = []
    document = put_model(tmp_path)
    run = StreamRun("calls", document, events.append, answered.append, batch=1)
    for number in (7, 8):
        run.add(CalledItem(number, {}, 0, whole=True))
    events.clear()
    for item in (0, 1):
        run.finish(item, attempts=1)
    assert ([each.number for each in answered], events) == ([7, 8], [])
    await asyncio.sleep(0)
    (stored,) = events
    assert isinstance(stored, ev.ItemsStored)
    assert stored.items == (0, 1)


async def test_an_item_that_has_travelled_is_answered_before_it_is_finished_and_once(
    tmp_path: Path,
) -> None:
    answered: list[Item] = []
    run = StreamRun("calls", put_model(tmp_path), lambda _: None, answered.append, batch=1)
    for number in (7, 8):
        run.add(CalledItem(number, {}, 0, whole=True))
    run.take_travelled([(0, {"y": row(0)})])
    assert [(each.number, list(each.results)) for each in answered] == [(7, ["y"])]
    run.finish(0, attempts=1)
    run.finish(1, attempts=1)
    assert [each.number for each in answered] == [7, 8]


@pytest.mark.parametrize(
    "arrays",
    [
        {"z": row(0)},
        {"x": row(0).astype(np.float64)},
        {"x": row(0)[0]},
        {"x": row(0), "more": row(0)},
    ],
)
async def test_an_item_that_does_not_suit_the_model_fails_alone(
    world: World, arrays: Mapping[str, np.ndarray]
) -> None:
    client = Client(world)
    async with connected(world.device("a")):
        await client.open()
        await client.send(0, arrays)
        await client.send(1, {"x": row(1)})
        answers = dict([await client.answer(), await client.answer()])
        assert await client.end() is grpc.StatusCode.OK
    failure = answers[0]
    assert isinstance(failure, pb.InferFailure)
    assert failure.kind == "InvalidInput"
    assert isinstance(answers[1], dict)


async def test_an_item_that_fails_on_its_devices_names_the_last_one(world: World) -> None:
    client, device = Client(world, backoff_limit=1), world.device("a")
    device.spoil = lambda frame: b"nonsense" if frame else frame
    async with connected(device):
        await client.open()
        await client.send(4, {"x": row(4)})
        number, failure = await client.answer()
    assert number == 4
    assert isinstance(failure, pb.InferFailure)
    assert (failure.kind, failure.device) == ("Runtime", "a")
    client.cancel()


async def test_nothing_is_left_of_a_client_that_goes_away(world: World) -> None:
    client, gate = Client(world), asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        name = await client.open()
        await client.send(0, {"x": row(0)})
        client.cancel()
        await check_ended(world, name)


async def test_nothing_is_left_of_a_local_client_that_goes_away_while_it_is_not_read(
    world: World,
) -> None:
    bound = item_streams.UNANSWERED_ITEMS
    transport = connect(world.target, suffix=INFER)
    assert transport is not None
    stream: LocalControl[pb.InferRequest, pb.InferAnswer] = LocalControl(
        transport, pb.InferAnswer.FromString
    )
    start = world.request(name="calls")
    await stream.write([pb.InferRequest(start=start)])
    (answer,) = await anext(stream.received())
    for number in range(bound + 20):
        (frame,) = frames_of(number, {"x": row(number)})
        await stream.write([pb.InferRequest(frame=bytes(frame))])
    jobs = world.coordinator.driver.state.jobs
    async with asyncio.timeout(SECONDS):
        while jobs[answer.started].items < bound:
            await asyncio.sleep(0.01)
    await stream.close()
    await check_ended(world, answer.started)


async def test_a_client_is_read_no_further_than_the_bound(world: World) -> None:
    client, gate = Client(world), asyncio.Semaphore(0)
    bound = item_streams.UNANSWERED_ITEMS
    async with connected(world.device("a", gate=gate)):
        name = await client.open()
        for number in range(bound + 20):
            await client.send(number, {"x": row(number)})
        jobs = world.coordinator.driver.state.jobs
        async with asyncio.timeout(SECONDS):
            while jobs[name].items < bound:
                await asyncio.sleep(0.01)
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert jobs[name].items == bound
        for _ in range(3 * (bound + 20)):
            gate.release()
        numbers = {(await client.answer())[0] for _ in range(bound + 20)}
        assert await client.end() is grpc.StatusCode.OK
    assert numbers == set(range(bound + 20))


async def test_a_model_that_fits_on_no_device_ends_the_call_with_need_and_have(
    world: World,
) -> None:
    client = Client(world)
    async with connected(world.device("a", budget=500)):
        await client.open()
        number, failure = await client.answer()
        assert await client.end() is grpc.StatusCode.OK
    assert number is None
    assert isinstance(failure, pb.InferFailure)
    assert (failure.kind, failure.need_bytes, failure.have_bytes) == ("Budget", 1000, 500)


async def test_a_call_whose_fragments_are_not_there_is_refused(world: World) -> None:
    for folder in (world.folder / "store" / "fragments").iterdir():
        (folder / "fragment.json").unlink()
    call = world.stub.Infer(timeout=60)
    await call.write(pb.InferRequest(start=world.request(name="calls")))
    code, reason = await refusal(call.read())
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "the fragment store lacks fragment 0" in reason


async def test_bytes_that_are_no_frame_end_the_call(world: World) -> None:
    call = world.stub.Infer(timeout=60)
    await call.write(pb.InferRequest(start=world.request(name="calls")))
    await call.read()
    await call.write(pb.InferRequest(frame=b"nonsense"))
    code, reason = await refusal(call.read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "frame" in reason


async def test_one_client_too_many_is_refused_until_another_leaves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_streams, "MAXIMUM_STREAMS", 1)
    first = Client(world)
    name = await first.open()
    call = world.stub.Infer(timeout=60)
    await call.write(pb.InferRequest(start=world.request(name="calls")))
    code, reason = await refusal(call.read())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "close one of them" in reason
    first.cancel()
    await check_ended(world, name)
    assert (await Client(world).open()).startswith("calls.")


async def test_a_coordinator_that_stops_ends_its_calls_at_once(tmp_path: Path) -> None:
    document, target = put_model(tmp_path / "store"), f"unix:{tmp_path}/s"
    settings = CoordinatorSettings(
        listen=target, store=tmp_path / "store", state=tmp_path / "state"
    )
    async with open_channel(target) as channel:
        async with serving(settings):
            call = CoordinatorStub(channel).Infer(timeout=60)
            start = submission(document, tmp_path, tmp_path, name="calls")
            await call.write(pb.InferRequest(start=start))
            await call.read()
        code, reason = await refusal(call.read())
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "the coordinator stops")
