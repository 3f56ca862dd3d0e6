"""The commands that workers run: what they print last, and how they end."""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from certificates import Pki
from cli.transfer.web_server import Web
from made_models import TOPOLOGIES
from shoal_cli.commands.app import run_app
from shoal_cluster.ports import lasting_port
from shoal_compiler.profile import profile_model
from shoal_protocol import coordinator_client
from shoal_protocol.channels import open_channel
from shoal_protocol.coordinator_client import CallFailed, CoordinatorClient
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import document_from_json
from shoal_protocol.v1.files_pb2 import PutHeader

pytestmark = pytest.mark.real


def shoal(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "NO_COLOR": "1", **environment},
    )


@contextlib.contextmanager
def coordinator(folder: Path, *options: str | Path) -> Iterator[str]:
    """A coordinator process; its target."""
    target = f"localhost:{lasting_port()}"
    command = [sys.executable, "-m", "shoal_coordinator", "--listen", target]
    command += ["--store", str(folder), "--log-level", "info", *map(str, options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "listening on" in line:
                break
        yield target
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return TOPOLOGIES["a chain"].save(tmp_path).rename(tmp_path / "chain.onnx")


def test_inspect_answers_in_one_line(model: Path, tmp_path: Path, web: Web) -> None:
    profile = profile_model(model)
    web.files["/chain.onnx"] = model.read_bytes()
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = shoal("inspect", f"{web.url}/chain.onnx", "--digest", profile.digest, "--json", **home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["digest"] == profile.digest
    assert (found["size_bytes"], found["opset"]) == (profile.size_bytes, profile.opset)
    assert [each["name"] for each in found["inputs"]] == [each.name for each in profile.inputs]
    table = shoal("inspect", f"pvc://models/{model.name}", "--volume", f"models={tmp_path}")
    assert table.returncode == 0, table.stderr
    assert profile.digest[:40] in table.stdout


def test_what_is_refused_ends_with_2_and_what_may_pass_with_1(
    model: Path,
    tmp_path: Path,
    web: Web,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = f"sha256:{'0' * 64}"
    (tmp_path / "bad.onnx").write_bytes(b"this is no model")
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        (["inspect", model, "--digest", other], "as it should be"),
        (["inspect", tmp_path / "bad.onnx"], "model refused"),
        (["inspect", tmp_path / "empty"], f"model refused {tmp_path}/empty: there is no .onnx"),
        (["inspect", tmp_path / "none.onnx"], f"refused {tmp_path}/none.onnx: there is no file"),
        (["inspect", f"{web.url}/none.onnx"], "404"),
        (["inspect", model, "--digest", "sha256:1"], "64 hexadecimal digits"),
        (["partition", model, "--fragments", "2", "--digest", other, "--document"], other),
        (["copy", tmp_path / "empty", tmp_path / "out"], "there are no files"),
        (["copy", tmp_path / "empty", "oci://example.com/"], "nothing can be written"),
    ):
        status = run_app([str(each) for each in arguments])
        errors = capsys.readouterr().err
        assert status == 2, (arguments, errors)
        assert said in " ".join(errors.split())
        assert "Traceback" not in errors
    monkeypatch.setattr(coordinator_client, "REACH_SECONDS", 0.1)
    status = run_app(["copy", str(model), "localhost:1/jobs/a/in", "--insecure"])
    errors = capsys.readouterr().err
    assert status == 1, errors
    assert errors.startswith("shoal: the transfer broke off")


def test_fragments_are_described_and_delivered_and_jobs_carried(
    model: Path, tmp_path: Path
) -> None:
    pki = Pki(tmp_path / "pki")

    def tls(name: str) -> list[str | Path]:
        proof = pki.issue(name)
        return [
            *("--tls-ca", proof.ca),
            *("--tls-certificate", proof.certificate),
            *("--tls-key", proof.key),
        ]

    cut = ["partition", f"pvc://models/{model.name}", "--volume", f"models={tmp_path}"]
    cut += ["--fragments", "2", "--digest", profile_model(model).digest]
    described = shoal(*cut, "--document")
    assert described.returncode == 0, described.stderr
    document = document_from_json(described.stdout.splitlines()[-1].encode())
    with coordinator(tmp_path / "volume", *tls("shelf-coordinator")) as target:
        for sent in ("2", "0"):
            delivered = shoal(*cut, "--to", target, *tls("shoal-worker"))
            assert delivered.returncode == 0, delivered.stderr
            assert f"{target} has 2 fragments; {sent} sent" in delivered.stdout
        store = FragmentStore(tmp_path / "volume")
        assert store.digests() == sorted(each.digest for each in document.fragments)
        for fragment in document.fragments:
            store.verify(fragment.digest)
        refused = shoal(*cut, "--to", target, *tls("pi-4"))
        assert refused.returncode == 2
        assert "'pi-4' is a device here, and may not put or fetch files" in refused.stderr

        inputs = tmp_path / "in"
        inputs.mkdir()
        (inputs / "a.npz").write_bytes(os.urandom(100_000))
        carried = shoal("copy", inputs, f"{target}/jobs/a/in", "--json", *tls("shoal-worker"))
        assert carried.returncode == 0, carried.stderr
        assert json.loads(carried.stdout) == {"files": 1, "bytes": 100_000, "skipped": 0}
    assert (tmp_path / "volume/jobs/a/in/a.npz").read_bytes() == (inputs / "a.npz").read_bytes()


async def test_an_upload_says_why_it_was_refused_whenever_it_learns_that(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    proof, device = pki.issue("shelf-coordinator"), pki.issue("pi-4")
    options = ("--tls-ca", proof.ca, "--tls-certificate", proof.certificate, "--tls-key", proof.key)
    with coordinator(tmp_path / "volume", *options) as target:
        async with open_channel(target, device) as channel:
            client = CoordinatorClient(channel)
            for steps, milliseconds in itertools.product(range(6), range(8)):
                stalled = asyncio.create_task(stall_after(steps, milliseconds / 3000))
                with pytest.raises(CallFailed, match="may not put or fetch files") as failure:
                    await client.put_file(PutHeader(path="jobs/a/in/0.npz", bytes=1), read, print)
                assert failure.value.final
                await stalled


async def stall_after(steps: int, seconds: float) -> None:
    """Hold the loop up while a call is under way: what came meanwhile comes at once."""
    for _ in range(steps):
        await asyncio.sleep(0)
    time.sleep(seconds)


async def read(offset: int) -> AsyncIterator[bytes]:
    yield b"x"[offset:]
