"""The chart on a real API server: what it is asked to take, what the operator may do, what is left.

There are no nodes, so that pods are made and stay Pending.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.values import AFFINITY
from cluster_fixtures import or_skip
from rendered_chart import CHART, rendered_text
from shoal_api.kinds import KINDS
from shoal_cluster import CommandFailed, ControlPlane

pytestmark = [pytest.mark.real, pytest.mark.cluster]

NAMESPACE = "shoal-system"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:shoal-operator"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """One of its own: the kinds come and go."""
    with or_skip(ControlPlane) as made:
        made.kubectl("create", "namespace", NAMESPACE)
        made.kubectl("label", "namespace", NAMESPACE, RESTRICTED)
        yield made


@pytest.fixture(scope="module")
def release(plane: ControlPlane) -> ControlPlane:
    """The chart installed."""
    plane.access.helm("install", "shoal", str(CHART), f"--namespace={NAMESPACE}")
    return plane


def may(plane: ControlPlane, verb: str, resource: str, *more: str, name: str = "") -> bool:
    whole, _, part = resource.partition("/")
    what = f"{whole}/{name}" if name else whole
    asked = ("auth", "can-i", verb, what, f"--subresource={part}", f"--as={ACCOUNT}")
    try:
        plane.kubectl(*asked, *more)
    except CommandFailed:
        return False
    return True


VALUES: list[dict[str, Any]] = [
    {},
    {"rbac.namespaced": True, "rbac.namespaces": ["default", NAMESPACE]},
    {"networkPolicies.metricsFrom": [{"namespaceSelector": {}}], "dashboards.enabled": True},
    {
        "operator.affinity": AFFINITY,
        "operator.nodeSelector": {"example.com/disk": "", "arch": "a" * 63},
        "operator.tolerations": [
            {"operator": "Exists", "value": ""},
            {"key": "example.com/edge", "value": "a", "effect": "NoSchedule"},
            {"key": "edge", "effect": "NoExecute", "tolerationSeconds": 0},
        ],
        "operator.resources": {
            "requests": {"cpu": 0, "memory": "1.5Gi", "example.com/gpu": 1},
            "limits": {"memory": "2G", "ephemeral-storage": "1Gi", "example.com/gpu": 1},
        },
        "operator.podAnnotations": {"example.com/note": "any text: {}"},
        "operator.priorityClassName": "",
        "networkPolicies.metricsFrom": [
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
            {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "a"}}},
        ],
    },
]


@pytest.mark.parametrize("values", VALUES, ids=["defaults", "namespaced", "dashboards", "places"])
def test_the_api_server_takes_what_the_chart_renders(
    plane: ControlPlane, values: dict[str, Any]
) -> None:
    dry_run = ("apply", "--server-side", "--dry-run=server", "--filename=-")
    said = plane.kubectl(*dry_run, given=rendered_text(values))
    assert "deployment.apps/shoal-operator serverside-applied (server dry run)" in said


def test_the_notes_say_how_to_go_on(release: ControlPlane) -> None:
    notes = release.access.helm("get", "notes", "shoal", f"--namespace={NAMESPACE}")
    assert "examples/ocr/prepare.py\n  SHOAL_IMAGE=shoal/worker:0.1.0 examples/volumes" in notes
    assert "kubectl get shoal" in notes
    assert "WARNING" not in notes


def test_the_notes_warn_of_alerts_about_what_nobody_measures(release: ControlPlane) -> None:
    """Without measurements there seems to be no operator, and all else seems to be well."""

    def notes(*values: str) -> str:
        given = [f"--set={each}" for each in values]
        where = (str(CHART), f"--namespace={NAMESPACE}", "--dry-run=server")
        said = release.access.helm("upgrade", "shoal", *where, *given)
        return " ".join(said.rpartition("NOTES:")[2].split())

    warning = "WARNING: prometheusRule.enabled without podMonitor.enabled"
    assert warning in notes("prometheusRule.enabled=true")
    assert warning not in notes("prometheusRule.enabled=true", "podMonitor.enabled=true")
    assert warning not in notes()


def test_the_operators_pod_passes_pod_security(release: ControlPlane) -> None:
    def pods() -> list[str]:
        found = release.access.get("pods", f"--namespace={NAMESPACE}")
        return [pod["metadata"]["name"] for pod in found["items"]]

    release.access.wait_until("the operator's pod is made", lambda: len(pods()) == 1)


def test_a_device_is_made_by_the_operator_only(release: ControlPlane) -> None:
    metadata = {"name": "mine", "namespace": "default"}
    device = {"apiVersion": "shoal.dev/v1alpha1", "kind": "Device", "metadata": metadata}
    given = json.dumps({**device, "spec": {"poolRef": {"name": "shelf"}}})
    tried = ("create", "--dry-run=server", "--filename=-")

    def refusal() -> str:
        try:
            return release.kubectl(*tried, given=given) and ""
        except CommandFailed as failed:
            return failed.said

    release.access.wait_until("the policy is in force", lambda: refusal() != "")
    assert "a Device is made by the operator for each agent that connects" in refusal()
    assert "created (server dry run)" in release.kubectl(*tried, f"--as={ACCOUNT}", given=given)


def test_the_pod_of_helm_test_passes_pod_security(release: ControlPlane) -> None:
    hooks = release.access.helm("get", "hooks", "shoal", f"--namespace={NAMESPACE}")
    (pod,) = [each for each in yaml.safe_load_all(hooks) if each]
    tried = ("create", "--dry-run=server", "--filename=-")
    assert "created (server dry run)" in release.kubectl(*tried, given=json.dumps(pod))


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("watch", "inferencejobs.shoal.dev"),
        ("patch", "inferencejobs.shoal.dev/status"),
        ("create", "deployments.apps"),
        ("create", "jobs.batch"),
        ("get", "pods/log"),
        ("create", "secrets"),
        ("create", "networkpolicies.networking.k8s.io"),
        ("create", "events"),
    ],
)
def test_the_operator_may_do_its_work(release: ControlPlane, verb: str, resource: str) -> None:
    assert may(release, verb, resource, "--namespace=default")


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("list", "secrets"),
        ("create", "pods"),
        ("create", "pods/exec"),
        ("delete", "namespaces"),
        ("patch", "nodes"),
        ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
        ("update", "inferencejobs.shoal.dev"),
        ("delete", "models.shoal.dev"),
        ("create", "leases.coordination.k8s.io"),
    ],
)
def test_the_operator_may_do_nothing_else(release: ControlPlane, verb: str, resource: str) -> None:
    assert not may(release, verb, resource, "--namespace=default")


def test_the_operator_may_take_its_lease_at_home(release: ControlPlane) -> None:
    lease, home = "leases.coordination.k8s.io", f"--namespace={NAMESPACE}"
    assert may(release, "update", lease, home, name="shoal-operator")
    assert not may(release, "update", lease, home, name="another")


def test_a_namespaced_operator_may_read_one_secret_at_home(release: ControlPlane) -> None:
    helm, home = release.access.helm, f"--namespace={NAMESPACE}"
    values = ("--set=rbac.namespaced=true", "--set=rbac.namespaces={default}")
    helm("upgrade", "shoal", str(CHART), home, *values)
    for namespace, name, allowed in (
        (NAMESPACE, "shoal-ca", True),
        (NAMESPACE, "another", False),
        ("default", "shelf-ca", True),
        ("kube-system", "another", False),
    ):
        where = f"--namespace={namespace}"
        assert may(release, "get", "secrets", where, name=name) is allowed, (namespace, name)
    helm("upgrade", "shoal", str(CHART), home, "--set=rbac.namespaced=false")


def test_a_release_that_would_see_what_another_sees_is_refused(release: ControlPlane) -> None:
    helm = release.access.helm
    elsewhere = ("--namespace=elsewhere", "--create-namespace", "--set=crds.install=false")

    def install(name: str, *namespaces: str) -> None:
        given = [f"--set=rbac.namespaces={{{','.join(namespaces)}}}"] if namespaces else []
        flag = f"--set=rbac.namespaced={str(bool(namespaces)).lower()}"
        helm("upgrade", "--install", name, str(CHART), *elsewhere, flag, *given)

    for namespaces in ((), ("elsewhere",)):
        with pytest.raises(
            CommandFailed, match="shoal in namespace shoal-system sees all namespaces"
        ):
            install("second", *namespaces)
    home = f"--namespace={NAMESPACE}"
    some = ("--set=rbac.namespaced=true", "--set=rbac.namespaces={default}")
    helm("upgrade", "shoal", str(CHART), home, *some)
    with pytest.raises(CommandFailed, match="sees default already, and this one would too"):
        install("second")
    with pytest.raises(CommandFailed, match="sees default already, and this one would too"):
        install("second", "elsewhere", "default")
    with pytest.raises(CommandFailed, match="shoal in namespace shoal-system has the name of this"):
        install("shoal", "elsewhere")
    install("second", "elsewhere")
    install("second", "elsewhere", "kube-system")  # what it sees itself is no hindrance
    helm("uninstall", "second", "--namespace=elsewhere")
    helm("upgrade", "shoal", str(CHART), home, "--set=rbac.namespaced=false")


def test_who_edits_a_namespace_may_write_jobs_in_it(release: ControlPlane) -> None:
    release.kubectl("create", "rolebinding", "anna", "--clusterrole=edit", "--user=anna")

    def may_anna(verb: str, resource: str) -> bool:
        try:
            release.kubectl("auth", "can-i", verb, resource, "--as=anna")
        except CommandFailed:
            return False
        return True

    release.access.wait_until(
        "the roles are joined", lambda: may_anna("create", "inferencejobs.shoal.dev")
    )
    assert may_anna("list", "devices.shoal.dev")
    assert not may_anna("create", "devices.shoal.dev")


def test_an_upgrade_with_objects_keeps_them_and_an_uninstall_keeps_the_kinds(
    release: ControlPlane,
) -> None:
    examples = Path(__file__).resolve().parents[2] / "examples" / "ocr"
    release.kubectl("apply", "--server-side", f"--filename={examples}")
    helm = release.access.helm
    helm("upgrade", "shoal", str(CHART), f"--namespace={NAMESPACE}", "--set=worker.memory=2Gi")
    assert release.access.get("inferencejob", "ocr")["spec"]["mode"] == "Streaming"
    helm("uninstall", "shoal", f"--namespace={NAMESPACE}", "--wait")
    for names in KINDS.values():
        release.kubectl("get", "crd", f"{names.plural}.shoal.dev")
    assert release.access.get("inferencejob", "ocr")
    # Installed again it takes its kinds back, and goes whole when told to.
    helm("install", "shoal", str(CHART), f"--namespace={NAMESPACE}", "--set=crds.keep=false")
    helm("uninstall", "shoal", f"--namespace={NAMESPACE}", "--wait")
    assert "shoal.dev" not in release.kubectl("get", "crd", "--output=name")
    release.kubectl("delete", "namespace", NAMESPACE, "--timeout=60s")
