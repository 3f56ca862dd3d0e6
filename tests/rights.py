"""What accounts may do: as the API server says it, as the chart says it, and as it was used."""

import json
import re

from rendered_chart import render
from shoal_cluster import ControlPlane

Rights = dict[tuple[str, str], set[str]]
"""(Resource with its group, name or empty) to verbs; a path that is no resource has no name."""
_ROW = re.compile(r"(?P<what>\S*)\s+\[(?P<urls>.*?)\]\s+\[(?P<names>.*?)\]\s+\[(?P<verbs>.*?)\]")


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


def without(rights: Rights, others: Rights) -> Rights:
    """Rights that others do not have as well."""
    left = {key: verbs - others.get(key, set()) for key, verbs in rights.items()}
    return {key: verbs for key, verbs in left.items() if verbs}


def of_rules(*roles: tuple[str, str]) -> Rights:
    """What rules of the chart allow, as `can-i` calls it."""
    found: Rights = {}
    chart = render()
    for role in roles:
        for rule in chart[role]["rules"]:
            assert not set(rule) - {"apiGroups", "resources", "resourceNames", "verbs"}, rule
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    whole, _, part = resource.partition("/")
                    name = f"{whole}.{group}" if group else whole
                    for named in rule.get("resourceNames", [""]):
                        key = (f"{name}/{part}" if part else name, named)
                        found.setdefault(key, set()).update(rule["verbs"])
    return found


def by_resource(rights: Rights) -> Rights:
    """Rights to named objects among those to their resource, as the audit log tells of them."""
    found: Rights = {}
    for (what, _), verbs in rights.items():
        found.setdefault((what, ""), set()).update(verbs)
    return found


def used(plane: ControlPlane, user: str) -> tuple[Rights, Rights]:
    """What a user has asked for, by the audit log: what was allowed, and what was forbidden."""
    assert plane.audit_log is not None, "the control plane was not made with audit=True"
    allowed: Rights = {}
    forbidden: Rights = {}
    for line in plane.audit_log.read_text().splitlines():
        entry = json.loads(line)
        subject = entry.get("objectRef")
        if entry["user"]["username"] != user or subject is None:
            continue
        group, part = subject.get("apiGroup"), subject.get("subresource")
        name = f"{subject.get('resource', '')}.{group}" if group else subject.get("resource", "")
        status = entry.get("responseStatus", {}).get("code")
        found = forbidden if status == 403 else allowed
        # What is applied and was not there asks for two rights, and is told of as one verb.
        asked = {entry["verb"], *(["create"] if status == 201 else [])}
        # A right may be to one object only.
        for which in {"", subject.get("name", "")}:
            found.setdefault((f"{name}/{part}" if part else name, which), set()).update(asked)
    return allowed, forbidden
