"""Closed networks: with the policies enforced Shoal works, from the enrolment on, and nobody else
gets through.
"""

import json
import shutil
from pathlib import Path

import pytest

from e2e_cluster import VERSION, Json, ShoalOnNodes
from faults_on_nodes.runs import (
    COORDINATOR_CLAIM,
    Work,
    operator_pods,
    running_job,
    vanish,
    wait_until_well,
)
from shoal_cluster.policies import enforcing

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(900),
]
PORTS = {"coordinator": (7400, 9400), "agent": (7401, 9400), "operator": (8443, 8080)}
# Again and again for a while: a new pod is let through a moment after it is known.
KNOCK = """
import json, socket, sys, time
doors = {f"{name}:{port}": (host, port) for name, host, port in json.loads(sys.argv[1])}
found = dict.fromkeys(doors, False)
for _ in range(8):
    for door, address in doors.items():
        try:
            socket.create_connection(address, timeout=2).close()
            found[door] = True
        except OSError:
            pass
    time.sleep(1)
print(json.dumps(found))
"""


def open_to_a_stranger(shoal: ShoalOnNodes, name: str) -> dict[str, bool]:
    """Which ports a pod of the same namespace reaches that belongs to nobody."""
    pods = {
        "coordinator": shoal.pods("coordinator")[0],
        "agent": shoal.pods("agent")[0],
        "operator": operator_pods(shoal)[0],
    }
    doors = [(of, pods[of]["status"]["podIP"], port) for of in PORTS for port in PORTS[of]]
    shoal.apply(stranger(name, json.dumps(doors)))
    shoal.kubectl(
        "wait", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=90s"
    )
    found: dict[str, bool] = json.loads(shoal.kubectl("logs", name))
    shoal.kubectl("delete", "pod", name, "--timeout=60s")
    return found


def stranger(name: str, doors: str) -> Json:
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "stranger",
        "image": f"shoal/worker:{VERSION}",
        "imagePullPolicy": "Never",
        "command": ["python", "-c", KNOCK, doors],
        "securityContext": restricted,
    }
    spec = {"restartPolicy": "Never", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def test_policies_let_through_what_shoal_needs_and_nobody_else(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path
) -> None:
    doors = {f"{name}:{port}" for name, ports in PORTS.items() for port in ports}
    assert open_to_a_stranger(shoal, "before") == dict.fromkeys(doors, True)
    with enforcing(shoal.cluster):
        # Everything connects anew: sessions, enrolment; and fragments are delivered again.
        shutil.rmtree(shoal.volume(COORDINATOR_CLAIM) / "fragments", ignore_errors=True)
        shoal.kubectl("delete", "jobs", "--selector=app.kubernetes.io/component=deliver")
        for pod in (*shoal.pods("agent"), *shoal.pods("coordinator"), *operator_pods(shoal)):
            vanish(shoal, pod)
        wait_until_well(shoal)
        with running_job(shoal, work, tmp_path, "enclosed") as job:
            job.finish()
            job.check()
        found = open_to_a_stranger(shoal, "after")
    # The operator's metrics are for every pod, unless the chart is told whose they are.
    assert {door for door, through in found.items() if through} == {"operator:8080"}
    assert found.keys() == doors
