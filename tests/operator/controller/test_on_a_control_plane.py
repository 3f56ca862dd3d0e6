"""One operator on a real API server: what it writes, and what it does not."""

import json
from functools import partial

import pytest

from operator_processes import Operators, model, wait_until
from shoal_cluster import ControlPlane

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow]


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


def versions(plane: ControlPlane, namespace: str) -> dict[str, str]:
    """The resource versions of everything in a namespace that the operator may write."""
    kinds = "models,partitions,placements,devicepools,devices,inferencejobs,jobs,configmaps,events"
    found = plane.access.get(kinds, f"--namespace={namespace}")
    return {
        f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["resourceVersion"]
        for each in found["items"]
        # Other controllers tell of what is theirs.
        if each["kind"] != "Event" or each["reportingComponent"] == "shoal-operator"
    }


def waits_for_a_node(plane: ControlPlane, namespace: str, kind: str, name: str) -> bool:
    message = condition(plane, namespace, kind, name, "Ready").get("message", "")
    return "Unschedulable" in message


def test_an_edit_is_seen_at_once_in_observed_generation(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    running.start().wait_until_leading()
    plane.access.apply(model("m"), namespace=namespace)
    for edit in range(3):
        source = {"uri": f"pvc://models/{edit}.onnx"}
        plane.access.apply(model("m", source=source), namespace=namespace)
        wait_until("the edit is seen", lambda: is_seen(plane, namespace, "m"), seconds=10)
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
    plane: ControlPlane, bare: str, running: Operators
) -> None:
    operator = running.start()
    operator.wait_until_leading()

    def observed(kind: str, generation: int) -> bool:
        found = plane.access.get(kind, "edited", f"--namespace={bare}")
        assert found["metadata"]["generation"] == generation, "nobody else edits it"
        return bool(found.get("status", {}).get("observedGeneration") == generation)

    for kind, (_, edit) in EDITS.items():
        wait_until(f"{kind} is seen", partial(observed, kind, 1), seconds=15)
        patch = f"--patch={json.dumps({'spec': edit})}"
        plane.kubectl("patch", kind, "edited", f"--namespace={bare}", "--type=merge", patch)
        wait_until(f"the edit of the {kind} is seen", partial(observed, kind, 2), seconds=10)
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
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    running.start().wait_until_leading()
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


