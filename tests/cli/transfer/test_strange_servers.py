"""Web servers and registries that are slow, or want a worker to read what is not theirs."""

import asyncio
import hashlib
import json
import socket
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from cli.local.workbench import MANIFEST, save_model
from cli.transfer.carrying import LARGE, carry, fill, read
from cli.transfer.web_server import Web, serve_web
from shoal_cli.local.manifests import ManifestErrors, load_manifests
from shoal_cli.local.remote import download, upload
from shoal_cli.transfer import web as module
from shoal_cli.transfer.addresses import Access, AddressRefused
from shoal_cli.transfer.copying import copy
from shoal_cli.transfer.places import TransferBroken, TransferRefused, redacted
from shoal_cli.transfer.registry import RegistrySource
from shoal_cli.transfer.web import open_session, why_not_redirect
from shoal_protocol import transfers

METADATA = "https://169.254.169.254/latest/meta-data"


def serve_artifact(web: Web, content: bytes) -> str:
    """An artifact of one file on a web server that is a registry now; its address."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    layer = {"digest": digest, "size": len(content), "mediaType": "application/vnd.onnx"}
    manifest = {"schemaVersion": 2, "layers": [layer], "annotations": {"padding": "x" * 5000}}
    web.files["/v2/models/tiny/manifests/1"] = json.dumps(manifest).encode()
    web.files[f"/v2/models/tiny/blobs/{digest}"] = content
    web.files["/token"] = json.dumps({"padding": "x" * 5000, "token": "let me in"}).encode()
    return f"oci://{web.url.removeprefix('http://')}/models/tiny:1"


async def test_a_manifest_and_a_token_may_come_in_several_segments(
    web: Web, access: Access
) -> None:
    address = serve_artifact(web, b"model")
    web.segment, web.token = 2000, "let me in"
    await carry(address, "out", access)
    assert read(access.base / "out") == {"model.onnx": b"model"}


async def test_a_token_that_ends_between_two_requests_is_asked_for_again(
    web: Web, access: Access
) -> None:
    content, numbers = b"model" * 2000, count()
    address = serve_artifact(web, content)

    def next_token() -> str:
        token = f"token {next(numbers)}"
        web.files["/token"] = json.dumps({"token": token}).encode()
        return token

    web.token, web.next_token = next_token(), next_token
    web.breaks, web.break_after = 1, 8000
    await carry(address, "out", access)
    assert read(access.base / "out") == {"model.onnx": content}
    blobs = [wanted for path, wanted in web.asked if "/blobs/" in path]
    assert blobs == [None, None, "bytes=8000-", "bytes=8000-"]


async def test_a_token_that_is_not_accepted_is_asked_for_once(web: Web, access: Access) -> None:
    source = access.source(serve_artifact(web, b"model"))
    (entry,) = await source.entries()
    web.token = "another"  # noqa: S105 - of this test
    with pytest.raises(TransferRefused, match="the server answers 401 Unauthorized"):
        await anext(source.read(entry, 0))
    await source.close()
    assert [path for path, _ in web.asked].count("/token?service=test") == 1


async def test_no_credentials_go_where_another_host_asks_for_them(
    web: Web, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCI_USERNAME", "me")
    with serve_web() as other:
        source = access.source(serve_artifact(web, b"model"))
        (entry,) = await source.entries()
        other.token = "another"  # noqa: S105 - of this test
        web.redirects[f"/v2/models/tiny/blobs/{entry.version}"] = f"{other.url}/blob"
        with pytest.raises(TransferRefused, match="the server answers 401 Unauthorized"):
            await anext(source.read(entry, 0))
        await source.close()
    assert [path for path, _ in other.asked] == ["/blob"]


async def test_an_endless_manifest_is_refused(web: Web, access: Access) -> None:
    address = serve_artifact(web, b"model")
    web.files["/v2/models/tiny/manifests/1"] = b" " * (5 << 20)
    with pytest.raises(TransferRefused, match="the answer has more than 4 MiB"):
        await carry(address, "out", access)


@pytest.mark.parametrize("size", [-(1 << 60), -1, 1.5, "5", None])
async def test_a_layer_of_no_size_is_refused(web: Web, access: Access, size: object) -> None:
    """It is no length of a file, and must not be counted as one."""
    address = serve_artifact(web, b"model")
    path = "/v2/models/tiny/manifests/1"
    manifest = json.loads(web.files[path])
    manifest["layers"][0]["size"] = size
    web.files[path] = json.dumps(manifest).encode()
    async with access.source(address) as source:
        with pytest.raises(TransferRefused, match="describes no layer"):
            await source.entries()


async def test_a_manifest_that_is_not_what_its_digest_says_is_not_believed(
    web: Web, access: Access
) -> None:
    address = serve_artifact(web, b"model").removesuffix(":1")
    reference = f"sha256:{'0' * 64}"
    manifests = "/v2/models/tiny/manifests"
    web.files[f"{manifests}/{reference}"] = web.files[f"{manifests}/1"]
    source = access.source(f"{address}@{reference}")
    with pytest.raises(TransferBroken, match="the manifest does not match its digest"):
        await source.entries()
    await source.close()


@pytest.mark.parametrize(
    "location",
    [METADATA, "https://[fe80::1]/a.npz", "https://[::ffff:169.254.169.254]/a.npz"],
)
async def test_link_local_addresses_are_neither_read_nor_followed_to(
    web: Web, access: Access, location: str
) -> None:
    web.redirects["/a.npz"] = location
    with pytest.raises(TransferRefused, match=r"127\.0\.0\.1 redirects to .* link-local address"):
        await carry(f"{web.url}/a.npz", "out", access)
    with pytest.raises(TransferRefused, match="is a link-local address"):
        await carry(location, "out", access)


@pytest.mark.parametrize("host", ["[fd00:ec2::254]", "100.100.100.200", "168.63.129.16"])
async def test_metadata_services_of_clouds_are_neither_read_nor_followed_to(
    web: Web, access: Access, host: str
) -> None:
    web.redirects["/a.npz"] = f"https://{host}/latest/meta-data"
    with pytest.raises(TransferRefused, match=r"redirects to .* address of a cloud's metadata"):
        await carry(f"{web.url}/a.npz", "out", access)
    with pytest.raises(TransferRefused, match="address of a cloud's metadata"):
        await carry(f"https://{host}/a.npz", "out", access)


async def test_a_name_of_a_link_local_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def named(host: str, *details: Any, **more: Any) -> Any:
        return look_up("169.254.169.254" if host == "metadata.test" else host, *details, **more)

    monkeypatch.setattr(socket, "getaddrinfo", named)
    async with open_session() as session:
        with pytest.raises(TransferRefused, match=r"metadata\.test: is a link-local address"):
            await session.get("https://metadata.test/")


async def test_a_redirect_to_a_name_of_this_machine_is_refused(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns a name says which address it has."""
    look_up = socket.getaddrinfo

    def named(host: str, *details: Any, **more: Any) -> Any:
        return look_up("127.0.0.1" if str(host).endswith(".test") else host, *details, **more)

    monkeypatch.setattr(socket, "getaddrinfo", named)
    port = web.url.rpartition(":")[2]
    web.files["/own"] = b"of a name that the user gave"
    web.redirects["/far"] = f"https://inside.test:{port}/x"
    async with open_session() as session:
        async with session.get(f"http://given.test:{port}/own") as response:
            assert response.status == 200
        with pytest.raises(TransferRefused, match=r"inside\.test: is this machine itself"):
            await session.get(f"http://given.test:{port}/far")
    assert [path for path, _ in web.asked] == ["/own", "/far"]


