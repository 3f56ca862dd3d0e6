"""Cuts and devices chosen together, on a real API server, with a real pool of unequal devices."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from pool import read_results

from made_models import Tensors, deep
from operator_processes import Operators
from parity_with_whole import TOLERANCE, largest_difference, whole
from shoal_cluster import ControlPlane
from simulated_world import NAMESPACE, World, job_spec, making_world, operating

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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    plane: ControlPlane, account: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Two devices of 14 MiB, and one of 20 MiB."""
    folder = tmp_path_factory.mktemp("world")
    async with making_world(plane, folder, "14Mi", three="20Mi") as made:
        yield made


def jobs_on(name: str) -> dict[str, object]:
    spec = job_spec(
        placementRef={"name": "deep"},
        inputs={"uri": "pvc://lines/deep"},
        outputs={"uri": f"pvc://lines/{name}"},
    )
    del spec["modelRef"], spec["poolRef"]
    return spec


def workers(world: World) -> list[str]:
    """Components of the workers of Partitions, as often as there are some."""
    found: list[dict[str, Any]] = world.plane.access.get("jobs", f"--namespace={NAMESPACE}")[
        "items"
    ]
    kinds = (each["metadata"]["labels"]["app.kubernetes.io/component"] for each in found)
    return sorted(each for each in kinds if each in {"cut", "table"})


async def test_a_placement_has_its_partition_cut_for_its_devices_and_jobs_share_that(
    world: World, running: Operators
) -> None:
    path = deep().save(world.claims / "models").rename(world.claims / "models" / "deep.onnx")
    folder = world.claims / "lines" / "deep"
    folder.mkdir(parents=True)
    inputs: list[Tensors] = [
        {"x": np.random.default_rng(item).random((1, 512), np.float32)} for item in range(ITEMS)
    ]
    for item, each in enumerate(inputs):
        np.savez(folder / f"{item}.npz", x=each["x"])
    world.apply_devices()
    world.apply("Model", "deep", source={"uri": "pvc://models/deep.onnx"})
    world.apply("Partition", "deep", modelRef={"name": "deep"}, cutting="Planned")
    world.apply("Placement", "deep", partitionRef={"name": "deep"}, poolRef={"name": "shelf"})
    with operating(running, world):
        world.apply("InferenceJob", "first", **jobs_on("first"))
        await world.wait("inferencejob", "first", "Complete")
        cut = world.get("placement", "deep")["status"]["cut"]
        partition = world.get("partition", "deep")["status"]
        world.apply("InferenceJob", "second", **jobs_on("second"))
        await world.wait("inferencejob", "second", "Complete")
        assert workers(world) == [], "the second job has nothing cut"
        assert world.get("partition", "deep")["status"] == partition
        assert world.get("placement", "deep")["status"]["cut"] == cut
    fragments = partition["fragments"]
    assert len(fragments) == len(cut["cuts"]) + 1 > 1
    assert [each["outputs"] for each in fragments[:-1]] == [[name] for name in cut["cuts"]]
    assert cut["reason"].startswith(f"{len(fragments)} fragments, the best cut for ")
    for name in ("first", "second"):
        results = read_results(world.claims / "lines" / name)
        for given, right in zip(results, whole(path, inputs), strict=True):
            assert largest_difference(given, right) <= TOLERANCE
