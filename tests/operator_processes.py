"""A real operator process for tests, and what its probes and metrics say."""

import contextlib
import functools
import http.client
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import forked
from shoal_cluster import ControlPlane

SETTINGS = """
images:
  coordinator: shoal/coordinator:test
  worker: shoal/worker:test
  agent: shoal/agent:test
  pullPolicy: Never
  pullSecrets: []
namespace: shoal-system
operatorLabels: {app.kubernetes.io/name: shoal}
enrolment: shoal-operator.shoal-system.svc:8443
agentFloor: 96Mi
coordinatorMemory: 512Mi
workerMemory: 1Gi
workerDisk: 10Gi
coordinatorPlace: {nodeSelector: {}, tolerations: [], affinity: {}}
workerPlace: {nodeSelector: {}, tolerations: [], affinity: {}}
certManager: false
podMonitors: false
monitorLabels: {}
monitorInterval: ""
networkPolicies: true
metricsFrom: []
offline: false
otherGroups: []
"""
CRDS = Path(__file__).parents[1] / "crds"
CHART = Path(__file__).parents[1] / "helm" / "shoal"
NAMESPACE = "shoal-system"
ACCOUNT = "shoal-operator"


@functools.cache
def prepare(plane: ControlPlane) -> Path:
    """The CRDs, the operator's namespace, and its account with the chart's roles and no others: a
    kubeconfig with that account's token. Once for each control plane.
    """
    plane.kubectl("apply", "--server-side", f"--filename={CRDS}")
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    plane.kubectl("create", "namespace", NAMESPACE)
    shown = [f"--show-only=templates/{name}.yaml" for name in ("rbac", "serviceaccount")]
    roles = plane.access.helm("template", "shoal", str(CHART), f"--namespace={NAMESPACE}", *shown)
    plane.kubectl("apply", "--filename=-", given=roles)
    return kubeconfig_of(plane, NAMESPACE, ACCOUNT)


def kubeconfig_of(plane: ControlPlane, namespace: str, account: str) -> Path:
    """A kubeconfig with the token of a service account."""
    asked = ("create", "token", account, f"--namespace={namespace}", "--duration=12h")
    document = json.loads(plane.kubeconfig.read_text())
    document["users"] = [{"name": "admin", "user": {"token": plane.kubectl(*asked).strip()}}]
    file = plane.folder / f"{namespace}.{account}.kubeconfig"
    file.write_text(json.dumps(document))
    return file


def wait_until(what: str, true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return once `true()`; TimeoutError naming `what` if it does not become so.

    It asks ever less often: what takes long must not cost the API server the time of others.
    """
    until = time.monotonic() + seconds
    pause = 0.05
    while not true():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(pause)
        pause = min(pause * 1.2, 0.5)


@dataclass
class RunningOperator:
    """One operator process."""

    name: str
    process: ForkServerProcess
    log: Path

    @property
    def url(self) -> str | None:
        """HOST:PORT of its metrics, as its log tells."""
        found = re.search(r"metrics and probes at http://(\S+)", self.log.read_text())
        return None if found is None else found[1]

    @property
    def enrolment(self) -> str | None:
        """HOST:PORT of enrolment, as its log tells."""
        found = re.search(r"enrolment at (\S+)", self.log.read_text())
        return None if found is None else found[1]

    def ask(self, path: str) -> tuple[int, str]:
        """Status and text of its HTTP server; 0 while there is none."""
        if self.url is None:
            return 0, "not listening yet"
        connection = http.client.HTTPConnection(self.url, timeout=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError as error:
            return 0, str(error)
        finally:
            connection.close()

    def ready(self) -> bool:
        """Whether its readiness probe passes."""
        return self.ask("/readyz")[0] == http.HTTPStatus.OK

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.ask("/metrics")[1].splitlines():
            found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if found is None or found[1] != name:
                continue
            given = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if labels.items() <= given.items():
                total += float(found[3])
        return total

    def leads(self) -> bool:
        """Whether it holds the lease."""
        return self.metric("shoal_operator_leader") == 1

    def wait_until_leading(self) -> None:
        """Return once it leads and has seen everything."""
        wait_until(f"{self.name} leads; {self.log}", lambda: self.leads() and self.ready())

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.is_alive()

    def stop(self) -> int | None:
        """SIGTERM, and its exit status; None if it has not ended half a minute later."""
        self.process.terminate()
        self.process.join(30)
        return self.process.exitcode

    def kill(self) -> None:
        """SIGKILL: it cannot say goodbye."""
        self.process.kill()
        self.process.join(30)

    def send(self, number: signal.Signals) -> None:
        """A signal to the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class Operators:
    """Starts operators against one control plane; what still runs at the end is killed."""

    def __init__(self, folder: Path, kubeconfig: Path) -> None:
        self._folder = folder
        self._kubeconfig = kubeconfig
        self._settings = folder / "operator.yaml"
        self._settings.write_text(SETTINGS)
        self._running: list[RunningOperator] = []

    def start(
        self,
        *options: str,
        kubeconfig: Path | None = None,
        watch_seconds: int = 20,
        environment: Mapping[str, str] | None = None,
    ) -> RunningOperator:
        """Start one more; it may not lead."""
        name = f"operator-{len(self._running)}"
        log = self._folder / f"{name}.log"
        log.touch()  # its process makes it too, a moment later
        arguments = (
            f"--settings={self._settings}",
            f"--kubeconfig={kubeconfig or self._kubeconfig}",
            *(f"--identity={name}", f"--watch-seconds={watch_seconds}"),
            *("--metrics-address=127.0.0.1:0", "--enrolment-address=127.0.0.1:0"),
            *options,
        )
        process = forked.start("operator", arguments, log, {**os.environ, **(environment or {})})
        operator = RunningOperator(name, process, log)
        self._running.append(operator)
        return operator

    @property
    def latest(self) -> RunningOperator:
        """The one that was started last."""
        return self._running[-1]

    def close(self) -> None:
        """End what still runs, in good order if it can, so that the next one may lead at once."""
        for operator in self._running:
            if operator.runs():
                with contextlib.suppress(ProcessLookupError):
                    operator.send(signal.SIGCONT)
                if operator.stop() is None:
                    operator.kill()
            # Shown by pytest if the test fails.
            print(f"--- {operator.name}, status {operator.process.exitcode}")
            print(operator.log.read_text()[-4000:])


@contextlib.contextmanager
def operators(folder: Path, kubeconfig: Path) -> Iterator[Operators]:
    """Operators that do not outlive the test."""
    started = Operators(folder, kubeconfig)
    try:
        yield started
    finally:
        started.close()


def model(name: str, **spec: object) -> dict[str, object]:
    """A Model that no node can fetch."""
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": name},
        "spec": {"source": {"uri": "pvc://models/m.onnx"}, **spec},
    }
