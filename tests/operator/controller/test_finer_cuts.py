"""A model whose fragments take more than was planned, on a real API server, with a real pool."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pool import read_results

from operator_processes import Operators
from parity_with_whole import TOLERANCE, largest_difference, whole
from shoal_cluster import ControlPlane
from simulated_world import NAMESPACE, World, job_spec, making_world, operating
from underestimated import spoken, underestimated, write_inputs, write_spoken

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.own_plane,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
ITEMS = 4
JOB = "hidden"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    plane: ControlPlane, account: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Devices of 16 MiB."""
    async with making_world(plane, tmp_path_factory.mktemp("world"), "16Mi") as made:
        yield made


def status_of(world: World, job: str = JOB) -> dict[str, Any]:
    found: dict[str, Any] = world.get("inferencejob", job).get("status", {})
    return found


def notes_of(world: World, job: str = JOB) -> list[dict[str, Any]]:
    """The Events of a job."""
    fields = f"--field-selector=involvedObject.name={job},involvedObject.kind=InferenceJob"
    found: list[dict[str, Any]] = world.plane.access.get(
        "events", fields, f"--namespace={NAMESPACE}"
    )["items"]
    return found


def reasons(world: World, job: str = JOB) -> list[str]:
    """Their reasons."""
    return [each["reason"] for each in notes_of(world, job)]


async def test_a_job_is_cut_finer_through_the_death_of_its_operator_and_succeeds(
    world: World, running: Operators
) -> None:
    underestimated().save(world.claims / "models").rename(world.claims / "models" / "hidden.onnx")
    inputs = write_inputs(world.claims / "lines" / JOB, ITEMS)
    world.apply_devices()
    world.apply("Model", "hidden", source={"uri": "pvc://models/hidden.onnx"})
    spec = job_spec(modelRef={"name": "hidden"}, inputs={"uri": f"pvc://lines/{JOB}"})
    world.apply("InferenceJob", JOB, **spec)
    with operating(running, world) as operator:
        await world.until("it is cut finer", lambda: "finerCut" in status_of(world))
        operator.kill()
    with operating(running, world):
        await world.wait("inferencejob", JOB, "Complete")
        await world.until("its end is told", lambda: "FinishedJob" in reasons(world))
    finer = status_of(world)["finerCut"]
    assert 2 <= finer["cuts"] <= 1 + len(finer["outgrown"])
    assert "needs" in finer["message"]
    assert "has 16 MiB" in finer["message"]
    notes = [each for each in notes_of(world) if each["reason"] == "CutFiner"]
    assert [each["type"] for each in notes] == ["Warning"] * (finer["cuts"] - 1)
    [partition] = world.plane.access.get("partitions", f"--namespace={NAMESPACE}")["items"]
    assert partition["spec"]["outgrown"] == finer["outgrown"]
    assert all(each["needBytes"] > 16 << 20 for each in finer["outgrown"])
    results = read_results(world.claims / "lines" / "out")
    path = world.claims / "models" / "hidden.onnx"
    for given, right in zip(results, whole(path, inputs), strict=True):
        assert largest_difference(given, right) <= TOLERANCE


async def test_where_no_finer_cut_is_possible_an_item_fails_by_itself_and_the_others_run(
    world: World, running: Operators
) -> None:
    """Of 20,000 rows one node takes 40 MiB and more, which no plan knows."""
    spoken().save(world.claims / "models").rename(world.claims / "models" / "spoken.onnx")
    write_spoken(world.claims / "lines" / "spoken", 20_000, 40, 60)
    world.apply_devices()
    world.apply("Model", "spoken", source={"uri": "pvc://models/spoken.onnx"})
    spec = job_spec(
        modelRef={"name": "spoken"},
        inputs={"uri": "pvc://lines/spoken"},
        outputs={"uri": "pvc://lines/spoken-out"},
    )
    world.apply("InferenceJob", "spoken", **spec)
    with operating(running, world):
        await world.wait("inferencejob", "spoken", "Failed")
        await world.until("its end is told", lambda: "FinishedJob" in reasons(world, "spoken"))
    status = status_of(world, "spoken")
    assert (status["items"]["succeeded"], status["items"]["failed"]) == (2, 1)
    (failure,) = status["failures"]
    assert failure["input"] == "0.npz"
    assert re.search("^Budget: it .* 16 MiB.* node", failure["reason"]), failure
    assert "it cannot be cut finer" in status["finerCut"]["message"]
    assert reasons(world, "spoken").count("CannotCutFiner") == 1
    partition = world.get("partition", "spoken")
    for part in ("seen", "outgrown"):
        assert partition["spec"].get(part) == status["finerCut"].get(part)
    assert len(read_results(world.claims / "lines" / "spoken-out")) == 2
