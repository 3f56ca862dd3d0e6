"""Links that are cut, watches that are silent, a store that is slow: noticed, told, survived."""

import asyncio
import base64
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from e2e_cluster import Json, ShoalOnNodes
from faults_on_nodes.runs import (
    METRICS_PORT,
    OPERATOR_PORT,
    STAGES,
    JobOnNodes,
    Work,
    ask,
    is_ready,
    restarts,
    running_job,
    slow_agents,
    the_pod,
    wait_until_well,
)
from shoal_protocol.channels import Credentials, open_channel
from shoal_protocol.frames import frames_in, split_frame
from shoal_protocol.pki.authority import Authority, Use
from shoal_protocol.services import PeerClient
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(1200),
]


COORDINATOR_PORT = 7400
PEER_PORT = 7401


@contextmanager
def link_cut(shoal: ShoalOnNodes, node: str) -> Iterator[None]:
    shoal.cluster.nodes[node].cut_link()
    try:
        yield
    finally:
        shoal.cluster.nodes[node].restore_link()


@contextmanager
def silent(shoal: ShoalOnNodes, pod: Json, *source_ports: int) -> Iterator[None]:
    """Nothing passes between the pod and the API server; or nothing on these ports of the pod."""
    node, address = shoal.cluster.nodes[pod["spec"]["nodeName"]], pod["status"]["podIP"]
    port = shoal.cluster.control_plane.port
    with ExitStack() as undo:
        for source_port in source_ports or (None,):
            node.drop(address, port, source_port)
            undo.callback(node.pass_on, address, port, source_port)
        yield


@contextmanager
def cut_from_coordinator(shoal: ShoalOnNodes, pod: Json) -> Iterator[None]:
    """Nothing passes between an agent and its coordinator."""
    node, address = shoal.cluster.nodes[pod["spec"]["nodeName"]], pod["status"]["podIP"]
    node.drop(address, COORDINATOR_PORT)
    try:
        yield
    finally:
        node.pass_on(address, COORDINATOR_PORT)


@contextmanager
def slow_store(shoal: ShoalOnNodes, seconds: float) -> Iterator[None]:
    shoal.cluster.control_plane.delay_store(seconds)
    try:
        yield
    finally:
        shoal.cluster.control_plane.delay_store(0)


def connections(shoal: ShoalOnNodes, pod: Json) -> list[int]:
    """The pod's ends of its open connections to HTTPS servers."""
    text = Path(f"/proc/{shoal.processes_of(pod)[0]}/net/tcp").read_text()
    https, established = f"{443:04X}", "01"
    found = re.findall(rf"^ *\d+: \w+:(\w+) \w+:{https} {established} ", text, re.M)
    return [int(port, 16) for port in found]


def readiness(shoal: ShoalOnNodes) -> str:
    """What the operator's probe says; empty while it passes."""
    pod = the_pod(shoal, "operator")
    status, text = ask(f"{pod['status']['podIP']}:{OPERATOR_PORT}", "/readyz")
    return "" if status == 200 else text or "no answer"


def silent_seconds(shoal: ShoalOnNodes) -> float:
    """How long the watch that was silent for longest has been, by the operator's own metrics."""
    pod = the_pod(shoal, "operator")
    text = ask(f"{pod['status']['podIP']}:{OPERATOR_PORT}", "/metrics")[1]
    ages = re.findall(r"^shoal_operator_watch_age_seconds\{.*\} (\S+)", text, re.M)
    return max(map(float, ages))


def epoch(shoal: ShoalOnNodes, job: JobOnNodes) -> int:
    return int(shoal.get("placement", job.name)["status"]["epoch"])


def device(shoal: ShoalOnNodes, node: str) -> str:
    """Whether a device is ready: True, False or Unknown."""
    return str(shoal.condition("device", f"shelf-{node}", "Ready")["status"])


def test_a_node_is_gone_and_comes_back_with_an_old_plan(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path
) -> None:
    node = shoal.cluster.nodes["pi-zero"]
    with (
        running_job(shoal, work, tmp_path, "node-gone", parallelism=1) as job,
        slow_agents(shoal),
    ):
        done, before = job.reach(0.05), epoch(shoal, job)
        with link_cut(shoal, node.name):
            shoal.wait_until("the device is lost", lambda: device(shoal, node.name) != "True")
            shoal.wait_until("there is another plan", lambda: epoch(shoal, job) > before)
            assert job.reach(done / work.items + 0.1) < work.items, "the job was too short for this"
            shoal.wait_until("the node is lost", lambda: not node.ready())
        shoal.wait_until("the node is back", node.ready)
        shoal.wait_until("the device is back", lambda: device(shoal, node.name) == "True")
        assert job.done() < work.items, "the job was too short for this"
        # What it might still send of the old plan, by its own name, over the real way.
        (peer,) = (pod for pod in shoal.pods("agent") if pod["spec"]["nodeName"] == "pi-4")
        address, refused = f"{peer['status']['podIP']}:{PEER_PORT}", stale(shoal)
        old = ActivationKey(job=job.run, epoch=before, item=0, producer=0, consumer=1)
        credentials = as_device(shoal, "pi-zero", tmp_path)
        assert asyncio.run(push_as(credentials, address, "pi-4", old)) == "STALE"
        assert stale(shoal) > refused
        job.finish(seconds=400)
        job.check()
        assert "LostDevice" in shoal.events("InferenceJob", job.name)
        assert "ReplannedPlacement" in shoal.events("Placement", job.name)


