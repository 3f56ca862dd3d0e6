"""What the agent does beside its session goes on after an error of this program."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.scripted_coordinator import PATIENCE_SECONDS, ScriptedCoordinator
from shoal_agent.agent import Agent
from shoal_agent.settings import parse
from shoal_agent.telemetry.machine import Machine
from shoal_agent.transport.links import PeerLinks

MIB = 1 << 20


@pytest.fixture
async def agent(folder: Path, coordinator: ScriptedCoordinator) -> AsyncIterator[Agent]:
    """One in the test's own process, with a session; its budget follows a limit."""
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


async def test_an_agent_rests_after_an_error(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    hung_up = asyncio.Event()

    async def close_idle(_: PeerLinks) -> None:
        if not agent.counters.failures["rest"]:
            raise ZeroDivisionError("a bug")
        hung_up.set()

    monkeypatch.setattr(PeerLinks, "close_idle", close_idle)
    await asyncio.wait_for(hung_up.wait(), PATIENCE_SECONDS)
    assert agent.counters.failures["rest"] == 1
