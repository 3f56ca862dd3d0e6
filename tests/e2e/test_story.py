"""The story of docs/install.md, on three nodes: from `helm install` to a namespace that is gone.

The tests are the story's chapters and run in its order.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from pool import read_results

from cli.transfer.servers import serve_s3
from cluster_fixtures import MIB
from e2e.agents import ABOVE, agents_of, allowance, have_adopted, limit_is_lowered
from e2e_cluster import (
    CHART,
    IMAGES,
    NAMESPACE,
    RELEASE,
    ROOT,
    SHAPES,
    SYSTEM,
    ShoalOnNodes,
)
from parity_with_whole import TOLERANCE
from shoal_api.kinds import KINDS
from shoal_cluster.programs import find

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
ITEMS = 24
FROM_BUCKET = 8
TIMES = 4
"""How often the long job reads each line; with two at once it lasts by its hops, and not by what it
computes."""
MAY_OCCUR = (
    "^CgroupV1 Node ",
    # A busy machine needs more than three seconds until a process listens.
    "^Unhealthy Pod .*: Startup probe failed: .* connect: connection refused",
    # The API server has not heard yet that the pod was bound to the node.
    '^FailedMount Pod .* is forbidden: User "system:node:.* no relationship found',
    # The kubelet waits a second for its first look at what the pod mounts.
    "^FailedMount Pod .* failed to sync (configmap|secret) cache: timed out",
    # What a node has not in its page cache is charged to the pod that reads it first; the kubelet
    # lowers the limit when the agent has given that back, which is tested below.
    "^ResizeError Pod .*cannot decrease memory limits: .* below current usage",
    # The nodes share one kernel log: each reports the processes that other tests have killed in
    # their own groups. That none of Shoal's was killed is tested beside this.
    "^SystemOOM Node .*: System OOM encountered, victim process: python",
)
NODES = {shape.name for shape in SHAPES}
BUDGET = 24 * MIB


@pytest.fixture(scope="module")
def read(on_nodes: ShoalOnNodes) -> ShoalOnNodes:
    """The example applied, and its job run to its end."""
    on_nodes.apply_example("ocr")
    on_nodes.wait("inferencejob/ocr", "Complete")
    return on_nodes


def test_the_release_passes_its_own_test(on_nodes: ShoalOnNodes) -> None:
    assert "Phase:          Succeeded" in on_nodes.helm("test", RELEASE)


def test_the_results_read_back_are_the_whole_models(read: ShoalOnNodes) -> None:
    items = read.get("inferencejob", "ocr")["status"]["items"]
    assert items == {
        "total": ITEMS,
        "active": 0,
        "succeeded": ITEMS,
        "failed": 0,
        "following": False,
    }
    results = read.results()
    assert len(results) == ITEMS
    assert read.difference(results) <= TOLERANCE


def test_a_routine_job_causes_no_warnings_but_these(read: ShoalOnNodes) -> None:
    warnings = read.warnings()
    print("warnings:", *warnings, sep="\n")
    assert [each for each in warnings if not re.search("|".join(MAY_OCCUR), each)] == []
    for pod in (*read.pods("agent"), *read.pods("coordinator")):
        (container,) = pod["status"]["containerStatuses"]
        assert container["restartCount"] == 0, container


def test_every_kind_is_shown_in_one_table_and_is_ready(read: ShoalOnNodes) -> None:
    shown = {line.split()[0] for line in read.kubectl("get", "shoal", "--no-headers").splitlines()}
    assert shown == {
        "devicepool.shoal.dev/shelf",
        *(f"device.shoal.dev/shelf-{node}" for node in NODES),
        "model.shoal.dev/ppocr-rec",
        "partition.shoal.dev/ppocr-rec-3",
        "placement.shoal.dev/ocr",
        "inferencejob.shoal.dev/ocr",
    }
    for what in sorted(shown):
        kind, name = what.split("/")
        if kind != "inferencejob.shoal.dev":
            assert read.condition(kind, name, "Ready")["status"] == "True", read.story_of(what)


def test_agents_are_on_different_nodes_and_their_limits_follow_their_floors(
    read: ShoalOnNodes,
) -> None:
    agents = read.pods("agent")
    assert {pod["spec"]["nodeName"] for pod in agents} == NODES
    for pod in agents:
        device = f"shelf-{pod['spec']['nodeName']}"

        lowered = partial(limit_is_lowered, read, pod, device, BUDGET)
        read.wait_until(f"the limit of {device} is lowered", lowered)
        memory, floor = read.memory_of(pod), read.get("device", device)["status"]["floorBytes"]
        print(device, memory, "floor", floor / MIB)
        assert memory.peak <= allowance(read) + BUDGET
        assert 2 * MIB <= memory.limit - BUDGET - floor < ABOVE
        assert memory.kills == 0
        (container,) = pod["status"]["containerStatuses"]
        assert container["restartCount"] == 0
        assert read.condition("device", device, "WithinBudget")["status"] == "True"


def test_an_idle_agent_takes_less_than_the_chart_allows_it(read: ShoalOnNodes) -> None:
    for node in NODES:
        device = read.get("device", f"shelf-{node}")["status"]
        print(node, "floor", device["floorBytes"] / MIB)
        assert 0 < device["floorBytes"] <= allowance(read)
        assert device["budgetBytes"] == BUDGET


def test_no_process_compiles_what_it_imports(read: ShoalOnNodes) -> None:
    """The root is read-only: what has no bytecode in the image is compiled at each start."""
    ask = (
        "import asyncio, os, ssl, sys, shoal_protocol.partition; "
        "places = [getattr(each, '__cached__', None) for each in sys.modules.values()]; "
        "print([place for place in places if place and not os.path.exists(place)], len(places))"
    )
    for component in ("agent", "coordinator"):
        pod = read.pods(component)[0]
        # As the process itself runs: bytecode without docstrings is bytecode of its own.
        python = takewhile(lambda each: each != "-m", pod["spec"]["containers"][0]["command"])
        asked = read.kubectl("exec", pod["metadata"]["name"], "--", *python, "-c", ask)
        missing, _, count = asked.rpartition(" ")
        assert missing == "[]"
        assert int(count) > 100, "it has imported what processes import"


def test_describe_tells_the_story(read: ShoalOnNodes) -> None:
    # An event is written after the status.
    read.wait_until("its end is told", lambda: "FinishedJob" in read.events("InferenceJob", "ocr"))
    job = read.kubectl("describe", "inferencejob", "ocr")
    for told in ("AllItemsSucceeded", "StartedJob", "FinishedJob", f"{ITEMS}/{ITEMS}"):
        assert told in job
    pool = read.kubectl("describe", "devicepool", "shelf")
    for told in ("3 of 3 agents connected", "PoolReady", "the coordinator answers"):
        assert told in pool
    placement = read.kubectl("describe", "placement", "ocr")
    assert all(node in placement for node in NODES)


def test_kubectl_shoal_shows_the_pool_to_one_who_may_only_look(
    read: ShoalOnNodes, tmp_path: Path
) -> None:
    looker = Looker(read, tmp_path)
    assert "kubectl-shoal" in looker.kubectl("plugin", "list")
    view = json.loads(looker.kubectl("shoal", "top", "--interval=0.5", "--output=json"))
    assert {device["name"] for device in view["devices"]} == NODES
    assert all(device["budget_bytes"] == BUDGET for device in view["devices"])
    assert "of the machine, or of the agent's limit" in looker.kubectl("shoal", "describe", "pi-4")
    why = looker.kubectl("shoal", "why", "ocr")
    print(why)
    assert why.startswith("ocr is Complete: AllItemsSucceeded")
    assert " stages on " in why
    assert "joined as session" in looker.kubectl("shoal", "logs", "coordinator", "--tail=1000")

    lost = read.job("lost", poolRef={"name": "attic"})
    read.apply(lost)
    read.wait_until("it is seen", lambda: bool(read.condition("inferencejob", "lost", "Planned")))
    said = looker.kubectl("shoal", "why", "lost")
    print(said)
    assert "attic" in " ".join(said.split()).partition(" - ")[0]
    read.kubectl("delete", "inferencejob", "lost")


@dataclass(frozen=True, slots=True)
class Looker:
    """Somebody with the Role of docs/top.md, and the plugin on the PATH."""

    shoal: ShoalOnNodes
    folder: Path

    def kubectl(self, *arguments: str) -> str:
        """Kubectl in the namespace, as this one."""
        self._plugin()
        done = subprocess.run(
            [find("kubectl"), *arguments],
            env=os.environ | {"KUBECONFIG": str(self._kubeconfig()), "PATH": self._path()},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _path(self) -> str:
        """With no other plugin of that name, as in an environment that somebody has activated:
        kubectl warns of those, and fails."""
        others = os.environ["PATH"].split(os.pathsep)
        known = [each for each in others if not (Path(each) / "kubectl-shoal").exists()]
        return os.pathsep.join([str(self.folder), str(find("kubectl").parent), *known])

    def _plugin(self) -> None:
        """As pip installs it."""
        plugin = self.folder / "kubectl-shoal"
        plugin.write_text(f"#!{sys.executable}\nfrom shoal_cli import main\nmain()\n")
        plugin.chmod(0o755)

    def _kubeconfig(self) -> Path:
        """One whose user has the Role alone."""
        file = self.folder / "kubeconfig"
        if not file.exists():
            page = (ROOT / "docs" / "top.md").read_text()
            (role,) = re.findall(r"```yaml\n(.*?kind: RoleBinding.*?)```", page, re.DOTALL)
            self.shoal.kubectl("apply", "--filename=-", given=role)
            token = self.shoal.kubectl("create", "token", "looker").strip()
            known = yaml.safe_load(self.shoal.cluster.kubeconfig.read_text())
            known["users"] = [{"name": "looker", "user": {"token": token}}]
            known["contexts"] = [
                {
                    "name": "looker",
                    "context": {
                        "cluster": known["clusters"][0]["name"],
                        "user": "looker",
                        "namespace": NAMESPACE,
                    },
                }
            ]
            known["current-context"] = "looker"
            file.write_text(yaml.safe_dump(known))
        return file


def test_a_job_reads_from_a_bucket_and_writes_to_it(read: ShoalOnNodes, tmp_path: Path) -> None:
    """Model, inputs and results in S3, on a server outside of the cluster; cut and placed without a
    Partition or a Placement of the user's.
    """
    with serve_s3(tmp_path, read.cluster.network.host_address) as server:
        shutil.copy(read.examples / "ocr" / "models" / "rec.onnx", server.folder)
        (server.folder / "in").mkdir()
        for line in sorted((read.examples / "ocr" / "lines" / "in").iterdir())[:FROM_BUCKET]:
            shutil.copy(line, server.folder / "in")
        there = {"secretRef": {"name": "bucket"}}
        shapes = read.get("model", "ppocr-rec")["spec"]["shapes"]
        source = {"uri": "s3://lines/rec.onnx", **there}
        read.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "bucket"},
                "stringData": server.environment,
            },
            {
                "apiVersion": "shoal.dev/v1alpha1",
                "kind": "Model",
                "metadata": {"name": "from-bucket"},
                "spec": {"source": source, "shapes": shapes},
            },
            {
                "apiVersion": "shoal.dev/v1alpha1",
                "kind": "InferenceJob",
                "metadata": {"name": "in-bucket"},
                "spec": {
                    "modelRef": {"name": "from-bucket"},
                    "poolRef": {"name": "shelf"},
                    "inputs": {"uri": "s3://lines/in", **there},
                    "outputs": {"uri": "s3://lines/out", **there},
                },
            },
        )
        read.wait("inferencejob/in-bucket", "Complete")
        results = read_results(server.folder / "out")
        assert len(results) == FROM_BUCKET
        assert read.difference(results) <= TOLERANCE


def give_many(shoal: ShoalOnNodes) -> None:
    """Each line `TIMES` times, in the folder `many`."""
    inputs = shoal.volume("lines")
    many = inputs / "many"
    many.mkdir(exist_ok=True)
    for line in sorted((inputs / "in").iterdir()):
        for number in range(TIMES):
            with contextlib.suppress(FileExistsError):
                os.link(line, many / f"{number:02}-{line.name}")


def test_a_budget_that_is_edited_during_a_job_is_adopted_and_nobody_is_started_again(
    read: ShoalOnNodes,
) -> None:
    give_many(read)
    before = agents_of(read)
    read.apply(read.job("moved", inputs={"uri": "pvc://lines/many"}, parallelism=1))
    read.wait_until("the job runs", lambda: "StartedJob" in read.events("InferenceJob", "moved"))
    for size in (40 * MIB, 18 * MIB, BUDGET):
        edit = {"spec": {"budget": {"memory": str(size)}}}
        read.kubectl("patch", "devicepool", "shelf", "--type=merge", f"--patch={json.dumps(edit)}")
        read.wait_until(f"all have {size // MIB} MiB", partial(have_adopted, read, size))
        done = read.get("inferencejob", "moved")["status"]["items"]["succeeded"]
        print(f"{size // MIB} MiB adopted with {done} items done")
        read.wait("devicepool/shelf")
    try:
        read.wait("inferencejob/moved", "Complete", seconds=300)
    except AssertionError:
        print(read.story_of("inferencejob/moved"))
        raise
    assert read.get("inferencejob", "moved")["status"]["items"]["succeeded"] == ITEMS * TIMES
    check_results(read, "moved")
    assert agents_of(read) == before, "the same pods, and no container was started again"
    for pod in read.pods("agent"):
        device = f"shelf-{pod['spec']['nodeName']}"
        lowered = partial(limit_is_lowered, read, pod, device, BUDGET)
        read.wait_until(f"the limit of {device} is lowered", lowered)
        memory, floor = read.memory_of(pod), read.get("device", device)["status"]["floorBytes"]
        assert 2 * MIB <= memory.limit - BUDGET - floor < ABOVE
        assert memory.kills == 0
        assert read.condition("device", device, "WithinBudget")["status"] == "True"


def test_a_job_goes_on_through_an_upgrade_of_everything(read: ShoalOnNodes) -> None:
    give_many(read)
    read.apply(read.job("long", inputs={"uri": "pvc://lines/many"}, parallelism=2))
    read.wait_until("the job runs", lambda: "StartedJob" in read.events("InferenceJob", "long"))
    for node in read.cluster.nodes.values():
        for image in IMAGES:
            name = f"docker.io/shoal/{image}"
            node.tag_image(f"{name}:0.1.0", f"{name}:next")
    tags = [f"--set=images.{part}.tag=next" for part in IMAGES]
    written = Written(read.volume("shelf-coordinator") / "jobs")
    before = written.look()
    read.helm("upgrade", RELEASE, str(CHART), "--wait", *tags)
    print("done before and after the upgrade:", before, written.look())

    def ended() -> bool:
        written.look()
        return read.condition("inferencejob", "long", "Complete").get("status") == "True"

    try:
        read.wait_until("the long job completes", ended, seconds=300)
    except TimeoutError as late:
        raise AssertionError(f"{late}\n{read.story_of('inferencejob/long')}") from late
    counts = read.get("inferencejob", "long")["status"]["items"]
    total = ITEMS * TIMES
    assert counts == {
        "total": total,
        "active": 0,
        "succeeded": total,
        "failed": 0,
        "following": False,
    }
    assert read.events("InferenceJob", "long").count("StartedJob") == 1
    read.wait_until("its end is told", lambda: "FinishedJob" in read.events("InferenceJob", "long"))
    assert read.events("InferenceJob", "long").count("FinishedJob") == 1
    check_results(read, "long")
    read.wait_until("everything is of the new version", lambda: images(read) == ALL_NEXT)
    read.wait("devicepool/shelf")


@dataclass(slots=True)
class Written:
    """Results on the coordinator's volume. A finished item is never done again, so a result that
    was seen once stays the file that it was.
    """

    jobs: Path
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)

    def look(self) -> int:
        """How many results there were so far."""
        for result in self.jobs.glob("long-*/out/*.npz"):
            with contextlib.suppress(FileNotFoundError):  # the job has ended and is removed
                stat = result.stat()
                identity = (stat.st_ino, stat.st_mtime_ns)
                assert self.seen.setdefault(result.name, identity) == identity, result
        return len(self.seen)


ALL_NEXT = ["next"] * (2 + len(NODES))


def images(shoal: ShoalOnNodes) -> list[str]:
    """The tags of the images that the operator's, the coordinator's and the agents' pods run."""
    operators = shoal.cluster.access.get("pods", f"--namespace={SYSTEM}")["items"]
    pods = [*operators, *shoal.pods("coordinator"), *shoal.pods("agent")]
    return [pod["spec"]["containers"][0]["image"].rpartition(":")[2] for pod in pods]


