"""A session in this process, whose disk stands still or whose coordinator does not read."""

import asyncio
import os
import shutil
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.fragment_making import cut, dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ConnectedDevice, ScriptedCoordinator
from agent.test_running import edge, task
from shoal_agent.cache import disk as disk_cache
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.cache.fetching import Fetcher
from shoal_agent.execution.values import Made
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime import opening
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.processor import Processor
from shoal_agent.session import control
from shoal_agent.session.control import Session
from shoal_agent.session.greeting import SessionBroken
from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.link import LinkMeters
from shoal_agent.transport import activations
from shoal_agent.transport.activations import ActivationStore, SpillFull
from shoal_agent.transport.links import PeerLinks
from shoal_agent.transport.shaping import Uplink
from shoal_protocol import PROTOCOL, pacing
from shoal_protocol.channels import open_channel
from shoal_protocol.pacing import Outbox
from shoal_protocol.services import SessionClient
from shoal_protocol.tensors import MODEL
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

MIB = 1 << 20
BUDGET = Bytes(64 * MIB)


async def at_once(_: int) -> None:
    """A link of any speed."""


class Agent:
    """The agent that a session belongs to: its real parts, without a process of its own."""

    name = "pi-4"

    largest_budget_bytes = BUDGET

    def __init__(self, folder: Path, processor: ThreadPoolExecutor) -> None:
        self.counters = Counters()
        self.uplink = Uplink()
        self.link_meters = LinkMeters()
        self.links = PeerLinks(None, self.uplink, self.counters, insecure=False)
        self._folder = folder
        cache, meter = FragmentCache(folder, 1 << 30), MemoryMeter()
        runtime = processor.submit(Runtime, meter, threads=1, limit_bytes=BUDGET).result()
        processor.submit(meter.settle).result()
        self.fragments = Fragments(
            ledger=Ledger(budget=BUDGET),
            cache=cache,
            fetcher=Fetcher(cache, lambda *_: None, at_once),
            runtime=runtime,
            processor=Processor(runtime, processor),
            counters=self.counters,
            on_evicted=lambda *_: None,
        )

    def hello(self) -> pb.Hello:
        return pb.Hello(protocol=PROTOCOL, device=self.name, budget_bytes=BUDGET)

    def resident(self) -> list[pb.ResidentFragment]:
        return []

    def telemetry(self) -> pb.Telemetry:
        return pb.Telemetry()

    def open_store(self) -> ActivationStore:
        store = ActivationStore(self._folder, 32 * MIB, self.fragments, self.fragments.buffers)
        self.fragments.spilling.spill = store.spill
        return store


@dataclass
class Joined:
    """A session in this process, and the coordinator's end of it."""

    agent: Agent
    device: ConnectedDevice


@pytest.fixture
async def agent(folder: Path) -> AsyncIterator[Agent]:
    with ThreadPoolExecutor(1) as processor:
        yield Agent(folder / "agent", processor)


@pytest.fixture
async def joined(
    agent: Agent, coordinator: ScriptedCoordinator, folder: Path
) -> AsyncIterator[Joined]:
    async with open_channel(f"unix:{folder}/c.sock") as channel:
        session = Session(agent, SessionClient(channel), None, agent.open_store())
        running = asyncio.create_task(session.run(lambda: None))
        yield Joined(agent, await coordinator.device())
        session.end("the test is over")
        with suppress(SessionBroken):
            await running
        await agent.links.close()


