"""Shoal on a cluster of three nodes, as its users have it: images from the Dockerfile, the chart
installed, the `ocr` example's model and inputs on claims of a namespace.

`shoal_on_nodes()` makes such a cluster and takes it down. What a test does with it is what a person
does with kubectl and helm.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pool import read_results

from cluster_fixtures import MIB, or_skip
from parity_with_whole import largest_difference, whole
from shoal_cluster import Cluster, CommandFailed, Image, NodeShape, base_image, build_image
from shoal_cluster.cluster import require_machine
from shoal_cluster.control_plane import Store
from shoal_cluster.programs import find

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "shoal"
RELEASE = "shoal"
SYSTEM = "shoal-system"
"""The namespace of the release."""
NAMESPACE = "reading"
"""The namespace of pool, model and jobs."""
VERSION = "0.1.0"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
POOL_LABEL = "shoal.dev/pool"
# Sizes and names like those of the example's devices.
SHAPES = (
    NodeShape("jetson", 2048 * MIB, {POOL_LABEL: "shelf"}),
    NodeShape("pi-4", 1024 * MIB, {POOL_LABEL: "shelf"}),
    NodeShape("pi-zero", 512 * MIB, {POOL_LABEL: "shelf"}),
)
_GROUPS = Path("/sys/fs/cgroup")
_V1 = (_GROUPS / "memory").is_dir()
"""Whether each controller has groups of its own."""
Json = dict[str, Any]


IMAGES = ("operator", "coordinator", "worker", "agent")


def shoal_image(target: str) -> Image:
    """One of the `IMAGES` of this checkout, built unless it is in the cache."""
    name = f"docker.io/shoal/{target}:{VERSION}"
    return build_image(name, dockerfile=ROOT / "Dockerfile", context=ROOT, target=target)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerMemory:
    """What the kernel says of a container's memory, in bytes. `anonymous` has no page cache."""

    limit: int
    now: int
    peak: int
    anonymous: int
    mapped: int
    kills: int


