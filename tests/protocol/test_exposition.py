"""Metrics, health and readiness over HTTP."""

import http.client
import re
import socket
from collections import Counter as Counted
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from threading import Event, active_count, get_ident
from time import sleep
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from shoal_protocol import exposition
from shoal_protocol.exposition import ExpositionServer


def get(url: str) -> tuple[int, str]:
    try:
        with urlopen(Request(url), timeout=60) as answer:  # noqa: S310 - loopback, in this test
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_are_those_of_the_registry() -> None:
    registry = CollectorRegistry()
    Counter("shoal_tasks", "Tasks run.", registry=registry).inc(3)
    with ExpositionServer(lambda: None, registry=registry) as server:
        status, text = get(f"{server.url}/metrics")
    assert status == 200
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert ("shoal_tasks_total", 3.0) in [(sample.name, sample.value) for sample in samples]


def test_readiness_is_decided_at_each_request() -> None:
    reason: str | None = "no session for 31 s"
    with ExpositionServer(lambda: reason) as server:
        assert get(f"{server.url}/readyz") == (503, "no session for 31 s\n")
        assert get(f"{server.url}/healthz") == (200, "ok\n")
        reason = None
        assert get(f"{server.url}/readyz?verbose") == (200, "ok\n")


def test_a_process_that_must_be_started_again_says_so_in_healthz() -> None:
    with ExpositionServer(lambda: None, liveness=lambda: "stuck for 61 s") as server:
        assert get(f"{server.url}/healthz") == (503, "stuck for 61 s\n")
        assert get(f"{server.url}/readyz") == (200, "ok\n")


def test_a_startup_probe_is_answered_when_the_process_is_ready() -> None:
    asked = iter(["no session yet"] * 3)
    with ExpositionServer(lambda: next(asked, None)) as server:
        assert get(f"{server.url}/healthz?wait") == (200, "ok\n")
        assert next(asked, None) is None


def test_a_startup_probe_of_a_process_that_must_be_started_again_does_not_wait() -> None:
    with ExpositionServer(lambda: "not yet", liveness=lambda: "stuck for 61 s") as server:
        assert get(f"{server.url}/healthz?wait") == (503, "stuck for 61 s\n")


def test_a_process_that_is_alive_has_started_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "WAIT_SECONDS", 0.0)
    with ExpositionServer(lambda: "not yet") as server:
        assert get(f"{server.url}/healthz?wait") == (200, "ok\n")
        assert get(f"{server.url}/readyz") == (503, "not yet\n")


def test_only_so_many_requests_wait() -> None:
    ready, threads = Event(), set[int]()

    def readiness() -> str | None:
        threads.add(get_ident())
        return None if ready.is_set() else "not yet"

    many = exposition.WAITING
    with ExpositionServer(readiness) as server, ThreadPoolExecutor(many) as pool:
        url = f"{server.url}/healthz?wait"
        waiters = [pool.submit(get, url) for _ in range(many)]
        while len(threads) < many:
            sleep(0.01)
        assert get(url) == (200, "ok\n")
        assert not any(waiter.done() for waiter in waiters)
        ready.set()
        assert {waiter.result() for waiter in waiters} == {(200, "ok\n")}


def test_a_readiness_that_raises_takes_no_place_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exposition, "WAITING", 1)
    asked = iter(["raises", "not yet"])

    def readiness() -> str | None:
        answer = next(asked, None)
        if answer == "raises":
            raise RuntimeError(answer)
        return answer

    with ExpositionServer(readiness) as server:
        url = f"{server.url}/healthz?wait"
        with pytest.raises(http.client.RemoteDisconnected):
            get(url)
        assert get(url) == (200, "ok\n")
        assert next(asked, None) is None, "the second request waited"
    assert "RuntimeError: raises" in capsys.readouterr().err


def test_other_paths_are_not_found() -> None:
    with ExpositionServer(lambda: None) as server:
        assert get(f"{server.url}/")[0] == 404


def test_a_client_that_says_nothing_holds_nothing_up() -> None:
    with ExpositionServer(lambda: None) as server:
        silent = [socket.create_connection((server.host, server.port)) for _ in range(5)]
        assert get(f"{server.url}/healthz")[0] == 200
    for connection in silent:
        connection.close()


@contextmanager
def connected(server: ExpositionServer, number: int) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    with ExitStack() as stack:
        address = (server.host, server.port)
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(number)]


