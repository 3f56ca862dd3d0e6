"""What the chart makes of its values."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis.strategies import from_regex
from prometheus_client import CollectorRegistry

from chart.values import AFFINITY, EVERYTHING, OPERATOR, REQUIRED, on_nodes, pod_of
from kind_definitions import definition
from rendered_chart import CHART, PROMETHEUS, Refused, helm, render, rendered_text
from shoal_api.fields import DISK, MEMORY
from shoal_api.kinds import KINDS
from shoal_api.shapes import Errors
from shoal_operator.command import operator_parser, read_settings
from shoal_operator.reconcile.settings import OperatorSettings, Place
from shoal_protocol.exposition import ExpositionServer

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
QUANTITY = SCHEMA["$defs"]["quantity"]
POLICY = "ValidatingAdmissionPolicy"


def settings_of(tmp_path: Path, values: dict[str, Any], *arguments: str) -> OperatorSettings:
    file = tmp_path / "operator.yaml"
    file.write_text(render(values, *arguments)["ConfigMap", OPERATOR]["data"]["operator.yaml"])
    return read_settings(file)


def test_helm_has_nothing_to_complain_about() -> None:
    assert "ERROR" not in helm("lint", "--strict", "--quiet", str(CHART))


def test_the_defaults_are_what_a_bare_cluster_needs() -> None:
    assert set(render()) == {
        *(("CustomResourceDefinition", f"{names.plural}.shoal.dev") for names in KINDS.values()),
        *((kind, OPERATOR) for kind in ("ServiceAccount", "ConfigMap", "Service", "Deployment")),
        *((kind, OPERATOR) for kind in ("ClusterRole", "ClusterRoleBinding")),
        *((kind, OPERATOR) for kind in ("Role", "RoleBinding", "NetworkPolicy")),
        *(("ClusterRole", name) for name in ("shoal-view", "shoal-edit")),
        *((kind, "shoal-devices") for kind in (POLICY, f"{POLICY}Binding")),
        ("Pod", "shoal-test"),
    }


# ---- values and their schema ---------------------------------------------------------------------


def test_every_value_is_in_the_schema_and_every_field_of_it_has_a_value() -> None:
    def paths(of: dict[str, Any]) -> set[str]:
        found = set()
        for name, inner in of.items():
            found.add(name)
            if isinstance(inner, dict):
                found |= {f"{name}.{path}" for path in paths(inner)}
        return found

    def fields(of: dict[str, Any]) -> set[str]:
        found = set()
        for name, inner in of.get("properties", {}).items():
            found |= {name, *(f"{name}.{path}" for path in fields(inner))}
        return found

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    known = fields(SCHEMA) - {"global"}
    free = ("operator.resources.",)
    assert {path for path in paths(values) if not path.startswith(free)} == known


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("agent.floor", "96", "does not match pattern"),
        ("agent.floor", 96, "want string"),
        ("images.registry", "http://mirror/", "does not match pattern"),
        ("images.registry", "mirror/a b", "does not match pattern"),
        ("images.pullPolicy", "Sometimes", "value must be one of"),
        ("images.agent.digest", "latest", "does not match pattern"),
        ("images.operator.repository", "shoal/operator:1", "does not match pattern"),
        ("operator.replicas", 2, "additional properties 'replicas' not allowed"),
        ("rbac.namespaces", ["Not_One"], "does not match pattern"),
        ("offline", "yes", "want boolean"),
        ("operator.resources", {"limits": {"memory": "banana"}}, "does not match pattern"),
        ("operator.resources", {"limit": {}}, "additional properties 'limit' not allowed"),
        ("worker.memory", "banana", "does not match pattern"),
        ("operator.tolerations", [{"ky": "edge"}], "additional properties 'ky' not allowed"),
        ("worker.tolerations", [{"key": "a", "operator": "Is"}], "value must be one of"),
        ("coordinator.affinity", {"nodeAfinity": {}}, "additional properties 'nodeAfinity' not"),
        ("networkPolicies.metricsFrom", [{"pods": {}}], "additional properties 'pods' not allowed"),
        ("worker.memory", "0Mi", "does not match pattern"),
        ("coordinator.memory", "1k", "does not match pattern"),
        ("worker.disk", "512Ki", "does not match pattern"),
        ("agent.floor", "99999Ti", "does not match pattern"),
        ("agent.floor", f"96.{'0' * 32}Mi", "maxLength"),
        ("images.agent.repository", "{agent}", "does not match pattern"),
        ("images.pullSecrets", [f"s{each}" for each in range(65)], "maxItems"),
        ("podMonitor.additionalLabels", {"release": "a" * 64}, "maxLength"),
        ("podMonitor.additionalLabels", {"release": "not one"}, "does not match pattern"),
        ("podMonitor.additionalLabels", {"not one": "a"}, "does not match pattern"),
        ("podMonitor.interval", f"{'0' * 32}1s", "maxLength"),
        ("worker.nodeSelector", {f"a{each}": "" for each in range(65)}, "maxProperties"),
        ("operator.resources", {"requests": {"memroy": "1Gi"}}, "does not match pattern"),
        ("operator.resources", {"limits": {"cpu": -1}}, "minimum: got -1"),
        ("operator.resources", {"claims": []}, "additional properties 'claims' not allowed"),
        ("worker.tolerations", [{}], "missing property"),
        ("worker.tolerations", [{"value": "a"}], "missing property 'key'"),
        ("worker.tolerations", [{"key": "a", "operator": "Exists", "value": "b"}], "maxLength"),
        ("worker.tolerations", [{"key": "a", "tolerationSeconds": 1}], "missing property 'effect'"),
        ("worker.tolerations", [{"key": "a"}] * 65, "maxItems"),
        ("networkPolicies.metricsFrom", [{"podSelector": {}}] * 65, "maxItems"),
        ("networkPolicies.metricsFrom", [{}], "minProperties"),
        ("operator.affinity", {"podAffinity": {REQUIRED: [{}]}}, "missing property 'topologyKey'"),
        ("worker.affinity", {"nodeAffinity": {REQUIRED: {"terms": []}}}, "'terms' not allowed"),
        (
            "coordinator.affinity",
            {"nodeAffinity": {REQUIRED: on_nodes({"key": "disk", "operator": "In"})}},
            "missing property 'values'",
        ),
    ],
)
def test_a_bad_value_is_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(Refused, match=said):
        render({name: value})


SIZES = ("1Mi", "1.5Mi", "64Mi", "2M", "0.5Gi", "0.05G", "1Gi", "9999G", "1Ti", "131072Ki")


@pytest.mark.parametrize("size", SIZES)
def test_a_size_that_people_write_is_taken(size: str) -> None:
    assert re.fullmatch(QUANTITY["pattern"], size)


@given(size=from_regex(QUANTITY["pattern"], fullmatch=True))
def test_every_size_that_the_schema_takes_is_one_for_the_operator(size: str) -> None:
    assume(size.isascii() and len(size) <= QUANTITY["maxLength"])
    for shape in (MEMORY, DISK):
        errors: Errors = []
        shape.read(size, (), errors)
        assert errors == []


def test_the_most_that_the_schema_takes_the_operator_reads(tmp_path: Path) -> None:
    labels = {f"example.com/{each}": "a" * 63 for each in range(64)}
    tolerations = [{"operator": "Exists"}, {"key": "a", "operator": "Exists", "value": ""}] * 32
    values: dict[str, Any] = {
        "images.registry": "r" * 512,
        "images.agent.repository": "a" * 255,
        "images.agent.tag": "1" * 128,
        "images.pullSecrets": [f"s{each}" for each in range(64)],
        "podMonitor.additionalLabels": labels,
        "podMonitor.interval": f"{'1' * 31}s",
        "networkPolicies.metricsFrom": [{"podSelector": {}}] * 64,
        **{f"{name}.nodeSelector": labels for name in ("coordinator", "worker")},
        **{f"{name}.tolerations": tolerations for name in ("coordinator", "worker")},
        **{f"{name}.affinity": AFFINITY for name in ("coordinator", "worker")},
    }
    settings = settings_of(tmp_path, values)
    assert settings.monitor_labels == labels
    assert settings.worker_place == settings.coordinator_place
    assert settings.worker_place.affinity == AFFINITY


# ---- the operator --------------------------------------------------------------------------------


def test_the_operator_can_read_its_settings(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, {})
    assert settings.images.coordinator == "shoal/coordinator:0.1.0"
    assert settings.enrolment == "shoal-operator.shoal-system.svc:8443"
    assert settings.namespace == "shoal-system"
    assert settings.agent_floor == 96 << 20
    assert settings.worker_memory == 1 << 30
    assert (settings.cert_manager, settings.pod_monitors, settings.offline) == (False, False, False)
    assert settings.network_policies
    labels = pod_of()["metadata"]["labels"]
    assert settings.operator_labels.items() <= labels.items()


def test_values_become_settings(tmp_path: Path) -> None:
    digest = "sha256:" + "0c1f" * 16
    readers = [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]
    tolerations = [{"key": "edge", "operator": "Exists"}]
    values = {
        "images.registry": "mirror.example/edge/",
        "images.agent.digest": digest,
        "images.worker.tag": "1.2.3",
        "images.pullPolicy": "Never",
        "images.pullSecrets": ["one", "two"],
        "offline": True,
        "certManager.enabled": True,
        "networkPolicies.enabled": False,
        "podMonitor.enabled": True,
        "podMonitor.additionalLabels": {"release": "prometheus"},
        "podMonitor.interval": "15s",
        "networkPolicies.metricsFrom": readers,
        "coordinator.nodeSelector": {"disk": "ssd"},
        "coordinator.affinity": {"nodeAffinity": {}},
        "worker.tolerations": tolerations,
        "worker.priorityClassName": "low",
        "agent.priorityClassName": "edge",
        **{f"{of}.podLabels": {"team": of} for of in ("agent", "coordinator", "worker")},
    }
    settings = settings_of(tmp_path, values, PROMETHEUS)
    assert settings.images.agent == f"mirror.example/edge/shoal/agent@{digest}"
    assert settings.images.worker == "mirror.example/edge/shoal/worker:1.2.3"
    assert settings.images.pull_policy == "Never"
    assert settings.images.pull_secrets == ("one", "two")
    assert (settings.offline, settings.cert_manager, settings.pod_monitors) == (True, True, True)
    assert not settings.network_policies
    assert settings.monitor_labels == {"release": "prometheus"}
    assert settings.monitor_interval == "15s"
    assert settings.metrics_from == tuple(readers)
    assert settings.coordinator_place == Place(
        node_selector={"disk": "ssd"}, affinity={"nodeAffinity": {}}
    )
    assert settings.worker_place == Place(tolerations=tuple(tolerations), priority_class_name="low")
    assert settings.agent_priority_class == "edge"
    labels = (settings.agent_labels, settings.coordinator_labels, settings.worker_labels)
    assert labels == ({"team": "agent"}, {"team": "coordinator"}, {"team": "worker"})
    assert settings.other_groups == ("monitoring.coreos.com",)
    assert not settings_of(tmp_path, values).pod_monitors, "the cluster has no such kind"


def test_the_operator_is_started_with_options_that_it_has() -> None:
    (container,) = pod_of({"rbac.namespaced": True, "rbac.namespaces": ["a", "b"]})["spec"][
        "containers"
    ]
    assert container["args"][0] == "--settings=/etc/shoal/operator.yaml"
    understood = operator_parser().parse_args(container["args"])
    assert understood.namespace == ["a", "b"]


@pytest.mark.parametrize("key", [("Deployment", OPERATOR), ("Pod", "shoal-test")], ids=str)
def test_pods_are_as_restricted_as_pod_security_asks(key: tuple[str, str]) -> None:
    found = render()[key]["spec"]
    spec = found["template"]["spec"] if "template" in found else found
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["runAsUser"] == 65532
        assert container["resources"]["limits"]["memory"]
    assert not [volume for volume in spec.get("volumes", []) if "hostPath" in volume]


def test_two_operators_never_run_side_by_side() -> None:
    spec = render()["Deployment", OPERATOR]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_other_settings_are_another_pod() -> None:
    one, other = pod_of(), pod_of({"worker.memory": "2Gi"})
    mark = "checksum/settings"
    assert one["metadata"]["annotations"][mark] != other["metadata"]["annotations"][mark]


def test_where_the_pod_runs_is_as_given() -> None:
    values: dict[str, Any] = {
        "operator.nodeSelector": {"disk": "ssd"},
        "operator.tolerations": [{"key": "a", "operator": "Exists"}],
        "operator.affinity": {"podAntiAffinity": {}},
        "operator.priorityClassName": "high",
        "operator.podLabels": {"team": "edge"},
        "operator.podAnnotations": {"note": "x"},
        "images.pullSecrets": ["one"],
    }
    pod = pod_of(values)
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert pod["spec"][name] == values[f"operator.{name}"]
    assert pod["spec"]["imagePullSecrets"] == [{"name": "one"}]
    assert pod["metadata"]["labels"]["team"] == "edge"
    assert pod["metadata"]["annotations"]["note"] == "x"


def test_the_release_test_has_the_labels_of_the_operators_pod() -> None:
    test = render({"operator.podLabels": {"team": "edge"}})["Pod", "shoal-test"]
    assert test["metadata"]["labels"]["team"] == "edge"


def test_service_and_policies_find_the_operator() -> None:
    objects = render()
    labels = objects["Deployment", OPERATOR]["spec"]["template"]["metadata"]["labels"]
    service = objects["Service", OPERATOR]["spec"]
    policy = objects["NetworkPolicy", OPERATOR]["spec"]
    for selector in (service["selector"], policy["podSelector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    assert {port["name"]: port["port"] for port in service["ports"]} == {
        "enrolment": 8443,
        "metrics": 8080,
    }


def test_an_operator_that_is_not_ready_still_signs_and_says_why() -> None:
    assert render()["Service", OPERATOR]["spec"]["publishNotReadyAddresses"] is True


def test_the_release_test_says_what_it_found_in_one_line(tmp_path: Path) -> None:
    """The pod's own program, run against an operator that is well, unready, and not there."""
    (container,) = render()["Pod", "shoal-test"]["spec"]["containers"]
    _, option, program, url = container["command"]
    answers = iter([None, "the watch of Model has been silent for 113 s"])
    with ExpositionServer(
        lambda: next(answers), host="127.0.0.1", port=0, registry=CollectorRegistry()
    ) as server:
        here = url.replace("http://shoal-operator.shoal-system.svc:8080", server.url)
        asked = [sys.executable, option, program, here]
        well, unready = (run(asked, tmp_path) for _ in range(2))
    away = run(asked, tmp_path)
    assert well[0] == 0
    assert unready == (1, f"{here} 503 the watch of Model has been silent for 113 s\n")
    assert away[0] == 1
    assert away[1].startswith(f"{here} does not answer: ")
    assert away[1].count("\n") == 1


