"""One operator on a real API server: what it writes of whom. It runs for all of these tests."""

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from operator_processes import RunningOperator, model, operators, wait_until
from shoal_cluster import ControlPlane
from shoal_cluster.access import CommandFailed

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def operator(account: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningOperator]:
    """One that leads and sees every namespace."""
    with operators(tmp_path_factory.mktemp("operator"), account) as started:
        running = started.start()
        running.wait_until_leading()
        yield running


def status(plane: ControlPlane, namespace: str, kind: str, name: str) -> dict[str, object]:
    found: dict[str, object] = plane.access.get(kind, name, f"--namespace={namespace}")
    given = found.get("status")
    return given if isinstance(given, dict) else {}


def condition(
    plane: ControlPlane, namespace: str, kind: str, name: str, type_: str
) -> dict[str, str]:
    conditions = status(plane, namespace, kind, name).get("conditions")
    listed = conditions if isinstance(conditions, list) else []
    return next((each for each in listed if each["type"] == type_), {})


def is_seen(plane: ControlPlane, namespace: str, name: str) -> bool:
    found = plane.access.get("model", name, f"--namespace={namespace}")
    observed = found.get("status", {}).get("observedGeneration")
    return bool(observed == found["metadata"]["generation"])


def test_an_edit_is_seen_at_once_in_observed_generation(
    plane: ControlPlane, namespace: str, operator: RunningOperator
) -> None:
    plane.access.apply(model("m"), namespace=namespace)
    for edit in range(3):
        source = {"uri": f"pvc://models/{edit}.onnx"}
        plane.access.apply(model("m", source=source), namespace=namespace)
        wait_until("the edit is seen", lambda: is_seen(plane, namespace, "m"))
    jobs = ("jobs", f"--namespace={namespace}")
    wait_until(
        "only the worker of the last address is left",
        lambda: len(plane.access.get(*jobs)["items"]) == 1,
    )


REFERS = {"modelRef": {"name": "m"}, "poolRef": {"name": "shelf"}}
EDITS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "Model": ({"source": {"uri": "s3://a/m.onnx"}}, {"source": {"uri": "s3://b/m.onnx"}}),
    "Partition": ({"modelRef": {"name": "m"}}, {"fragments": 3}),
    "DevicePool": ({"budget": {"memory": "64Mi"}}, {"budget": {"memory": "96Mi"}}),
    "Placement": (
        {"partitionRef": {"name": "p"}, "poolRef": {"name": "shelf"}},
        {"pins": [{"fragment": 0, "device": "pi-4"}]},
    ),
    "InferenceJob": (
        {**REFERS, "inputs": {"uri": "s3://a/in"}, "outputs": {"uri": "s3://a/out"}},
        {"priority": 7},
    ),
}


@pytest.fixture
def bare(plane: ControlPlane, namespace: str) -> str:
    """One object of every kind that people write; nothing that they need is there."""
    plane.access.apply(
        *(
            {
                "apiVersion": "shoal.dev/v1alpha1",
                "kind": kind,
                "metadata": {"name": "edited"},
                "spec": spec,
            }
            for kind, (spec, _) in EDITS.items()
        ),
        namespace=namespace,
    )
    return namespace


def test_of_every_kind_each_edit_is_seen_at_once_and_nothing_is_ready_that_lacks_something(
    plane: ControlPlane, bare: str, operator: RunningOperator
) -> None:

    def observed(kind: str, generation: int) -> bool:
        found = plane.access.get(kind, "edited", f"--namespace={bare}")
        assert found["metadata"]["generation"] == generation, "nobody else edits it"
        return bool(found.get("status", {}).get("observedGeneration") == generation)

    for kind, (_, edit) in EDITS.items():
        wait_until(f"{kind} is seen", partial(observed, kind, 1))
        patch = f"--patch={json.dumps({'spec': edit})}"
        plane.kubectl("patch", kind, "edited", f"--namespace={bare}", "--type=merge", patch)
        wait_until(f"the edit of the {kind} is seen", partial(observed, kind, 2))
        conditions = status(plane, bare, kind, "edited")["conditions"]
        assert isinstance(conditions, list)
        for each in conditions:
            assert each["observedGeneration"] == 2, (kind, each)
        told = {each["type"]: each for each in conditions}
        type_ = "Planned" if kind == "InferenceJob" else "Ready"
        assert told[type_]["status"] == "False"
        assert told[type_]["message"], f"{kind} says what it lacks"
        until = f"--for=condition={type_}=False"
        said = plane.kubectl("wait", until, f"{kind}/edited", f"--namespace={bare}")
        assert "condition met" in said