@dataclass(frozen=True, slots=True)
class ShoalOnNodes:
    """A cluster on which Shoal is installed. `examples`: a copy of the checkout's, prepared."""

    cluster: Cluster
    examples: Path
    seconds: dict[str, float] = field(default_factory=dict)

    # ---- kubectl and helm ------------------------------------------------------------------------

    def kubectl(self, *arguments: str, given: str = "", seconds: float = 120.0) -> str:
        """Kubectl in `NAMESPACE`."""
        where = f"--namespace={NAMESPACE}"
        return self.cluster.kubectl(where, *arguments, given=given, seconds=seconds)

    def helm(self, *arguments: str, seconds: float = 300.0) -> str:
        """Helm in `SYSTEM`."""
        return self.cluster.access.helm(*arguments, f"--namespace={SYSTEM}", seconds=seconds)

    def get(self, *arguments: str) -> Any:
        """`kubectl get ARGUMENTS` in `NAMESPACE`, parsed."""
        return self.cluster.access.get(*arguments, f"--namespace={NAMESPACE}")

    def apply(self, *manifests: Mapping[str, object]) -> None:
        """Apply manifests in `NAMESPACE`."""
        self.cluster.access.apply(*manifests, namespace=NAMESPACE)

    def apply_example(self, name: str = "ocr") -> str:
        """`kubectl apply -f examples/NAME`; what kubectl said."""
        return self.kubectl("apply", f"--filename={self.examples / name}")

    def wait(self, what: str, condition: str = "Ready", *, seconds: float = 180.0) -> None:
        """`kubectl wait --for=condition=CONDITION KIND/NAME`; on failure with its description."""
        asked = (f"--for=condition={condition}", what, f"--timeout={seconds:.0f}s")
        try:
            self.kubectl("wait", *asked, seconds=seconds + 30)
        except CommandFailed as failed:
            raise AssertionError(f"{failed}\n{self.story_of(what)}") from failed

    def wait_until(self, what: str, true: Callable[[], bool], *, seconds: float = 120.0) -> None:
        """Until `true()`; as `Access.wait_until`."""
        self.cluster.access.wait_until(what, true, seconds=seconds)

    def condition(self, kind: str, name: str, type_: str) -> Json:
        """A condition of an object; empty when it has none."""
        conditions = self.get(kind, name).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == type_), {})

    def events(self, kind: str, name: str) -> list[str]:
        """The reasons of the operator's events about an object, in their order."""
        about = f"--field-selector=involvedObject.kind={kind},involvedObject.name={name}"
        found = self.get("events", about)["items"]
        found.sort(key=lambda each: each["metadata"]["creationTimestamp"])
        return [each["reason"] for each in found if each["reportingComponent"] == "shoal-operator"]

    def warnings(self) -> list[str]:
        """The Warning events of the whole cluster, each with whom it is about and how often."""
        asked = ("get", "events", "-A", "--field-selector=type=Warning", "--output=json")
        found = json.loads(self.cluster.kubectl(*asked))["items"]
        return [
            f"{each['reason']} {about['kind']} {about.get('namespace', '')}/{about['name']} "
            f"x{each.get('count') or 1}: {each['message']}"
            for each in found
            for about in [each["involvedObject"]]
        ]

    def story_of(self, what: str) -> str:
        """`kubectl describe`, and everything that is not well around it."""
        told = [self.kubectl("describe", what), self.kubectl("get", "shoal,pods,jobs,events")]
        logs = [("deployment/shoal-operator", "--tail=60", f"--namespace={SYSTEM}")]
        pods = (*self.pods("coordinator"), *self.pods("agent"))
        here = f"--namespace={NAMESPACE}"
        logs += [(f"pod/{pod['metadata']['name']}", "--tail=30", here) for pod in pods]
        for each in logs:
            with contextlib.suppress(CommandFailed):
                told.append(f"{each[0]}:\n{self.cluster.kubectl('logs', *each)}")
        return "\n".join(told)

    # ---- jobs ------------------------------------------------------------------------------------

    def job(self, name: str, **spec: object) -> Json:
        """An InferenceJob like the example's, with results in `pvc://lines/NAME`."""
        whole_spec = {
            "partitionRef": {"name": "ppocr-rec-3"},
            "poolRef": {"name": "shelf"},
            "inputs": {"uri": "pvc://lines/in"},
            "outputs": {"uri": f"pvc://lines/{name}"},
        } | spec
        kind = {"apiVersion": "shoal.dev/v1alpha1", "kind": "InferenceJob"}
        return {**kind, "metadata": {"name": name}, "spec": whole_spec}

    def volumes(self, what: str, name: str = "ocr") -> None:
        """`examples/volumes fill|fetch NAME`, as a person runs it."""
        environment = os.environ | {
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "PATH": f"{find('kubectl').parent}:{os.environ['PATH']}",
        }
        command = (self.examples / "volumes", what, name, f"--namespace={NAMESPACE}")
        done = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def volume(self, claim: str) -> Path:
        """The folder of this machine where a claim's volume has its files."""
        name = self.get("pvc", claim)["spec"]["volumeName"]
        spec = self.cluster.access.get("pv", name)["spec"]
        (term,) = spec["nodeAffinity"]["required"]["nodeSelectorTerms"]
        (node,) = term["matchExpressions"][0]["values"]
        return self.cluster.nodes[node].file(spec["hostPath"]["path"])

    def results(self) -> list[Any]:
        """The results of the job `ocr`, read back from its volume, in the order of its inputs."""
        shutil.rmtree(self.examples / "ocr" / "lines" / "out", ignore_errors=True)
        self.volumes("fetch")
        return read_results(self.examples / "ocr" / "lines" / "out")

    def difference(self, results: list[Any]) -> float:
        """The largest difference of results of the first inputs from the whole model's."""
        inputs = read_results(self.examples / "ocr" / "lines" / "in")[: len(results)]
        right = whole(self.examples / "ocr" / "models" / "rec.onnx", inputs)
        return max(largest_difference(one, two) for one, two in zip(results, right, strict=True))

    # ---- pods ------------------------------------------------------------------------------------

    def pods(self, component: str) -> list[Json]:
        """The pods of a component: agent, coordinator, inspect, cut, deliver, transfer-inputs,
        transfer-results; one that is being deleted is not among them.
        """
        chosen = f"--selector=app.kubernetes.io/component={component}"
        found: list[Json] = self.get("pods", chosen)["items"]
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def memory_of(self, pod: Json) -> ContainerMemory:
        """What the kernel says of the memory of a pod's first container."""
        group = self._group_of(pod)
        return _memory_v1(group) if _V1 else _memory_v2(group)

    def processes_of(self, pod: Json) -> list[int]:
        """The processes of a pod's first container, by this machine's ids."""
        return [int(pid) for pid in (self._group_of(pod) / "cgroup.procs").read_text().split()]

    def slow_down(self, pod: Json, cpus: float) -> None:
        """Let a pod's first container have so much of a processor, until it is started anew."""
        _set_quota(self._group_of(pod, "cpu"), cpus)

    def slow_node(self, name: str, cpus: float) -> None:
        """Let all pods of a node have so much of a processor together; no container sees that."""
        _set_quota(self._group_of_node(name, "cpu"), cpus)

    def favour_nodes(self) -> None:
        """Let the pods of all nodes run before whatever else this machine does."""
        for node in self.cluster.nodes:
            setting, weight = ("cpu.shares", 1 << 18) if _V1 else ("cpu.weight", 10_000)
            (self._group_of_node(node, "cpu") / setting).write_text(str(weight))

    def _group_of(self, pod: Json, controller: str = "memory") -> Path:
        (container, *_) = pod["status"]["containerStatuses"]
        name = str(container["containerID"]).removeprefix("containerd://")
        (group,) = self._group_of_node(pod["spec"]["nodeName"], controller).rglob(name)
        return group

    def _group_of_node(self, name: str, controller: str) -> Path:
        root = f"shoal{self.cluster.network.number}-{name}"
        return (_GROUPS / controller if _V1 else _GROUPS) / root