def test_nothing_is_written_when_nothing_has_changed_not_even_by_a_new_operator(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    first = running.start("--resync-seconds", "2")
    first.wait_until_leading()
    plane.access.apply(
        model("m"),
        {
            "apiVersion": "shoal.dev/v1alpha1",
            "kind": "Partition",
            "metadata": {"name": "p"},
            "spec": {"modelRef": {"name": "m"}, "fragments": 3},
        },
        namespace=namespace,
    )
    for kind, name in (("model", "m"), ("partition", "p")):
        wait_until(
            f"why the pod waits is told of the {kind}",
            partial(waits_for_a_node, plane, namespace, kind, name),
            seconds=20,
        )
    before = versions(plane, namespace)
    looks = first.metric("shoal_operator_reconcile_seconds_count")
    wait_until(
        "three resyncs have passed",
        lambda: first.metric("shoal_operator_reconcile_seconds_count") >= looks + 6,
    )
    assert versions(plane, namespace) == before
    assert first.stop() == 0
    second = running.start("--resync-seconds", "2")
    second.wait_until_leading()
    wait_until(
        "the new one has looked at everything more than once",
        lambda: second.metric("shoal_operator_reconcile_seconds_count") >= 6,
    )
    assert versions(plane, namespace) == before
    assert second.metric("shoal_operator_api_requests_total", verb="patch") == 0


def test_two_hundred_objects_at_once_are_all_seen_and_told_of_once(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    operator = running.start()
    operator.wait_until_leading()
    partitions = [
        {
            "apiVersion": "shoal.dev/v1alpha1",
            "kind": "Partition",
            "metadata": {"name": f"p-{number}"},
            "spec": {"modelRef": {"name": "missing"}},
        }
        for number in range(200)
    ]
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
        lambda: operator.metric("shoal_operator_reconcile_seconds_count", kind="Partition") >= 400,
    )


def test_no_object_ever_gets_a_finalizer_or_an_annotation_of_kopf(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    operator = running.start()
    operator.wait_until_leading()
    plane.access.apply(model("m"), namespace=namespace)
    wait_until("it was seen", lambda: bool(status(plane, namespace, "model", "m")))
    kinds = "models,jobs,events"
    for each in plane.access.get(kinds, f"--namespace={namespace}")["items"]:
        assert "finalizers" not in each["metadata"], each["metadata"]
        assert not any("kopf" in name for name in each["metadata"].get("annotations", {}))
    operator.kill()
    plane.kubectl("delete", "namespace", namespace, "--timeout=60s")


def test_an_object_that_is_gone_takes_its_children_with_it(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    running.start().wait_until_leading()
    plane.access.apply(model("m"), namespace=namespace)
    jobs = ("jobs", f"--namespace={namespace}")
    wait_until("the worker is made", lambda: len(plane.access.get(*jobs)["items"]) == 1)
    plane.kubectl("delete", "model", "m", f"--namespace={namespace}")
    wait_until("the worker is gone", lambda: plane.access.get(*jobs)["items"] == [])


def test_a_name_that_somebody_else_has_is_left_alone_and_told(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    """The worker's name is known beforehand, so it can be taken beforehand."""
    operator = running.start()
    operator.wait_until_leading()
    plane.access.apply(model("m"), namespace=namespace)
    jobs = ("jobs", f"--namespace={namespace}")
    wait_until("the worker is made", lambda: len(plane.access.get(*jobs)["items"]) == 1)
    [worker] = plane.access.get(*jobs)["items"]
    operator.stop()
    plane.kubectl("delete", "model", "m", f"--namespace={namespace}")
    wait_until("the worker is gone", lambda: plane.access.get(*jobs)["items"] == [])
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}
    plane.access.apply(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": worker["metadata"]["name"],
                "labels": {"app.kubernetes.io/managed-by": "shoal-operator"},
            },
            "spec": {"template": template},
        },
        namespace=namespace,
    )
    running.start().wait_until_leading()
    plane.access.apply(model("m"), namespace=namespace)

    def told() -> bool:
        events = plane.access.get("events", f"--namespace={namespace}")["items"]
        return any(each["reason"] == "NotApplied" for each in events)

    wait_until("it is told", told)
    [job] = plane.access.get(*jobs)["items"]
    assert "ownerReferences" not in job["metadata"]


def test_an_operator_of_one_namespace_looks_at_no_other(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    operator = running.start("--namespace", namespace)
    operator.wait_until_leading()
    plane.access.apply(model("elsewhere"), namespace="default")
    plane.access.apply(model("here"), namespace=namespace)
    wait_until("it works", lambda: is_seen(plane, namespace, "here"))
    wait_until(
        "it has counted", lambda: operator.metric("shoal_operator_objects", kind="Model") == 1
    )
    assert status(plane, "default", "model", "elsewhere") == {}
    plane.kubectl("delete", "model", "elsewhere", "--namespace=default")


def test_an_object_that_says_what_no_schema_knows_is_told_what_is_wrong(
    plane: ControlPlane, namespace: str, running: Operators
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
        running.start().wait_until_leading()
        plane.access.apply(
            {
                "apiVersion": "shoal.dev/v1alpha1",
                "kind": "Placement",
                "metadata": {"name": "odd"},
                "spec": {"partitionRef": "p", "poolRef": {"name": "shelf"}},
            },
            namespace=namespace,
        )
        wait_until(
            "it is told",
            lambda: (
                condition(plane, namespace, "placement", "odd", "Ready").get("reason") == "Invalid"
            ),
        )
        told = condition(plane, namespace, "placement", "odd", "Ready")
        assert "spec.partitionRef" in told["message"]
    finally:
        plane.kubectl("delete", "placement", "odd", f"--namespace={namespace}")
        plane.kubectl(*schema, json.dumps([{"op": "replace", "path": place, "value": before}]))
