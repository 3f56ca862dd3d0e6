"""A node: a container runtime, a kubelet and a kube-proxy in namespaces of their own.

The node's first process holds a network, a mount and a process namespace; everything else of the
node runs in these, its pods included. `/var/lib`, `/var/log`, `/run` and `/opt` are the node's own
folders, so that all the usual paths are the node's, and hostPath volumes of two nodes differ. When
the first process is killed, the kernel ends everything in the node and lets go of its mounts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal_cluster import cgroups, image_store, images
from shoal_cluster.control_plane import SPARING, ControlPlane
from shoal_cluster.images import Image
from shoal_cluster.network import Network, within
from shoal_cluster.processes import Process
from shoal_cluster.programs import find_all

# The kubelet evicts pods when less than this is free, so it is reserved on top.
_EVICTION_BYTES = 50 * 2**20
_SOCKET = "/run/containerd/containerd.sock"


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What a node is to look like.

    `taints` are written as kubectl takes them: "key=value:NoSchedule".
    """

    name: str
    memory_bytes: int
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[str] = ()


class Node:
    """One node of a cluster; `Cluster.add_node` makes them."""

    def __init__(
        self, shape: NodeShape, number: int, network: Network, control_plane: ControlPlane
    ) -> None:
        self.shape = shape
        self.name = shape.name
        self.number = number
        self.address = network.node_address(number)
        self.folder = control_plane.folder / "nodes" / shape.name
        self._network = network
        self._plane = control_plane
        self._programs = find_all(("kubelet", "kube-proxy"))
        self._first_pid = 0
        self._images: frozenset[Image] = frozenset()
        self._init = self._process("init", *self._init_command(), wraps=True)
        self.runtime = self._process("containerd", *self._runtime_command())
        self.kubelet = self._process("kubelet", *self._kubelet_command())
        self.proxy = self._process("kube-proxy", *self._proxy_command())

    @property
    def processes(self) -> Sequence[Process]:
        """Its own processes; pods are not among them."""
        return (self.runtime, self.kubelet, self.proxy)

    # --- What one does with a node ---------------------------------------------------------

    def cut_link(self) -> None:
        """Take its link down: nothing comes from it and nothing reaches it, until restored."""
        self._network.set_link(self.number, "down")

    def restore_link(self) -> None:
        """Take its link up again."""
        self._network.set_link(self.number, "up")

    def drop(self, pod: str, port: int, pod_port: int | None = None) -> None:
        """Drop what passes between a pod of the node, by its address, and TCP ports `port` outside
        of the node; only on its `pod_port` if one is given. Connections stay open.
        """
        self._filter("--insert", pod, port, pod_port)

    def pass_on(self, pod: str, port: int, pod_port: int | None = None) -> None:
        """End such a `drop`."""
        self._filter("--delete", pod, port, pod_port)

    def _filter(self, change: str, pod: str, port: int, pod_port: int | None) -> None:
        for here, there in (("source", "destination"), ("destination", "source")):
            ports = [f"--{there}-port", str(port)]
            ports += [f"--{here}-port", str(pod_port)] if pod_port else []
            rule = ("FORWARD", f"--{here}", pod, "--protocol", "tcp", *ports, "--jump", "DROP")
            within(self._first_pid, "iptables", "--wait", change, *rule)

    def load_rules(self, file: Path) -> None:
        """Have `nft` do as a file says, in the node's network namespace."""
        within(self._first_pid, "nft", "--file", file)

    def import_image(self, image: Image) -> None:
        """Put the image where this node's pods find it, unless it has it from its start."""
        if image not in self._images:
            import_image(self.folder, image)

    def tag_image(self, name: str, other: str) -> None:
        """Give an image of this node another name besides: an image of another version."""
        tag = ("--namespace=k8s.io", "image", "tag", "--force", name, other)
        image_store.ctr(self.file(_SOCKET), *tag)

    def file(self, path: str) -> Path:
        """As `file_of`."""
        return file_of(self.folder, path)

    def volume_folder(self, name: str) -> Path:
        """A folder that everybody may write to, for a volume on this node."""
        folder = self.folder / "volumes" / name
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        return folder

    def ready(self) -> bool:
        """Whether the API server says that the node is ready."""
        chosen = f"--field-selector=metadata.name={self.name}"
        return any(
            (condition["type"], condition["status"]) == ("Ready", "True")
            for node in self._plane.access.get("nodes", chosen)["items"]
            for condition in node["status"].get("conditions", ())
        )

    def resident_bytes(self) -> dict[str, int]:
        """The resident memory of its own processes, in bytes."""
        return {process.name: process.resident_bytes() for process in self.processes}

    # --- Its life --------------------------------------------------------------------------

    def start(self, others: Sequence["Node"], having: Sequence[Image] = ()) -> None:
        """Start it with the images `having`, reach the pods of `others` and be reached; ready a few
        seconds later.
        """
        cgroups.make(cgroups.root(self._network.number, self.name))
        self._init.start()
        started = self.folder / "started"
        self._init.wait_until(started.exists, "having its namespaces")
        self._first_pid = self._init.pid
        for process in self.processes:
            process.within = self._first_pid
        self._network.add_node(self.number, self._first_pid)
        for other in others:
            self._network.join(self.number, self._first_pid, other.number)
            self._network.join(other.number, other._first_pid, self.number)
        if having:
            root = self.file("/var/lib/containerd")
            image_store.fill(root, having, self._plane.folder)
            self._images = frozenset(having)
        self.runtime.start()
        socket = self.file(_SOCKET)
        self.runtime.wait_until(lambda: image_store.answers(socket), "answering")
        self.import_image(images.pause_image())
        self.kubelet.start()
        self.proxy.start()

    def switch_off(self) -> None:
        """End everything in it at once: it goes with the first process of its namespaces."""
        for process in (self._init, *self.processes):
            process.kill()

    def stop(self) -> None:
        """Switch it off and remove what it was made of."""
        self.switch_off()
        self._network.remove_node(self.number)
        cgroups.remove(self._network.number, self.name)

    # --- Its parts -------------------------------------------------------------------------

    def _process(self, name: str, *command: str | Path, wraps: bool = False) -> Process:
        log = self._plane.folder / "log" / f"{self.name}-{name}.log"
        home, environment = self._plane.folder, {} if wraps else SPARING
        return Process(f"{self.name}-{name}", command, log, home, wraps, environment=environment)

    def _init_command(self) -> Sequence[str | Path]:
        script = Path(__file__).with_name("init.sh")
        namespaces = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--propagation=slave")
        return ("unshare", *namespaces, "bash", script, self.folder)

    def _runtime_command(self) -> Sequence[str | Path]:
        cni = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    # Every packet is routed, also between two pods of the node: over a bridge the
                    # answers of a service's pod would pass by kube-proxy's rules.
                    "type": "ptp",
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/run/cni-addresses",
                        "ranges": [[{"subnet": self._network.node_pods(self.number)}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
        folder = self.folder / "cni"
        folder.mkdir(parents=True)
        (folder / "pods.conflist").write_text(json.dumps(cni))
        file = self.folder / "containerd.toml"
        # restrict_oom_score_adj: without CAP_SYS_RESOURCE no pod would start. runc: crun refuses
        # the hybrid form of cgroups.
        file.write_text(
            f"""version = 2
[grpc]
  address = "{_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{images.PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}"
"""
        )
        return ("containerd", f"--config={file}")

    def _kubelet_command(self) -> Sequence[str | Path]:
        authority = self._plane.authority
        pair = authority.sign(
            f"node-{self.name}",
            subject=f"/O=system:nodes/CN=system:node:{self.name}",
            usage="clientAuth,serverAuth",
            addresses=(f"DNS:{self.name}", f"IP:{self.address}"),
        )
        kubeconfig = authority.write_kubeconfig(
            self.folder / "kubelet.kubeconfig", server=self._plane.url, user=pair
        )
        config = self.folder / "kubelet.json"
        serving = {"tlsCertFile": str(pair.certificate), "tlsPrivateKeyFile": str(pair.key)}
        config.write_text(json.dumps(self._kubelet_config() | serving))
        labels = ",".join(f"{key}={value}" for key, value in self.shape.labels.items())
        return (
            self._programs["kubelet"],
            f"--config={config}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--node-labels={labels}",
        )

    def _kubelet_config(self) -> dict[str, object]:
        meminfo = Path("/proc/meminfo").read_text().split()
        machine_bytes = int(meminfo[meminfo.index("MemTotal:") + 1]) * 1024
        reserved = machine_bytes - self.shape.memory_bytes - _EVICTION_BYTES
        authority = str(self._plane.authority.pair.certificate)
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "readOnlyPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": authority},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{_SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{cgroups.root(self._network.number, self.name)}",
            "enforceNodeAllocatable": ["pods"],
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "localStorageCapacityIsolation": False,
            "systemReserved": {"memory": str(reserved)},
            "evictionHard": {"memory.available": str(_EVICTION_BYTES)},
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "5s",
            "resolvConf": "",
            "clusterDNS": [self._network.host_address],
            "clusterDomain": "cluster.local",
            "registerWithTaints": [_taint(taint) for taint in self.shape.taints],
        }

    def _proxy_command(self) -> Sequence[str | Path]:
        authority = self._plane.authority
        pair = authority.sign(
            f"proxy-{self.name}", subject="/CN=system:kube-proxy", usage="clientAuth"
        )
        kubeconfig = authority.write_kubeconfig(
            self.folder / "proxy.kubeconfig", server=self._plane.url, user=pair
        )
        config = self.folder / "proxy.json"
        # Zeroes: the limits of connection tracking belong to the host.
        zero = {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        }
        config.write_text(
            json.dumps(
                {
                    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
                    "kind": "KubeProxyConfiguration",
                    "mode": "iptables",
                    "clientConnection": {"kubeconfig": str(kubeconfig)},
                    "clusterCIDR": self._network.pods,
                    "hostnameOverride": self.name,
                    "bindAddress": self.address,
                    "conntrack": zero,
                }
            )
        )
        return (self._programs["kube-proxy"], f"--config={config}")


def import_image(node: Path, image: Image) -> None:
    """Put an image on the node with this folder. Raises `OSError`."""
    image_store.import_image(file_of(node, _SOCKET), image)


def file_of(node: Path, path: str) -> Path:
    """Where this machine has a file below /opt, /run, /var/lib or /var/log of a node."""
    return node / "own" / path.removeprefix("/")


def _taint(written: str) -> dict[str, str]:
    """`key=value:Effect` or `key:Effect`, as the API writes it."""
    rest, effect = written.rsplit(":", 1)
    key, _, value = rest.partition("=")
    return {"key": key, "value": value, "effect": effect}