def is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def drip(connection: socket.socket) -> None:
    for byte in cycle(b"GET /healthz HTTP/1.0\r\nX: "):
        connection.sendall(bytes([byte]))
        sleep(0.02)


def test_of_too_many_connections_the_oldest_gives_way_to_whoever_comes() -> None:
    many, before = exposition.CONNECTIONS, active_count()
    with ExpositionServer(lambda: None) as server, connected(server, 10 * many) as silent:
        assert get(f"{server.url}/healthz") == (200, "ok\n")
        assert active_count() - before < 2 * many
        assert all(is_cut(connection) for connection in silent[: 9 * many])


def test_a_request_that_waits_gives_way_to_nobody() -> None:
    waits, ready = Event(), Event()

    def readiness() -> str | None:
        waits.set()
        return None if ready.is_set() else "not yet"

    with ExpositionServer(readiness) as server, ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(get, f"{server.url}/healthz?wait")
        waits.wait()
        with connected(server, 2 * exposition.CONNECTIONS) as silent:
            assert is_cut(silent[0])
            ready.set()
            assert waiter.result() == (200, "ok\n")


def test_a_client_that_sends_a_byte_now_and_then_is_cut_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exposition, "OPEN_SECONDS", 0.5)
    with ExpositionServer(lambda: None) as server, connected(server, 1) as (connection,):
        with pytest.raises(ConnectionError):
            drip(connection)
        monkeypatch.undo()  # half a second is little on a machine that is busy
        assert get(f"{server.url}/healthz") == (200, "ok\n")


class Stuck(Collector):
    """Reads a disk that does not answer until it is told to."""

    def __init__(self) -> None:
        self.answers = Event()

    def collect(self) -> Iterator[Metric]:
        self.answers.wait()
        return iter(())


def test_scrapes_that_are_stuck_do_not_keep_a_probe_from_its_answer() -> None:
    registry, stuck = CollectorRegistry(auto_describe=False), Stuck()
    stuck.answers.set()
    registry.register(stuck)
    stuck.answers.clear()
    many = 2 * exposition.CONNECTIONS
    with (
        ExpositionServer(lambda: None, registry=registry) as server,
        ThreadPoolExecutor(many) as pool,
    ):
        scrapes = [pool.submit(get, f"{server.url}/metrics") for _ in range(many)]
        while sum(scrape.done() for scrape in scrapes) < many - exposition.SCRAPES:
            sleep(0.01)
        assert get(f"{server.url}/healthz") == (200, "ok\n")
        refused = [scrape.result()[0] for scrape in scrapes if scrape.done()]
        assert refused == [503] * (many - exposition.SCRAPES)
        stuck.answers.set()
        assert Counted(scrape.result()[0] for scrape in scrapes)[200] == exposition.SCRAPES


def test_it_is_reachable_on_loopback_only_unless_told_otherwise() -> None:
    with ExpositionServer(lambda: None) as server:
        assert server.host == "127.0.0.1"
    with ExpositionServer(lambda: None, host="0.0.0.0") as server:  # noqa: S104 - the point
        for host in ("127.0.0.1", *(["[::1]"] if socket.has_dualstack_ipv6() else [])):
            assert get(f"http://{host}:{server.port}/healthz")[0] == 200


def test_ipv6_is_served() -> None:
    with ExpositionServer(lambda: None, host="::1") as server:
        assert get(f"{server.url}/healthz")[0] == 200


def test_the_port_is_free_after_closing_and_taken_before() -> None:
    with ExpositionServer(lambda: None) as server:
        port = server.port
        with pytest.raises(OSError, match="in use"):
            ExpositionServer(lambda: None, port=port)
    with ExpositionServer(lambda: None, port=port) as server:
        assert server.port == port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_that_is_taken_is_named(host: str) -> None:
    """A process has others."""
    with ExpositionServer(lambda: None, host=host) as server:
        shown = server.url.removeprefix("http://")
        with pytest.raises(OSError, match=re.escape(f"'{shown}'")):
            ExpositionServer(lambda: None, host=host, port=server.port)


def test_a_unix_socket_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/none/m"
    with pytest.raises(FileNotFoundError, match=re.escape(f"'{address}'")):
        ExpositionServer(lambda: None, host=address)


def test_a_unix_socket_takes_the_place_of_one_that_a_killed_process_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with ExpositionServer(lambda: None, host=f"unix:{path}") as server:
        assert server.url == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert client.makefile("rb").read().endswith(b"\r\n\r\nok\n")
    assert not path.exists()
