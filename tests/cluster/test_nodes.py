"""Pods on the nodes that the tests run on behave as on any cluster, and nothing stays behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cluster_fixtures import MIB, or_skip
from shoal_cluster import Cluster, NodeShape, base_image, build_image, places
from shoal_cluster.images import BASE_IMAGE, untagged
from shoal_cluster.removal import take_down

# The first test waits for the cluster as well, on a machine that may be busy.
pytestmark = [
    pytest.mark.real,
    pytest.mark.nodes,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).resolve().parents[2]

SHAPES = (
    NodeShape("large", 1024 * MIB, {"size": "large"}),
    NodeShape("medium", 512 * MIB, {"size": "medium"}),
    NodeShape("small", 256 * MIB, {"size": "small"}),
)
SERVE = """
import http.server, os, pathlib
pathlib.Path("/tmp/hello").write_text("hello from a service")
os.chdir("/tmp")
http.server.test(http.server.SimpleHTTPRequestHandler, port=8000)
"""
ASK = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())
"""


def pod(name: str, node: str, *command: str, **container: object) -> dict[str, object]:
    """A pod on a named node that runs once, as little privileged as a pod can be."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": BASE_IMAGE,
                    "imagePullPolicy": "Never",
                    "command": list(command),
                    **container,
                }
            ],
        },
    }


def phase(cluster: Cluster, name: str) -> str:
    return str(cluster.access.get("pod", name)["status"]["phase"])


def run(cluster: Cluster, manifest: Mapping[str, object]) -> None:
    """Run a pod until it ends, well or not."""
    cluster.access.apply(manifest)
    name = str(manifest["metadata"]["name"])  # type: ignore[index]
    cluster.access.wait_until(
        f"pod {name} ends", lambda: phase(cluster, name) in {"Succeeded", "Failed"}
    )


def logs(cluster: Cluster, name: str) -> str:
    return cluster.kubectl("logs", name).strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes of different memory sizes: large, medium and small."""
    with or_skip(Cluster) as made:
        made.add_nodes(SHAPES)
        yield made


@pytest.fixture(scope="module")
def with_python(cluster: Cluster) -> Cluster:
    cluster.import_image(base_image())
    return cluster


@pytest.fixture
def server(with_python: Cluster) -> Iterator[str]:
    """The URL path of a service whose pod runs on the large node."""
    container = {"ports": [{"containerPort": 8000}]}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "greeting"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    with_python.access.apply(pod("server", "large", "python3", "-c", SERVE, **container), service)
    with_python.kubectl("wait", "--for=condition=Ready", "pod/server", "--timeout=60s")
    yield "http://greeting.default.svc.cluster.local/hello"
    with_python.kubectl("delete", "service/greeting", "pod/server", "--now")


def test_nodes_offer_the_memory_that_was_asked_for(cluster: Cluster) -> None:
    offered = {
        item["metadata"]["name"]: item["status"]["allocatable"]["memory"]
        for item in cluster.access.get("nodes")["items"]
    }
    assert offered == {"large": "1Gi", "medium": "512Mi", "small": "256Mi"}


def test_a_pod_runs_on_a_node_and_its_log_is_read(with_python: Cluster) -> None:
    run(with_python, pod("hello", "small", "python3", "-c", "print('hello')"))
    assert logs(with_python, "hello") == "hello"


@pytest.mark.parametrize("node", ["large", "medium"])
def test_a_service_is_found_by_its_name(with_python: Cluster, server: str, node: str) -> None:
    # On the node of the service's pod, and on another.
    run(with_python, pod(f"asks-from-{node}", node, "python3", "-c", ASK, server))
    assert logs(with_python, f"asks-from-{node}") == "hello from a service"


def test_a_pod_reaches_the_api_server(with_python: Cluster) -> None:
    url = "https://kubernetes.default.svc/healthz"
    authority = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    ask = (
        "import ssl, urllib.request; print(urllib.request.urlopen("
        f"'{url}', context=ssl.create_default_context(cafile='{authority}')).read().decode())"
    )
    run(with_python, pod("asks-the-api", "medium", "python3", "-c", ask))
    assert logs(with_python, "asks-the-api") == "ok"


def test_a_pod_above_its_memory_limit_is_killed(with_python: Cluster) -> None:
    grow = "kept = [bytearray(b'x' * 2**20) for _ in range(64)]"
    limit = {"resources": {"limits": {"memory": "32Mi"}}}
    run(with_python, pod("grows", "large", "python3", "-c", grow, **limit))
    (container,) = with_python.access.get("pod", "grows")["status"]["containerStatuses"]
    ended = container["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def writer(name: str, storage_class: str | None) -> tuple[dict[str, object], dict[str, object]]:
    """A claim, and a pod that is not root and writes to the volume."""
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
        **({"storageClassName": storage_class} if storage_class else {}),
    }
    write = "import pathlib; pathlib.Path('/results/said').write_text('written')"
    writes = pod(name, "medium", "python3", "-c", write)
    spec = writes["spec"]
    assert isinstance(spec, dict)
    spec["volumes"] = [{"name": "results", "persistentVolumeClaim": {"claimName": name}}]
    spec["containers"][0]["volumeMounts"] = [{"name": "results", "mountPath": "/results"}]
    kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    return {**kind, "metadata": {"name": name}, "spec": claim}, writes


def test_what_a_pod_writes_to_a_volume_is_read_from_its_folder(with_python: Cluster) -> None:
    folder = with_python.add_volume("results", node="medium")
    claim, writes = writer("results", "local")
    with_python.access.apply(claim)
    run(with_python, writes)
    assert (folder / "said").read_text() == "written"


