"""What the agent does beside its session goes on after errors, and while the disk stands still."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from agent.fragment_making import InBlocks, dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ScriptedCoordinator
from agent.test_running import edge
from agent.test_slow_disk import stopped
from shoal_agent.agent import Agent
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES, MemoryMeter
from shoal_agent.settings import parse
from shoal_agent.telemetry.machine import Machine
from shoal_agent.transport.links import PeerLinks
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

MIB = 1 << 20


@pytest.fixture
async def agent(
    folder: Path, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Agent]:
    """One in the test's own process, with a session; its budget follows a limit. What the test
    itself makes beside it may be growth."""
    monkeypatch.setattr("shoal_agent.agent.RESERVES_BYTES", (LIBRARY_RESERVE_BYTES, 64 * MIB))
    where = ["--coordinator", f"unix:{folder}/c.sock", "--cache", str(folder / "cache")]
    agent = Agent(parse([*where, "--budget", "64Mi", "--speed", "/dev/null", "--threads", "1"]))
    running = asyncio.create_task(agent.run())
    await coordinator.device()
    yield agent
    running.cancel()
    await asyncio.wait((running,))


async def test_the_budget_follows_the_limit_again_after_an_error(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    floor = agent.hello().floor_bytes

    def limit(_: Machine) -> int:
        if not agent.counters.failures["limit"]:
            raise ZeroDivisionError("a bug")
        return floor + 32 * MIB

    monkeypatch.setattr(Machine, "memory_limit_bytes", limit)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while agent.fragments.ledger.budget != 32 * MIB:
            await asyncio.sleep(0.05)
    assert agent.counters.failures["limit"] == 1


async def test_a_budget_that_changes_again_is_adopted_while_fragments_follow_the_first_change(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    floor, fragments = agent.hello().floor_bytes, agent.fragments
    limits, followed = [floor + 32 * MIB], asyncio.Event()
    change_budget = fragments.change_budget

    async def slowly(budget: int) -> None:
        await change_budget(budget)
        await followed.wait()

    monkeypatch.setattr(fragments, "change_budget", slowly)
    monkeypatch.setattr(Machine, "memory_limit_bytes", lambda _: limits[-1])
    async with asyncio.timeout(PATIENCE_SECONDS):
        for size in (32 * MIB, 24 * MIB, 48 * MIB):
            limits.append(floor + size)
            while fragments.ledger.budget != size:
                await asyncio.sleep(0.01)
    assert not followed.is_set()
    followed.set()


async def test_without_a_limit_the_budget_is_what_the_settings_say_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int | None] = [agent.hello().floor_bytes + 32 * MIB]
    monkeypatch.setattr(Machine, "memory_limit_bytes", lambda _: limits[-1])
    async with asyncio.timeout(PATIENCE_SECONDS):
        while agent.fragments.ledger.budget != 32 * MIB:
            await asyncio.sleep(0.01)
        limits.append(None)
        while agent.fragments.ledger.budget == 32 * MIB:
            await asyncio.sleep(0.01)
    assert agent.fragments.ledger.budget == agent.settings.budget == 64 * MIB


async def test_the_coordinator_is_told_of_a_budget_before_what_follows_from_it(
    agent: Agent, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_fragment(coordinator.store, dense_model([512] * 9), 24 * MIB, InBlocks(8))
    limits = [agent.hello().floor_bytes + 64 * MIB]
    monkeypatch.setattr(Machine, "memory_limit_bytes", lambda _: limits[-1])
    (device,) = coordinator.devices.values()
    assert (await device.load(made.digest, made.resident_bytes)).HasField("loaded")
    said: list[tuple[int, dict[str, int]]] = []
    for size in (12 * MIB, made.least_bytes - 1):
        limits.append(agent.hello().floor_bytes + size)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not said or said[-1][0] != size:
                telemetry = await device.telemetry.get()
                if telemetry.HasField("budget_bytes"):
                    resident = {each.digest: each.resident_bytes for each in telemetry.resident}
                    said.append((telemetry.budget_bytes, resident))
    evicted = await asyncio.wait_for(device.evicted.get(), PATIENCE_SECONDS)
    assert evicted.digest == made.digest
    assert said == [(12 * MIB, {made.digest: 12 * MIB}), (made.least_bytes - 1, {})]
    reply = await device.load(made.digest, made.resident_bytes)
    assert reply.failure.have_bytes == made.least_bytes - 1


async def test_what_fits_a_budget_that_has_grown_is_taken_in_a_session_that_began_with_less(
    agent: Agent, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int | None] = [agent.hello().floor_bytes + 4 * MIB]
    monkeypatch.setattr(Machine, "memory_limit_bytes", lambda _: limits[-1])
    async with asyncio.timeout(PATIENCE_SECONDS):
        while agent.fragments.ledger.budget != 4 * MIB:
            await asyncio.sleep(0.01)
    (left,) = coordinator.devices.values()
    left.down.put_nowait(None)
    device = await coordinator.device()
    assert device.hello.budget_bytes == 4 * MIB
    limits.append(None)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while agent.fragments.ledger.budget == 4 * MIB:
            await asyncio.sleep(0.01)
    answer = await device.give(edge(-1, 0), {"x": np.ones(8 * MIB, np.uint8)})
    assert answer.outcome == Acknowledgement.ACCEPTED


async def test_an_agent_rests_after_an_error(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    hung_up = asyncio.Event()

    async def close_idle(_: PeerLinks) -> None:
        if not agent.counters.failures["rest"]:
            raise ZeroDivisionError("a bug")
        hung_up.set()

    monkeypatch.setattr(PeerLinks, "close_idle", close_idle)
    await asyncio.wait_for(hung_up.wait(), PATIENCE_SECONDS)
    assert agent.counters.failures["rest"] == 1


async def test_what_is_free_a_while_after_an_agent_began_to_rest_is_given_back_too(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung_up, given_back = list[PeerLinks](), list[int]()

    async def close_idle(links: PeerLinks) -> None:
        hung_up.append(links)

    monkeypatch.setattr(PeerLinks, "close_idle", close_idle)
    monkeypatch.setattr(MemoryMeter, "give_back", lambda _: given_back.append(len(hung_up)))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(given_back) < 2:
            await asyncio.sleep(0.05)
    assert given_back == [1, 2]


async def test_the_agent_goes_on_while_the_disk_forgets_what_the_last_session_had(
    agent: Agent, coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    (left,) = coordinator.devices.values()
    with stopped(monkeypatch, shutil, "rmtree") as disk:
        left.down.put_nowait(None)
        assert await asyncio.to_thread(disk.entered.wait, PATIENCE_SECONDS)
        assert not disk.leave.is_set()
        disk.leave.set()
        device = await coordinator.device()
    assert device.session > left.session
