"""A budget that is told in a file is adopted while the agent runs, larger ones than that of the
start among them; and an agent that starts has the newest."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from agent.conftest import environment
from agent.control_groups import limit
from agent.fragment_making import InBlocks, MadeFragment, dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ConnectedDevice, ScriptedCoordinator
from agent.test_memory_in_blocks import run
from shoal_agent.budget import ToldBudget
from shoal_agent.memory.told_budgets import LEAST_BYTES, left_by, read_budget
from shoal_agent.runtime.failures import OverBudget
from shoal_agent.runtime.fragments import Fragments
from shoal_protocol.units import Bytes

MIB = 1 << 20
WIDE = 4096


def wide_model() -> onnx.ModelProto:
    """Its activations take 24 MiB: 16 of WIDE rows and 1,024 columns, 8 of half of them."""
    text = (
        f"g (float[{WIDE},1] x, float[1,1024] w) => (float[1,1] y) {{"
        "table = Mul(x, w) rows = ReduceMax<axes = [1], keepdims = 1>(table)"
        "y = ReduceMax<axes = [0], keepdims = 1>(rows) }"
    )
    return helper.make_model(
        onnx.parser.parse_graph(text), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )


def item() -> dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    shapes = {"x": (WIDE, 1), "w": (1, 1024)}
    return {name: chance.random(shape, dtype=np.float32) for name, shape in shapes.items()}


# ---- what is believed ----------------------------------------------------------------------------


@given(st.integers(LEAST_BYTES, 1 << 50), st.integers(LEAST_BYTES, 1 << 50))
def test_no_budget_that_is_told_is_more_than_the_machine_has(told: int, machine: int) -> None:
    assert read_budget(f"{told}\n", machine) == min(told, machine)


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "64", "1e400", "64Mi 32Mi"])
def test_what_makes_no_sense_is_no_budget(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_budget(text, 1 << 30)


def test_a_unit_that_was_left_out_is_guessed() -> None:
    with pytest.raises(ValueError, match=r"^'64' is less than 1 MiB \(did you mean 64Mi\?\)$"):
        read_budget("64\n", 1 << 30)


def test_a_limit_never_leaves_more_than_it_has_beside_the_idle_agent() -> None:
    assert left_by(None, 60, 100) == 100
    assert left_by(150, 60, 100) == 90
    assert left_by(200, 60, 100) == 100
    assert left_by(50, 60, 100) == 0


def test_a_file_that_is_damaged_or_gone_leaves_the_budget_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "budget"
    told = ToldBudget(file, Bytes(64 * MIB), 1 << 40)
    assert told.read() == 64 * MIB
    for text, budget in (("32Mi", 32), ("nonsense", 32), ("", 32), ("96Mi", 96)):
        file.write_text(text)
        assert told.read() == budget * MIB
    file.write_bytes(b"\xff")
    assert told.read() == 96 * MIB
    file.unlink()
    assert told.read() == 96 * MIB


# ---- more than ever before -----------------------------------------------------------------------


async def test_what_outgrows_the_first_budget_runs_in_a_larger_one(
    tmp_path: Path, make: Callable[..., Fragments]
) -> None:
    made = write_fragment(tmp_path, wide_model(), 20 * MIB)
    evicted: list[str] = []
    fragments = make(budget=12 * MIB, on_evicted=lambda digest, _: evicted.append(digest))
    with pytest.raises(OverBudget):
        await fragments.load(made.digest, made.resident_bytes, [])
    await fragments.change_budget(72 * MIB)
    await fragments.load(made.digest, made.resident_bytes, [])
    result = await fragments.run(made.digest, item())
    x = item()
    assert np.array_equal(result.outputs["y"], (x["x"] * x["w"]).max(keepdims=True))
    assert 16 * MIB < result.peak_bytes < 72 * MIB
    assert evicted == []
    await fragments.change_budget(128 * MIB)
    assert evicted == [made.digest], "it has its arena, and another has to be made"
    assert fragments.ledger.budget == 128 * MIB
    await fragments.change_budget(100 * MIB)
    await fragments.load(made.digest, made.resident_bytes, [])
    await fragments.change_budget(128 * MIB)
    assert evicted == [made.digest], "so much there was before"
    await fragments.unload(made.digest)
    await fragments.close()


async def test_of_budgets_that_are_told_in_a_row_the_last_is_adopted(
    tmp_path: Path, make: Callable[..., Fragments]
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 24 * MIB, InBlocks(8))
    for last in (40, 80, 160):
        fragments = make(budget=32 * MIB)
        loading = asyncio.create_task(fragments.load(made.digest, made.resident_bytes, []))
        await asyncio.sleep(0)
        told = [fragments.change_budget(size * MIB) for size in (64, 20, 128, last)]
        # Where it does not fit one of them, it is given up while it is loaded.
        await asyncio.gather(loading, *told, return_exceptions=True)
        assert fragments.ledger.budget == last * MIB
        if made.digest not in fragments.ledger.resident:
            await fragments.load(made.digest, made.resident_bytes, [])
        await fragments.run(made.digest, {"x": np.ones((1, 512), np.float32)})
        await fragments.unload(made.digest)
        await fragments.close()


# ---- a process -----------------------------------------------------------------------------------


class Told:
    """An agent's process whose budget is told in a file, within a group where there is one."""

    def __init__(self, folder: Path, group: Path | None = None) -> None:
        self.folder = folder
        self.errors = folder / "agent.err"
        self.file = folder / "budget"
        self._group = group
        self._process: asyncio.subprocess.Process | None = None

    def tell(self, budget: str) -> None:
        """As a kubelet does it: as a whole."""
        new = self.folder / "budget.new"
        new.write_text(budget)
        new.rename(self.file)

    async def start(self) -> None:
        command = [sys.executable, "-m", "shoal_agent", "--name", "pi-4"]
        command += ["--budget-file", str(self.file), "--speed", os.devnull, "--threads", "1"]
        command += ["--coordinator", f"unix:{self.folder}/c.sock", "--log-level", "info"]
        command += ["--cache", str(self.folder / "cache")]
        if self._group is not None:
            joins = f'echo $$ > {self._group}/cgroup.procs && exec "$@"'
            command = ["sh", "-c", joins, "sh", *command]
        with self.errors.open("ab") as file:
            self._process = await asyncio.create_subprocess_exec(
                *command, stderr=file, env=environment()
            )

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(self._process.wait(), PATIENCE_SECONDS)

    async def says(self, words: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while words not in self.errors.read_text():
                await asyncio.sleep(0.05)


@pytest.fixture
async def told(folder: Path, coordinator: ScriptedCoordinator) -> AsyncIterator[Told]:
    agent = Told(folder)
    yield agent
    await agent.stop()


async def budget_reported(device: ConnectedDevice) -> int:
    """The next one that telemetry carries."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (telemetry := await device.telemetry.get()).HasField("budget_bytes"):
            pass
    return int(telemetry.budget_bytes)


async def run_one(device: ConnectedDevice, made: MadeFragment, number: int) -> int:
    """Run one item; its peak."""
    reply = await device.load(made.digest, made.resident_bytes)
    assert reply.HasField("loaded"), reply
    executed, output = await run(device, made, number)
    assert output.shape == (1, 1024)
    return int(executed.executed.peak_bytes)


@pytest.mark.real
async def test_a_budget_in_a_file_is_adopted_by_the_agent_that_runs_and_by_the_next(
    told: Told, coordinator: ScriptedCoordinator
) -> None:
    made = write_fragment(coordinator.store, dense_model([1024] * 9), 40 * MIB, InBlocks(8))
    told.tell("16Mi")
    await told.start()
    device = await coordinator.device()
    assert device.hello.budget_bytes == 16 * MIB
    for number, size in enumerate((64, 8, 32)):
        told.tell(f"{size * MIB}\n")
        assert await budget_reported(device) == size * MIB
        assert await run_one(device, made, number) <= size * MIB
    told.tell("nonsense")
    await told.says("the budget stays as it is")
    told.tell("40Mi")
    assert await budget_reported(device) == 40 * MIB
    await told.stop()
    await told.start()
    assert (await coordinator.device()).hello.budget_bytes == 40 * MIB


@pytest.mark.real
async def test_a_budget_that_is_told_waits_for_a_limit_that_has_room_for_it(
    folder: Path,
    coordinator: ScriptedCoordinator,
    group: Path,
) -> None:
    told = Told(folder, group)
    told.tell("32Mi")
    try:
        await told.start()
        device = await coordinator.device()
        floor = device.hello.floor_bytes
        limit(group, floor + 48 * MIB)
        told.tell("96Mi")
        assert await budget_reported(device) == 48 * MIB
        limit(group, floor + 112 * MIB)
        assert await budget_reported(device) == 96 * MIB
    finally:
        await told.stop()


def test_a_file_that_says_nothing_to_start_with_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "budget"
    command = [sys.executable, "-m", "shoal_agent", "--coordinator", "unix:/c", "--budget-file"]
    for text, said in ((None, "No such file"), ("lots", "lots"), ("1", "less than")):
        if text is not None:
            file.write_text(text)
        done = subprocess.run(
            [*command, str(file)], env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert said in done.stderr.splitlines()[-1]
