"""On kine with SQLite, the datastore of K3s, in the place of etcd: the faults that a store could
matter for, and the end. The story itself is in tests/e2e, for either store.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e_cluster import NAMESPACE, SYSTEM, ShoalOnNodes, shoal_on_nodes
from faults_on_nodes.runs import (
    STAGES,
    Work,
    crash,
    operator_pods,
    put_work,
    running_job,
    the_pod,
    wait_until_well,
)

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def on_kine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShoalOnNodes]:
    with shoal_on_nodes(tmp_path_factory.mktemp("kine"), store="kine") as shoal:
        yield shoal


@pytest.fixture(scope="module")
def kine_work(on_kine: ShoalOnNodes) -> Work:
    return put_work(on_kine)


def test_a_job_survives_operator_coordinator_and_api_server(
    on_kine: ShoalOnNodes, kine_work: Work, tmp_path: Path
) -> None:
    with running_job(on_kine, kine_work, tmp_path, "struck") as job:
        done = job.reach(0.2)
        for component in ("operator", "coordinator"):
            crash(on_kine, the_pod(on_kine, component))
        on_kine.cluster.control_plane.restart_api_server()
        job.finish()
        job.check()
        assert job.executed() <= (2 * kine_work.items - done) * STAGES
    wait_until_well(on_kine)


def test_a_namespace_with_a_job_that_runs_is_deleted_without_an_operator(
    on_kine: ShoalOnNodes, kine_work: Work, tmp_path: Path
) -> None:
    with running_job(on_kine, kine_work, tmp_path, "left") as job:
        job.reach(0.1)
        on_kine.cluster.kubectl(
            "scale", "deployment/shoal-operator", "--replicas=0", f"--namespace={SYSTEM}"
        )
        on_kine.wait_until("the operator is gone", lambda: not operator_pods(on_kine))
        on_kine.cluster.kubectl(*("delete", "namespace", NAMESPACE, "--timeout=120s"), seconds=150)
