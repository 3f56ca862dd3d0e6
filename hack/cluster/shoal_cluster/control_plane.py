"""A control plane: etcd or kine, API server, controller-manager and scheduler.

Ports come from the kernel, certificates and folders are its own, so that several run side by side.
It needs neither root nor nodes, and is ready within a few seconds.
"""

import http.client
import json
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from shoal_cluster import places
from shoal_cluster.access import Access
from shoal_cluster.certificates import Authority
from shoal_cluster.lifetimes import Lifetime
from shoal_cluster.places import Home
from shoal_cluster.ports import lasting_port
from shoal_cluster.processes import Process
from shoal_cluster.programs import find_all
from shoal_cluster.removal import take_down
from shoal_cluster.slow_link import set_delay

Store = Literal["etcd", "kine"]
SERVICE_SUBNET = "10.96.0.0/16"
_SERVICE_ADDRESS = "10.96.0.1"
# A heap of 100 MB and much garbage: let it grow before it is collected. One processor for each
# program: on several, its scheduler and its collector spend a quarter more on looking for work.
SPARING = {"GOGC": "400", "GOMAXPROCS": "1"}
_WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True, slots=True)
class ApiWrite:
    """One request that changed something, from the audit log; `seconds` in the API server."""

    user: str
    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    status: int
    seconds: float


