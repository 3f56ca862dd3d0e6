"""The chart with values that are allowed and odd, or that were taken away."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.values import EVERYTHING
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
        "fullnameOverride": "2025",
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


@pytest.mark.parametrize("name", ["nodeSelector", "tolerations", "affinity"])
def test_a_null_for_where_pods_may_run_is_anywhere(name: str, tmp_path: Path) -> None:
    values = {f"{who}.{name}": None for who in ("operator", "coordinator", "worker")}
    rendered = render({**values, "images.pullSecrets": None, "networkPolicies.metricsFrom": None})
    (tmp_path / "s.yaml").write_text(
        rendered["ConfigMap", "shoal-operator"]["data"]["operator.yaml"]
    )
    read = read_settings(tmp_path / "s.yaml")
    assert (read.worker_place, read.images.pull_secrets) == (read.coordinator_place, ())