def run(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit status, and what was said on standard error."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stderr


def test_a_pod_that_only_tests_is_let_in() -> None:
    values = {"networkPolicies.metricsFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}]}
    objects = render(values)
    _, metrics = objects["NetworkPolicy", OPERATOR]["spec"]["ingress"]
    labels = objects["Pod", "shoal-test"]["metadata"]["labels"]
    assert metrics["from"][-1]["podSelector"]["matchLabels"].items() <= labels.items()


# ---- the kinds -----------------------------------------------------------------------------------


def crds(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    objects = render(values)
    return {name: each for (kind, name), each in objects.items() if kind.startswith("CustomRes")}


def test_the_kinds_are_those_of_the_declarations() -> None:
    found = crds({})
    assert len(found) == len(KINDS)
    for names in KINDS.values():
        assert found[f"{names.plural}.shoal.dev"]["spec"] == definition(names)["spec"]


@pytest.mark.parametrize("keep", [True, False])
def test_kinds_are_kept_or_go_with_the_release(keep: bool) -> None:
    for crd in crds({"crds.keep": keep}).values():
        annotations = crd["metadata"].get("annotations", {})
        assert annotations == ({"helm.sh/resource-policy": "keep"} if keep else {})


def test_kinds_can_be_left_to_others() -> None:
    assert crds({"crds.install": False}) == {}


# ---- what may be left out ------------------------------------------------------------------------


def test_monitors_are_made_only_where_the_cluster_knows_them() -> None:
    monitoring = {("PodMonitor", OPERATOR), ("PrometheusRule", OPERATOR)}
    assert monitoring.isdisjoint(render(EVERYTHING))
    assert monitoring.isdisjoint(render({}, PROMETHEUS))
    assert monitoring <= set(render(EVERYTHING, PROMETHEUS))


def test_monitors_and_dashboards_carry_more_labels() -> None:
    labels = {"release": "prometheus"}
    names = ("podMonitor", "prometheusRule", "dashboards")
    more: dict[str, Any] = {f"{name}.additionalLabels": labels for name in names}
    objects = render(EVERYTHING | more, PROMETHEUS)
    found = [
        each
        for (kind, name), each in objects.items()
        if kind in ("PodMonitor", "PrometheusRule") or "dashboard" in name
    ]
    assert len(found) >= 3
    for each in found:
        assert labels.items() <= each["metadata"]["labels"].items()


def test_a_dashboard_is_found_by_its_label() -> None:
    objects = render(EVERYTHING)
    found = {name: each for (_, name), each in objects.items() if "dashboard" in name}
    sources = sorted((CHART / "dashboards").glob("*.json"))
    assert sorted(found) == [f"shoal-dashboard-{path.stem}" for path in sources]
    for path in sources:
        dashboard = found[f"shoal-dashboard-{path.stem}"]
        assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(dashboard["data"][path.name]) == json.loads(path.read_text())


def test_cert_manager_makes_the_authority_when_told_to() -> None:
    objects = render({"certManager.enabled": True})
    certificate = objects["Certificate", "shoal-ca"]["spec"]
    assert (certificate["secretName"], certificate["isCA"]) == ("shoal-ca", True)
    assert ("Issuer", certificate["issuerRef"]["name"]) in objects


def test_nothing_is_a_webhook_or_a_hook_that_could_hang() -> None:
    for (kind, _), each in render(EVERYTHING, PROMETHEUS).items():
        assert "Webhook" not in kind
        hook = each["metadata"].get("annotations", {}).get("helm.sh/hook")
        assert hook in (None, "test")


def test_devices_are_protected_in_the_namespaces_of_the_operator_where_the_cluster_can() -> None:
    everywhere = render()[f"{POLICY}Binding", "shoal-devices"]["spec"]
    assert "matchResources" not in everywhere
    values = {"rbac.namespaced": True, "rbac.namespaces": ["a", "b"]}
    some = render(values)[f"{POLICY}Binding", "shoal-devices"]["spec"]["matchResources"]
    (among,) = some["namespaceSelector"]["matchExpressions"]
    assert (among["key"], among["values"]) == ("kubernetes.io/metadata.name", ["a", "b"])
    assert not [kind for kind, _ in render({"admissionPolicy.enabled": False}) if POLICY in kind]
    assert not [kind for kind, _ in render({}, "--kube-version=1.29.4") if POLICY in kind]


def test_a_second_release_clashes_with_nothing_but_the_kinds() -> None:
    where = ("other", str(CHART), "--namespace=elsewhere")
    texts = [rendered_text(), helm("template", *where, "--set=crds.install=false")]
    names = [
        {
            (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
            for each in yaml.safe_load_all(text)
            if each
        }
        for text in texts
    ]
    assert names[0].isdisjoint(names[1])
