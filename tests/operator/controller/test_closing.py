"""How an operator leaves its API server, where it breaks off what is answered still."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from kubeconfigs import write
from shoal_cluster.certificates import Authority
from shoal_operator.controller import api as api_module
from shoal_operator.controller.api import Api
from shoal_operator.controller.login import log_in
from shoal_operator.controller.telemetry import Telemetry

PATIENCE_SECONDS = 60.0
BEGUN = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"


class BusyServer:
    """It begins an answer that has no end, over TLS, and looks at nothing that its client says
    before it may."""

    def __init__(self, authority: Authority) -> None:
        pair = authority.sign(
            "server", subject="/CN=server", usage="serverAuth", addresses=["IP:127.0.0.1"]
        )
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(pair.certificate, pair.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.may_hear = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # nobody came, or its client has given it up
            client, _ = self._listener.accept()
            with self._tls.wrap_socket(client, server_side=True) as connection:
                connection.recv(1 << 16)
                connection.sendall(BEGUN + b"1\r\nx\r\n")
                self.may_hear.wait()
                while connection.recv(1 << 16):
                    pass

    def close(self) -> None:
        self.may_hear.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("pki") / "authority")


@pytest.fixture
def server(authority: Authority) -> Iterator[BusyServer]:
    found = BusyServer(authority)
    yield found
    found.close()


@pytest_asyncio.fixture
async def broken_off(server: BusyServer, authority: Authority, tmp_path: Path) -> Api:
    """Requests of which one was broken off in the midst of its answer."""
    cluster = {"server": server.url, "certificate-authority": str(authority.pair.certificate)}
    (tmp_path / "token").write_text("t")
    login = await log_in(write(tmp_path, cluster, {"tokenFile": str(tmp_path / "token")}))
    api = Api(login, Telemetry(lambda: 0.0), namespace="shoal-system")
    async with api.open_session() as session, session.get(server.url) as answer:
        assert await answer.content.readexactly(1) == b"x"
    return api


async def test_who_closes_waits_until_its_server_knows(
    broken_off: Api, server: BusyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that was left open warns when it is found, in whatever runs then."""
    monkeypatch.setattr(api_module, "_FAREWELL_SECONDS", PATIENCE_SECONDS)
    closing = asyncio.create_task(broken_off.close())
    done, _ = await asyncio.wait([closing], timeout=0.2)
    assert not done, "the server has not looked yet"
    server.may_hear.set()
    await asyncio.wait_for(closing, PATIENCE_SECONDS)
    assert not broken_off._open_sockets()


async def test_a_server_that_never_looks_is_not_waited_for(
    broken_off: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "_FAREWELL_SECONDS", 0.1)
    await asyncio.wait_for(broken_off.close(), PATIENCE_SECONDS)
    monkeypatch.setattr(api_module, "_FAREWELL_SECONDS", PATIENCE_SECONDS)
    await broken_off._all_closed()
    assert not broken_off._open_sockets()
