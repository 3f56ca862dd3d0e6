"""What travels on the control streams: small inputs and results, several messages as one."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.scripted import connected, tensor
from coordinator.world import World
from shoal_coordinator.server.device_session import DeviceSession
from shoal_coordinator.storage.inputs import InputSet, scan_inputs
from shoal_coordinator.storage.job_records import CrashCount
from shoal_coordinator.storage.prefetch import InputPrefetch
from shoal_protocol.channels import MAXIMUM_MESSAGE_BYTES
from shoal_protocol.control import coordinators_stream
from shoal_protocol.frame_sizes import INLINE_BYTES
from shoal_protocol.pacing import BATCHED_MESSAGES
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.session_pb2 import AgentMessage, CoordinatorMessage, Execute, Hello, Probe


async def test_small_inputs_and_results_need_no_bulk_stream(world: World) -> None:
    rows = world.inputs(30, 10)
    device = world.device("a")
    async with connected(device):
        await world.submit()
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    world.check_results(rows)
    # The first ones may be wanted before they are read; what one device has it need not send.
    assert device.inline_inputs >= 40
    assert device.bulk_transfers <= 2 * 40 - device.inline_inputs


async def test_inputs_and_results_above_the_bound_go_the_other_way(world: World) -> None:
    rows = world.inputs(3, size=INLINE_BYTES // 4 + 1)
    device = world.device("a")
    async with connected(device):
        await world.submit()
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    world.check_results(rows)
    assert device.inline_inputs == 0
    assert device.bulk_transfers == 2 * 3 + 2 * 3


@pytest.mark.parametrize("spoil", [lambda frame: frame[:-1], lambda frame: b"nonsense"])
async def test_results_that_make_no_sense_fail_the_item(world: World, spoil: Any) -> None:
    world.inputs(1)
    device = world.device("a")
    device.spoil = lambda frame: spoil(frame) if frame else frame
    async with connected(device):
        await world.submit(backoff_limit=1)
        last = await world.ended()
    assert (last.state, last.failed) == (api.JobStatus.FAILED, 1)
    assert last.failures[0].reason.startswith("Runtime: ")


class AtOnce(Executor):
    """Runs what it is given, at once, and counts."""

    def __init__(self) -> None:
        self.visits = 0

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        self.visits += 1
        done: Future[Any] = Future()
        done.set_result(function(*arguments, **named))
        return done


def inputs_of(folder: Path, items: int) -> InputSet:
    folder.mkdir()
    np.savez(folder / "a.npz", x=np.arange(items * 4, dtype=np.float32).reshape(items, 1, 4))
    return scan_inputs(folder, (tensor("x"),))


def test_what_is_asked_for_in_order_is_read_in_rows(tmp_path: Path) -> None:
    inputs, reader = inputs_of(tmp_path / "in", 200), AtOnce()
    prefetch = InputPrefetch(inputs, reader, 16, CrashCount(tmp_path / "crashes"))
    found = [prefetch.cached(item, ["x"]) for item in range(200)]
    assert found[0] is None, "nobody had asked before"
    for item, arrays in enumerate(found[1:], 1):
        assert arrays is not None, item
        np.testing.assert_array_equal(arrays["x"], inputs.read(item)["x"])
    assert reader.visits == 4
    inputs.close()


def test_a_window_of_items_is_in_memory_when_it_is_asked_for_at_once(tmp_path: Path) -> None:
    inputs, reader = inputs_of(tmp_path / "in", 2000), AtOnce()
    prefetch = InputPrefetch(inputs, reader, 16, CrashCount(tmp_path / "crashes"))
    prefetch.look_ahead(0)
    assert reader.visits == 4, "and no more than a window"
    for first in range(0, 2000, 200):
        window = [prefetch.cached(item, ["x"]) for item in range(first, first + 200)]
        assert None not in window
        for item in range(first, first + 200):
            prefetch.forget(item)
    assert reader.visits == 32, "each item was read once"
    inputs.close()


def test_an_item_is_forgotten_when_it_has_ended_and_large_ones_are_left_alone(
    tmp_path: Path,
) -> None:
    inputs = inputs_of(tmp_path / "in", 10)
    prefetch = InputPrefetch(inputs, AtOnce(), 16, CrashCount(tmp_path / "crashes"))
    prefetch.cached(0, ["x"])
    assert prefetch.cached(1, ["x"]) is not None
    prefetch.forget(1)
    assert prefetch.cached(1, ["x"]) is None
    small = InputPrefetch(inputs, AtOnce(), 15, CrashCount(tmp_path / "crashes"))
    assert [small.cached(item, ["x"]) for item in range(10)] == [None] * 10
    inputs.close()


class Context:
    """A stream that keeps what is written to it, and is as slow as it is told."""

    def __init__(self) -> None:
        self.flows = asyncio.Event()
        self.written: list[CoordinatorMessage] = []

    async def write(self, message: CoordinatorMessage) -> None:
        await self.flows.wait()
        self.written.append(message)


async def no_requests() -> AsyncIterator[AgentMessage]:
    return
    yield


async def test_messages_that_wait_go_together_in_order_and_within_the_limits() -> None:
    session, context = DeviceSession(number=1, hello=Hello(device="a")), Context()
    stream = coordinators_stream(no_requests(), context.write)
    writing = asyncio.create_task(session.write_all(stream))
    frame = bytes(INLINE_BYTES)
    for number in range(300):
        session.send(CoordinatorMessage(execute=Execute(instruction=number, input_frame=frame)))
    session.send(CoordinatorMessage(probe=Probe(nonce=7)))
    context.flows.set()
    async with asyncio.timeout(60):
        while sum(len(each.batch.messages) or 1 for each in context.written) < 301:
            await asyncio.sleep(0)
    writing.cancel()
    heard = [m for each in context.written for m in (each.batch.messages or (each,))]
    assert [m.execute.instruction for m in heard[:-1]] == list(range(300))
    assert heard[-1].probe.nonce == 7
    sizes = [len(each.batch.messages) for each in context.written]
    assert max(sizes) == BATCHED_MESSAGES
    assert len(sizes) <= 300 // BATCHED_MESSAGES + 2
    assert max(each.ByteSize() for each in context.written) < MAXIMUM_MESSAGE_BYTES / 2
