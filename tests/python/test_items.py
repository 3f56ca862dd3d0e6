"""The items of a model between a program and a real coordinator, with devices that are played."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

import shoal
from coordinator.scripted import ScriptedDevice, connected, put_model, submission, whole_model
from shoal import items
from shoal.items import Items
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_protocol.channels import open_channel

X = np.ones((1, 4), np.float32)


class Bench:
    """A store with a model, and the coordinator's settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = f"unix:{folder}/s"
        self.document = put_model(folder / "store")
        self.settings = CoordinatorSettings(
            listen=self.target, store=folder / "store", state=folder / "state"
        )

    def items(self) -> Items:
        start = submission(self.document, self.folder, self.folder, name="model")
        # Another address for the same socket: else gRPC has the devices share its connection, with
        # the pauses that it makes while the coordinator is away.
        return Items(open_channel(f"unix:{self.folder}/./s"), start)

    def device(self, budget: int = 10_000, gate: asyncio.Semaphore | None = None) -> ScriptedDevice:
        return ScriptedDevice(self.target, "a", self.document, budget=budget, gate=gate)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


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
