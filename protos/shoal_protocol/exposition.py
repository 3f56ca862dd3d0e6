"""The small HTTP server that every process has: `/metrics`, `/healthz`, `/readyz`.

It runs in a thread of its own, so that it still answers when the event loop is stuck: `/healthz`
says that the process lives, and fails where only starting it again would help; `/readyz` says that
it makes progress. The process itself decides both.

`/healthz?wait` is for a startup probe: it answers once the process is ready too, or after
`WAIT_SECONDS`. Kubernetes asks for readiness after that, and each answer "not yet" is a Warning.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import (
    AF_INET,
    AF_INET6,
    AF_UNIX,
    IPPROTO_IPV6,
    IPV6_V6ONLY,
    SHUT_RDWR,
    has_dualstack_ipv6,
    socket,
)
from socketserver import TCPServer
from threading import BoundedSemaphore, Lock, Thread
from time import monotonic, sleep
from typing import Any, Final
from urllib.parse import urlsplit

from prometheus_client import REGISTRY, CollectorRegistry, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from shoal_protocol.histograms import Histogram

ANY: Final = "0.0.0.0"  # noqa: S104 - a name for it
"""All addresses of the machine, of IPv6 too where it has any, as gRPC takes it."""
UNIX: Final = "unix:"
WAIT_SECONDS: Final = 25.0
WAITING: Final = 8
"""Requests that wait at the same time; others are answered at once."""
SCRAPES: Final = 8
"""At the same time, each of which reads disks; others are refused, so that probes are answered."""
CONNECTIONS: Final = 32
"""At the same time. Of more, the oldest is cut: a probe must not find all places taken."""
OPEN_SECONDS: Final = 30.0
"""After which a connection is cut, unless it waits."""
_POLL_SECONDS: Final = 0.1
Readiness = Callable[[], str | None]
"""None when all is well, else the reason why not. Called from the server's threads."""


class Reading(Collector):
    """A gauge that is read at every scrape, in the server's thread."""

    def __init__(self, name: str, text: str, read: Callable[[], float | None] | None) -> None:
        """Without `read`, and while that returns None or raises `OSError`, there is no sample: a
        value that is not known is not zero."""
        self._name = name
        self._text = text
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        value = None
        with suppress(OSError):
            value = None if self._read is None else self._read()
        yield GaugeMetricFamily(self._name, self._text, value=value)


class HistogramCollector(Collector):
    """One of our own histograms."""

    def __init__(self, name: str, text: str, histogram: Histogram) -> None:
        self._name = name
        self._text = text
        self._histogram = histogram

    def collect(self) -> Iterator[HistogramMetricFamily]:
        buckets, total = self._histogram.buckets(), self._histogram.sum
        yield HistogramMetricFamily(self._name, self._text, buckets, total)


