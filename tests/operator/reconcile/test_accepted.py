"""A real API server takes what the builders make, under the Pod Security standard "restricted"."""

import json

import pytest

from reconcile.rules import decide
from reconcile.test_device_pool import node, snapshot
from reconcile.test_inference_job import PLANNED
from reconcile.test_partition import partition, ready_model
from reconcile.values import SETTINGS, model, pool
from shoal_api.kinds import AnyKind
from shoal_cluster import ControlPlane
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.workers import (
    WorkerSpec,
    cut_worker,
    deliver_worker,
    input_transfer_worker,
    inspect_worker,
    result_transfer_worker,
    worker_job,
)

pytestmark = [pytest.mark.real, pytest.mark.cluster]


def made() -> list[Manifest]:
    """One of everything that Kubernetes itself knows."""
    own = PLANNED.job
    worker_specs: list[tuple[AnyKind, WorkerSpec]] = [
        (model(), inspect_worker(model())),
        (partition(), cut_worker(partition(), ready_model(), ("--fragments", "3"))),
        (partition(), deliver_worker(partition(), ready_model(), ("--fragments", "3"), "shelf")),
        (own, input_transfer_worker(own, "shelf")),
        (own, result_transfer_worker(own, "shelf")),
    ]
    of_size = pool(
        budget={"percent": 50},
        cache={"storageClassName": "local-path"},
        tolerations=[{"key": "edge", "operator": "Exists", "effect": "NoSchedule"}],
    )
    return [
        *decide(snapshot()).children,
        *decide(snapshot(of_size, nodes=(node("n1"), node("n2", 1 << 31)))).children,
        *(worker_job(owner, worker_spec, SETTINGS) for owner, worker_spec in worker_specs),
    ]


def test_everything_is_accepted_without_a_warning(control_plane: ControlPlane) -> None:
    level = "pod-security.kubernetes.io"
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": "lab",
            "labels": {f"{level}/enforce": "restricted", f"{level}/warn": "restricted"},
        },
    }
    control_plane.kubectl("apply", "-f", "-", given=json.dumps(namespace))
    items = {"apiVersion": "v1", "kind": "List", "items": made()}
    options = ("--server-side", "--dry-run=server", "--validate=strict", "--warnings-as-errors")
    answer = control_plane.kubectl("apply", *options, "-f", "-", given=json.dumps(items))
    assert answer.count("serverside-applied") == len(made())


@pytest.mark.parametrize("name", ["4gb-pis", "1" * 63, "p" * 63])
def test_a_pool_may_have_any_name_that_its_kind_takes(
    control_plane: ControlPlane, name: str
) -> None:
    """The name of a Service has to begin with a letter, that of a pool has not."""
    children = decide(snapshot(pool(name=name))).children
    items = {"apiVersion": "v1", "kind": "List", "items": children}
    options = ("--server-side", "--dry-run=server", "--validate=strict", "--namespace=default")
    given = json.dumps(items).replace('"namespace": "lab"', '"namespace": "default"')
    answer = control_plane.kubectl("apply", *options, "-f", "-", given=given)
    assert answer.count("serverside-applied") == len(children)
