"""Real servers that files are carried from and to: S3's and a registry's."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal_cluster import MachineLacks
from shoal_cluster.ports import lasting_port
from shoal_cluster.programs import find

READY_SECONDS = 20.0


@dataclass(frozen=True)
class S3:
    """A gateway with one bucket, `lines`, which is `folder` on disk."""

    environment: dict[str, str]
    folder: Path
    process: "subprocess.Popen[bytes]"


@contextlib.contextmanager
def serve_s3(folder: Path, host: str = "127.0.0.1") -> Iterator[S3]:
    """Skips the test where there is no gateway."""
    try:
        program = find("versitygw")
    except MachineLacks as lacking:
        pytest.skip(f"no S3 server: {lacking}")
    bucket = folder / "buckets" / "lines"
    bucket.mkdir(parents=True, exist_ok=True)
    port = lasting_port(host)
    keys = {"AWS_ACCESS_KEY_ID": "worker", "AWS_SECRET_ACCESS_KEY": "worker-secret"}
    command = [str(program), "--port", f"{host}:{port}", "--access", keys["AWS_ACCESS_KEY_ID"]]
    command += ["--secret", keys["AWS_SECRET_ACCESS_KEY"], "--quiet", "posix", str(bucket.parent)]
    url = f"http://{host}:{port}"
    with running(command, folder, f"{url}/") as process:
        yield S3({**keys, "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}, bucket, process)


@dataclass(frozen=True)
class Registry:
    """A registry on loopback."""

    host: str

    def push(self, name: str, tag: str, layers: dict[str, bytes], *, titles: bool = True) -> str:
        """Push an artifact, as tools for that do; its manifest's digest."""
        described = [self._layer(name, title, each, titles) for title, each in layers.items()]
        config = self._layer(name, "", b"{}", False)
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": "application/vnd.onnx.model",
            "config": config | {"mediaType": "application/vnd.oci.empty.v1+json"},
            "layers": described,
        }
        return self.put_manifest(name, tag, manifest)

    def put_manifest(self, name: str, tag: str, manifest: dict[str, object]) -> str:
        content = json.dumps(manifest).encode()
        url = f"http://{self.host}/v2/{name}/manifests/{tag}"
        kind = {"Content-Type": str(manifest["mediaType"])}
        request = urllib.request.Request(url, content, kind, method="PUT")
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            assert answer.status == 201
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    def _layer(self, name: str, title: str, content: bytes, titles: bool) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        start = urllib.request.Request(
            f"http://{self.host}/v2/{name}/blobs/uploads/", b"", method="POST"
        )
        with urllib.request.urlopen(start, timeout=60) as answer:  # noqa: S310
            place = answer.headers["Location"]
        upload = urllib.request.Request(  # noqa: S310
            f"{place}&digest={digest}",
            content,
            {"Content-Type": "application/octet-stream"},
            method="PUT",
        )
        with urllib.request.urlopen(upload, timeout=60) as answer:  # noqa: S310
            assert answer.status == 201
        layer: dict[str, object] = {
            "mediaType": "application/vnd.onnx",
            "digest": digest,
            "size": len(content),
        }
        if titles:
            layer["annotations"] = {"org.opencontainers.image.title": title}
        return layer


_REGISTRY = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextlib.contextmanager
def serve_registry(folder: Path) -> Iterator[Registry]:
    """Skips the test where there is no registry."""
    program = shutil.which("docker-registry") or shutil.which("registry")
    if program is None:
        pytest.skip("no OCI registry on PATH: Debian has it in the package docker-registry")
    port = lasting_port()
    settings = folder / "registry.yaml"
    settings.write_text(_REGISTRY.format(folder=folder, port=port))
    with running([program, "serve", str(settings)], folder, f"http://127.0.0.1:{port}/v2/"):
        yield Registry(f"127.0.0.1:{port}")


@contextlib.contextmanager
def running(command: list[str], folder: Path, url: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A server for as long as the context lasts; it answers at `url`, whatever it says."""
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
    try:
        until = time.monotonic() + READY_SECONDS
        while not _answers(url):
            ended = process.poll() is not None
            if ended or time.monotonic() > until:
                raise AssertionError((folder / "server.log").read_text())
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(10)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=1).close()  # noqa: S310 - http on loopback
    except urllib.error.HTTPError as answer:
        answer.close()
        return True
    except OSError:
        return False
    return True
