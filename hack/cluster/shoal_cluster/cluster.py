"""A cluster: a control plane, nodes of different sizes, and cluster DNS."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from shoal_cluster import machine, places, volumes
from shoal_cluster.access import Access
from shoal_cluster.build import NODE_PROGRAMS
from shoal_cluster.control_plane import ControlPlane, Store
from shoal_cluster.images import Image, base_image
from shoal_cluster.lifetimes import Lifetime
from shoal_cluster.machine import MachineLacks
from shoal_cluster.network import MOST_NODES, Network
from shoal_cluster.node import Node, NodeShape
from shoal_cluster.processes import Process
from shoal_cluster.programs import find_all
from shoal_cluster.removal import take_down

_DNS_USER = "cluster-dns"


def require_machine() -> None:
    """Raise MachineLacks, naming everything at once, where this machine cannot run nodes."""
    lacks = list(machine.lacks_for_nodes())
    if packages := machine.missing_packages({**machine.NODE_PROGRAMS, **machine.IMAGE_PROGRAMS}):
        lacks.append(f"apt-get install {' '.join(packages)}")
    try:
        find_all(NODE_PROGRAMS)
    except MachineLacks as missing:
        lacks.extend(missing.lacks)
    if lacks:
        raise MachineLacks("A cluster with nodes", tuple(lacks))


class Cluster(Lifetime):
    """A cluster; use it as a context manager, and add nodes.

    Args:
        store: As for `ControlPlane`.
        audit: As for `ControlPlane`.
        slowable_store: As for `ControlPlane`.

    Raises:
        MachineLacks: where the machine cannot.
    """

    def __init__(
        self, *, store: Store = "etcd", audit: bool = False, slowable_store: bool = False
    ) -> None:
        require_machine()
        self._home = places.claim(take_down)
        self.folder = self._home.folder
        self.network = Network(self._home.number)
        self.control_plane = ControlPlane(
            store=store,
            audit=audit,
            slowable_store=slowable_store,
            address=self.network.host_address,
            home=self._home,
        )
        self.access: Access = self.control_plane.access
        self.nodes: dict[str, Node] = {}
        self._numbers_given = 0
        self.dns = self._dns()
        self.provisioner: Process | None = None

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of a user who may do everything."""
        return self.access.kubeconfig

    def kubectl(self, *arguments: str, given: str = "", seconds: float = 120.0) -> str:
        """As `Access.kubectl`."""
        return self.access.kubectl(*arguments, given=given, seconds=seconds)

    # --- Nodes -----------------------------------------------------------------------------

    def add_node(
        self,
        name: str,
        *,
        memory_bytes: int,
        labels: Mapping[str, str] | None = None,
        taints: Sequence[str] = (),
    ) -> Node:
        """Add one node, on which pods may ask for `memory_bytes`; returns when it is ready."""
        (node,) = self.add_nodes([NodeShape(name, memory_bytes, labels or {}, taints)])
        return node

    def add_nodes(self, shapes: Iterable[NodeShape], images: Sequence[Image] = ()) -> list[Node]:
        """Add several nodes, which have `images` from their start; they become ready together."""
        added: list[Node] = []
        for shape in shapes:
            assert shape.name not in self.nodes, f"there is a node {shape.name} already"
            assert self._numbers_given < MOST_NODES, f"a cluster has {MOST_NODES} nodes at most"
            self._numbers_given += 1
            node = Node(shape, self._numbers_given, self.network, self.control_plane)
            others = list(self.nodes.values())
            self.nodes[shape.name] = node
            node.start(others, images)
            added.append(node)
        for node in added:
            node.kubelet.wait_until(node.ready, "ready")
        return added

    def remove_node(self, name: str) -> None:
        """Switch a node off for good and delete its object."""
        self.nodes.pop(name).stop()
        self.kubectl("delete", "node", name)

    def import_image(self, image: Image, nodes: Iterable[str] | None = None) -> None:
        """Put an image on the named nodes, on all by default, at the same time."""
        chosen = [self.nodes[name] for name in (self.nodes if nodes is None else nodes)]
        with ThreadPoolExecutor(max_workers=max(len(chosen), 1)) as pool:
            list(pool.map(lambda node: node.import_image(image), chosen))

    def add_volume(self, name: str, *, node: str, size: str = "1Gi") -> Path:
        """Make the PersistentVolume `name` of class "local" on a node; returns its folder."""
        folder = self.nodes[node].volume_folder(name)
        volumes.make_local(self.access, name, node=node, folder=folder, size=size)
        return folder

    def provide_volumes(self) -> None:
        """From now on claims of the default class "local-path" get a volume when a pod uses them.

        The nodes that are there now get the base image, which the provisioner's pods run.
        """
        self.import_image(base_image())
        volumes.make_local_path_class(self.access)
        self.provisioner = volumes.provisioner(self.access, self.folder)
        self.provisioner.start()

    # --- Its life --------------------------------------------------------------------------

    def start(self) -> None:
        """Start the control plane and cluster DNS; nodes are added afterwards."""
        machine.allow_file_watchers()
        self.network.make()
        self.control_plane.start()
        self.access.kubectl(
            *("create", "clusterrolebinding", _DNS_USER, "--clusterrole=view"),
            f"--user={_DNS_USER}",
        )
        volumes.make_local_class(self.access)
        self.dns.start()

    def stop(self) -> None:
        """Remove everything of the cluster."""
        for node in self.nodes.values():
            node.switch_off()
        for process in (self.dns, self.provisioner):
            if process is not None:
                process.kill()
        self.control_plane.stop()
        take_down(self._home)

    def keep(self, kubeconfig: Path) -> None:
        """Let the cluster outlive this process; its kubeconfig is copied to `kubeconfig`."""
        kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.kubeconfig, kubeconfig)
        self._home.keep()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop, after a look at `SHOAL_CLUSTER_LOGS`: where that names a folder, logs go there."""
        if wanted := os.environ.get("SHOAL_CLUSTER_LOGS"):
            shutil.copytree(self.folder / "log", wanted, dirs_exist_ok=True)
        super().__exit__(kind, error, traceback)

    # --- Its parts -------------------------------------------------------------------------

    def _dns(self) -> Process:
        """CoreDNS on the host's address, as it answers in every cluster."""
        authority = self.control_plane.authority
        user = authority.sign(_DNS_USER, subject=f"/CN={_DNS_USER}", usage="clientAuth")
        kubeconfig = authority.write_kubeconfig(
            self.folder / "dns.kubeconfig", server=self.control_plane.url, user=user
        )
        address = self.network.host_address
        corefile = self.folder / "Corefile"
        corefile.write_text(
            f""".:53 {{
  bind {address}
  errors
  kubernetes cluster.local in-addr.arpa ip6.arpa {{
    kubeconfig {kubeconfig}
  }}
  cache 5
}}
"""
        )
        program = find_all(("coredns",))["coredns"]
        log = self.folder / "log" / "coredns.log"
        return Process("coredns", (program, "-conf", corefile), log, self.folder)
