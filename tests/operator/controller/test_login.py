"""Logins to a real API server by every kind of credential, and what happens when one expires."""

import base64
import contextlib
import http.server
import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from kubeconfigs import Plugin, with_user
from operator_processes import NAMESPACE, Operators
from shoal_cluster import Access, ControlPlane
from shoal_cluster.certificates import Authority
from shoal_operator.controller.api import Api, ApiError
from shoal_operator.controller.login import Login, LoginRefused, log_in
from shoal_operator.controller.telemetry import Telemetry
from shoal_operator.reconcile.resources import CONFIG_MAP

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow]


@pytest.fixture
def token(account: Path) -> str:
    """A token of the operator's service account."""
    [user] = json.loads(account.read_text())["users"]
    found: str = user["user"]["token"]
    return found


@contextlib.asynccontextmanager
async def api_of(path: Path) -> AsyncIterator[Api]:
    """Requests with a kubeconfig's rights."""
    api = Api(await log_in(path), Telemetry(lambda: 0.0), namespace=NAMESPACE)
    try:
        yield api
    finally:
        await api.close()


async def is_let_in(api: Api) -> bool:
    """Whether the API server knows who asks."""
    try:
        await api.get(CONFIG_MAP, NAMESPACE, "there-is-none")
    except ApiError as error:
        return error.status != 401
    return True


@contextlib.contextmanager
def issuer(plane: ControlPlane, token: str) -> Iterator[str]:
    """An OIDC issuer whose certificate the cluster's authority has signed; its URL."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"token_endpoint": f"{url}/token"})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer({"access_token": "a", "id_token": token, "refresh_token": "r"})

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def _answer(self, document: dict[str, str]) -> None:
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    pair = plane.authority.sign(
        "issuer", subject="/CN=issuer", usage="serverAuth", addresses=["IP:127.0.0.1"]
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.certificate, pair.key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        url = f"https://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield url
        finally:
            server.shutdown()
            serving.join()


def expired_token() -> str:
    """An OIDC token that has expired long ago."""
    parts: tuple[dict[str, object], ...] = ({"alg": "none"}, {"exp": 1}, {})
    encoded = (base64.urlsafe_b64encode(json.dumps(part).encode()) for part in parts)
    return ".".join(part.decode().rstrip("=") for part in encoded)


def test_an_operator_whose_kubeconfig_has_an_exec_plugin_leads(
    account: Path, running: Operators, token: str, tmp_path: Path
) -> None:
    plugin = Plugin(tmp_path)
    plugin.answer(token=token)
    running.start(kubeconfig=with_user(account, tmp_path, exec=plugin.user)).wait_until_leading()
    assert plugin.runs == 1


def test_the_tests_own_access_runs_an_exec_plugin(
    account: Path, token: str, tmp_path: Path
) -> None:
    plugin = Plugin(tmp_path)
    plugin.answer(token=token)
    access = Access(with_user(account, tmp_path, exec=plugin.user))
    assert access.get("models", f"--namespace={NAMESPACE}")["items"] == []
    assert "shoal-operator" in access.kubectl("auth", "whoami")
    assert plugin.runs == 2


async def test_an_exec_plugin_runs_again_when_its_token_is_rejected(
    account: Path, token: str, tmp_path: Path
) -> None:
    plugin = Plugin(tmp_path)
    plugin.answer(token="revoked")  # noqa: S106 - not a secret
    async with api_of(with_user(account, tmp_path, exec=plugin.user)) as api:
        assert not await is_let_in(api)
        plugin.answer(token=token)
        assert await is_let_in(api)
        runs = plugin.runs
        assert await is_let_in(api)
        assert plugin.runs == runs


async def test_an_exec_plugin_may_answer_with_a_certificate_and_renew_it(
    plane: ControlPlane, account: Path, tmp_path: Path
) -> None:
    def answer(authority: Authority) -> None:
        pair = authority.sign("exec", subject="/O=system:masters/CN=e", usage="clientAuth")
        certificate, key = pair.certificate.read_text(), pair.key.read_text()
        plugin.answer(clientCertificateData=certificate, clientKeyData=key)

    plugin = Plugin(tmp_path)
    answer(Authority.make(tmp_path / "unknown"))
    async with api_of(with_user(account, tmp_path, exec=plugin.user)) as api:
        assert not await is_let_in(api)
        answer(plane.authority)
        # Connections that have shown the old certificate end one by one.
        assert await is_let_in(api) or await is_let_in(api)


async def test_a_pods_token_is_read_again_when_it_is_rejected(
    plane: ControlPlane, token: str, tmp_path: Path
) -> None:
    host, port = plane.url.removeprefix("https://").split(":")
    environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    file, authority = tmp_path / "token", plane.authority.pair.certificate
    file.write_text("expired")
    login = Login("pod", InClusterConfigLoader(file, authority, environ=environment).load_and_set)
    await login.load()
    api = Api(login, Telemetry(lambda: 0.0), namespace=NAMESPACE)
    assert not await is_let_in(api)
    file.write_text(token)
    assert await is_let_in(api)
    await api.close()


async def test_a_file_of_a_token_is_read_again_when_the_token_is_rejected(
    account: Path, token: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("expired\n")
    async with api_of(with_user(account, tmp_path, tokenFile="token")) as api:
        assert not await is_let_in(api)
        (tmp_path / "token").write_text(f"{token}\n")
        assert await is_let_in(api)


async def test_an_expired_oidc_token_is_renewed_by_an_issuer_that_is_verified(
    plane: ControlPlane, account: Path, token: str, tmp_path: Path
) -> None:
    """The issuer returns a token that this API server accepts."""
    with issuer(plane, token) as url:
        provider = {
            "client-id": "shoal",
            "client-secret": "none",
            "id-token": expired_token(),
            "refresh-token": "refresh",
            "idp-issuer-url": url,
        }
        user = {"name": "oidc", "config": provider}
        stranger = with_user(account, tmp_path, **{"auth-provider": user})
        with pytest.raises(LoginRefused, match="certificate verify failed"):
            await log_in(stranger)
        trusted = base64.b64encode(plane.authority.pair.certificate.read_bytes()).decode()
        provider["idp-certificate-authority-data"] = trusted
        async with api_of(with_user(account, tmp_path, **{"auth-provider": user})) as api:
            assert await is_let_in(api)
