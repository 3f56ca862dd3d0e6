"""How an operator leaves its API server, where it breaks off what is answered still."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kubeconfigs import write
from shoal_cluster.certificates import Authority
from shoal_operator.controller.api import Api
from shoal_operator.controller.login import log_in
from shoal_operator.controller.telemetry import Telemetry

BUSY_SECONDS = 0.3
"""How long a server that is busy does not look at what its clients say."""
BEGUN = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"


class BusyServer:
    """It begins an answer that has no end, over TLS, and is then told that nobody wants it."""

    def __init__(self, authority: Authority, *, hears: bool) -> None:
        pair = authority.sign(
            "server", subject="/CN=server", usage="serverAuth", addresses=["IP:127.0.0.1"]
        )
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(pair.certificate, pair.key)
        self._hears = hears
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.left, self.may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with self._tls.wrap_socket(client, server_side=True) as connection:
            connection.recv(1 << 16)
            connection.sendall(BEGUN + b"1\r\nx\r\n")
            time.sleep(BUSY_SECONDS)
            if self._hears:
                with suppress(OSError):
                    while connection.recv(1 << 16):
                        pass
                self.left.set()
            else:
                self.may_end.wait()

    def close(self) -> None:
        self.may_end.set()
        self._thread.join()
        self._listener.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("pki") / "authority")


@pytest.fixture(params=[True, False])
def server(request: pytest.FixtureRequest, authority: Authority) -> Iterator[BusyServer]:
    found = BusyServer(authority, hears=request.param)
    yield found
    found.close()


async def test_who_closes_waits_until_its_server_knows_but_not_for_ever(
    server: BusyServer, authority: Authority, tmp_path: Path
) -> None:
    """Connections that were left open warn when they are found, in whatever runs then."""
    cluster = {"server": server.url, "certificate-authority": str(authority.pair.certificate)}
    (tmp_path / "token").write_text("t")
    login = await log_in(write(tmp_path, cluster, {"tokenFile": str(tmp_path / "token")}))
    api = Api(login, Telemetry(lambda: 0.0), namespace="shoal-system")
    async with api.open_session() as session, session.get(server.url) as answer:
        assert await answer.content.readexactly(1) == b"x"
    await asyncio.wait_for(api.close(), 30)
    assert server.left.is_set() == server._hears
    assert not api._open_sockets()