def check_results(shoal: ShoalOnNodes, job: str) -> None:
    """Each line was read as often as it was given, and each time as the first job read it."""
    found = read_results(shoal.volume("lines") / job)
    first = read_results(shoal.volume("lines") / "out")
    assert len(found) == ITEMS * TIMES
    for number, result in enumerate(found):
        expected = first[number % ITEMS]
        assert result.keys() == expected.keys()
        for name, value in result.items():
            assert abs(value - expected[name]).max() <= TOLERANCE


def test_an_uninstall_keeps_what_users_wrote(read: ShoalOnNodes) -> None:
    read.helm("uninstall", RELEASE, "--wait")
    left = ("pods", f"--namespace={SYSTEM}")
    read.wait_until("the operator is gone", lambda: not read.cluster.access.get(*left)["items"])
    for names in KINDS.values():
        read.kubectl("get", "crd", f"{names.plural}.shoal.dev")
    assert read.condition("inferencejob", "ocr", "Complete")["status"] == "True"
    # Who serves jobs stands; only nobody looks after it.
    assert len(read.pods("agent")) == len(NODES)


def test_both_namespaces_delete_without_the_operator(read: ShoalOnNodes) -> None:
    for namespace in (NAMESPACE, SYSTEM):
        read.cluster.kubectl("delete", "namespace", namespace, "--timeout=100s")
    read.cluster.kubectl("delete", "crd", *(f"{each.plural}.shoal.dev" for each in KINDS.values()))
    assert "shoal" not in read.cluster.kubectl("get", "clusterroles,crds", "--output=name")
