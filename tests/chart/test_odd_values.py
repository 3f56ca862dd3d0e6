"""The chart with values that are allowed and odd, or that were taken away."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.values import EVERYTHING, pod_of
from rendered_chart import CHART, PROMETHEUS, Refused, helm, render
from shoal_operator.command import read_settings

NAMES = ("name", "namespace", "serviceAccountName", "priorityClassName")


def texts(value: object) -> Iterator[object]:
    """What has to be text wherever it stands: names, and values of labels and annotations."""
    if isinstance(value, list):
        for each in value:
            yield from texts(each)
    elif isinstance(value, dict):
        yield from (value[name] for name in NAMES if name in value)
        for table in ("labels", "annotations", "matchLabels"):
            yield from (value.get(table) or {}).values()
        for each in value.values():
            yield from texts(each)


def test_names_that_look_like_numbers_stay_names(tmp_path: Path) -> None:
    """As those of namespaces that are called after the numbers of customers."""
    namespaces = ["12345", "true", "null"]
    given = {
        "nameOverride": "2024",
        "fullnameOverride": "n2025",
        "images.pullSecrets": ["1", "on"],
        "operator.priorityClassName": "100",
        "serviceAccount.name": "007",
        "rbac.namespaced": True,
        "rbac.namespaces": namespaces,
        **EVERYTHING,
    }
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(_nested(given)))
    options = ("--namespace=12345", f"--values={values}", PROMETHEUS)
    rendered = helm("template", "2026", str(CHART), *options)
    objects = [each for each in yaml.load_all(rendered, yaml.CSafeLoader) if each]
    found = list(texts([each for each in objects if each["kind"] != "CustomResourceDefinition"]))
    assert {"12345", "2024", "2026", "007", "100", "1", "on", "true"} <= set(map(str, found))
    assert not [each for each in found if not isinstance(each, str)]
    (settings,) = [
        each for each in objects if each["kind"] == "ConfigMap" and "operator.yaml" in each["data"]
    ]
    (tmp_path / "operator.yaml").write_text(settings["data"]["operator.yaml"])
    read = read_settings(tmp_path / "operator.yaml")
    assert (read.namespace, read.images.pull_secrets) == ("12345", ("1", "on"))
    assert read.operator_labels["app.kubernetes.io/instance"] == "2026"


def _nested(given: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, value in given.items():
        *sections, last = path.split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = value
    return values


def test_a_secret_for_a_registry_may_be_called_after_its_host() -> None:
    pod = render({"images.pullSecrets": ["ghcr.io"]})["Deployment", "shoal-operator"]
    assert pod["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "ghcr.io"}]


def test_an_interval_is_written_as_prometheus_writes_them() -> None:
    values = {"podMonitor.enabled": True, "podMonitor.interval": "1m30s"}
    monitor = render(values, PROMETHEUS)["PodMonitor", "shoal-operator"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["interval"] == "1m30s"
    with pytest.raises(Refused, match="does not match pattern"):
        render({**values, "podMonitor.interval": "30s1m"}, PROMETHEUS)


@pytest.mark.parametrize("address", ['https://a/b"c: d', "https://a/b c", "https://a/$1"])
def test_an_address_of_runbooks_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(Refused, match="does not match pattern"):
        render({"prometheusRule.enabled": True, "prometheusRule.runbooks": address}, PROMETHEUS)


@pytest.mark.parametrize(
    "name",
    [
        *("images", "images.agent", "images.pullPolicy", "operator", "operator.logLevel", "agent"),
        *("agent.floor", "coordinator", "coordinator.memory", "worker", "worker.memory"),
        *("worker.disk", "rbac", "crds", "podMonitor", "operator.terminationGracePeriodSeconds"),
    ],
)
def test_what_the_operator_cannot_do_without_is_asked_for_by_its_name(name: str) -> None:
    """A null in a file of values takes the default away."""
    with pytest.raises(Refused, match=f"missing propert(y|ies):? .*'{name.rpartition('.')[2]}'"):
        render({name: None})


@pytest.mark.parametrize(
    ("path", "more", "own"),
    [
        ("operator.podLabels", {"team": "a", "app.kubernetes.io/component": "x"}, "component"),
        ("operator.podLabels", {"helm.sh/chart": "x"}, "helm.sh/chart"),
        ("operator.podAnnotations", {"checksum/settings": "x"}, "checksum/settings"),
        ("podMonitor.additionalLabels", {"app.kubernetes.io/name": "x"}, "app.kubernetes.io/name"),
        ("prometheusRule.additionalLabels", {"app.kubernetes.io/version": "x"}, "version"),
        ("dashboards.additionalLabels", {"grafana_dashboard": "x"}, "grafana_dashboard"),
    ],
)
def test_what_the_chart_sets_itself_is_not_set_twice(
    path: str, more: dict[str, str], own: str
) -> None:
    everything = {
        f"{each}.enabled": True for each in ("podMonitor", "prometheusRule", "dashboards")
    }
    with pytest.raises(Refused, match=f"{path}: .*{own} is set by the chart itself"):
        render({**everything, path: more}, PROMETHEUS)


@pytest.mark.parametrize("of", ["agent", "coordinator", "worker"])
@pytest.mark.parametrize("own", ["app.kubernetes.io/component", "shoal.dev/pool"])
def test_labels_by_which_the_operator_knows_its_pods_are_not_taken(of: str, own: str) -> None:
    with pytest.raises(Refused, match=f"{of}.podLabels: {own} is set by the operator itself"):
        render({f"{of}.podLabels": {"team": "a", own: "x"}})


@pytest.mark.parametrize("release", ["2026", "a.b"])
def test_a_release_whose_service_could_not_be_called_so_is_refused(release: str) -> None:
    options = ("template", release, str(CHART), "--namespace=shoal-system")
    with pytest.raises(Refused, match=f"no Service may be called {release}-shoal-operator: "):
        helm(*options)
    assert helm(*options, "--set=fullnameOverride=shoal")
    with pytest.raises(Refused, match=r"fullnameOverride.*does not match pattern"):
        helm(*options, "--set-string=fullnameOverride=2026")


@pytest.mark.parametrize(
    ("resources", "limit", "request_"),
    [
        ({"limits": {"memory": "64Mi"}}, "64Mi", "128Mi"),
        ({"limits": {"memory": "134M"}}, "134M", "128Mi"),
        ({"limits": {"memory": 1000}}, "1000", "128Mi"),
        ({"limits": {"cpu": "49m"}}, "49m", "50m"),
        ({"limits": {"cpu": "0.5"}, "requests": {"cpu": 1}}, "0.5", "1"),
    ],
)
def test_a_limit_below_a_request_is_refused(
    resources: dict[str, Any], limit: str, request_: str
) -> None:
    with pytest.raises(Refused, match=f", {limit}, is below the request, {request_}; lower"):
        render({f"operator.resources.{name}": each for name, each in resources.items()})


@pytest.mark.parametrize(
    "limits", [{"memory": "128Mi"}, {"memory": "1.5G", "cpu": 1}, {"memory": "1Gi", "cpu": "50m"}]
)
def test_a_limit_of_at_least_the_request_is_taken(limits: dict[str, Any]) -> None:
    pod = pod_of({"operator.resources.limits": limits})["spec"]
    assert pod["containers"][0]["resources"]["limits"] == limits
    assert pod["containers"][0]["resources"]["requests"] == {"cpu": "50m", "memory": "128Mi"}


@pytest.mark.parametrize("name", ["nodeSelector", "tolerations", "affinity"])
def test_a_null_for_where_pods_may_run_is_anywhere(name: str, tmp_path: Path) -> None:
    values = {f"{who}.{name}": None for who in ("operator", "coordinator", "worker")}
    rendered = render({**values, "images.pullSecrets": None, "networkPolicies.metricsFrom": None})
    (tmp_path / "s.yaml").write_text(
        rendered["ConfigMap", "shoal-operator"]["data"]["operator.yaml"]
    )
    read = read_settings(tmp_path / "s.yaml")
    assert (read.worker_place, read.images.pull_secrets) == (read.coordinator_place, ())


def test_namespaces_that_would_be_ignored_are_refused() -> None:
    """Who forgets the other value would get an operator with rights in all namespaces."""
    with pytest.raises(Refused, match=r"Set rbac\.namespaced to true, or leave"):
        render({"rbac.namespaces": ["lab"]})
    assert render({"rbac.namespaces": ["lab"], "rbac.namespaced": True})


def test_a_repository_may_name_the_port_of_its_registry() -> None:
    image = {"repository": "mirror.example.com:5000/edge/operator", "tag": "1"}
    (container,) = pod_of({"images.operator": image})["spec"]["containers"]
    assert container["image"] == "mirror.example.com:5000/edge/operator:1"
    for wrong in ("mirror.example.com:5000", "a:b/c", "https://a/b", "a/b:1"):
        with pytest.raises(Refused, match="does not match pattern"):
            render({"images.operator.repository": wrong})


def test_a_secret_for_a_registry_is_named_once() -> None:
    """The API server takes no pod that names one twice."""
    with pytest.raises(Refused, match="items at 0 and 1 are equal"):
        render({"images.pullSecrets": ["a", "a"]})
