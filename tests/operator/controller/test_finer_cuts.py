"""A model whose fragments take more than was planned, on a real API server, with a real pool."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pool import read_results

from cluster_fixtures import or_skip
from operator_processes import Operators
from parity_with_whole import TOLERANCE, largest_difference, whole
from shoal_cluster import ControlPlane
from simulated_world import NAMESPACE, World, job_spec, making_world, operating
from underestimated import underestimated, write_inputs

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
ITEMS = 4
JOB = "hidden"


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """One of its own, with played nodes."""
    with or_skip(ControlPlane) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    plane: ControlPlane, account: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Devices of 16 MiB."""
    async with making_world(plane, tmp_path_factory.mktemp("world"), "16Mi") as made:
        yield made


def status_of(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.get("inferencejob", JOB).get("status", {})
    return found


def notes_of(world: World) -> list[dict[str, Any]]:
    """The Events of the job."""
    fields = f"--field-selector=involvedObject.name={JOB},involvedObject.kind=InferenceJob"
    found: list[dict[str, Any]] = world.plane.access.get(
        "events", fields, f"--namespace={NAMESPACE}"
    )["items"]
    return found


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
        await world.until("its end is told", lambda: "FinishedJob" in map(_reason, notes_of(world)))
    finer = status_of(world)["finerCut"]
    assert 2 <= finer["cuts"] <= 1 + len(finer["outgrown"])
    assert "needs" in finer["message"]
    assert "has 16 MiB" in finer["message"]
    told = [each for each in notes_of(world) if _reason(each) == "CutFiner"]
    assert [each["type"] for each in told] == ["Warning"] * (finer["cuts"] - 1)
    [partition] = world.plane.access.get("partitions", f"--namespace={NAMESPACE}")["items"]
    assert partition["spec"]["outgrown"] == finer["outgrown"]
    assert all(each["needBytes"] > 16 << 20 for each in finer["outgrown"])
    results = read_results(world.claims / "lines" / "out")
    path = world.claims / "models" / "hidden.onnx"
    for given, right in zip(results, whole(path, inputs), strict=True):
        assert largest_difference(given, right) <= TOLERANCE


def _reason(event: dict[str, Any]) -> str:
    return str(event["reason"])