def test_a_claim_of_the_default_class_gets_a_volume_that_goes_with_it(with_python: Cluster) -> None:
    with_python.provide_volumes()
    claim, writes = writer("provided", None)
    with_python.access.apply(claim)
    run(with_python, writes)
    assert phase(with_python, "provided") == "Succeeded"
    with_python.kubectl("delete", "pod/provided", "persistentvolumeclaim/provided")

    def provided() -> list[str]:
        volumes = with_python.access.get("persistentvolumes")["items"]
        return [item for item in volumes if item["spec"]["storageClassName"] == "local-path"]

    with_python.access.wait_until("the volume is removed", lambda: not provided())


def test_an_image_built_from_a_dockerfile_runs(with_python: Cluster, tmp_path: Path) -> None:
    said = f"from the context, {time.time()}"  # never built before
    (tmp_path / "said").write_text(said)
    (tmp_path / "Dockerfile").write_text(
        f"FROM {BASE_IMAGE} AS built\nRUN python --version > /version\nCOPY said /said\n"
        f"FROM {BASE_IMAGE} AS wanted\nCOPY --from=built /version /said /\nUSER 1000\n"
        "FROM wanted AS other\nRUN exit 1\n"
    )
    name = "example.test/tiny:1"
    image = build_image(name, dockerfile=tmp_path / "Dockerfile", context=tmp_path, target="wanted")
    with_python.import_image(image, nodes=["large"])
    manifest = pod("built", "large", "cat", "/version", "/said", image=name)
    run(with_python, manifest)
    assert logs(with_python, "built").startswith("Python 3.11")
    assert logs(with_python, "built").endswith(said)


def test_an_image_that_is_built_anew_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nCOPY said /said\n")
    name = "example.test/again:1"

    def build(said: str) -> None:
        (tmp_path / "said").write_text(said)
        or_skip(lambda: build_image(name, dockerfile=tmp_path / "Dockerfile", context=tmp_path))

    build("once")
    before = untagged()
    build(f"again, {time.time()}")
    assert untagged() == before


def test_a_node_whose_link_is_cut_is_lost_and_comes_back(cluster: Cluster) -> None:
    node = cluster.nodes["small"]
    node.cut_link()
    try:
        cluster.access.wait_until("the node is lost", lambda: not node.ready(), seconds=60)
    finally:
        node.restore_link()
    cluster.access.wait_until("the node is back", node.ready, seconds=60)


def test_a_killed_kubelet_goes_on_with_its_pods(with_python: Cluster) -> None:
    node = with_python.nodes["medium"]
    with_python.access.apply(pod("stays", "medium", "sleep", "600"))
    with_python.kubectl("wait", "--for=condition=Ready", "pod/stays", "--timeout=60s")
    node.kubelet.kill()
    node.kubelet.start()
    ask = ("exec", "stays", "--", "echo", "still here")
    with_python.access.wait_until(
        "the pod is reached", lambda: with_python.kubectl(*ask).strip() == "still here"
    )
    (container,) = with_python.access.get("pod", "stays")["status"]["containerStatuses"]
    assert container["restartCount"] == 0
    with_python.kubectl("delete", "pod", "stays", "--now")


def traces(number: int, folder: str) -> list[str]:
    """What there is on this machine of the cluster with this number and folder."""
    links = [f"/sys/class/net/shoal{number}{link}" for link in ("", "n1")]
    own = [link for link in links if Path(link).exists()]
    groups = [str(group) for group in Path("/sys/fs/cgroup").glob(f"*/shoal{number}-*")]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if folder in line]
    marked = [
        process.name
        for process in Path("/proc").iterdir()
        if process.name.isdecimal() and f"{folder}/" in _words(process)
    ]
    kept = [folder] if Path(folder).exists() else []
    return [*own, *groups, *mounts, *marked, *kept]


def _words(process: Path) -> str:
    try:
        return (process / "environ").read_text() + (process / "cmdline").read_text()
    except OSError:
        return ""


def test_a_second_cluster_comes_and_goes_beside_the_first(with_python: Cluster) -> None:
    with or_skip(Cluster) as second:
        second.add_node("only", memory_bytes=256 * MIB, taints=["kept=free:NoSchedule"])
        second.import_image(base_image())
        manifest = pod("sleeps", "only", "sleep", "600")
        spec = manifest["spec"]
        assert isinstance(spec, dict)
        spec["tolerations"] = [{"key": "kept", "operator": "Exists"}]
        second.access.apply(manifest)
        second.kubectl("wait", "--for=condition=Ready", "pod/sleeps", "--timeout=60s")
        number, folder = second.network.number, str(second.folder)
        assert len(traces(number, folder)) > 10
    assert not traces(number, folder)
    assert with_python.nodes["large"].ready()


def test_what_a_killed_maker_leaves_is_taken_down_without_it(cluster: Cluster) -> None:
    script = """
import json, sys
from shoal_cluster import Cluster
cluster = Cluster()
cluster.start()
cluster.add_node("left", memory_bytes=2**28)
print(json.dumps([cluster.network.number, str(cluster.folder)]), flush=True)
sys.stdin.read()
"""
    maker = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT / "hack" / "cluster")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with maker:
        assert maker.stdout is not None
        number, folder = json.loads(maker.stdout.readline())
        maker.kill()
    assert traces(number, folder)
    places.take_down_abandoned(take_down)
    assert not traces(number, folder)
    assert cluster.nodes["large"].ready()