class StandingStill:
    """A function of the disk that does not return before the test lets it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.entered = threading.Event()
        self.leave = threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.entered.set()
        assert self.leave.wait(PATIENCE_SECONDS), "nothing else could run meanwhile"
        return self.function(*arguments, **options)


@contextmanager
def stopped(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> Iterator[StandingStill]:
    function = StandingStill(getattr(where, name))
    with monkeypatch.context() as patched:
        patched.setattr(where, name, function)
        yield function
    function.leave.set()


async def answers_probes_while(device: ConnectedDevice, disk: StandingStill) -> None:
    assert await asyncio.to_thread(disk.entered.wait, PATIENCE_SECONDS)
    for nonce in range(5):
        device.send(probe=pb.Probe(nonce=nonce))
        reply = await asyncio.wait_for(device.probe_replies.get(), PATIENCE_SECONDS)
        assert reply.nonce == nonce
    assert not disk.leave.is_set()
    disk.leave.set()


ROWS = np.ones((1024, 64), np.float32)


async def test_probes_are_answered_while_an_output_is_written_to_disk(
    joined: Joined, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 512]))
    device = joined.device
    await device.load(fragment.digest, BUDGET - MIB)
    await device.give(edge(-1, 0), {"x": ROWS})
    execute = pb.Execute(
        task=task(0),
        digest=fragment.digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        kept=["y"],
    )
    with stopped(monkeypatch, activations, "_write") as disk:
        waiting = device.begin("execute", execute)
        await answers_probes_while(device, disk)
        reply = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    assert reply.executed.output_bytes == 2 * MIB, reply
    route = pb.Route(consumer=MODEL, tensors=["y"])
    reply = await device.ask("forward", pb.Forward(task=task(0), route=route))
    assert reply.HasField("forwarded"), reply
    assert (await device.result()).tensors["y"].shape == (1024, 512)


async def test_probes_are_answered_while_an_activation_is_received_to_disk(
    joined: Joined, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 512]))
    device = joined.device
    await device.load(fragment.digest, BUDGET - MIB // 8)
    with stopped(monkeypatch, os, "posix_fallocate") as disk:
        giving = asyncio.create_task(device.give(edge(-1, 0), {"x": ROWS}))
        await answers_probes_while(device, disk)
        assert (await giving).outcome == Acknowledgement.ACCEPTED
    held = joined.agent.fragments.ledger
    assert (held.reserved, held.moving) == (0, 0), "it is on disk"


async def test_probes_are_answered_while_a_load_waits_for_activations_to_be_written(
    joined: Joined, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 512]))
    device = joined.device
    for item in range(3):
        await device.give(edge(-1, 0, item), {"x": ROWS})
    with stopped(monkeypatch, activations, "_write") as disk:
        loading = asyncio.create_task(device.load(fragment.digest, BUDGET))
        await answers_probes_while(device, disk)
        reply = await loading
    assert reply.HasField("loaded"), reply
    assert joined.agent.fragments.ledger.reserved == 0


async def test_what_a_run_uses_while_it_is_written_still_counts_where_that_fails(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    store, ledger, made = agent.open_store(), agent.fragments.ledger, Made("job", 1, 0, 0)
    await store.put(made, {"x": np.ones(MIB, np.uint8)})
    with stopped(monkeypatch, activations, "_write") as disk:
        spilling = asyncio.create_task(store.spill(MIB))
        assert await asyncio.to_thread(disk.entered.wait, PATIENCE_SECONDS)
        store.cover(made)
        await store.uncover(made)
        shutil.rmtree(folder / "agent" / "activations")
        (folder / "agent" / "activations").touch()  # nothing can be written there
        disk.leave.set()
        with pytest.raises(SpillFull):
            await spilling
    assert store.in_memory(made)
    assert ledger.reserved == MIB


async def test_nothing_runs_while_an_input_that_others_need_too_is_written(
    joined: Joined, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run had it in its fragment's share of the budget, which the next run needs."""
    first, second = (
        write_fragment(coordinator.store, each) for each in cut(dense_model([64, 512, 512]), 2)
    )
    device, fragments = joined.device, joined.agent.fragments
    ran: list[str] = []

    async def run(digest: str, tensors: Any) -> Any:
        ran.append(digest)
        return await original(digest, tensors)

    original = fragments.run
    monkeypatch.setattr(fragments, "run", run)

    def execute(stage: int, item: int) -> asyncio.Future[pb.Reply]:
        fragment = (first, second)[stage]
        order = pb.Execute(
            task=task(stage, item),
            digest=fragment.digest,
            inputs=[pb.InputSource(producer=stage - 1, tensors=fragment.inputs)],
            kept=fragment.outputs,
        )
        return device.begin("execute", order)

    for fragment, bytes_needed in ((first, BUDGET // 2), (second, BUDGET // 2 - 3 * MIB)):
        await device.load(fragment.digest, bytes_needed)
    for item in range(2):
        await device.give(edge(-1, 0, item), {"x": ROWS})
    assert (await execute(0, 0)).HasField("executed")
    with stopped(monkeypatch, activations, "_write") as disk:
        waiting = execute(1, 0), execute(0, 1)
        assert await asyncio.to_thread(disk.entered.wait, PATIENCE_SECONDS)
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert len(ran) == 2, "the next run has its memory only then"
        disk.leave.set()
        replies = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_SECONDS)
    assert all(reply.HasField("executed") for reply in replies), replies
    assert len(ran) == 3


async def test_what_was_written_to_disk_has_left_memory_when_the_next_run_begins(
    joined: Joined, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 512]))
    device, fragments = joined.device, joined.agent.fragments
    written: list[weakref.ref[Any]] = []
    left: list[bool] = []
    write, run = activations._write, fragments.run

    def writing(path: Path, arrays: Mapping[str, Any]) -> Any:
        written.extend(weakref.ref(array) for array in arrays.values())
        return write(path, arrays)

    async def running(digest: str, tensors: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(each() is not None for each in written) and time.monotonic() < deadline:
            time.sleep(0.01)  # the thread that wrote may not have let go of its arguments yet
        left.extend(each() is None for each in written)
        return await run(digest, tensors)

    monkeypatch.setattr(activations, "_write", writing)
    monkeypatch.setattr(fragments, "run", running)
    await device.load(fragment.digest, BUDGET - MIB)
    source = pb.InputSource(producer=-1, tensors=["x"])
    waiting = []
    for item in range(3):
        await device.give(edge(-1, 0, item), {"x": ROWS})
    for item in range(3):
        execute = pb.Execute(
            task=task(0, item), digest=fragment.digest, inputs=[source], kept=["y"]
        )
        waiting.append(device.begin("execute", execute))
    replies = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_SECONDS)
    assert all(reply.HasField("executed") for reply in replies), replies
    assert len(written) == 3
    assert left == [True] * 3