def _set_quota(group: Path, cpus: float) -> None:
    quota = round(cpus * 100_000)
    if _V1:
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (group / "cpu.max").write_text(f"{quota} 100000")


def _memory_v1(group: Path) -> ContainerMemory:
    def of(name: str) -> int:
        return int((group / f"memory.{name}").read_text())

    stat, control = _fields(group / "memory.stat"), _fields(group / "memory.oom_control")
    return ContainerMemory(
        limit=of("limit_in_bytes"),
        now=of("usage_in_bytes"),
        peak=of("max_usage_in_bytes"),
        anonymous=stat["rss"],
        mapped=stat["mapped_file"],
        kills=control.get("oom_kill", 0),
    )


def _memory_v2(group: Path) -> ContainerMemory:
    def of(name: str) -> int:
        return int((group / f"memory.{name}").read_text())

    stat, events = _fields(group / "memory.stat"), _fields(group / "memory.events")
    return ContainerMemory(
        limit=of("max"),
        now=of("current"),
        peak=of("peak"),
        anonymous=stat["anon"],
        mapped=stat["file_mapped"],
        kills=events["oom_kill"],
    )


def _fields(file: Path) -> dict[str, int]:
    return {name: int(text) for name, text in map(str.split, file.read_text().splitlines())}


@contextlib.contextmanager
def shoal_on_nodes(
    folder: Path, *, store: Store = "etcd", **cluster: bool
) -> Iterator[ShoalOnNodes]:
    """A cluster with Shoal. `folder`: for the copy of the examples; the rest as for `Cluster`.

    How long each step took is in `seconds`, and printed.
    """
    seconds: dict[str, float] = {}
    or_skip(require_machine)
    with _timed(seconds, "build"):
        images = [shoal_image(target) for target in IMAGES]
    examples = prepared_examples(folder)
    with _timed(seconds, "cluster"):
        made = or_skip(lambda: Cluster(store=store, **cluster))
        entered = made.__enter__()
    with contextlib.ExitStack() as stack:
        stack.push(made)
        with _timed(seconds, "nodes"):
            entered.add_nodes(SHAPES, [base_image(), *images])
            entered.provide_volumes()
        shoal = ShoalOnNodes(entered, examples, seconds)
        for namespace in (SYSTEM, NAMESPACE):
            entered.kubectl("create", "namespace", namespace)
            entered.kubectl("label", "namespace", namespace, RESTRICTED)
        with _timed(seconds, "helm install --wait"):
            shoal.helm("install", RELEASE, str(CHART), "--wait", "--timeout=2m")
        with _timed(seconds, "volumes"):
            shoal.volumes("fill")
        steps = (f"{name} {spent:.0f} s" for name, spent in seconds.items())
        print("Shoal on nodes:", ", ".join(steps))
        yield shoal


def prepared_examples(folder: Path) -> Path:
    """A copy of the checkout's examples, with the model and the inputs of `ocr` made."""
    left_out = shutil.ignore_patterns("in", "out", "models", "__pycache__")
    examples = folder / "examples"
    shutil.copytree(ROOT / "examples", examples, ignore=left_out)
    subprocess.run([sys.executable, examples / "ocr" / "prepare.py"], check=True)
    return examples


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started
