"""Who may talk to a pool's pods and read their metrics, and what goes when it is switched off."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconcile.test_device_pool import children, see, settings
from reconcile.test_inference_job import planned
from reconcile.test_partition import partition
from reconcile.values import NAMESPACE, model
from shoal_api.labels import COMPONENT, POOL
from shoal_operator.reconcile.decision import ObjectKey
from shoal_operator.reconcile.workers import (
    WorkerSpec,
    cut_worker,
    deliver_worker,
    input_follower,
    input_transfer_worker,
    inspect_worker,
    result_follower,
    result_transfer_worker,
    table_worker,
    worker_job,
)

JOB = planned().job
INSTALL = Path(__file__).parents[3] / "docs" / "install.md"


def test_only_those_who_must_may_talk_to_a_pools_pods() -> None:
    policies = children(see(), "NetworkPolicy")
    closed = policies["shelf-closed"]["spec"]
    assert isinstance(closed, Mapping)
    assert (closed["ingress"], closed["egress"]) == ([], [])
    agents = policies["shelf-agents"]["spec"]
    assert isinstance(agents, Mapping)
    assert [rule["ports"][0]["port"] for rule in agents["ingress"]] == [7401]
    assert [rule["ports"][0]["port"] for rule in agents["egress"]] == [7400, 7401, 8443, 53]
    workers = policies["shelf-workers"]["spec"]
    assert isinstance(workers, Mapping)
    assert workers["egress"] == [{}]
    offline = children(see(settings=settings(offline=True)), "NetworkPolicy")["shelf-workers"]
    spec = offline["spec"]
    assert isinstance(spec, Mapping)
    assert [rule["ports"][0]["port"] for rule in spec["egress"]] == [7400, 53]
    assert not children(see(settings=settings(network_policies=False)), "NetworkPolicy")


@pytest.mark.parametrize(
    "worker",
    [
        deliver_worker(partition(), model(), (), "shelf"),
        input_transfer_worker(JOB, "shelf"),
        input_follower(JOB, "shelf"),
        result_follower(JOB, "shelf"),
        result_transfer_worker(JOB, "shelf"),
    ],
    ids=lambda worker: worker.component,
)
def test_every_worker_that_a_pool_closes_is_let_through_to_its_coordinator(
    worker: WorkerSpec,
) -> None:
    policies: Any = children(see(), "NetworkPolicy")
    made: Any = worker_job(JOB, worker, settings())
    labels = made["spec"]["template"]["metadata"]["labels"]
    (port,) = [
        rule
        for rule in policies["shelf-coordinator"]["spec"]["ingress"]
        if rule["ports"] == [{"port": 7400, "protocol": "TCP"}]
    ]
    assert selects(policies["shelf-closed"]["spec"]["podSelector"], labels)
    assert selects(policies["shelf-workers"]["spec"]["podSelector"], labels)
    assert any(selects(peer["podSelector"], labels) for peer in port["from"])


def test_what_workers_may_do_neither_coordinators_nor_agents_may() -> None:
    policies: Any = children(see(), "NetworkPolicy")
    for component in ("coordinator", "agent"):
        labels = {POOL: "shelf", COMPONENT: component}
        assert selects(policies["shelf-closed"]["spec"]["podSelector"], labels)
        assert not selects(policies["shelf-workers"]["spec"]["podSelector"], labels)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector of ours selects a pod with these labels."""
    equal = all(labels.get(key) == text for key, text in selector.get("matchLabels", {}).items())
    found = [
        (labels.get(each["key"]) in each["values"]) == (each["operator"] == "In")
        for each in selector.get("matchExpressions", [])
    ]
    return equal and all(found)


def test_metrics_are_for_those_who_are_named_else_for_all_where_they_are_read() -> None:
    def readers(**more: object) -> object:
        policy = children(see(settings=settings(**more)), "NetworkPolicy")["shelf-agents"]
        spec = policy["spec"]
        assert isinstance(spec, Mapping)
        return [rule["from"] for rule in spec["ingress"] if rule["ports"][0]["port"] == 9400]

    named = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    assert readers() == []
    assert readers(pod_monitors=True) == [[{"namespaceSelector": {}}]]
    assert readers(metrics_from=(named,)) == [[named]]
    assert readers(metrics_from=(named,), pod_monitors=True) == [[named]]