@pytest.mark.parametrize(
    ("realm", "said"),
    [
        ("https://127.0.0.1:8443/token", "is this machine itself"),
        ("http://registry.example/token", "is not encrypted"),
        ("https://[::1/token", "names no address for a token"),
    ],
)
async def test_a_registry_far_away_sends_nobody_where_it_would_do_harm(
    access: Access, realm: str, said: str
) -> None:
    source = access.source("oci://registry.example/models/tiny:1")
    assert isinstance(source, RegistrySource)
    source._base = "https://registry.example/v2/models/tiny"  # as after a request
    with pytest.raises(TransferRefused, match=said):
        await source._authorise(f'Bearer realm="{realm}",service="test"')
    await source.close()


async def test_a_registry_does_not_send_its_clients_elsewhere_for_a_token(
    web: Web, access: Access
) -> None:
    address = serve_artifact(web, b"model")
    web.token, web.url = "let me in", "https://169.254.169.254"
    with pytest.raises(TransferRefused, match="is a link-local address"):
        await carry(address, "out", access)


def test_only_this_machine_redirects_to_this_machine() -> None:
    for to in ("https://localhost/x", "https://127.0.0.1:8443/x", "https://[::1]/x"):
        assert why_not_redirect(URL("https://example.com/"), URL(to)) == "is this machine itself"
        assert why_not_redirect(URL("https://localhost/"), URL(to)) is None
    assert why_not_redirect(URL("https://localhost/"), URL("http://localhost/x")) is not None
    assert why_not_redirect(URL("http://localhost/"), URL("http://127.0.0.1/x")) is None
    assert why_not_redirect(URL("https://example.com/"), URL("https://example.org/x")) is None


