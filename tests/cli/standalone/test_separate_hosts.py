"""Three devices, a coordinator and a client, each on a host of its own, without Kubernetes."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from made_models import deep
from separate_hosts import PATIENCE_SECONDS, Host, separate_hosts, stop, wait_until

ROOT = Path(__file__).resolve().parents[3]
DEVICES = ("pi-1", "pi-2", "pi-3")
SLOWLY = ("--link-latency-milliseconds", "100")
"""So that a device dies amid work."""

CHAIN = """\
apiVersion: shoal.dev/v1alpha1
kind: Model
metadata: {name: chain}
spec: {source: {uri: model.onnx}}
---
apiVersion: shoal.dev/v1alpha1
kind: Partition
metadata: {name: chain}
spec: {modelRef: {name: chain}, fragments: 3}
---
apiVersion: shoal.dev/v1alpha1
kind: DevicePool
metadata: {name: shelf}
spec:
  local:
    devices:
    - {name: pi-1, memory: 24Mi}
    - {name: pi-2, memory: 24Mi}
    - {name: pi-3, memory: 24Mi}
  budget: {memory: 24Mi}
---
apiVersion: shoal.dev/v1alpha1
kind: Placement
metadata: {name: chain}
spec:
  partitionRef: {name: chain}
  poolRef: {name: shelf}
  pins:
  - {fragment: 0, device: pi-1}
  - {fragment: 1, device: pi-2}
  - {fragment: 2, device: pi-3}
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {name: chain}
spec:
  placementRef: {name: chain}
  inputs: {uri: in, follow: true}
  outputs: {uri: out}
"""
"""A plan of one device after the other. The 2 KiB of an item between them measure no link."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2"),
]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with separate_hosts(tmp_path, "shelf", "laptop", *DEVICES) as hosts:
        yield hosts


def start_coordinator(shelf: Host) -> subprocess.Popen[bytes]:
    process = shelf.start("out", "-m", "shoal_cli", "coordinator")
    wait_until("the coordinator is up", lambda: "each line works once" in shelf.said("out"))
    return process


def invited(shelf: Host, *options: str) -> str:
    printed = str(shelf.shoal("invite", *options).stdout)
    return printed.rsplit(maxsplit=1)[-1]


def start_agent(host: Host, name: str, line: str) -> subprocess.Popen[bytes]:
    command = ("-m", "shoal_agent", line, "--name", name, "--budget", "24Mi", *SLOWLY)
    known = ("--speed", os.devnull)  # to measure takes a second
    return host.start("log", *command, *known, "--log-level", "info")


def ready(laptop: Host) -> list[str]:
    found = laptop.asked("devices")
    return [each["name"] for each in found if each.get("state", "READY") == "READY"]


def sessions(devices: list[Host]) -> list[int]:
    """How many each has had so far."""
    return [host.said("log").count(" session ") for host in devices]


def wait_until_ready(laptop: Host, devices: list[Host], before: list[int]) -> None:
    """Until all have a session more. Logs are asked first: `shoal devices` starts a process."""

    def joined() -> bool:
        return all(now > then for now, then in zip(sessions(devices), before, strict=True))

    wait_until("three devices have sessions", joined)
    wait_until("three devices are ready", lambda: ready(laptop) == list(DEVICES))


def wait_until_amid_work(
    laptop: Host, devices: list[Host], running: subprocess.Popen[bytes]
) -> None:
    def loaded() -> bool:
        assert running.poll() is None, laptop.said("run")
        return any(re.search(r" loaded \w{12} in ", host.said("log")) for host in devices)

    def some_are_done() -> bool:
        assert running.poll() is None, laptop.said("run")
        return any(job["succeeded"] >= 2 for job in laptop.asked("jobs"))

    wait_until("a device has loaded its fragment", loaded)
    wait_until("two items are done", some_are_done)


def prepared_example(laptop: Host) -> Path:
    made = shutil.ignore_patterns("in", "out", "models", "__pycache__")
    example = laptop.home / "examples" / "ocr"
    shutil.copytree(ROOT / "examples" / "ocr", example, ignore=made)
    subprocess.run([sys.executable, str(example / "prepare.py")], check=True, capture_output=True)
    return example


