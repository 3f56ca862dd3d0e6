"""Deliveries to a store that loses what it has, on a real API server with a real coordinator."""

import shutil
from typing import Any

import pytest
from pool import read_results

from controller.jobs import cut_already
from operator_processes import Operators
from simulated_world import ITEMS, NAMESPACE, World, job_spec, operating

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.own_plane,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]


def deliveries(world: World) -> list[str]:
    found: Any = world.plane.access.get("jobs", f"--namespace={NAMESPACE}")["items"]
    kinds = [each["metadata"]["labels"]["app.kubernetes.io/component"] for each in found]
    return [each for each in kinds if each == "deliver"]


async def test_a_job_whose_fragments_have_left_the_store_has_them_delivered_again(
    world: World, running: Operators
) -> None:
    world.apply_pool()
    with operating(running, world):
        world.apply("InferenceJob", "slow", **job_spec())
        await world.wait("inferencejob", "slow", "Complete")
        assert len(deliveries(world)) == 1
        for each in world.pool.workspace.store.joinpath("fragments").iterdir():
            shutil.rmtree(each)
        world.apply("InferenceJob", "next", **cut_already(outputs={"uri": "pvc://lines/next"}))
        await world.wait("inferencejob", "next", "Complete")
        assert len(deliveries(world)) == 2
    assert len(read_results(world.claims / "lines" / "next")) == ITEMS
