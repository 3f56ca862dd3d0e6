"""A job that is under way on nodes, told of by what nothing that is struck can touch: files on the
nodes' disks and the counters of the agents.

Every file of the job has one item, so an item's end is one line of the coordinator's journal
(`shoal_coordinator.storage`). A journal is appended to, by whatever coordinator; only when the
job is complete another file is put in its place. So a second name for it, made while the job runs,
keeps every line that was ever written.
"""

import json
import os
import re
import shutil
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from pool import read_results

from e2e_cluster import NAMESPACE, SYSTEM, Json, ShoalOnNodes
from parity_with_whole import TOLERANCE, largest_difference, whole
from shoal_cluster import CommandFailed

COPIES: Final = 4
"""Of each of the example's inputs: a job that lasts long enough to be struck."""
SLOW_CPUS: Final = 0.08
"""Of an agent that is slowed down: with one item on its way at a time a job takes minutes."""
STAGES: Final = 3
METRICS_PORT: Final = 9400
OPERATOR_PORT: Final = 8080
COORDINATOR_CLAIM: Final = "shelf-coordinator"
KINDS: Final = "models,partitions,devicepools,devices,placements,inferencejobs"
CHILDREN: Final = (
    "deployments,daemonsets,jobs,services,serviceaccounts,secrets,configmaps,networkpolicies"
)


# ---- the inputs and what must come out -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What every job here does: inputs on the claim `lines`, and the whole model's results."""

    items: int
    expected: list[dict[str, np.ndarray]]


def put_work(shoal: ShoalOnNodes) -> Work:
    """Put the inputs on the claim, and have the model, the partition and the pool ready."""
    lines = shoal.examples / "ocr" / "lines"
    singles = sorted((lines / "in").glob("*.npz"))
    right = whole(shoal.examples / "ocr" / "models" / "rec.onnx", read_results(lines / "in"))
    many = shoal.volume("lines") / "many"
    many.mkdir()
    os.chown(many, 65532, 65532)
    for copy in range(COPIES):
        for single in singles:
            shutil.copy(single, many / f"{copy:02}-{single.name}")
    for name in ("model", "partition", "pool"):
        shoal.kubectl("apply", f"--filename={shoal.examples / 'ocr' / f'{name}.yaml'}")
    for what in ("partition/ppocr-rec-3", "devicepool/shelf"):
        shoal.wait(what)
    return Work(items=COPIES * len(singles), expected=right * COPIES)


# ---- a job ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class JobOnNodes:
    """One job, from `apply` on."""

    shoal: ShoalOnNodes
    work: Work
    name: str
    uid: str
    journal: Path
    executed_before: Counter[str] = field(default_factory=Counter)

    @property
    def run(self) -> str:
        """What the coordinator calls it."""
        return f"{self.name}-{self.uid[:8]}"

    def lines(self) -> list[Json]:
        """What the journal has ever said."""
        return [json.loads(line) for line in self.journal.read_text().splitlines()]

    def done(self) -> int:
        """How many items have ended, by the journal."""
        return len(self.lines())

    def reach(self, part: float, *, seconds: float = 120.0) -> int:
        """Until this part of all items is done; how many are."""
        wanted = round(part * self.work.items)
        what = f"{wanted} of {self.work.items} items of {self.name} done"
        try:
            self.shoal.wait_until(what, lambda: self.done() >= wanted, seconds=seconds)
        except TimeoutError as late:
            said = self.shoal.story_of(f"inferencejob/{self.name}")
            raise AssertionError(f"{late}: {self.done()} are\n{said}") from late
        return self.done()

    def finish(self, *, seconds: float = 240.0) -> None:
        """Until it is Complete; `kubectl` may fail meanwhile."""
        what = f"inferencejob/{self.name}"

        def ended() -> bool:
            return any(self.holds(type_) for type_ in ("Complete", "Failed"))

        try:
            self.shoal.wait_until(f"{what} has ended", ended, seconds=seconds)
            assert self.holds("Complete")
        except (AssertionError, TimeoutError) as failed:
            raise AssertionError(f"{failed}\n{self.shoal.story_of(what)}") from failed

    def holds(self, type_: str) -> bool:
        """Whether a condition of the job is True."""
        told = self.shoal.condition("inferencejob", self.name, type_)
        return bool(told.get("status") == "True")

    def executed(self) -> int:
        """Tasks that agents have run since the job was applied; those that died meanwhile do not
        tell.
        """
        return (executed(self.shoal) - self.executed_before).total()

    def check(self) -> None:
        """Nothing was lost, done twice or left behind, and the results are right."""
        self.shoal.wait_until("the run is removed", lambda: not self._folder().exists())
        items = self.shoal.get("inferencejob", self.name)["status"]["items"]
        count = self.work.items
        assert items == {
            "total": count,
            "active": 0,
            "succeeded": count,
            "failed": 0,
            "following": False,
        }
        ended = Counter(line["file"] for line in self.lines())
        assert ended == dict.fromkeys(range(count), 1), "items ended twice, or not at all"
        results = read_results(self.shoal.volume("lines") / self.name)
        assert len(results) == count
        for given, right in zip(results, self.work.expected, strict=True):
            assert largest_difference(given, right) <= TOLERANCE
        # Kubernetes removes those that ended minutes ago.
        for worker in (*self._workers("transfer-inputs"), *self._workers("transfer-results")):
            assert worker["status"].get("succeeded") == 1, worker["status"]
        told = Counter(self.shoal.events("InferenceJob", self.name))
        assert told["FinishedJob"] == 1, told
        check_finalizers(self.shoal)

    def delete(self) -> None:
        """Delete it, and clear away what it has left for its user."""
        self.shoal.kubectl("delete", f"inferencejob/{self.name}", "--timeout=30s")
        shutil.rmtree(self.shoal.volume("lines") / self.name, ignore_errors=True)
        self.journal.unlink(missing_ok=True)

    def _folder(self) -> Path:
        return self.shoal.volume(COORDINATOR_CLAIM) / "jobs" / self.run

    def _workers(self, worker_spec: str) -> list[Json]:
        jobs: list[Json] = self.shoal.get("jobs")["items"]
        return [each for each in jobs if each["metadata"]["name"] == f"{self.run}-{worker_spec}"]


