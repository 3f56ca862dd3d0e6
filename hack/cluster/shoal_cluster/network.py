"""The network of one cluster: a bridge on the host, to which each node's namespace is linked.

Cluster N has 10.(160+N).0.0/16: the host's and the nodes' addresses are in .255.0/24, the pods of
node M in .M.0/24. Nothing outside the machine reaches these, and nothing is sent outside from them.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_NODES = 200


@dataclass(frozen=True, slots=True)
class Network:
    """The bridge and the addresses of the cluster with this number."""

    number: int

    @property
    def bridge(self) -> str:
        """The bridge's name."""
        return f"shoal{self.number}"

    @property
    def host_address(self) -> str:
        """The host's address on the bridge: of the API server and of cluster DNS."""
        return f"{self._prefix}.255.1"

    @property
    def pods(self) -> str:
        """The subnet of all pods."""
        return f"{self._prefix}.0.0/16"

    def node_address(self, node: int) -> str:
        """The address of node number `node`, from 1 on."""
        return f"{self._prefix}.255.{node + 1}"

    def node_pods(self, node: int) -> str:
        """The subnet of the pods on node number `node`."""
        return f"{self._prefix}.{node}.0/24"

    def link(self, node: int) -> str:
        """The name of the host's end of that node's link."""
        return f"shoal{self.number}n{node}"

    @property
    def _prefix(self) -> str:
        return f"10.{160 + self.number}"

    def make(self) -> None:
        """Make the bridge."""
        ip("link", "add", self.bridge, "type", "bridge")
        ip("address", "add", f"{self.host_address}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def remove(self) -> None:
        """Remove the links and the bridge; the routes go with them."""
        links = Path("/sys/class/net").glob(f"{self.bridge}n*")
        for name in (*(link.name for link in links), self.bridge):
            _delete_link(name)

    def add_node(self, node: int, pid: int) -> None:
        """Link the network namespace of process `pid` to the bridge, as node number `node`."""
        link = self.link(node)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        ip("link", "set", link, "master", self.bridge, "up")
        address = self.node_address(node)
        within(pid, "ip", "link", "set", "lo", "up")
        within(pid, "ip", "address", "add", f"{address}/24", "dev", "eth0")
        within(pid, "ip", "link", "set", "eth0", "up")
        within(pid, "ip", "route", "add", "default", "via", self.host_address)
        within(pid, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
        ip("route", "replace", self.node_pods(node), "via", address)

    def remove_node(self, node: int) -> None:
        """Remove the link of a node, and the way to its pods."""
        _delete_link(self.link(node))
        ip("route", "delete", self.node_pods(node))

    def join(self, node: int, pid: int, other: int) -> None:
        """Let node `node`, whose process is `pid`, reach the pods of node `other`."""
        route = ("via", self.node_address(other))
        within(pid, "ip", "route", "replace", self.node_pods(other), *route)

    def set_link(self, node: int, state: str) -> None:
        """Set the host's end of a node's link "up" or "down"."""
        ip("link", "set", self.link(node), state)


def _delete_link(name: str) -> None:
    """Delete a link, which may go by itself at the same time, together with its namespace."""
    here = Path("/sys/class/net", name)
    try:
        if here.exists():
            ip("link", "delete", name)
    except OSError:
        if here.exists():
            raise


def within(pid: int, *command: str | Path) -> None:
    """Run a command in the network namespace of process `pid`."""
    _run(("nsenter", f"--net=/proc/{pid}/ns/net", "--", *command))


def ip(*arguments: str) -> None:
    """Run iproute2's `ip` on the host."""
    _run(("ip", *arguments))


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
