"""A cluster's pools through kubectl: a real coordinator under TLS, and a kubectl that answers from
files and forwards to that coordinator's port."""

import base64
import json
import os
import stat
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from certificates import Pki
from coordinator.scripted import ScriptedDevice, connected, put_model
from shoal_cli.live.cluster import ClusterRefused, Kubectl, find_job, find_pool, retry_job
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_protocol.channels import Credentials
from shoal_protocol.pki.authority import Use

HOST = "shelf-coordinator.reading.svc"
KUBECTL = """\
#!{python}
import json, sys, time
from pathlib import Path
here = Path(__file__).parent
words = [word for word in sys.argv[1:] if not word.startswith("--")]
with (here / "asked").open("a") as asked:
    print(*sys.argv[1:], file=asked)
if words[0] == "port-forward":
    print("Forwarding from 127.0.0.1:" + (here / "port").read_text() + " -> 7400", flush=True)
    time.sleep(60)
file = here / ("-".join(words[1:]) + ".json")
if not file.exists() or not file.read_text():
    print('E1123 14:03:48.714129 9802 memcache.go:265] "Unhandled Error"', file=sys.stderr)
if not file.exists():
    sys.exit("Error from server (NotFound): " + " ".join(words[1:]) + " not found")
if not file.read_text():
    sys.exit("Error from server (Forbidden): " + words[1] + " is forbidden")
print(file.read_text())
"""
Json = dict[str, Any]


