"""`shoal devices`, `shoal jobs` and `shoal cancel`, against a real coordinator."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from coordinator.scripted import connected
from coordinator.world import World, running_world
from shoal_cli.commands.app import run_app

Shoal = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running_world(tmp_path) as world:
        yield world


@pytest.fixture
def shoal(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Shoal:
    """Runs a command about this coordinator; status, output and errors."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("SHOAL_COORDINATOR", world.target)
    monkeypatch.setenv("XDG_STATE_HOME", str(world.folder / "user"))

    async def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = await asyncio.to_thread(run_app, arguments)
        return status, *capsys.readouterr()

    return run


async def test_devices_are_listed_with_what_they_have(world: World, shoal: Shoal) -> None:
    async with connected(world.device("pi-4"), world.device("jetson")):
        _, listed, _ = await shoal("devices")
        rows = [line.split()[:2] for line in listed.splitlines()[2:]]
        assert rows == [["jetson", "ready"], ["pi-4", "ready"]]
        _, listed, _ = await shoal("devices", "--json")
        assert [device["name"] for device in json.loads(listed)] == ["jetson", "pi-4"]


async def test_a_coordinator_without_devices_and_jobs_says_so(shoal: Shoal) -> None:
    assert await shoal("devices") == (0, "", "no device has joined\n")
    assert await shoal("jobs") == (0, "", "no jobs\n")
    assert await shoal("jobs", "--json") == (0, "[]\n", "")


async def test_a_job_is_listed_cancelled_and_removed(world: World, shoal: Shoal) -> None:
    world.inputs(3)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("pi-4", gate=gate)):
        await world.submit(name="lines")
        _, listed, _ = await shoal("jobs")
        assert "lines  running    0/3" in listed
        assert await shoal("cancel", "lines") == (0, "lines: cancelled, 0 of 3 items done\n", "")
        _, listed, _ = await shoal("jobs")
        assert "cancelled by `shoal cancel`" in listed
        _, said, _ = await shoal("cancel", "lines", "--remove")
        assert said == "lines: cancelled, 0 of 3 items done, removed\n"
        assert (await shoal("jobs"))[2] == "no jobs\n"


async def test_a_job_may_be_called_as_its_manifest_calls_it_where_that_names_one(
    world: World, shoal: Shoal
) -> None:
    world.inputs(3)
    async with connected(world.device("pi-4", gate=asyncio.Semaphore(0))):
        await world.submit(name="lines-6f1c22ab")
        assert "lines-6f1c22ab does not follow its inputs" in (await shoal("end", "lines"))[2]
        _, said, _ = await shoal("cancel", "lines", "--remove")
        assert said == "lines-6f1c22ab: cancelled, 0 of 3 items done, removed\n"


async def test_of_several_jobs_of_a_name_none_is_cancelled(world: World, shoal: Shoal) -> None:
    world.inputs(3)
    async with connected(world.device("pi-4", gate=asyncio.Semaphore(0))):
        for name in ("lines-6f1c22ab", "lines-0d41b7aa"):
            await world.submit(name=name, outputs_uri=str(world.folder / name))
        status, _, said = await shoal("cancel", "lines")
        assert status == 2
        assert "2 jobs are called lines; name one: lines-6f1c22ab, lines-0d41b7aa" in said
        _, listed, _ = await shoal("jobs")
        assert "cancelled" not in listed
        await shoal("cancel", "lines-6f1c22ab", "lines-0d41b7aa")


async def test_a_program_gets_numbers_also_where_they_are_zero(world: World, shoal: Shoal) -> None:
    world.inputs(3)
    async with connected(world.device("pi-4", gate=asyncio.Semaphore(0))):
        await world.submit(name="lines")
        _, listed, _ = await shoal("jobs", "--json")
        (job,) = json.loads(listed)
        counts = [job[name] for name in ("state", "items", "succeeded", "failed", "following")]
        assert counts == ["RUNNING", 3, 0, 0, False]
        _, listed, _ = await shoal("devices", "--json")
        (device,) = json.loads(listed)
        assert (device["state"], device["budget_bytes"] > 0) == ("READY", True)
        assert "loading_seconds" not in device, "absent: nothing is being loaded"
        await shoal("cancel", "lines")


async def test_a_job_that_is_not_there_is_named(world: World, shoal: Shoal) -> None:
    status, _, said = await shoal("cancel", "lines")
    assert status == 2
    assert said.splitlines() == [
        "shoal: the coordinator refuses",
        f"  {world.target}: there is no job 'lines' here",
    ]


async def test_a_coordinator_that_is_away_may_be_there_another_time(shoal: Shoal) -> None:
    status, _, said = await shoal("jobs", "--coordinator", "unix:/nowhere/s")
    assert status == 1
    assert said.startswith("shoal: coordinator not reached\n  unix:/nowhere/s: ")


async def test_a_coordinator_that_was_not_joined_is_named_with_what_to_do(shoal: Shoal) -> None:
    status, _, said = await shoal("jobs", "--coordinator", "shelf.local:7400")
    assert status == 2
    assert "shelf.local:7400 was not joined by this user; `shoal invite --client`" in said


@pytest.mark.parametrize(
    ("option", "value"),
    [("--devices", "3"), ("--budget", "64Mi"), ("--threads", "2"), ("--enforce", "cgroup")],
)
async def test_a_run_on_a_coordinator_pretends_no_devices(
    shoal: Shoal, world: World, option: str, value: str
) -> None:
    (world.folder / "m.onnx").touch()
    model, there = str(world.folder / "m.onnx"), ("--coordinator", world.target)
    status, _, said = await shoal("run", model, *there, option, value)
    assert status == 2
    assert f"{option} is about devices of this machine" in " ".join(said.replace("│", "").split())


async def test_a_run_on_a_coordinator_without_devices_says_how_to_get_one(
    shoal: Shoal, world: World
) -> None:
    (world.folder / "m.onnx").touch()
    model, there = str(world.folder / "m.onnx"), ("--coordinator", world.target)
    status, _, said = await shoal("run", model, *there, "--inputs", "in", "--outputs", "out")
    assert status == 2
    assert "has no device that is ready; `shoal invite` on the coordinator's machine" in said
