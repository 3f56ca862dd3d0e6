"""What is killed comes back, and the job goes on: nothing is lost and nothing is done twice."""

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e_cluster import Json, ShoalOnNodes
from faults_on_nodes.runs import (
    STAGES,
    Work,
    crash,
    operator_pods,
    restarts,
    running_job,
    the_pod,
    vanish,
    wait_until_well,
)
from shoal_cluster import CommandFailed

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.minutes,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
Kill = Callable[[ShoalOnNodes, Json], None]
HOG = """
kept = []
while True:
    kept.append(b"x" * 2**20)
"""


@pytest.mark.minutes
@pytest.mark.parametrize("kill", [crash, vanish])
def test_a_killed_operator_is_not_missed_by_a_running_job(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path, kill: Kill
) -> None:
    with running_job(shoal, work, tmp_path, f"operator-{kill.__name__}") as job:
        done = job.reach(0.1)
        kill(shoal, the_pod(shoal, "operator"))
        assert job.reach(0.2) > done
        job.finish()
        job.check()
        assert job.executed() == work.items * STAGES, "tasks were run twice"


@pytest.mark.minutes
@pytest.mark.parametrize("kill", [crash, vanish])
def test_a_killed_coordinator_goes_on_with_what_is_missing(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path, kill: Kill
) -> None:
    with running_job(shoal, work, tmp_path, f"coordinator-{kill.__name__}") as job:
        done = job.reach(0.2)
        kill(shoal, the_pod(shoal, "coordinator"))
        job.finish()
        job.check()
        assert job.executed() <= (2 * work.items - done) * STAGES, "finished items were run again"


def test_operator_and_coordinator_are_killed_at_once(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path
) -> None:
    with running_job(shoal, work, tmp_path, "both") as job:
        done = job.reach(0.2)
        struck = [the_pod(shoal, component) for component in ("operator", "coordinator")]
        for pod in struck:
            crash(shoal, pod)
        job.finish()
        job.check()
        assert job.executed() <= (2 * work.items - done) * STAGES, "finished items were run again"


@pytest.mark.minutes
def test_everything_is_killed_at_once(shoal: ShoalOnNodes, work: Work, tmp_path: Path) -> None:
    with running_job(shoal, work, tmp_path, "everything") as job:
        job.reach(0.2)
        for pod in (*operator_pods(shoal), *shoal.pods("coordinator"), *shoal.pods("agent")):
            crash(shoal, pod)
        job.finish()
        job.check()


def test_an_agent_out_of_memory_is_killed_alone_and_comes_back(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path
) -> None:
    with running_job(shoal, work, tmp_path, "out-of-memory") as job:
        job.reach(0.1)
        victim = next(pod for pod in shoal.pods("agent") if pod["spec"]["nodeName"] == "pi-zero")
        name, before = victim["metadata"]["name"], restarts(victim)
        # In the container's own group: what goes beyond its limit is the container.
        with pytest.raises(CommandFailed, match="137"):
            shoal.kubectl("exec", name, "--", "python", "-c", HOG)

        def killed() -> bool:
            return restarts(shoal.get("pod", name)) > before

        shoal.wait_until("the agent was killed and is started anew", killed)
        (container,) = shoal.get("pod", name)["status"]["containerStatuses"]
        ended = container["lastState"]["terminated"]
        assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
        job.finish()
        job.check()
    wait_until_well(shoal)
    others = [pod for pod in shoal.pods("agent") if pod["metadata"]["name"] != name]
    assert [shoal.memory_of(pod).kills for pod in others] == [0, 0]


def test_the_api_server_is_restarted_under_a_running_job(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path
) -> None:
    with running_job(shoal, work, tmp_path, "api-server") as job:
        done = job.reach(0.1)
        plane = shoal.cluster.control_plane
        plane.api_server.kill()
        assert job.reach(0.3) > done, "the job needs the API server to go on"
        plane.api_server.start()
        plane.wait_until_ready()
        job.finish()
        job.check()
        assert job.executed() == work.items * STAGES, "tasks were run twice"