def check_links_are_probed_before_use(laptop: Host) -> None:
    """A job without items yet: nothing goes from device to device but probes."""
    folder = laptop.home / "chain"
    (folder / "in").mkdir(parents=True)
    deep().save(folder)
    (folder / "job.yaml").write_text(CHAIN)
    run = ("run", folder, "--coordinator", "10.99.0.1:7400", "--progress", "plain")
    running = laptop.start("chain.log", "-m", "shoal_cli", *run)

    def probed() -> bool:
        assert running.poll() is None, laptop.said("chain.log")
        return measured_links(laptop) >= {("pi-1", "pi-2"), ("pi-2", "pi-3")}

    wait_until("the links of the plan are measured", probed)
    assert ("pi-3", "pi-1") not in measured_links(laptop), "no plan counts on it"
    (job,) = laptop.asked("jobs")
    assert job["succeeded"] == 0
    np.save(folder / "in" / "a.npy", np.ones((1, 512), np.float32))
    running.send_signal(signal.SIGINT)  # what has come is the last
    assert running.wait(PATIENCE_SECONDS) == 0, laptop.said("chain.log")
    assert [each.name for each in (folder / "out").glob("*.npz")] == ["a.npz"]
    laptop.shoal("cancel", job["name"], "--remove")


def measured_links(laptop: Host) -> set[tuple[str, str]]:
    """From a device to another, of which the rate is known."""
    return {
        (device["name"], link["device"])
        for device in laptop.asked("devices")
        for link in device.get("links", [])
        if "bytes_per_second" in link and link.get("device")
    }


def results(example: Path) -> dict[str, np.ndarray]:
    found = {}
    for path in sorted((example / "lines" / "out").glob("*.npz")):
        with np.load(path) as stored:
            found[path.name] = stored[stored.files[0]]
    return found


def leave_failures(outputs: Path) -> Path:
    """In place of results: what an earlier job said, before its inputs were corrected."""
    shutil.rmtree(outputs)
    outputs.mkdir()
    failures = outputs / "failures.json"
    failures.write_text("of an earlier job")
    return failures


def test_three_devices_read_text_for_a_fourth_and_survive_what_dies(hosts: list[Host]) -> None:
    shelf, laptop, *devices = hosts
    coordinator = start_coordinator(shelf)
    assert f"coordinator at {shelf.address}:7400" in shelf.said("out")
    used = invited(shelf, "--client")
    laptop.shoal("join", used)
    lines = {name: invited(shelf) for name in DEVICES}
    agents = {
        name: start_agent(host, name, lines[name])
        for name, host in zip(DEVICES, devices, strict=True)
    }
    wait_until_ready(laptop, devices, before=[0, 0, 0])

    check_links_are_probed_before_use(laptop)

    # A device dies amid the work; the others take over.
    example = prepared_example(laptop)
    run = ("run", example, "--coordinator", f"{shelf.address}:7400", "--progress", "plain")
    running = laptop.start("run", "-m", "shoal_cli", *run, "--verify", "--tolerance", "1e-5")
    wait_until_amid_work(laptop, devices, running)
    agents["pi-2"].send_signal(signal.SIGKILL)
    assert running.wait(PATIENCE_SECONDS) == 0, laptop.said("run")
    assert "24/24" in laptop.said("run")
    first = results(example)
    assert len(first) == 24
    assert ready(laptop) == ["pi-1", "pi-3"]

    # Coordinator and device start again, with what they know on their disks.
    before = sessions(devices)
    stop(coordinator)
    assert coordinator.returncode == 0
    coordinator = start_coordinator(shelf)
    start_agent(devices[1], "pi-2", lines["pi-2"])
    wait_until_ready(laptop, devices, before)
    (job,) = laptop.asked("jobs")
    assert (job["state"], job["succeeded"]) == ("COMPLETE", 24)
    failures = leave_failures(example / "lines" / "out")
    again = laptop.shoal(*run, "--no-keep")
    assert re.search(r"24/24 +24 ", again.stdout), "nothing was computed again"
    for name, array in results(example).items():
        np.testing.assert_array_equal(array, first[name])
    assert laptop.asked("jobs") == []
    assert not failures.exists()

    # What was used by one is of no use to another.
    stolen = laptop.start("thief", "-m", "shoal_agent", lines["pi-1"], "--name", "pi-4")
    refusal = "the token was used already, with another key"
    wait_until("the thief is refused", lambda: refusal in laptop.said("thief"))
    stolen.kill()
    refused = devices[0].shoal("join", used, check=False)
    assert refused.returncode == 2
    assert refusal in refused.stderr
