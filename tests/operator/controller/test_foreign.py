"""Foreign objects reduced, and what their pods say."""

import pytest

from shoal_operator.controller.foreign import Raw, job_state, node_state, workload_state
from shoal_operator.controller.pods import problem
from shoal_operator.reconcile.snapshot import WorkerPhase


def job(**status: object) -> dict[str, object]:
    metadata = {"name": "w", "namespace": "n", "uid": "u", "resourceVersion": "7"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "status": status}


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ({}, WorkerPhase.PENDING),
        ({"active": 1, "ready": 0}, WorkerPhase.PENDING),
        ({"active": 1, "ready": 1}, WorkerPhase.RUNNING),
        ({"conditions": [{"type": "SuccessCriteriaMet", "status": "True"}]}, WorkerPhase.PENDING),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, WorkerPhase.SUCCEEDED),
        (
            {"conditions": [{"type": "Failed", "status": "True", "message": "BackoffLimit"}]},
            WorkerPhase.FAILED,
        ),
    ],
)
def test_a_jobs_phase_is_what_its_conditions_and_counts_say(
    status: dict[str, object], phase: WorkerPhase
) -> None:
    assert job_state(job(**status)).phase is phase


def test_a_job_that_ended_says_when() -> None:
    complete = {"type": "Complete", "status": "True"}
    done = job_state(job(conditions=[complete], completionTime="2026-01-31T12:00:00Z"))
    assert done.ended_at == "2026-01-31T12:00:00Z"
    assert job_state(job()).ended_at is None


def test_a_workload_is_current_only_when_its_controller_has_seen_the_newest_template() -> None:
    document = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d", "namespace": "n", "uid": "u", "generation": 2},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"b": "2", "a": "1"}}},
        "status": {"observedGeneration": 1, "readyReplicas": 1, "updatedReplicas": 1},
    }
    assert workload_state(document).selector == "a=1,b=2"
    stale = workload_state(document).workload
    assert (stale.wanted, stale.ready, stale.current, stale.updated) == (1, 1, False, 0)
    seen = {"observedGeneration": 2, "readyReplicas": 1, "updatedReplicas": 1}
    assert workload_state({**document, "status": seen}).workload.current


def test_a_node_gives_what_pods_may_allocate_and_its_taints() -> None:
    node = node_state(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "pi", "labels": {"kubernetes.io/arch": "arm64"}},
            "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]},
            "status": {
                "allocatable": {"memory": "16250696Ki"},
                "conditions": [{"type": "Ready", "status": "Unknown"}],
            },
        }
    ).node
    assert node.allocatable_memory == 16250696 * 1024
    assert node.taints == (("k", "", "NoSchedule"),)
    assert (node.ready, node.architecture) == (False, "arm64")


def pod(**status: object) -> Raw:
    return Raw({"metadata": {"name": "p"}, "status": status})


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"phase": "Pending", "containerStatuses": []}, ""),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
            "",
        ),
        (
            {
                "containerStatuses": [
                    {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such"}}}
                ]
            },
            "pod p: ImagePullBackOff: no such",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "restartCount": 3,
                        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "wait"}},
                        "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
                    }
                ]
            },
            "pod p: OOMKilled (exit status 137), 3 times",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "restartCount": 0,
                        "state": {
                            "terminated": {
                                "reason": "Error",
                                "exitCode": 1,
                                "message": "sending: 1 of 9 MiB\nshoal: it broke off\n  no room\n",
                            }
                        },
                    }
                ]
            },
            "pod p: Error (exit status 1): shoal: it broke off\n  no room",
        ),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available",
                    }
                ]
            },
            "pod p: Unschedulable: 0/3 nodes are available",
        ),
    ],
)
def test_a_pod_that_does_not_get_ready_says_why(status: dict[str, object], said: str) -> None:
    assert problem([pod(**status)]) == said