def test_a_worker_is_made_owned_and_restricted(
    plane: ControlPlane, namespace: str, operator: RunningOperator
) -> None:
    plane.access.apply(model("m"), namespace=namespace)
    wait_until(
        "the worker is made",
        lambda: len(plane.access.get("jobs", f"--namespace={namespace}")["items"]) == 1,
    )
    [worker] = plane.access.get("jobs", f"--namespace={namespace}")["items"]
    [owner] = worker["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("Model", "m", True)
    pod = worker["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    wait_until(
        "the reason why the worker's pod waits is told",
        lambda: "Unschedulable" in condition(plane, namespace, "model", "m", "Ready")["message"],
        seconds=20,
    )


def test_a_worker_that_a_quota_keeps_from_having_a_pod_says_so(
    plane: ControlPlane, namespace: str, operator: RunningOperator
) -> None:
    limits = {"hard": {"limits.cpu": "4"}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}}
    plane.access.apply({**quota, "spec": limits}, namespace=namespace)
    counts = "--for=jsonpath={.status.used}"
    plane.kubectl("wait", counts, "resourcequota/team", f"--namespace={namespace}")
    plane.access.apply(model("m"), namespace=namespace)
    told = partial(condition, plane, namespace, "model", "m", "Ready")
    wait_until("the quota is told", lambda: "limits.cpu" in told().get("message", ""))


def test_two_hundred_objects_at_once_are_all_seen_and_told_of_once(
    plane: ControlPlane, namespace: str, operator: RunningOperator
) -> None:
    reconciles_of_partitions = partial(
        operator.metric, "shoal_operator_reconcile_seconds_count", kind="Partition"
    )
    partitions = [
        {
            "apiVersion": "shoal.dev/v1alpha1",
            "kind": "Partition",
            "metadata": {"name": f"p-{number}"},
            "spec": {"modelRef": {"name": "missing"}},
        }
        for number in range(200)
    ]
    before = reconciles_of_partitions()
    plane.access.apply(*partitions, namespace=namespace)

    def seen() -> bool:
        found = plane.access.get("partitions", f"--namespace={namespace}")["items"]
        return sum("status" in each for each in found) == 200

    wait_until("all have a status", seen, seconds=60)
    wait_until("the queue is empty", lambda: operator.metric("shoal_operator_queue_depth") == 0)
    writes = [
        each
        for each in plane.api_writes()
        if each.namespace == namespace and each.subresource == "status"
    ]
    assert len(writes) == 200
    plane.access.apply(model("missing"), namespace=namespace)
    wait_until(
        "all have looked again",
        lambda: reconciles_of_partitions() >= before + 400,
    )


def test_an_object_that_is_gone_takes_its_children_with_it(
    plane: ControlPlane, namespace: str, operator: RunningOperator
) -> None:
    plane.access.apply(model("m"), namespace=namespace)
    jobs = ("jobs", f"--namespace={namespace}")
    wait_until("the worker is made", lambda: len(plane.access.get(*jobs)["items"]) == 1)
    plane.kubectl("delete", "model", "m", f"--namespace={namespace}")
    wait_until("the worker is gone", lambda: plane.access.get(*jobs)["items"] == [])


def test_an_object_that_is_replaced_while_its_worker_is_there_gets_one_of_its_own(
    plane: ControlPlane, namespace: str, operator: RunningOperator
) -> None:
    def owners() -> list[str]:
        jobs = plane.access.get("jobs", f"--namespace={namespace}")["items"]
        return [each["metadata"]["ownerReferences"][0]["uid"] for each in jobs]

    plane.access.apply(model("m"), namespace=namespace)
    wait_until("the worker is made", lambda: len(owners()) == 1)
    again = json.dumps(model("m"))
    plane.kubectl("replace", "--force", "--filename=-", f"--namespace={namespace}", given=again)
    uid = plane.access.get("model", "m", f"--namespace={namespace}")["metadata"]["uid"]
    wait_until("it is seen", lambda: is_seen(plane, namespace, "m"))
    # Kubernetes deletes the old one by itself, in half a minute.
    plane.kubectl("delete", "jobs", "--all", f"--namespace={namespace}")
    wait_until("another worker is made", lambda: owners() == [uid])


def test_an_object_that_says_what_no_schema_knows_is_told_what_is_wrong(
    plane: ControlPlane, namespace: str, operator: RunningOperator
) -> None:
    """The API server lets through what a CRD of another version does not forbid."""
    loose = {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
    }
    crd = plane.access.get("crd", "placements.shoal.dev")
    before = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema = ("patch", "crd", "placements.shoal.dev", "--type=json", "--patch")
    place = "/spec/versions/0/schema/openAPIV3Schema"
    plane.kubectl(*schema, json.dumps([{"op": "replace", "path": place, "value": loose}]))
    try:
        odd = {
            "apiVersion": "shoal.dev/v1alpha1",
            "kind": "Placement",
            "metadata": {"name": "odd"},
            "spec": {"partitionRef": "p", "poolRef": {"name": "shelf"}},
        }

        def let_through() -> bool:
            # The API server answers by the old schema until its own informer has the new one.
            with contextlib.suppress(CommandFailed):
                plane.access.apply(odd, namespace=namespace)
                return True
            return False

        wait_until("the loose schema is in force", let_through)
        wait_until(
            "it is told",
            lambda: (
                condition(plane, namespace, "placement", "odd", "Ready").get("reason") == "Invalid"
            ),
        )
        told = condition(plane, namespace, "placement", "odd", "Ready")
        assert "spec.partitionRef" in told["message"]
    finally:
        plane.kubectl(
            "delete", "placement", "odd", f"--namespace={namespace}", "--ignore-not-found"
        )
        plane.kubectl(*schema, json.dumps([{"op": "replace", "path": place, "value": before}]))
