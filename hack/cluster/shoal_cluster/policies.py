"""NetworkPolicies enforced: nftables rules in each node's network namespace.

A node routes every packet of its pods, also between two of them, so one chain of `forward` on each
node sees all of them. A pod that a policy selects is closed in that policy's directions, but for
what some policy lets through; answers always pass, and so does the node itself with its probes.

Known is what Shoal's policies say: `podSelector` and `namespaceSelector` with labels, `In` and
`NotIn`, ports by number or name. An `ipBlock` is refused instead of being taken for less than it
is.

A pod that starts is open until the next poll, a second at most.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shoal_cluster.access import CommandFailed
from shoal_cluster.cluster import Cluster

_POLL_SECONDS: Final = 1.0
_TABLE: Final = "policies"
_KINDS: Final = "pods,networkpolicies,namespaces"
Json = Mapping[str, Any]


def rules(objects: Sequence[Json]) -> str:
    """The script for `nft` that enforces the policies among these pods, namespaces and policies.

    Raises:
        ValueError: where a policy says what is not known here.
    """
    pods = [each for each in objects if each["kind"] == "Pod" and _address(each)]
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    namespaces = {
        each["metadata"]["name"]: each["metadata"].get("labels", {})
        for each in objects
        if each["kind"] == "Namespace"
    }
    jumps: list[str] = []
    chains: list[str] = []
    for number, pod in enumerate(sorted(pods, key=_address)):
        for direction, mine, theirs in (
            ("Egress", "saddr", "daddr"),
            ("Ingress", "daddr", "saddr"),
        ):
            of_pod = [each for each in policies if _selects(each, pod, direction)]
            if not of_pod:
                continue
            name = f"{direction.lower()}_{number}"
            jumps.append(f"ip {mine} {_address(pod)} jump {name}")
            let_through = [
                line
                for policy in of_pod
                for rule in policy["spec"].get(direction.lower(), [])
                for line in _lines(rule, policy, pod, direction, theirs, pods, namespaces)
            ]
            body = "\n".join((*let_through, "counter reject"))
            chains.append(f"chain {name} {{\n{body}\n}}")
    hook = "type filter hook forward priority 10; policy accept;"
    base = "\n".join((hook, "ct state established,related return", *jumps))
    inside = "\n".join((*chains, f"chain forward {{\n{base}\n}}"))
    return f"table ip {_TABLE}\ndelete table ip {_TABLE}\ntable ip {_TABLE} {{\n{inside}\n}}\n"


def _lines(  # noqa: PLR0913, PLR0917 - what a rule depends on
    rule: Json,
    policy: Json,
    pod: Json,
    direction: str,
    theirs: str,
    pods: Sequence[Json],
    namespaces: Mapping[str, Json],
) -> Iterator[str]:
    """A rule of a policy, as lines that let through."""
    peers = rule.get("from" if direction == "Ingress" else "to")
    found = [each for each in pods if peers is None or _among(each, peers, policy, namespaces)]
    others = f"ip {theirs} {{ {', '.join(map(_address, found))} }} " if found else ""
    if peers is None:
        others = ""  # anybody, and not only pods
    elif not found:
        return
    if not rule.get("ports"):
        yield f"{others}return"
    for port in rule.get("ports") or ():
        # A name is the receiver's own.
        numbers = {_number(port["port"], each) for each in ([pod] if theirs == "saddr" else found)}
        if isinstance(port["port"], int):
            numbers = {port["port"]}
        for number in sorted(numbers - {None}):
            yield f"{others}{port.get('protocol', 'TCP').lower()} dport {number} return"


def _number(port: int | str, pod: Json) -> Any:
    """The number of a pod's port."""
    named = (each for one in pod["spec"]["containers"] for each in one.get("ports", ()))
    return next((each["containerPort"] for each in named if each.get("name") == port), None)


def _selects(policy: Json, pod: Json, direction: str) -> bool:
    spec = policy["spec"]
    same = policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
    return same and direction in spec["policyTypes"] and _matches(spec["podSelector"], pod)


def _among(pod: Json, peers: Sequence[Json], policy: Json, namespaces: Mapping[str, Json]) -> bool:
    """Whether a pod is one of a rule's peers."""
    for peer in peers:
        if set(peer) - {"podSelector", "namespaceSelector"}:
            raise ValueError(f"policy {policy['metadata']['name']}: {sorted(peer)} is not known")
        home = pod["metadata"]["namespace"]
        if "namespaceSelector" in peer:
            there = _fits(peer["namespaceSelector"], namespaces.get(home, {}))
        else:
            there = home == policy["metadata"]["namespace"]
        if there and _matches(peer.get("podSelector", {}), pod):
            return True
    return False


def _matches(selector: Json, pod: Json) -> bool:
    return _fits(selector, pod["metadata"].get("labels", {}))


def _fits(selector: Json, labels: Json) -> bool:
    for each in selector.get("matchExpressions", ()):
        if each["operator"] not in ("In", "NotIn"):
            raise ValueError(f"the operator {each['operator']} is not known")
        if (labels.get(each["key"]) in each["values"]) != (each["operator"] == "In"):
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def _address(pod: Json) -> str:
    """A pod's own address; empty where it has none, or its node's."""
    shares = pod["spec"].get("hostNetwork", False)
    return "" if shares else str(pod.get("status", {}).get("podIP") or "")


@contextlib.contextmanager
def enforcing(cluster: Cluster) -> Iterator[None]:
    """Enforce the cluster's policies until the context ends; they are when it begins."""
    ended = threading.Event()
    file = cluster.control_plane.folder / "policies.nft"
    loaded = ""

    def load() -> None:
        nonlocal loaded
        objects = cluster.access.get(_KINDS, "--all-namespaces")["items"]
        if (text := rules(objects)) != loaded:
            file.write_text(text)
            for node in cluster.nodes.values():
                node.load_rules(file)
            loaded = text

    def go_on() -> None:
        while not ended.wait(_POLL_SECONDS):
            with contextlib.suppress(CommandFailed):  # the API server may be away for a while
                load()

    load()
    thread = threading.Thread(target=go_on, name="policies", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        file.write_text(f"table ip {_TABLE}\ndelete table ip {_TABLE}\n")
        for node in cluster.nodes.values():
            node.load_rules(file)
