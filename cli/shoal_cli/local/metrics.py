"""`shoal run --metrics-address`: the metrics of all processes of a run at one address.

Each process serves its own on a Unix socket of the run. At every scrape they are read and put
together, with the labels that a pool's metrics have on a cluster too: `pool`, `component` and
`device`. A process that does not answer just then is left out; `shoal_coordinator_devices` counts
it.

They are read as OpenMetrics: in the older format, the times at which counters began are gauges of
names that OpenMetrics keeps for counters, and who asks here for that would get what it is not.
"""

import http.client
from collections.abc import Callable, Iterable, Iterator
from socket import AF_UNIX, socket
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from shoal_cli.local.pool import Target
from shoal_protocol.exposition import UNIX, ExpositionServer

PATIENCE_SECONDS: Final = 2.0


def serve(address: tuple[str, int], targets: Callable[[], Iterable[Target]]) -> ExpositionServer:
    """Start the HTTP server; `targets` are those at the moment of a scrape, and called in another
    thread. Raises `OSError` where the address is taken."""
    registry = CollectorRegistry()
    registry.register(_Joined(targets))
    host, port = address
    return ExpositionServer(lambda: None, host=host, port=port, registry=registry)


class _Joined(Collector):
    def __init__(self, targets: Callable[[], Iterable[Target]]) -> None:
        self._targets = targets

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for target in self._targets():
            try:
                text = _read(target.address)
            except (OSError, http.client.HTTPException):
                continue
            for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
                known = joined.setdefault(family.name, _empty(family))
                known.samples += [
                    sample._replace(labels=sample.labels | target.labels)
                    for sample in family.samples
                ]
        yield from joined.values()


def _empty(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type)


def _read(address: str) -> str:
    connection = _UnixConnection(address.removeprefix(UNIX))
    try:
        connection.request("GET", "/metrics", headers={"Accept": CONTENT_TYPE_LATEST})
        return connection.getresponse().read().decode()
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket(AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