class ExpositionServer(ThreadingHTTPServer):
    """Serves a registry and the process's health until `close`; by default on loopback only.

    `port` 0 asks for any free port; the bound one is in `port`. Raises `OSError`, which names
    the address, when it is taken.
    `unix:/path` as the host is a Unix socket, which takes the place of one that is there.
    """

    daemon_threads = True
    # A client that holds its connection open must not hold up `close`.
    block_on_close = False

    def __init__(
        self,
        readiness: Readiness,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        registry: CollectorRegistry = REGISTRY,
        liveness: Readiness = lambda: None,
    ) -> None:
        # The library would add a series to each counter: when it began. No page has these.
        disable_created_metrics()  # type: ignore[no-untyped-call] # declares no type
        self.host = host
        self._path = Path(host.removeprefix(UNIX)) if host.startswith(UNIX) else None
        waiting = BoundedSemaphore(WAITING)
        handler = partial(_Handler, readiness, liveness, registry, waiting)
        self.scrapes = BoundedSemaphore(SCRAPES)
        self._places = BoundedSemaphore(CONNECTIONS)
        self._open: dict[socket, float] = {}  # what may be cut, and since when; the oldest first
        self._lock = Lock()
        address: Any  # a server of TCP, by its type; an address of AF_UNIX is a path
        if self._path is None:
            address = "::" if host == ANY and has_dualstack_ipv6() else host, port
            self.address_family = AF_INET6 if ":" in address[0] else AF_INET
            # Of a burst of connections none is to wait for its second try, a second later. At a
            # Unix socket there are no strangers, and a short queue shows a process that hangs.
            self.request_queue_size = 128
        else:
            address = str(self._path)
            self.address_family = AF_UNIX
            self._path.unlink(missing_ok=True)
        try:
            super().__init__(address, handler)
        except OSError as error:  # which says nothing of the address
            where = host if self._path is not None else _joined(host, port)
            raise OSError(error.errno, error.strerror, where) from error
        self.port = self.server_port
        # How often it checks whether to stop; requests are answered at once.
        loop = partial(self.serve_forever, poll_interval=0.2)
        self._thread = Thread(target=loop, name="exposition", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        if self._path is not None:
            return self.host
        return f"http://{_joined(self.host, self.port)}"

    def close(self) -> None:
        """Stop listening; the port is free again on return."""
        self.shutdown()
        self.server_close()
        self._thread.join()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go before they have read the answer are no news; else it is a mistake."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, one for each place."""
        free = self._places.acquire(blocking=False)
        while not free:
            self._cut_older_than(0.0)
            free = self._places.acquire(timeout=_POLL_SECONDS)
        with self._lock:
            self._open[request] = monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The end of each connection, whatever became of it."""
        self.spare(request)
        super().shutdown_request(request)
        self._places.release()

    def service_actions(self) -> None:
        """Called several times a second."""
        self._cut_older_than(OPEN_SECONDS)

    def spare(self, request: Any) -> None:
        """From now on it is not cut."""
        with self._lock:
            self._open.pop(request, None)

    def _cut_older_than(self, seconds: float) -> None:
        """The oldest connection, if it is so old. Its thread then reads, or writes, no more."""
        with self._lock:
            oldest = next(iter(self._open), None)
            if oldest is not None and monotonic() - self._open[oldest] >= seconds:
                del self._open[oldest]
                with suppress(OSError):  # the client was faster
                    oldest.shutdown(SHUT_RDWR)

    def server_bind(self) -> None:
        """HTTPServer's own asks the resolver for the host's full name, which may take seconds."""
        if self.address_family == AF_INET6:
            self.socket.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)
        if self.address_family == AF_UNIX:
            self.server_name, self.server_port = self.host, 0
        else:
            host, port = self.socket.getsockname()[:2]
            self.server_name, self.server_port = str(host), int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Handler(BaseHTTPRequestHandler):
    server: ExpositionServer
    timeout = 5.0
    server_version = "shoal"
    sys_version = ""

    def __init__(
        self,
        readiness: Readiness,
        liveness: Readiness,
        registry: CollectorRegistry,
        waiting: BoundedSemaphore,
        *connection: Any,
    ) -> None:
        self._readiness = readiness
        self._liveness = liveness
        self._registry = registry
        self._waiting = waiting
        super().__init__(*connection)

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        match asked.path:
            case "/metrics":
                self._measure()
            case "/healthz":
                if asked.query == "wait":
                    self._wait_until_ready()
                self._judge(self._liveness())
            case "/readyz":
                self._judge(self._readiness())
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"try /metrics, /healthz or /readyz\n")

    def _measure(self) -> None:
        if not self.server.scrapes.acquire(blocking=False):
            self._judge("too many scrapes at the same time")
            return
        try:
            encoder, content_type = choose_encoder(self.headers.get("Accept", ""))
            body = encoder(self._registry)
        finally:
            self.server.scrapes.release()
        self._answer(HTTPStatus.OK, body, content_type)

    def _wait_until_ready(self) -> None:
        if not self._waiting.acquire(blocking=False):
            return
        try:
            self.server.spare(self.connection)
            end = monotonic() + WAIT_SECONDS
            while self._liveness() is None and self._readiness() and monotonic() < end:
                sleep(_POLL_SECONDS)
        finally:
            self._waiting.release()

    def _judge(self, reason: str | None) -> None:
        status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, f"{reason or 'ok'}\n".encode())

    def _answer(
        self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Probes every few seconds are no news."""