@pytest.mark.parametrize("name", ["description", "unplanned_inputs"])
async def test_probes_are_answered_while_a_manifest_is_read(
    joined: Joined, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 512]), unknown_sizes=True)
    with stopped(monkeypatch, opening, name) as disk:
        loading = asyncio.create_task(joined.device.load(fragment.digest, 8 * MIB))
        await answers_probes_while(joined.device, disk)
        reply = await loading
    assert reply.HasField("loaded"), reply


@pytest.mark.parametrize("name", ["make_room_to_prepare", "count_prepared"])
async def test_probes_are_answered_while_the_disk_is_measured_for_what_is_prepared(
    joined: Joined, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([512] * 9))
    with stopped(monkeypatch, joined.agent.fragments.cache, name) as disk:
        loading = asyncio.create_task(joined.device.load(fragment.digest, BUDGET))
        await answers_probes_while(joined.device, disk)
        reply = await loading
    assert reply.HasField("loaded"), reply


async def test_the_cache_is_read_while_the_files_of_a_fetched_fragment_are_looked_at(
    joined: Joined, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 512]))
    with stopped(monkeypatch, disk_cache, "inodes") as disk:
        ways = iter([disk.function])  # to make room for it, before it is here

        def inodes(*arguments: Any) -> Any:
            return next(ways, disk)(*arguments)

        monkeypatch.setattr(disk_cache, "inodes", inodes)
        loading = asyncio.create_task(joined.device.load(fragment.digest, BUDGET))
        assert await asyncio.to_thread(disk.entered.wait, PATIENCE_SECONDS)
        assert joined.agent.fragments.cache.cached() == {}
        disk.leave.set()
        reply = await loading
    assert reply.HasField("loaded"), reply
    assert fragment.digest in joined.agent.fragments.cache


async def test_what_is_dropped_while_it_is_written_leaves_nothing_behind(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    store = agent.open_store()
    key = Made("j", 1, 0, 0)
    await store.put(key, {"y": ROWS})
    assert agent.fragments.ledger.reserved == ROWS.nbytes
    with stopped(monkeypatch, activations, "_write") as disk:
        spilling = asyncio.create_task(store.spill(ROWS.nbytes))
        assert await asyncio.to_thread(disk.entered.wait, PATIENCE_SECONDS)
        store.drop([key])
        disk.leave.set()
        with suppress(activations.SpillFull):
            await spilling
    assert (store.held_bytes, store.spilled_bytes) == (0, 0)
    agent.fragments.buffers.give_back()
    assert agent.fragments.ledger.reserved == 0
    while list((folder / "agent" / "activations").iterdir()):
        await asyncio.sleep(0.01)


# ---- the outbox ----------------------------------------------------------------------------------


async def test_instructions_are_not_read_while_the_outbox_is_full(
    agent: Agent,
    coordinator: ScriptedCoordinator,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = asyncio.Event()
    outboxes: list[Outbox[pb.AgentMessage]] = []

    class Unread(Outbox[pb.AgentMessage]):
        """The other side does not read at first."""

        def __init__(self) -> None:
            super().__init__()
            outboxes.append(self)

        async def write_all(self, *arguments: Any, **options: Any) -> None:
            await reads.wait()
            await super().write_all(*arguments, **options)

    monkeypatch.setattr(control, "Outbox", Unread)
    monkeypatch.setattr(pacing, "UNSENT_MESSAGES", 8)
    async with open_channel(f"unix:{folder}/c.sock") as channel:
        session = Session(agent, SessionClient(channel), None, agent.open_store())
        running = asyncio.create_task(session.run(lambda: None))
        device = await coordinator.device()
        for nonce in range(500):
            device.send(probe=pb.Probe(nonce=nonce))
        while not agent.counters.full_queues["outbox"]:
            await asyncio.sleep(0.01)
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert len(outboxes[0]) == 8
        reads.set()
        for nonce in range(500):
            reply = await asyncio.wait_for(device.probe_replies.get(), PATIENCE_SECONDS)
            assert reply.nonce == nonce
        session.end("the test is over")
        with suppress(SessionBroken):
            await running