def test_a_crawling_device_that_only_its_peers_reach_holds_nothing_up(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path
) -> None:
    """To its peers it is there: it takes what they send, and takes for ever to say so."""
    node = shoal.cluster.nodes["pi-zero"]
    (pod,) = (pod for pod in shoal.pods("agent") if pod["spec"]["nodeName"] == node.name)
    with running_job(shoal, work, tmp_path, "crawling-peer", parallelism=4) as job:
        with slow_agents(shoal):
            job.reach(0.05)
            before = epoch(shoal, job)
            shoal.slow_down(pod, 0.01)
            with cut_from_coordinator(shoal, pod):
                shoal.wait_until("the device is lost", lambda: device(shoal, node.name) != "True")
                shoal.wait_until("there is another plan", lambda: epoch(shoal, job) > before)
                done = job.done()
                assert job.reach(done / work.items + 0.1) > done
        shoal.wait_until("the device is back", lambda: device(shoal, node.name) == "True")
        job.finish(seconds=400)
        job.check()


def stale(shoal: ShoalOnNodes) -> float:
    """How many activations of an older epoch the agents have refused."""
    texts = [
        ask(f"{pod['status']['podIP']}:{METRICS_PORT}", "/metrics")[1]
        for pod in shoal.pods("agent")
    ]
    name = r'^shoal_agent_transfers_refused_total\{outcome="STALE"\} (\S+)'
    return sum(float(number) for text in texts for number in re.findall(name, text, re.M))


def as_device(shoal: ShoalOnNodes, name: str, folder: Path) -> Credentials:
    """A certificate of the pool's own authority, as the device with this name has one."""
    held = shoal.get("secret", "shelf-ca")["data"]
    certificate, key = (base64.b64decode(held[part]) for part in ("tls.crt", "tls.key"))
    authority = Authority.load(certificate, key)
    issued = authority.issue(name, datetime.now(UTC), use=Use.BOTH)
    parts = {"ca": certificate, "certificate": issued.certificate, "key": issued.key}
    for part, content in parts.items():
        (folder / part).write_bytes(content)
    return Credentials(**{part: folder / part for part in parts})


async def push_as(credentials: Credentials, address: str, to: str, key: ActivationKey) -> str:
    """Send an activation to a device; what it answers."""
    tensors = {"x": np.zeros((1, 8), np.float32)}
    async with open_channel(address, credentials, server_name=to) as channel:
        call = PeerClient(channel).push()
        for frame in encode_activation(key, to, tensors, transfer=1):
            await call.write(frame)
        async for message in call:
            for frame in frames_in(message):
                outcome = split_frame(frame)[0].acknowledgement.outcome
                return Acknowledgement.Outcome.Name(outcome)
    raise AssertionError("no answer")


def test_an_operator_that_hears_nothing_for_minutes_is_not_ready_and_comes_back(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path
) -> None:
    operator = the_pod(shoal, "operator")
    name = operator["metadata"]["name"]
    with running_job(shoal, work, tmp_path, "silence", parallelism=1) as job:
        with silent(shoal, operator):
            shoal.wait_until("its probe fails", lambda: bool(readiness(shoal)))
            not_ready = lambda: not is_ready(the_pod(shoal, "operator"))  # noqa: E731
            shoal.wait_until("it is not ready", not_ready)
            job.reach(1.0, seconds=300)
            shoal.wait_until("minutes pass", lambda: silent_seconds(shoal) > 150, seconds=240)
            assert readiness(shoal)
            assert not job.holds("Complete"), "who has told it?"
        shoal.wait_until("its probe passes", lambda: not readiness(shoal), seconds=150)
        job.finish()
        job.check()
        assert job.executed() == work.items * STAGES, "tasks were run twice"
    now = the_pod(shoal, "operator")
    assert (now["metadata"]["name"], restarts(now)) == (name, restarts(operator))


def test_watches_that_are_dropped_without_a_word_are_opened_anew(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path
) -> None:
    operator = the_pod(shoal, "operator")
    ports = connections(shoal, operator)
    assert len(ports) > 5, "each kind is watched over a connection of its own"
    with silent(shoal, operator, *ports):
        with running_job(shoal, work, tmp_path, "dropped") as job:
            job.finish()
            job.check()
        others = lambda: set(connections(shoal, operator)).isdisjoint(ports)  # noqa: E731
        shoal.wait_until("all are opened anew", others, seconds=150)
        shoal.wait_until("its probe passes", lambda: not readiness(shoal), seconds=150)
    assert restarts(the_pod(shoal, "operator")) == restarts(operator)


def test_a_slow_store_slows_the_control_plane_and_not_the_job(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path
) -> None:
    with slow_store(shoal, 0.25), running_job(shoal, work, tmp_path, "slow-store") as job:
        job.finish()
        job.check()
        assert job.executed() == work.items * STAGES, "tasks were run twice"


def test_a_store_too_slow_for_the_lease_stops_the_operator_until_it_is_faster(
    shoal: ShoalOnNodes, work: Work, tmp_path: Path
) -> None:
    with (
        running_job(shoal, work, tmp_path, "crawling", parallelism=1) as job,
        slow_agents(shoal),
    ):
        job.reach(0.05)
        with slow_store(shoal, 2.5):
            shoal.wait_until("its probe fails", lambda: bool(readiness(shoal)), seconds=150)
            done = job.done()
            assert job.reach(done / work.items + 0.1) > done, "the job needs the store to go on"
        shoal.wait_until("its probe passes", lambda: not readiness(shoal), seconds=150)
        wait_until_well(shoal)
        job.finish()
        job.check()
        assert job.executed() == work.items * STAGES, "tasks were run twice"