class ControlPlane(Lifetime):
    """A control plane; use it as a context manager.

    Args:
        store: What keeps the objects: etcd, or kine on SQLite, as in K3s.
        audit: Write an audit log, which `api_writes` reads.
        slowable_store: Put a proxy before the store, so that `delay_store` works.
        node_grace_seconds: How long a node may be silent before it is NotReady, and before its
            pods are evicted.
        address: What the API server listens on.
        home: The folder and number of the cluster it is part of; its own by default.
    """

    def __init__(
        self,
        *,
        store: Store = "etcd",
        audit: bool = False,
        slowable_store: bool = False,
        node_grace_seconds: int = 20,
        address: str = "127.0.0.1",
        home: Home | None = None,
    ) -> None:
        names = [store, "kube-apiserver", "kube-controller-manager", "kube-scheduler"]
        self._programs = find_all([*names, "kubectl"])
        self._owns_home = home is None
        self.home = home or places.claim(take_down)
        self.folder = self.home.folder
        self.address = address
        self._node_grace_seconds = node_grace_seconds
        first = lasting_port(in_a_row=4)
        self._api_port, self._store_port, self._peer_port, self._slow_port = range(first, first + 4)
        self._control = self.folder / "slow.sock"
        self.audit_log = self.folder / "log" / "audit.log" if audit else None
        self.authority = Authority.make(self.folder / "pki")
        self.access = Access(self._write_kubeconfig("admin", "/O=system:masters/CN=admin"))
        self._client = self._client_context()
        self.slow_store = self._slow_store() if slowable_store else None
        self.store = self._etcd() if store == "etcd" else self._kine()
        self.api_server = self._api_server()
        self.controller_manager = self._controller_manager()
        self.scheduler = self._scheduler()

    # --- What it gives ---------------------------------------------------------------------

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of a user who may do everything."""
        return self.access.kubeconfig

    @property
    def url(self) -> str:
        """The API server's URL."""
        return f"https://{self.address}:{self._api_port}"

    @property
    def port(self) -> int:
        """The API server's port."""
        return self._api_port

    @property
    def processes(self) -> Sequence[Process]:
        """All its processes, in the order in which they start."""
        before = [self.slow_store] if self.slow_store else []
        return [*before, self.store, self.api_server, self.controller_manager, self.scheduler]

    def kubectl(self, *arguments: str, given: str = "", seconds: float = 120.0) -> str:
        """As `Access.kubectl`."""
        return self.access.kubectl(*arguments, given=given, seconds=seconds)

    def ready(self) -> bool:
        """Whether the API server says now that it is ready."""
        return self._answers("/readyz")

    def api_writes(self) -> list[ApiWrite]:
        """The requests so far that changed something, oldest first (`audit=True`)."""
        assert self.audit_log is not None, "the control plane was not made with audit=True"
        lines = self.audit_log.read_text().splitlines() if self.audit_log.exists() else []
        return [
            _api_write(entry) for line in lines if (entry := json.loads(line))["verb"] in _WRITES
        ]

    def delay_store(self, seconds: float) -> None:
        """Delay what goes to the store and what comes back by `seconds` each, from now on."""
        assert self.slow_store is not None, (
            "the control plane was not made with slowable_store=True"
        )
        set_delay(self._control, seconds)

    def restart_api_server(self) -> None:
        """Kill the API server, start it anew on the same port, and wait until it is ready."""
        self.api_server.kill()
        self.api_server.start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Return once the API server is ready.

        Raises:
            ProgramFailed: with the end of its log.
        """
        self.api_server.wait_until(self.ready, "ready")

    # --- Its life --------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and wait until objects can be made and pods would be scheduled."""
        if self.slow_store:
            self.slow_store.start()
            self.slow_store.wait_until(self._control.exists, "listening")
        self.store.start()
        self.api_server.start()
        self.wait_until_ready()
        self.controller_manager.start()
        self.scheduler.start()
        # The controller-manager makes it; without it no pod can be made.
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self.controller_manager.wait_until(lambda: self._answers(account), "making accounts")

    def stop(self) -> None:
        """Stop everything and remove the folder, unless a cluster owns it."""
        for process in reversed(self.processes):
            process.kill()
        if self._owns_home:
            take_down(self.home)

    # --- Its parts -------------------------------------------------------------------------

    def _process(self, name: str, command: Sequence[str | Path]) -> Process:
        log = self.folder / "log" / f"{name}.log"
        return Process(name, command, log, self.folder, environment=SPARING)

    def _etcd(self) -> Process:
        client, peer = (f"http://127.0.0.1:{p}" for p in (self._store_port, self._peer_port))
        flags: dict[str, str | Path] = {
            "data-dir": self.folder / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "unsafe-no-fsync": "true",  # the machine will not lose power and keep the cluster
        }
        return self._process("etcd", (self._programs["etcd"], *_flags(flags)))

    def _kine(self) -> Process:
        database = self.folder / "kine.db"
        options = "_journal=WAL&cache=shared&_busy_timeout=30000"
        flags: dict[str, str | Path] = {
            "endpoint": f"sqlite://{database}?{options}",
            "listen-address": f"127.0.0.1:{self._store_port}",
            "metrics-bind-address": "0",
        }
        return self._process("kine", (self._programs["kine"], *_flags(flags)))

    def _slow_store(self) -> Process:
        ports = (str(self._slow_port), str(self._store_port))
        # By its path, so that it needs no PYTHONPATH.
        script = Path(__file__).with_name("slow_link.py")
        return self._process("slow-store", (sys.executable, script, *ports, self._control))

    def _api_server(self) -> Process:
        kubelets = self.authority.sign(
            "kubelets", subject="/O=system:masters/CN=kube-apiserver", usage="clientAuth"
        )
        names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
        serving = self.authority.sign(
            "api-server",
            subject="/CN=kube-apiserver",
            usage="serverAuth",
            addresses=[
                *(f"DNS:{name}" for name in names),
                *(f"IP:{address}" for address in {self.address, "127.0.0.1", _SERVICE_ADDRESS}),
            ],
        )
        tokens = self.authority.tokens
        store_port = self._slow_port if self.slow_store else self._store_port
        flags: dict[str, str | Path] = {
            "etcd-servers": f"http://127.0.0.1:{store_port}",
            "bind-address": self.address,
            "advertise-address": self.address,
            "secure-port": str(self._api_port),
            "tls-cert-file": serving.certificate,
            "tls-private-key-file": serving.key,
            "client-ca-file": self.authority.pair.certificate,
            "cert-dir": self.folder / "pki",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": tokens.certificate,
            "service-account-signing-key-file": tokens.key,
            "service-cluster-ip-range": SERVICE_SUBNET,
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "kubelet-client-certificate": kubelets.certificate,
            "kubelet-client-key": kubelets.key,
            # Node names resolve nowhere, so logs and exec go by address.
            "kubelet-preferred-address-types": "InternalIP",
            # A pod lives some seconds after its node is lost, not five minutes.
            "default-not-ready-toleration-seconds": "30",
            "default-unreachable-toleration-seconds": "30",
        }
        if self.audit_log:
            policy = self.folder / "audit-policy.json"
            policy.write_text(json.dumps(_AUDIT_POLICY))
            flags |= {"audit-policy-file": policy, "audit-log-path": self.audit_log}
        return self._process("api-server", (self._programs["kube-apiserver"], *_flags(flags)))

    def _controller_manager(self) -> Process:
        user = "system:kube-controller-manager"
        authority = self.authority
        flags: dict[str, str | Path] = {
            "kubeconfig": self._write_kubeconfig("controller-manager", f"/CN={user}"),
            "service-account-private-key-file": authority.tokens.key,
            "root-ca-file": authority.pair.certificate,
            "cluster-signing-cert-file": authority.pair.certificate,
            "cluster-signing-key-file": authority.pair.key,
            "use-service-account-credentials": "true",
            "leader-elect": "false",
            "secure-port": "0",
            "node-monitor-grace-period": f"{self._node_grace_seconds}s",
            # By default it spends its first five seconds waiting for its own rate limit.
            "kube-api-qps": "200",
            "kube-api-burst": "400",
            # A claim that it saw before its volume is bound after that time, by default 15 s.
            "pvclaimbinder-sync-period": "1s",
        }
        program = self._programs["kube-controller-manager"]
        return self._process("controller-manager", (program, *_flags(flags)))

    def _scheduler(self) -> Process:
        flags: dict[str, str | Path] = {
            "kubeconfig": self._write_kubeconfig("scheduler", "/CN=system:kube-scheduler"),
            "leader-elect": "false",
            "secure-port": "0",
        }
        return self._process("scheduler", (self._programs["kube-scheduler"], *_flags(flags)))

    def _write_kubeconfig(self, name: str, subject: str) -> Path:
        user = self.authority.sign(name, subject=subject, usage="clientAuth")
        file = self.folder / f"{name}.kubeconfig"
        return self.authority.write_kubeconfig(file, server=self.url, user=user)

    def _client_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority.pair.certificate)
        folder = self.authority.folder
        context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
        return context

    def _answers(self, path: str) -> bool:
        """Whether the API server answers 200 for `path`."""
        connection = http.client.HTTPSConnection(
            self.address, self._api_port, context=self._client, timeout=5
        )
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()


def _flags(flags: Mapping[str, str | Path]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def _api_write(entry: Mapping[str, object]) -> ApiWrite:
    """One line of the audit log (audit.k8s.io/v1 Event)."""
    user, what, answer = entry.get("user"), entry.get("objectRef"), entry.get("responseStatus")
    assert isinstance(user, dict)
    subject = what if isinstance(what, dict) else {}
    status = answer if isinstance(answer, dict) else {}
    return ApiWrite(
        user=str(user.get("username", "")),
        verb=str(entry["verb"]),
        resource=str(subject.get("resource", "")),
        subresource=str(subject.get("subresource", "")),
        namespace=str(subject.get("namespace", "")),
        name=str(subject.get("name", "")),
        status=int(status.get("code", 0)),
        seconds=_time(entry["stageTimestamp"]) - _time(entry["requestReceivedTimestamp"]),
    )


def _time(text: object) -> float:
    """Seconds since 1970 of a time in the audit log."""
    return datetime.fromisoformat(str(text)).timestamp()
