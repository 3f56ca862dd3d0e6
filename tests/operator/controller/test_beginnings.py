"""Operators on a real API server that begin, end, and see less than everything: what they write."""

import socket
import ssl
from functools import partial
from pathlib import Path

import pytest

from controller.jobs import secret
from controller.test_on_a_control_plane import condition, is_seen, status
from operator_processes import (
    CHART,
    NAMESPACE,
    SETTINGS,
    Operators,
    kubeconfig_of,
    model,
    wait_until,
)
from shoal_cluster import ControlPlane

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow]


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

    def reported() -> bool:
        events = plane.access.get("events", f"--namespace={namespace}")["items"]
        return any(each["reason"] == "NotApplied" for each in events)

    wait_until("it is reported", reported)
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


def test_agents_enrol_however_long_the_names_of_release_and_namespace_are(
    plane: ControlPlane, account: Path, running: Operators, tmp_path: Path
) -> None:
    """The host that they dial has both; it may be longer than a certificate's common name."""
    host = f"{'r' * 50}-operator.{'n' * 63}.svc"
    settings = tmp_path / "long.yaml"
    settings.write_text(SETTINGS.replace("shoal-operator.shoal-system.svc", host))
    operator = running.start(f"--settings={settings}")
    wait_until("enrolment listens", lambda: bool(operator.enrolment) or not operator.runs())
    assert operator.enrolment is not None, operator.log.read_text()
    trusted = secret(plane, NAMESPACE, "shoal-ca")["ca.crt"].decode()
    context = ssl.create_default_context(cadata=trusted)
    context.set_alpn_protocols(["h2"])
    address, _, port = operator.enrolment.rpartition(":")
    with (
        socket.create_connection((address, int(port))) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        shown = secured.getpeercert()
    assert shown is not None
    assert ("DNS", host) in shown["subjectAltName"]


def test_a_namespace_that_cannot_be_read_keeps_no_other_waiting(
    plane: ControlPlane, namespace: str, running: Operators, tmp_path: Path
) -> None:
    """Of a namespace that is deleted, the operator's Role there goes as well."""
    home, other = f"{namespace}-home", f"{namespace}-other"
    values = (f"--set=fullnameOverride={home},rbac.namespaced=true", f"--namespace={home}")
    given = f"--set=rbac.namespaces={{{namespace},{other}}}"
    shown = [f"--show-only=templates/{name}.yaml" for name in ("rbac", "serviceaccount")]
    roles = plane.access.helm("template", "r", str(CHART), *values, given, *shown)
    plane.kubectl("create", "namespace", home)
    with pytest.raises(Exception, match=f'namespaces "{other}" not found'):
        plane.kubectl("apply", "--filename=-", given=roles)
    settings = tmp_path / "namespaced.yaml"
    settings.write_text(SETTINGS.replace(NAMESPACE, home))
    operator = running.start(
        *("--namespace", namespace, "--namespace", other, f"--settings={settings}"),
        kubeconfig=kubeconfig_of(plane, home, f"{home}-operator"),
    )
    plane.access.apply(model("m"), namespace=namespace)
    wait_until("it works", lambda: is_seen(plane, namespace, "m"))
    said = f"namespace {other} cannot be read"
    wait_until("it says which it cannot read", lambda: said in operator.ask("/readyz")[1])
    plane.kubectl("create", "namespace", other)
    plane.access.apply(model("m"), namespace=other)
    plane.kubectl("apply", "--filename=-", given=roles)
    wait_until("it works there too", lambda: is_seen(plane, other, "m"))
    wait_until("nothing is wrong any more", operator.ready)
    plane.kubectl("delete", "namespace", other)
    assert operator.stop() == 0