class FakeKubectl:
    """What it is to answer is in files of its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        program = folder / "kubectl"
        program.write_text(KUBECTL.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def has(self, what: str, document: Json | None) -> None:
        """Answer `kubectl get WHAT`, its words joined by dashes; None: forbidden."""
        text = "" if document is None else json.dumps(document)
        (self.folder / f"{what}.json").write_text(text)

    def has_pool(self) -> None:
        port = {"name": "grpc", "port": 7400}
        metadata = {"name": "shelf-coordinator", "namespace": "reading"}
        metadata |= {"annotations": {"shoal.dev/viewed-with": "shelf-viewer-tls"}}  # type: ignore[dict-item]
        service = {"metadata": metadata, "spec": {"ports": [{"name": "metrics"}, port]}}
        self.has("services", {"items": [service]})
        self.has("devicepools.shoal.dev", {"items": [{"metadata": {"name": "shelf"}}]})

    def has_secret(self, pki: Pki) -> None:
        viewer = pki.issue("shoal-viewer")
        files = {"ca.crt": viewer.ca, "tls.crt": viewer.certificate, "tls.key": viewer.key}
        data = {name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()}
        self.has("secret-shelf-viewer-tls", {"data": data})

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    fake = FakeKubectl(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    return fake


def coordinators_certificate(pki: Pki) -> Credentials:
    issued = pki.authority.issue(
        "shelf-coordinator", datetime.now(UTC), hosts=(HOST,), use=Use.BOTH
    )
    certificate, key = pki.folder / "c.pem", pki.folder / "c.key"
    certificate.write_bytes(issued.certificate)
    key.write_bytes(issued.key)
    return Credentials(ca=pki.ca, certificate=certificate, key=key)


async def test_a_pool_is_seen_through_a_port_forward_with_its_viewers_certificate(
    kubectl: FakeKubectl, tmp_path: Path
) -> None:
    pki = Pki(tmp_path / "pki")
    kubectl.has_pool()
    kubectl.has_secret(pki)
    settings = CoordinatorSettings(
        listen="127.0.0.1:0",
        store=tmp_path / "store",
        state=tmp_path / "state",
        credentials=coordinators_certificate(pki),
    )
    document = put_model(tmp_path / "store")
    async with serving(settings) as coordinator:
        (kubectl.folder / "port").write_text(str(coordinator.port))
        device = ScriptedDevice(
            f"127.0.0.1:{coordinator.port}",
            "pi-4",
            document,
            credentials=pki.issue("pi-4"),
            server_name=HOST,
        )
        async with connected(device):
            pool = find_pool(Kubectl(("--namespace=reading",)), None)
            async with pool.calling() as client:
                shown = await client.overview()
    assert [each.status.name for each in shown.devices] == ["pi-4"]
    assert all(line.endswith("--namespace=reading") for line in kubectl.asked)
    assert any("service/shelf-coordinator :7400" in line for line in kubectl.asked)


def test_a_pool_that_is_not_there_is_said_with_those_that_are(kubectl: FakeKubectl) -> None:
    kubectl.has_pool()
    kubectl.has("services", {"items": []})
    with pytest.raises(ClusterRefused, match=r"pool attic has no coordinator .* there are shelf"):
        find_pool(Kubectl(), "attic")
    with pytest.raises(ClusterRefused, match="kubectl describe devicepool shelf says why"):
        find_pool(Kubectl(), "shelf")
    both = [{"metadata": {"name": name}} for name in ("shelf", "attic")]
    kubectl.has("devicepools.shoal.dev", {"items": both})
    with pytest.raises(ClusterRefused, match="several pools; name one with --pool: shelf, attic"):
        find_pool(Kubectl(), None)


async def test_without_the_right_to_read_the_secret_the_rights_are_named(
    kubectl: FakeKubectl,
) -> None:
    kubectl.has_pool()
    kubectl.has("secret-shelf-viewer-tls", None)
    with pytest.raises(ClusterRefused) as caught:
        async with find_pool(Kubectl(), "shelf").calling():
            pytest.fail("it was let in")
    assert str(caught.value) == (
        "Error from server (Forbidden): secret is forbidden\n"
        "looking at pool shelf needs the right to get Secret shelf-viewer-tls and to create "
        "pods/portforward in namespace reading; docs/top.md has a Role for that"
    )


def test_without_kubectl_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterRefused, match="install it, or name a coordinator"):
        find_pool(Kubectl(), "shelf")


def condition(type_: str, status: str, message: str = "") -> Json:
    return {"type": type_, "status": status, "reason": "Reason", "message": message}


def test_a_job_says_what_is_not_well_with_it_and_with_what_it_refers_to(
    kubectl: FakeKubectl,
) -> None:
    def made(kind: str, name: str, spec: Json, *conditions: Json) -> Json:
        metadata, status = {"name": name}, {"conditions": list(conditions)}
        return {"kind": kind, "metadata": metadata, "spec": spec, "status": status}

    job = made(
        "InferenceJob",
        "ocr",
        {"modelRef": {"name": "rec"}, "poolRef": {"name": "shelf"}},
        condition("Failed", "False"),
        condition("Planned", "False", "there is no plan yet"),
        condition("Complete", "False", "there is no plan yet"),
    )
    placement = made("Placement", "ocr", {}, condition("Planned", "False", "needs 96 MiB"))
    lost = {"alternative": "even split", "itemsPerSecond": 21.33, "reason": "slower"}
    placement["status"]["rejected"] = [lost, {"alternative": "one device", "reason": "no room"}]
    model = made("Model", "rec", {}, condition("Ready", "True", "inspected"))
    pool = made("DevicePool", "shelf", {}, condition("WithinBudget", "False", "pi-4 is over"))
    for what, document in (
        ("inferencejob.shoal.dev-ocr", job),
        ("placement.shoal.dev-ocr", placement),
        ("model.shoal.dev-rec", model),
        ("devicepool.shoal.dev-shelf", pool),
    ):
        kubectl.has(what, document)
    found = find_job(Kubectl(), "ocr")
    assert (found.pool, found.ended) == ("shelf", "")
    assert found.plan == (
        "even split would give 21.3 items/s: slower",
        "one device: no room",
    )
    assert found.problems == (
        "InferenceJob ocr: Planned False (Reason): there is no plan yet",
        "Placement ocr: Planned False (Reason): needs 96 MiB",
        "DevicePool shelf: WithinBudget False (Reason): pi-4 is over",
    )

    job["status"]["conditions"] = [
        condition("Complete", "False", "a device is gone"),
        condition("Failed", "True", "a device is gone"),
    ]
    kubectl.has("inferencejob.shoal.dev-ocr", job)
    ended = find_job(Kubectl(), "ocr")
    assert ended.ended == "Failed: Reason: a device is gone"
    assert ended.problems == found.problems[1:]


def test_a_job_that_is_not_there_is_said_with_those_that_are(kubectl: FakeKubectl) -> None:
    kubectl.has("inferencejobs.shoal.dev", {"items": [{"metadata": {"name": "ocr"}}]})
    with pytest.raises(
        ClusterRefused, match=r"(?s)inferencejob.shoal.dev orc not found.*there are: ocr"
    ):
        find_job(Kubectl(), "orc")


def test_the_logs_of_a_device_are_those_of_its_nodes_pod(kubectl: FakeKubectl) -> None:
    kubectl.has_pool()
    pods = [
        {"metadata": {"name": f"agent-{node}"}, "spec": {"nodeName": node}}
        for node in ("pi-4", "jetson")
    ]
    kubectl.has("pods", {"items": pods})
    pool = find_pool(Kubectl(("--context=home",)), None)
    command = pool.logs("agent", "jetson")
    assert command[1:] == ["logs", "pod/agent-jetson", "--context=home"]
    with pytest.raises(ClusterRefused, match="its agent on pi-5; there are some on jetson, pi-4"):
        pool.logs("agent", "pi-5")


def test_the_logs_of_a_coordinator_are_those_of_the_pod_that_runs(kubectl: FakeKubectl) -> None:
    """One that was evicted stays until somebody deletes it, and so does one that made way."""
    kubectl.has_pool()
    pods = [
        {
            "metadata": {"name": name, "creationTimestamp": f"2026-11-30T0{hour}:00:00Z"},
            "spec": {"nodeName": "pi-4"},
            "status": {"phase": phase},
        }
        for name, hour, phase in (
            ("a-evicted", 3, "Failed"),
            ("b-runs", 1, "Running"),
            ("c-ended", 2, "Succeeded"),
        )
    ]
    kubectl.has("pods", {"items": pods})
    assert find_pool(Kubectl(), None).logs("coordinator", None)[1:] == ["logs", "pod/b-runs"]
    for pod in pods:
        pod["status"] = {"phase": "Pending"}
    kubectl.has("pods", {"items": pods})
    assert find_pool(Kubectl(), None).logs("coordinator", None)[1:] == ["logs", "pod/a-evicted"]


def test_a_job_that_follows_its_inputs_is_retried_before_it_has_any_status(
    kubectl: FakeKubectl,
) -> None:
    spec = {"inputs": {"uri": "pvc://lines/in", "follow": True}}
    kubectl.has("inferencejob.shoal.dev-ocr", {"spec": spec, "metadata": {"name": "ocr"}})
    assert retry_job(Kubectl(), "ocr", []) == 1
    assert kubectl.asked[-1].startswith("patch inferencejob.shoal.dev ocr --type=merge")