@contextmanager
def slow_agents(shoal: ShoalOnNodes) -> Iterator[None]:
    """A job takes minutes meanwhile."""
    for pod in shoal.pods("agent"):
        shoal.slow_down(pod, SLOW_CPUS)
    try:
        yield
    finally:
        for pod in shoal.pods("agent"):
            shoal.slow_down(pod, float(os.cpu_count() or 1))


@contextmanager
def running_job(
    shoal: ShoalOnNodes, work: Work, folder: Path, name: str, **spec: object
) -> Iterator[JobOnNodes]:
    """A job that has begun; deleted at the end. The rest is part of its spec."""
    before = executed(shoal)
    shoal.apply(shoal.job(name, inputs={"uri": "pvc://lines/many"}, **spec))
    uid = shoal.get("inferencejob", name)["metadata"]["uid"]
    job = JobOnNodes(shoal, work, name, uid, folder / f"{name}.jsonl", before)
    try:
        _keep_journal(job)
        yield job
    except BaseException:
        print(shoal.story_of(f"inferencejob/{name}"))
        raise
    finally:
        with suppress(CommandFailed):
            job.delete()


def _keep_journal(job: JobOnNodes) -> None:
    """Give the job's journal a second name as soon as it is there."""
    of = job.shoal.volume(COORDINATOR_CLAIM)
    there = of / "jobs" / job.run / "out" / ".shoal" / job.run / "journal.jsonl"
    kept = of / f"kept-{job.run}.jsonl"  # on the same disk

    def linked() -> bool:
        if not there.exists():
            return False
        os.link(there, kept)
        return True

    job.shoal.wait_until(f"{job.name} runs", linked, seconds=180)
    job.journal = kept


# ---- pods ----------------------------------------------------------------------------------------


def executed(shoal: ShoalOnNodes) -> Counter[str]:
    """How many tasks each agent container has run since it was started."""
    counted: Counter[str] = Counter()
    for pod in shoal.pods("agent"):
        (container,) = pod["status"]["containerStatuses"]
        text = ask(f"{pod['status']['podIP']}:{METRICS_PORT}", "/metrics")[1]
        found = re.search(r'^shoal_agent_tasks_total\{outcome="executed"\} (\S+)', text, re.M)
        counted[container["containerID"]] = int(float(found[1])) if found else 0
    return counted


def ask(address: str, path: str) -> tuple[int, str]:
    """Status and text of a pod's HTTP server; 0 where it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()
    except OSError as error:
        return 0, str(error)


def operator_pods(shoal: ShoalOnNodes) -> list[Json]:
    """The operator's pods that are not being deleted."""
    chosen = ("--selector=app.kubernetes.io/component=operator", f"--namespace={SYSTEM}")
    found: list[Json] = shoal.cluster.access.get("pods", *chosen)["items"]
    return [each for each in found if "deletionTimestamp" not in each["metadata"]]


def the_pod(shoal: ShoalOnNodes, component: str) -> Json:
    """The only pod of a component."""
    (pod,) = operator_pods(shoal) if component == "operator" else shoal.pods(component)
    return pod


def is_ready(pod: Json) -> bool:
    """Whether a pod is Ready."""
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def crash(shoal: ShoalOnNodes, pod: Json) -> None:
    """SIGKILL to every process of a pod's first container; the kubelet starts it anew."""
    for pid in shoal.processes_of(pod):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def vanish(shoal: ShoalOnNodes, pod: Json) -> None:
    """Delete a pod at once, without waiting for it to end; another is made for it."""
    name, where = pod["metadata"]["name"], pod["metadata"]["namespace"]
    now = ("--force", "--grace-period=0", "--wait=false")
    shoal.cluster.kubectl("delete", "pod", name, f"--namespace={where}", *now)


def restarts(pod: Json) -> int:
    """How often a pod's first container was started anew."""
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def wait_until_well(shoal: ShoalOnNodes) -> None:
    """Until operator, coordinator and every agent are ready, and the pool says so."""

    def well() -> bool:
        pods = [*operator_pods(shoal), *shoal.pods("coordinator"), *shoal.pods("agent")]
        pool = shoal.get("devicepool", "shelf")["status"]["devices"]
        return (
            len(pods) == 2 + len(shoal.cluster.nodes)
            and all(map(is_ready, pods))
            and pool["ready"] == pool["total"] == len(shoal.cluster.nodes)
        )

    try:
        shoal.wait_until("everything is well again", well, seconds=180)
    except TimeoutError as failed:
        raise AssertionError(f"{failed}\n{shoal.story_of('devicepool/shelf')}") from failed


def check_finalizers(shoal: ShoalOnNodes) -> None:
    """Nothing of ours would keep anything from being deleted."""
    found: list[Any] = shoal.get(f"{KINDS},{CHILDREN}")["items"]
    assert found
    kept = {
        f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["finalizers"]
        for each in found
        if each["metadata"].get("finalizers")
    }
    assert not kept, f"finalizers in {NAMESPACE}: {kept}"
