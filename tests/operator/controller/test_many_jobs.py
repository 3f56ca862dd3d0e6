"""Jobs go on through what befalls a control plane; none is lost, none begins twice.

The control plane and the operators are real; nodes and the pool are simulated, as in the bench of
the operator, so that a job is a matter of seconds and the coordinator can say how often each was
begun.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
from scale_story import NAMESPACE, PATIENCE_SECONDS, Simulated, Size, job, shelf, simulating
from simulated_coordinator import Work

from cluster_fixtures import or_skip
from operator_processes import Operators, RunningOperator, operators, wait_until
from shoal_cluster import CommandFailed, ControlPlane

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(600),
]

KINDS = "models,partitions,placements,devicepools,devices,inferencejobs"


def operate(started: Operators, simulated: Simulated) -> RunningOperator:
    return started.start("--coordinator", f"{NAMESPACE}/shelf={simulated.target}")


async def wait(what: str, true: Callable[[], bool], seconds: float = 300.0) -> None:
    """As `wait_until`; a kubectl that fails because its API server is away means not yet."""

    def holds() -> bool:
        try:
            return true()
        except CommandFailed:
            return False

    await asyncio.to_thread(wait_until, what, holds, seconds)


def complete(plane: ControlPlane) -> int:
    """How many jobs are complete; one that failed is told at once."""
    count = 0
    for each in plane.access.get("inferencejobs", f"--namespace={NAMESPACE}")["items"]:
        held = {
            one["type"]: one["message"]
            for one in each.get("status", {}).get("conditions", ())
            if one["status"] == "True"
        }
        assert "Failed" not in held, (each["metadata"]["name"], held)
        count += "Complete" in held
    return count


def some_complete(plane: ControlPlane, count: int) -> bool:
    return complete(plane) >= count


async def apply_jobs(plane: ControlPlane, count: int) -> None:
    jobs = [job(f"job-{number:03}") for number in range(count)]
    await asyncio.to_thread(plane.access.apply, *shelf(), *jobs, namespace=NAMESPACE)


def assert_all_is_well(plane: ControlPlane, simulated: Simulated, jobs: int) -> None:
    """Each job was begun once, is forgotten by its coordinator, and holds nothing back."""
    assert sorted(simulated.coordinator.begun.values()) == [1] * jobs
    for each in plane.access.get(KINDS, f"--namespace={NAMESPACE}")["items"]:
        assert "finalizers" not in each["metadata"], each["metadata"]["name"]
        observed = each["status"]["observedGeneration"]
        assert observed == each["metadata"]["generation"], each["metadata"]["name"]


async def test_jobs_run_with_the_datastore_of_k3s(tmp_path: Path) -> None:
    size = Size(jobs=8, devices=3, work=Work(seconds=1.0), idle_seconds=0)
    make = or_skip(lambda: ControlPlane(store="kine", node_grace_seconds=PATIENCE_SECONDS))
    with make as plane:
        async with simulating(plane, size, tmp_path) as simulated:
            with operators(tmp_path, simulated.account) as started:
                operator = operate(started, simulated)
                await apply_jobs(plane, size.jobs)
                await wait("all are complete", lambda: complete(plane) == size.jobs)
                assert operator.runs()
        assert_all_is_well(plane, simulated, size.jobs)


async def test_jobs_run_while_the_store_is_slow(tmp_path: Path) -> None:
    size = Size(jobs=8, devices=3, work=Work(seconds=1.0), idle_seconds=0)
    make = or_skip(lambda: ControlPlane(slowable_store=True, node_grace_seconds=PATIENCE_SECONDS))
    with make as plane:
        async with simulating(plane, size, tmp_path) as simulated:
            with operators(tmp_path, simulated.account) as started:
                operator = operate(started, simulated)
                await asyncio.to_thread(operator.wait_until_leading)
                plane.delay_store(0.2)
                await apply_jobs(plane, size.jobs)
                await wait("all are complete", lambda: complete(plane) == size.jobs)
                assert operator.runs()
                assert operator.leads(), "a slow store has cost it the lease"
                plane.delay_store(0.0)
        assert_all_is_well(plane, simulated, size.jobs)


@pytest.mark.parametrize("seed", [1])
async def test_operators_are_killed_and_the_api_server_restarts_at_any_moment(
    seed: int, tmp_path: Path
) -> None:
    """Two operators; the one that leads is killed, and another takes the place of the second."""
    random = Random(seed)  # noqa: S311
    size = Size(jobs=40, devices=3, work=Work(seconds=2.0, at_once=4), idle_seconds=0)
    with or_skip(lambda: ControlPlane(node_grace_seconds=PATIENCE_SECONDS)) as plane:
        async with simulating(plane, size, tmp_path) as simulated:
            with operators(tmp_path, simulated.account) as started:
                leading, waiting = operate(started, simulated), operate(started, simulated)
                await wait("one leads", lambda: leading.leads() or waiting.leads())
                await apply_jobs(plane, size.jobs)
                marks = sorted(random.sample(range(1, size.jobs * 3 // 4), 2))
                for mark in marks:
                    await wait(f"{mark} are complete", partial(some_complete, plane, mark))
                    if waiting.leads():
                        leading, waiting = waiting, leading
                    leading.kill()
                    if mark == marks[0]:
                        await asyncio.to_thread(plane.restart_api_server)
                    leading, waiting = waiting, operate(started, simulated)
                await wait("all are complete", lambda: complete(plane) == size.jobs)
                await wait("one leads still", lambda: leading.leads() or waiting.leads())
        assert_all_is_well(plane, simulated, size.jobs)
