"""`/metrics`: the agent's counters and gauges as Prometheus families, made when they are asked for.

Loaded only where metrics are served: the client library is a part of the idle agent's memory.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from shoal_agent.telemetry.counters import Counters
from shoal_protocol.exposition import ExpositionServer, HistogramCollector
from shoal_protocol.speeds import Link

GAUGES: Final = {
    "budget_bytes": "Bytes that may be used above the idle floor.",
    "floor_bytes": "Resident bytes of the idle agent.",
    "used_bytes": "Resident bytes above the floor.",
    "peak_bytes": "Highest resident bytes above the floor since the start.",
    "fragments_bytes": "Bytes of the budget that resident fragments account for.",
    "reserved_bytes": "Bytes of the budget of waiting activations and of memory for the next ones.",
    "grown_bytes": "Bytes of the budget that the agent itself takes, beyond its reserve.",
    "withheld_bytes": "Bytes withheld from fragments while memory is short on the machine.",
    "resident_fragments": "Fragments that can run now.",
    "cached_fragments": "Fragments on disk.",
    "cached_bytes": "Bytes of fragments on disk.",
    "spilled_bytes": "Bytes of activations on disk.",
    "queued_tasks": "Tasks that wait or are ready.",
    "peer_links": "Streams to peers.",
    "session_connected": "1 while the agent has a session.",
    "cache_limit_bytes": "Bytes that fragments on disk may take.",
    "disk_free_bytes": "Bytes free on the disk of the cache.",
    "certificate_expiration_timestamp_seconds": (
        "When the agent's certificate expires, in seconds since 1970."
    ),
    "processors": "Undisturbed threads that the device's processors amount to, as measured.",
    "convolution_flops_per_second": "Operations of convolutions, of one thread.",
    "product_flops_per_second": "Operations of matrix products, of one thread.",
    "memory_bytes_per_second": "Bytes that one thread reads from memory.",
    "page_bytes_per_second": "Bytes that one thread maps again and reads.",
    "disk_bytes_per_second": "Bytes that the disk reads.",
    "link_bytes_per_second": "Bytes that the link carries, in the fastest of the last transfers.",
    "link_round_trip_seconds": "The shortest of the last round trips to the coordinator.",
    "transfer_seconds_per_byte": "Processor time that a byte takes to be sent or received.",
    "handling_seconds": "Processor time of a task or a transfer, besides computing and bytes.",
}
SHARES: Final = {
    "granted_bytes": "Bytes that a fragment in blocks may take now.",
    "least_bytes": "Bytes that it can run in at the least.",
    "wanted_bytes": "Bytes that it was loaded for.",
    "lent_bytes": "Bytes that it has beyond that while nobody needs them.",
}


class AgentCollector(Collector):
    """Turns counters and gauges into families, with the prefix `shoal_agent_`."""

    def __init__(
        self,
        info: dict[str, str],
        counters: Counters,
        gauges: Callable[[], Mapping[str, float | None]],
        shares: Callable[[], Mapping[str, Mapping[str, int]]] = dict,
        links: Callable[[], Link] = Link,
    ) -> None:
        """`gauges` gives the present value of each of `GAUGES`, None: it is not known. `shares`
        gives that of each of `SHARES`, for each resident fragment that can run in blocks; `links`
        what is known of links to peers."""
        self._info = info
        self._counters = counters
        self._gauges = gauges
        self._shares = shares
        self._links = links

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        yield InfoMetricFamily("shoal_agent", "Version and architecture of the agent.", self._info)
        readings = self._gauges()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"shoal_agent_{name}", text, value=readings.get(name))
        shares = self._shares()
        for name, text in SHARES.items():
            share = GaugeMetricFamily(f"shoal_agent_fragment_{name}", text, labels=["fragment"])
            for fragment, values in shares.items():
                share.add_metric([fragment], values[name])
            yield share
        link, peers = "shoal_agent_peer_bytes_per_second", self._links().peers
        rates = GaugeMetricFamily(link, "Bytes that the link to a peer carries.", labels=["peer"])
        for name, each in peers:
            if name and each.bytes_per_second is not None:
                rates.add_metric([name], each.bytes_per_second)
        yield rates
        for name, text, count in (
            ("sent_bytes", "Bytes of bulk sent.", counters.sent_bytes),
            ("received_bytes", "Bytes of activations received.", counters.received_bytes),
            ("evictions", "Fragments evicted.", counters.evictions),
            ("sessions", "Sessions opened.", counters.sessions),
            ("grants", "Times a fragment was given more or less memory.", counters.grants),
            ("over_budget_runs", "Runs that were measured above the budget.", counters.over_budget),
        ):
            yield CounterMetricFamily(f"shoal_agent_{name}", text, value=count)
        full_queues = {"outbox": 0, "peers": 0, **counters.full_queues}
        full_queues["transfers"] = counters.traffic.full_queues
        for name, text, label, counts in (
            ("fetched_bytes", "Bytes of fragments fetched.", "source", counters.fetched_bytes),
            ("tasks", "Tasks answered.", "outcome", counters.tasks),
            ("loads", "Loads answered.", "outcome", counters.loads),
            ("transfers_refused", "Activations refused.", "outcome", counters.transfers_refused),
            ("failures", "Background tasks that failed.", "part", counters.failures),
            ("full_queues", "Times that a queue was full.", "queue", full_queues),
        ):
            family = CounterMetricFamily(f"shoal_agent_{name}", text, labels=[label])
            for key, number in list(counts.items()):
                family.add_metric([key], number)
            yield family
        for name, text, histogram in (
            ("task_compute_seconds", "Time of a task in ONNX Runtime.", counters.compute),
            ("task_seconds", "Time from a task's arrival to its answer.", counters.task),
            ("load_seconds", "Time to make a fragment resident.", counters.load),
            (
                "memory_estimate_ratio",
                "Measured memory of a fragment, as a share of what it was planned with.",
                counters.memory_ratio,
            ),
        ):
            yield from HistogramCollector(f"shoal_agent_{name}", text, histogram).collect()


def serve(
    address: tuple[str, int],
    readiness: Callable[[], str | None],
    collector: AgentCollector,
) -> ExpositionServer:
    """Start the HTTP server; raises `OSError` where the address is taken."""
    host, port = address
    return ExpositionServer(readiness, host=host, port=port, registry=registry_of(collector))


def registry_of(collector: AgentCollector) -> CollectorRegistry:
    """All that an agent exposes."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
