"""Who may do what, as the API server itself says it: `kubectl auth can-i --list` of each account.

What the operator may do is what the chart's rules say, beside which stands why; coordinators,
agents and workers may do nothing at all, and carry no token of the API server.
"""

from pathlib import Path

import pytest
import yaml

from operator_processes import ACCOUNT, NAMESPACE, Operators, wait_until
from rights import Rights, of_rules, rights, without
from shoal_cluster import ControlPlane

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow]

API = "shoal.dev/v1alpha1"


def of_anyone(plane: ControlPlane, namespace: str) -> Rights:
    """What every account may do: ask what there is, and about itself."""
    return rights(plane, "nobody-in-particular", "default", namespace)


def test_the_operator_may_do_what_the_chart_says_and_nothing_else(
    plane: ControlPlane, namespace: str
) -> None:
    everywhere = of_rules(("ClusterRole", ACCOUNT))
    at_home = of_rules(("ClusterRole", ACCOUNT), ("Role", ACCOUNT))
    for where, allowed in ((namespace, everywhere), (NAMESPACE, at_home)):
        may = rights(plane, ACCOUNT, NAMESPACE, where)
        assert without(may, of_anyone(plane, where)) == allowed, where


def test_of_anyones_rights_none_changes_or_reads_an_object(
    plane: ControlPlane, namespace: str
) -> None:
    """So that what the operator's list is compared without hides nothing."""
    for (what, _), verbs in of_anyone(plane, namespace).items():
        about_itself = what.startswith("selfsubject")
        assert verbs == ({"create"} if about_itself else {"get"}), what
        assert about_itself or what.startswith("/"), what


def test_the_operators_token_is_its_own_accounts(account: Path) -> None:
    kubeconfig = yaml.safe_load(account.read_text())
    [user] = kubeconfig["users"]
    assert set(user["user"]) == {"token"}


def test_coordinators_agents_and_workers_may_do_nothing_and_carry_no_token(
    plane: ControlPlane, namespace: str, running: Operators, coordinator: str
) -> None:
    node = {"apiVersion": "v1", "kind": "Node"}
    plane.access.apply({**node, "metadata": {"name": "n1", "labels": {"shelf": "yes"}}})
    running.start("--coordinator", f"{namespace}/shelf={coordinator}").wait_until_leading()
    plane.access.apply(
        {
            "apiVersion": API,
            "kind": "DevicePool",
            "metadata": {"name": "shelf"},
            "spec": {"nodeSelector": {"shelf": "yes"}, "budget": {"memory": "64Mi"}},
        },
        {
            "apiVersion": API,
            "kind": "Model",
            "metadata": {"name": "m"},
            "spec": {"source": {"uri": "s3://models/m.onnx"}},
        },
        namespace=namespace,
    )
    kinds = ("deployments,daemonsets,jobs", f"--namespace={namespace}")
    wait_until("all is made", lambda: len(plane.access.get(*kinds)["items"]) == 3)
    accounts = set[str]()
    for made in plane.access.get(*kinds)["items"]:
        pod = made["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False, made["metadata"]["name"]
        accounts.add(pod.get("serviceAccountName", "default"))
    assert accounts == {"shelf-coordinator", "shelf-agent", "default"}
    anyone = of_anyone(plane, namespace)
    for account in accounts:
        assert rights(plane, account, namespace, namespace) == anyone, account
    # An agent shows who it is with a token that is good for nothing but that.
    [agents] = plane.access.get("daemonsets", f"--namespace={namespace}")["items"]
    tokens = [
        source["serviceAccountToken"]["audience"]
        for volume in agents["spec"]["template"]["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", ())
        if "serviceAccountToken" in source
    ]
    assert tokens == ["shoal.dev/enrolment"]
    plane.kubectl("delete", "node", "n1")