def test_what_was_switched_off_is_removed() -> None:
    everything = settings(cert_manager=True, pod_monitors=True)
    assert see(settings=everything).removals == ()
    assert see(settings=settings(network_policies=False)).removals == tuple(
        ObjectKey(
            api_version="networking.k8s.io/v1",
            kind="NetworkPolicy",
            namespace=NAMESPACE,
            name=f"shelf-{name}",
        )
        for name in ("closed", "coordinator", "agents", "workers")
    )
    both = settings(other_groups=("cert-manager.io", "monitoring.coreos.com"))
    assert [(key.kind, key.name) for key in see(settings=both).removals] == [
        ("Issuer", "shelf-self-signed"),
        ("Certificate", "shelf-ca"),
        ("Issuer", "shelf-ca"),
        ("Certificate", "shelf-coordinator-tls"),
        ("Certificate", "shelf-worker-tls"),
        ("Certificate", "shelf-viewer-tls"),
        ("PodMonitor", "shelf-pods"),
    ]
    assert see(settings=replace(everything, other_groups=both.other_groups)).removals == ()


def test_a_pod_monitor_is_made_where_it_means_something() -> None:
    assert not children(see(), "PodMonitor")
    asked = settings(pod_monitors=True, monitor_labels={"release": "prometheus"})
    (monitor,) = children(see(settings=asked), "PodMonitor").values()
    metadata = monitor["metadata"]
    assert isinstance(metadata, Mapping)
    assert metadata["labels"]["release"] == "prometheus"
    assert intervals(monitor) == [None]
    often = replace(asked, monitor_interval="15s")
    (monitor,) = children(see(settings=often), "PodMonitor").values()
    assert intervals(monitor) == ["15s"]


def test_every_series_of_a_pool_says_of_which_pool_and_device_it_is() -> None:
    (monitor,) = children(see(settings=settings(pod_monitors=True)), "PodMonitor").values()
    spec = monitor["spec"]
    assert isinstance(spec, Mapping)
    (endpoint,) = spec["podMetricsEndpoints"]

    def target(component: str) -> dict[str, str]:
        labels = {
            "__meta_kubernetes_pod_label_shoal_dev_pool": "shelf",
            "__meta_kubernetes_pod_label_app_kubernetes_io_component": component,
            "__meta_kubernetes_pod_node_name": "pi-4",
        }
        for rule in endpoint["relabelings"]:
            joined = ";".join(labels.get(name, "") for name in rule["sourceLabels"])
            if (found := re.fullmatch(rule.get("regex", "(.*)"), joined)) is not None:
                labels[rule["targetLabel"]] = found[1]
        return {name: text for name, text in labels.items() if not name.startswith("__")}

    assert target("agent") == {"pool": "shelf", "component": "agent", "device": "pi-4"}
    assert target("coordinator") == {"pool": "shelf", "component": "coordinator"}


def intervals(monitor: Mapping[str, object]) -> list[object]:
    spec = monitor["spec"]
    assert isinstance(spec, Mapping)
    return [each.get("interval") for each in spec["podMetricsEndpoints"]]


@pytest.mark.parametrize(
    "worker",
    [
        inspect_worker(model()),
        cut_worker(partition(), model(), ()),
        table_worker(partition(), model(), ()),
    ],
    ids=lambda worker: worker.component,
)
def test_the_documented_policy_is_for_the_workers_that_no_pool_has(worker: WorkerSpec) -> None:
    pod: Any = worker_job(model(), worker, settings())
    labels = pod["spec"]["template"]["metadata"]["labels"]
    assert POOL not in labels, "the policies of pools would select it"
    policies = [
        yaml.safe_load(block)
        for block in re.findall(r"```yaml\n(.*?)```", INSTALL.read_text(), re.DOTALL)
        if "kind: NetworkPolicy" in block
    ]
    (policy,) = policies
    (chosen,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert chosen["key"] == COMPONENT
    assert labels[COMPONENT] in chosen["values"]
