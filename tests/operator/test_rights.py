"""Who may do what, as the API server itself says it: `kubectl auth can-i --list` of each account.

What the operator may do is what the chart's rules say, beside which stands why; coordinators,
agents and workers may do nothing at all, and carry no token of the API server.
"""

import re

import pytest
import yaml

from operator_processes import ACCOUNT, NAMESPACE, Operators, wait_until
from rendered_chart import render
from shoal_cluster import ControlPlane

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow]

Rights = dict[tuple[str, str], set[str]]
"""(Resource with its group, name or empty) to verbs; a path that is no resource has no name."""
_ROW = re.compile(r"(?P<what>\S*)\s+\[(?P<urls>.*?)\]\s+\[(?P<names>.*?)\]\s+\[(?P<verbs>.*?)\]")
API = "shoal.dev/v1alpha1"


def rights(plane: ControlPlane, account: str, home: str, namespace: str) -> Rights:
    """What an account of the namespace `home` may do in a namespace."""
    said = plane.kubectl(
        *("auth", "can-i", "--list", f"--namespace={namespace}"),
        f"--as=system:serviceaccount:{home}:{account}",
        *("--as-group=system:serviceaccounts", f"--as-group=system:serviceaccounts:{home}"),
        "--as-group=system:authenticated",
    )
    found: Rights = {}
    for line in said.splitlines()[1:]:
        row = _ROW.fullmatch(line.rstrip())
        assert row is not None, line
        for name in row["names"].split() or [""]:
            key = (row["what"] or row["urls"], name)
            found.setdefault(key, set()).update(row["verbs"].split())
    return found


def of_anyone(plane: ControlPlane, namespace: str) -> Rights:
    """What every account may do: ask what there is, and about itself."""
    return rights(plane, "nobody-in-particular", "default", namespace)


def without(rights: Rights, others: Rights) -> Rights:
    left = {key: verbs - others.get(key, set()) for key, verbs in rights.items()}
    return {key: verbs for key, verbs in left.items() if verbs}


def of_rules(*roles: tuple[str, str]) -> Rights:
    """What rules of the chart allow, as `can-i` calls it."""
    found: Rights = {}
    chart = render()
    for role in roles:
        for rule in chart[role]["rules"]:
            assert not set(rule) - {"apiGroups", "resources", "verbs"}, rule
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    whole, _, part = resource.partition("/")
                    name = f"{whole}.{group}" if group else whole
                    key = (f"{name}/{part}" if part else name, "")
                    found.setdefault(key, set()).update(rule["verbs"])
    return found


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


def test_the_operators_token_is_its_own_accounts(plane: ControlPlane) -> None:
    kubeconfig = yaml.safe_load((plane.folder / "operator.kubeconfig").read_text())
    [user] = kubeconfig["users"]
    assert set(user["user"]) == {"token"}


def test_coordinators_agents_and_workers_may_do_nothing_and_carry_no_token(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    node = {"apiVersion": "v1", "kind": "Node"}
    plane.access.apply({**node, "metadata": {"name": "n1", "labels": {"shelf": "yes"}}})
    running.start().wait_until_leading()
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
