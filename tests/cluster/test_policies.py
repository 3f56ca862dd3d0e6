"""What a NetworkPolicy becomes on a node."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal_cluster.policies import rules

Json = dict[str, Any]


def pod(name: str, address: str, namespace: str = "jobs", **labels: str) -> Json:
    ports = [{"name": "metrics", "containerPort": 9400}]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"ports": ports}]},
        "status": {"podIP": address},
    }


def policy(selector: Json, **spec: object) -> Json:
    types = [name for name in ("Ingress", "Egress") if name.lower() in spec]
    return {
        "kind": "NetworkPolicy",
        "metadata": {"name": "p", "namespace": "jobs"},
        "spec": {"podSelector": selector, "policyTypes": types, **spec},
    }


SERVER = pod("server", "10.0.0.1", app="server")
CLIENT = pod("client", "10.0.0.2", app="client")
ABROAD = pod("abroad", "10.0.1.3", "system", app="client")
NAMESPACES = [
    {"kind": "Namespace", "metadata": {"name": name, "labels": {"name": name}}}
    for name in ("jobs", "system")
]
EVERYTHING = [SERVER, CLIENT, ABROAD, *NAMESPACES]
OF_SERVER = {"matchLabels": {"app": "server"}}
OF_CLIENTS = {"matchExpressions": [{"key": "app", "operator": "In", "values": ["client"]}]}
OF_OTHERS = {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["server"]}]}


def chain(text: str, name: str) -> list[str]:
    """The lines of a chain."""
    return text.split(f"chain {name} {{")[1].split("}\n", maxsplit=1)[0].strip().splitlines()


def test_nobody_is_closed_whom_no_policy_selects() -> None:
    assert "jump" not in rules(EVERYTHING)
    assert "10.0.0.2 jump" not in rules([*EVERYTHING, policy(OF_SERVER, ingress=[])])


def test_who_is_closed_takes_answers_and_nothing_else() -> None:
    text = rules([*EVERYTHING, policy(OF_SERVER, ingress=[], egress=[])])
    assert "ct state established,related return" in text
    assert "ip daddr 10.0.0.1 jump ingress_0" in text
    assert "ip saddr 10.0.0.1 jump egress_0" in text
    assert chain(text, "ingress_0") == chain(text, "egress_0") == ["counter reject"]


@pytest.mark.parametrize(
    ("peer", "addresses"),
    [
        ({"podSelector": OF_CLIENTS}, "10.0.0.2"),
        ({"podSelector": OF_OTHERS}, "10.0.0.2"),
        ({"podSelector": {}, "namespaceSelector": {"matchLabels": {"name": "system"}}}, "10.0.1.3"),
        ({"namespaceSelector": {}}, "10.0.0.1, 10.0.0.2, 10.0.1.3"),
    ],
)
def test_peers_are_pods_of_the_policys_namespace_or_of_those_it_names(
    peer: Json, addresses: str
) -> None:
    rule = {"from": [peer], "ports": [{"port": "metrics"}]}
    text = rules([*EVERYTHING, policy(OF_SERVER, ingress=[rule])])
    assert chain(text, "ingress_0") == [
        f"ip saddr {{ {addresses} }} tcp dport 9400 return",
        "counter reject",
    ]


def test_a_rule_without_peers_is_for_anybody_and_one_without_ports_for_any() -> None:
    dns = {"ports": [{"port": 53, "protocol": "UDP"}]}
    text = rules([*EVERYTHING, policy(OF_SERVER, egress=[dns])])
    assert chain(text, "egress_0") == ["udp dport 53 return", "counter reject"]
    text = rules([*EVERYTHING, policy(OF_SERVER, egress=[{}])])
    assert chain(text, "egress_0") == ["return", "counter reject"]


def test_what_is_not_known_is_refused() -> None:
    block = {"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    with pytest.raises(ValueError, match="ipBlock"):
        rules([*EVERYTHING, policy(OF_SERVER, ingress=[block])])


def test_nft_takes_the_rules(tmp_path: Path) -> None:
    everybody = {"from": [{"namespaceSelector": {}}], "ports": [{"port": 7400}]}
    file = tmp_path / "rules.nft"
    file.write_text(rules([*EVERYTHING, policy(OF_SERVER, ingress=[everybody], egress=[{}])]))
    try:
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--net", "nft", "--check", "--file", file],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("there is no nft here")
    if "unshare:" in done.stderr or "nft: No such" in done.stderr:
        pytest.skip(f"no namespace to try them in: {done.stderr}")
    assert done.returncode == 0, done.stderr
