"""What an operator makes for a pool, on a real API server, when others have their hands in it."""

import json

import pytest

from operator_processes import Operators, wait_until
from shoal_cluster import ControlPlane
from shoal_protocol.units import parse_quantity

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow]

NAME = "shelf-coordinator"


class Pools:
    """A pool `shelf` in a namespace, and what is made for it."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace

    def apply(self, **spec: object) -> None:
        given = {"nodeSelector": {"shoal.dev/pool": "shelf"}, "budget": {"memory": "64Mi"}, **spec}
        metadata = {"name": "shelf"}
        manifest = {"apiVersion": "shoal.dev/v1alpha1", "kind": "DevicePool"}
        self.plane.access.apply(
            {**manifest, "metadata": metadata, "spec": given}, namespace=self.namespace
        )

    def kubectl(self, *arguments: str, given: str = "") -> str:
        return self.plane.kubectl(f"--namespace={self.namespace}", *arguments, given=given)

    def find(self, kind: str, name: str) -> dict[str, object]:
        listed = self.plane.access.get(kind, f"--namespace={self.namespace}")["items"]
        return next((each for each in listed if each["metadata"]["name"] == name), {})

    def ready(self) -> dict[str, object]:
        status = self.find("devicepools", "shelf").get("status")
        conditions = status["conditions"] if isinstance(status, dict) else []
        return next((each for each in conditions if each["type"] == "Ready"), {})

    def wait_for_reason(self, reason: str) -> str:
        """Until Ready is False for this reason; its message."""
        wait_until(f"Ready is {reason}", lambda: self.ready().get("reason") == reason)
        return str(self.ready()["message"])

    def replicas(self) -> object:
        spec = self.find("deployments", NAME).get("spec")
        return spec["replicas"] if isinstance(spec, dict) else None

    def claimed(self) -> tuple[object, object]:
        """Size and class of the coordinator's claim."""
        spec = self.find("persistentvolumeclaims", NAME).get("spec")
        if not isinstance(spec, dict):
            return None, None
        size = parse_quantity(spec["resources"]["requests"]["storage"])
        return int(size), spec.get("storageClassName")


@pytest.fixture
def pools(plane: ControlPlane, namespace: str) -> Pools:
    return Pools(plane, namespace)


def test_an_edit_of_a_coordinator_is_undone_whether_the_operator_saw_it_or_not(
    pools: Pools, running: Operators
) -> None:
    first = running.start()
    first.wait_until_leading()
    pools.apply()
    wait_until("the coordinator is made", lambda: pools.replicas() == 1)
    pools.kubectl("scale", "deployment", NAME, "--replicas=0")
    wait_until("an edit before its eyes is undone", lambda: pools.replicas() == 1)
    first.stop()
    pools.kubectl("scale", "deployment", NAME, "--replicas=0")
    second = running.start()
    second.wait_until_leading()
    wait_until("an edit in its absence is undone", lambda: pools.replicas() == 1)
    pools.kubectl("scale", "deployment", NAME, "--replicas=0")
    wait_until("and one after that", lambda: pools.replicas() == 1)


def test_a_deployment_of_somebody_else_is_left_alone_and_told(
    pools: Pools, running: Operators
) -> None:
    running.start().wait_until_leading()
    pools.kubectl("create", "deployment", NAME, "--image=theirs", "--replicas=0")
    pools.apply()
    message = pools.wait_for_reason("NotApplied")
    assert message.startswith(f"Deployment {pools.namespace}/{NAME} is there already")
    metadata = pools.find("deployments", NAME)["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["labels"] == {"app": NAME}
    assert "ownerReferences" not in metadata
    pools.kubectl("delete", "deployment", NAME)
    wait_until("its own takes the place", lambda: pools.replicas() == 1)
    wait_until("that is told", lambda: pools.ready()["reason"] != "NotApplied")


def test_a_volume_larger_than_asked_for_is_no_growth_and_one_that_cannot_grow_is_told(
    pools: Pools, running: Operators
) -> None:
    volume = {
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": "20Gi"},
        "hostPath": {"path": "/nowhere"},
        "claimRef": {"namespace": pools.namespace, "name": NAME},
    }
    metadata = {"name": f"volume-of-{pools.namespace}"}
    manifest = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata}
    pools.kubectl("apply", "--filename=-", given=json.dumps({**manifest, "spec": volume}))
    running.start().wait_until_leading()
    pools.apply()
    pools.wait_for_reason("CoordinatorFailing")  # The claim is bound; there are no nodes.
    pools.apply(coordinator={"storage": {"size": "6Gi"}})
    message = pools.wait_for_reason("NotApplied")
    assert message.startswith(f"PersistentVolumeClaim {NAME} is refused: ")
    assert "only dynamically provisioned pvc can be resized" in message
    assert pools.ready()["observedGeneration"] == 2
    pools.apply(coordinator={"storage": {"size": "5Gi"}})
    pools.wait_for_reason("CoordinatorFailing")  # As before: one can go back.
    pools.kubectl("delete", "devicepool", "shelf")
    wait_until("its claim is gone", lambda: pools.claimed() == (None, None))
    pools.apply(coordinator={"storage": {"size": "7Gi", "storageClassName": "fast"}})
    # A pool that is made again gets what it asks for.
    wait_until("there is another", lambda: pools.claimed() == (7 << 30, "fast"))


def test_a_claim_that_is_being_deleted_is_told_and_made_anew_when_it_is_gone(
    pools: Pools, running: Operators
) -> None:
    """Kubernetes keeps it as long as the coordinator's pod has it mounted."""
    running.start().wait_until_leading()
    pools.apply()
    wait_until("there is a claim", lambda: pools.claimed()[0] == 5 << 30)
    hold = {"metadata": {"finalizers": ["example.com/mounted"]}}
    pools.kubectl("patch", "pvc", NAME, "--type=merge", f"--patch={json.dumps(hold)}")
    pools.kubectl("delete", "pvc", NAME, "--wait=false")
    message = pools.wait_for_reason("VolumeLeaving")
    assert message.startswith(f"the volume claim {NAME} is being deleted")
    hold["metadata"]["finalizers"] = []
    pools.kubectl("patch", "pvc", NAME, "--type=merge", f"--patch={json.dumps(hold)}")
    pools.wait_for_reason("VolumePending")
    assert "deletionTimestamp" not in str(pools.find("persistentvolumeclaims", NAME)["metadata"])
