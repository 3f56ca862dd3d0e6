"""Fragments are placed before a job, and a failed job is retried, on a real API server with a real
pool."""

from collections.abc import Iterator
from typing import Any

import pytest
from pool import read_results

from cluster_fixtures import or_skip
from operator_processes import Operators
from shoal_cluster import ControlPlane
from simulated_world import ITEMS, World, job_spec, operating

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """One of its own, with played nodes."""
    with or_skip(ControlPlane) as made:
        yield made


async def test_fragments_are_on_their_devices_before_there_is_a_job(
    world: World, running: Operators
) -> None:
    world.apply_pool()
    world.apply("Partition", "cut", modelRef={"name": "m"}, fragments=2)
    refs = {"partitionRef": {"name": "cut"}, "poolRef": {"name": "shelf"}}
    world.apply("Placement", "early", **refs, prefetch=True)
    with operating(running, world):
        await world.wait("placement", "early", "Prefetched")
        status = world.get("placement", "early")["status"]
        assert {each["fragment"] for each in status["prefetched"]} == {0, 1}
        assert {each["state"] for each in status["prefetched"]} <= {"Cached", "Resident"}
        assert not world.plane.access.get("inferencejobs", "--namespace=jobs")["items"]
        world.patch("placement", "early", prefetch=False)
        await world.until(
            "it is reported no more",
            lambda: not world.condition("placement", "early", "Prefetched"),
        )


def end_of(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.get("inferencejob", "late")["status"]
    return found


async def test_a_failed_job_that_is_retried_runs_and_completes(
    world: World, running: Operators
) -> None:
    world.apply("InferenceJob", "late", **job_spec(activeDeadlineSeconds=1))
    with operating(running, world) as operator:
        await world.wait("inferencejob", "late", "Failed")
        assert world.condition("inferencejob", "late", "Failed")["reason"] == "DeadlineExceeded"
        world.patch("inferencejob", "late", activeDeadlineSeconds=None, retry={"number": 1})
        await world.until("it is retried", lambda: "retry" in end_of(world))
        assert "completionTime" not in end_of(world)
        operator.kill()
    with operating(running, world):
        await world.wait("inferencejob", "late", "Complete")
    world.kubectl("wait", "--for=condition=Complete", "inferencejob/late", "--timeout=30s")
    status = end_of(world)
    assert (status["retry"]["number"], status["items"]["succeeded"]) == (1, ITEMS)
    assert world.condition("inferencejob", "late", "Failed")["status"] == "False"
    assert len(read_results(world.claims / "lines" / "out")) == ITEMS
    failure = "Forbidden|denied|Invalid|ended"
    patch = '{"status": {"completionTime": null}}'
    arguments = ("patch", "inferencejob", "late", "--subresource=status", "--type=merge")
    with pytest.raises(Exception, match=failure):
        world.kubectl(*arguments, f"--patch={patch}")
