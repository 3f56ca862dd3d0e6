"""What the chart lets the operator do."""

from itertools import pairwise
from typing import Any

import pytest

from chart.values import EVERYTHING, OPERATOR, pod_of
from rendered_chart import CHART, PROMETHEUS, Refused, render
from shoal_operator.controller.enrolling import AUTHORITY_SECRET
from shoal_operator.controller.operator import LEASE_NAME
from shoal_operator.reconcile.resources import CHILDREN, SHOAL

OTHERS = (PROMETHEUS, "--api-versions=cert-manager.io/v1")


def rules(values: dict[str, Any], kind: str, name: str, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = render(values, *arguments)[kind, name]["rules"]
    return found


def verbs(granted: list[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for rule in granted:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def test_nothing_is_granted_by_a_star() -> None:
    for (kind, name), role in render(EVERYTHING, PROMETHEUS).items():
        if kind in ("Role", "ClusterRole"):
            granted = verbs(role["rules"])
            assert not [key for key, each in granted.items() if "*" in (*key, *each)], name


def test_secrets_are_never_listed_and_pods_never_made_or_deleted() -> None:
    granted = verbs(rules(EVERYTHING, "ClusterRole", OPERATOR))
    assert granted["", "secrets"] == {"get", "create", "patch"}
    assert granted["", "pods"] == {"get", "list", "patch"}, "an annotation has an agent's budget"
    assert ("rbac.authorization.k8s.io", "roles") not in granted
    assert not [resource for _, resource in granted if resource.endswith(("/exec", "/attach"))]


def test_at_home_the_operator_may_read_its_own_secret_and_lease_and_no_others() -> None:
    named = {
        (resource, *rule["resourceNames"]): set(rule["verbs"])
        for rule in rules({}, "Role", OPERATOR)
        for resource in rule["resources"]
        if "resourceNames" in rule
    }
    assert named == {
        ("leases", LEASE_NAME): {"get", "update"},
        ("secrets", AUTHORITY_SECRET): {"get"},
    }
    others = [rule for rule in rules({}, "Role", OPERATOR) if "resourceNames" not in rule]
    assert {verb for rule in others for verb in rule["verbs"]} == {"create"}


def test_what_the_operator_watches_it_may_watch() -> None:
    granted = verbs(rules({}, "ClusterRole", OPERATOR))
    for resource in (*SHOAL.values(), *CHILDREN):
        group = resource.api_version.partition("/")[0]
        assert {"list", "watch"} <= granted[group, resource.plural]
    for resource in SHOAL.values():
        assert granted["shoal.dev", f"{resource.plural}/status"] == {"patch"}


def test_every_rule_says_why() -> None:
    lines = (CHART / "templates" / "_rules.tpl").read_text().splitlines()
    for before, line in pairwise(lines):
        if line.startswith("- apiGroups"):
            assert before.startswith("# "), line


def test_a_namespaced_operator_has_roles_in_its_namespaces_only() -> None:
    values = {"rbac.namespaced": True, "rbac.namespaces": ["a", "b"]}
    objects = render(values)
    for namespace in ("a", "b"):
        role = objects["Role", f"{namespace}/{OPERATOR}-pools"]
        assert verbs(role["rules"]) == {
            key: each
            for key, each in verbs(render()["ClusterRole", OPERATOR]["rules"]).items()
            if key not in (("", "nodes"), ("authentication.k8s.io", "tokenreviews"))
        }
        binding = objects["RoleBinding", f"{namespace}/{OPERATOR}-pools"]
        assert binding["subjects"][0]["namespace"] == "shoal-system"
    assert set(verbs(objects["ClusterRole", OPERATOR]["rules"])) == {
        ("", "nodes"),
        ("authentication.k8s.io", "tokenreviews"),
    }


def test_what_is_switched_off_is_not_granted() -> None:
    groups = {group for group, _ in verbs(rules({}, "ClusterRole", OPERATOR))}
    assert not {"monitoring.coreos.com", "cert-manager.io"} & groups


def test_what_was_switched_off_may_only_be_removed() -> None:
    off = verbs(rules({"networkPolicies.enabled": False}, "ClusterRole", OPERATOR, *OTHERS))
    for key in (
        ("networking.k8s.io", "networkpolicies"),
        ("monitoring.coreos.com", "podmonitors"),
        ("cert-manager.io", "issuers"),
        ("cert-manager.io", "certificates"),
    ):
        assert off[key] == {"get", "delete"}
    on = verbs(rules(EVERYTHING, "ClusterRole", OPERATOR, *OTHERS))
    for key in off:
        if key[0] in {"networking.k8s.io", "monitoring.coreos.com", "cert-manager.io"}:
            assert on[key] == {"get", "create", "patch"}


def test_no_roles_are_made_when_others_make_them() -> None:
    kinds = {kind for kind, _ in render({"rbac.create": False})}
    assert not {kind for kind in kinds if "Role" in kind}


def test_a_foreign_service_account_needs_a_name() -> None:
    with pytest.raises(Refused, match=r"serviceAccount\.name is needed"):
        render({"serviceAccount.create": False})
    values = {"serviceAccount.create": False, "serviceAccount.name": "mine"}
    assert ("ServiceAccount", "mine") not in render(values)
    assert pod_of(values)["spec"]["serviceAccountName"] == "mine"