async def test_a_server_that_drips_is_given_up_and_what_came_is_kept(
    web: Web, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "STALL_SECONDS", 0.5)
    web.files["/a.npz"] = b"x" * 1000
    source, target = access.source(f"{web.url}/a.npz"), access.target("out")
    await source.entries()
    web.drips = True
    with pytest.raises(TransferBroken, match=r"a\.npz: stalled: .* in 0\.5 s, fewer than 4096"):
        await copy(source, target)
    await source.close()
    offsets = [wanted for path, wanted in web.asked if path == "/a.npz"][1:]
    assert offsets[-1] is not None, "the last try did not resume"
    assert list((access.base / "out").iterdir())


async def test_a_server_that_never_answers_is_given_up(
    web: Web, access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)
    fill(tmp_path / "in", LARGE)
    web.silent = threading.Event()
    try:
        with pytest.raises(TransferBroken, match="does not answer in time"):
            await carry(f"{web.url}/a.npz", "out", access)
        with pytest.raises(TransferBroken, match="does not answer in time"):
            await carry("in", web.url, access)
    finally:
        web.silent.set()
        await asyncio.sleep(
            0.2
        )  # the connection with unsent bytes ends when the server's side does


@pytest.mark.parametrize("path", ["missing.npz", "loop.npz", "here.npz"])
async def test_no_error_shows_a_signature(web: Web, access: Access, path: str) -> None:
    web.redirects["/loop.npz"] = f"{web.url}/loop.npz?signature=secret"
    web.redirects["/here.npz"] = "https://169.254.169.254/a.npz?signature=secret"
    with pytest.raises(TransferRefused) as caught:
        await carry(f"{web.url}/{path}?X-Amz-Signature=secret", "out", access)
    assert path in str(caught.value) or "169.254" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_notes_of_a_run_show_no_signature(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_model(tmp_path / "small.onnx")
    web.files["/small.onnx"] = (tmp_path / "small.onnx").read_bytes()
    web.files["/a.npz"] = b"items"
    text = MANIFEST.format(fragments=3, budget="32Mi")
    for local, path in (("small.onnx", "small.onnx"), ("lines/in", "a.npz"), ("lines/out", "out")):
        text = text.replace(f"uri: pvc://{local}", f"uri: {local}")
        text = text.replace(f"uri: {local}", f'uri: "https://a.example/{path}?sig=secret"')
    (tmp_path / "job.yaml").write_text(text)
    manifests = load_manifests([tmp_path / "job.yaml"])
    (model,), (job,) = manifests.models.values(), manifests.jobs.values()
    for place in (model.spec.source, job.spec.inputs, job.spec.outputs):
        here = place.uri.replace("https://a.example", web.url)  # loopback needs no TLS
        object.__setattr__(place, "uri", here)
    notes: list[str] = []
    downloaded = await download(manifests, tmp_path / "work", notes.append)
    results = tmp_path / "work/outputs/job"
    results.mkdir(parents=True)
    (results / "a.npz").write_bytes(b"result")
    await upload(downloaded, notes.append)
    assert len(notes) == 3
    assert all(f"{web.url}/" in note for note in notes)
    assert not [note for note in notes if "secret" in note]


def test_a_manifest_that_is_refused_shows_no_signature(tmp_path: Path) -> None:
    text = MANIFEST.format(fragments=3, budget="32Mi")
    text = text.replace("uri: small.onnx", 'uri: "ftp://a.example/m.onnx?sig=secret"')
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(
        ManifestErrors, match=r'"ftp://a\.example/m\.onnx\?\.\.\." is not'
    ) as caught:
        load_manifests([tmp_path / "job.yaml"])
    assert "secret" not in str(caught.value)


def test_addresses_are_shown_without_their_queries() -> None:
    text = "https://a.example/b/c.npz?sig=secret: refused; write 's3://x/y#secret', or https://a/b"
    shown = "https://a.example/b/c.npz?...: refused; write 's3://x/y?...', or https://a/b"
    assert redacted(text) == shown
    assert "secret" not in str(AddressRefused("ftp://a/b?secret", "names no file"))
