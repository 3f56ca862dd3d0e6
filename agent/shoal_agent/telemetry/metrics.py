"""`/metrics`: the agent's counters and gauges as Prometheus families, made when they are asked for.

Loaded only where metrics are served: the client library is a part of the idle agent's memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shoal_agent.telemetry.counters import Counters, Histogram
from shoal_protocol.exposition import ExpositionServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What is true now."""

    budget_bytes: int
    floor_bytes: int
    used_bytes: int
    peak_bytes: int
    fragments_bytes: int
    reserved_bytes: int
    resident_fragments: int
    cached_fragments: int
    cached_bytes: int
    spilled_bytes: int
    queued_tasks: int
    peer_links: int
    connected: bool


class AgentCollector(Collector):
    """Turns counters and gauges into families, with the prefix `shoal_agent_`."""

    def __init__(
        self, info: dict[str, str], counters: Counters, gauges: Callable[[], Gauges]
    ) -> None:
        self._info = info
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield InfoMetricFamily("shoal_agent", "Version and architecture of the agent.", self._info)
        yield from _gauges(self._gauges())
        yield from _counters(self._counters)
        counters = self._counters
        yield _histogram(
            "task_compute_seconds", "Time of a task in ONNX Runtime.", counters.compute
        )
        yield _histogram("task_seconds", "Time from a task's arrival to its answer.", counters.task)
        yield _histogram("load_seconds", "Time to make a fragment resident.", counters.load)


def _gauges(now: Gauges) -> Iterator[Metric]:
    for name, text, value in (
        ("budget_bytes", "Bytes that may be used above the idle floor.", now.budget_bytes),
        ("floor_bytes", "Resident bytes of the idle agent.", now.floor_bytes),
        ("used_bytes", "Resident bytes above the floor.", now.used_bytes),
        ("peak_bytes", "Highest resident bytes above the floor since the start.", now.peak_bytes),
        (
            "fragments_bytes",
            "Bytes of the budget that fragments are reckoned with.",
            now.fragments_bytes,
        ),
        (
            "reserved_bytes",
            "Bytes of the budget that waiting activations have.",
            now.reserved_bytes,
        ),
        ("resident_fragments", "Fragments that can run now.", now.resident_fragments),
        ("cached_fragments", "Fragments on disk.", now.cached_fragments),
        ("cached_bytes", "Bytes of fragments on disk.", now.cached_bytes),
        ("spilled_bytes", "Bytes of activations on disk.", now.spilled_bytes),
        ("queued_tasks", "Tasks that wait or are ready.", now.queued_tasks),
        ("peer_links", "Streams to peers.", now.peer_links),
        ("session_connected", "1 while the agent has a session.", int(now.connected)),
    ):
        yield GaugeMetricFamily(f"shoal_agent_{name}", text, value=value)


def _counters(counters: Counters) -> Iterator[Metric]:
    for name, text, value in (
        ("sent_bytes", "Bytes of bulk sent.", counters.sent_bytes),
        ("received_bytes", "Bytes of activations received.", counters.received_bytes),
        ("evictions", "Fragments given up.", counters.evictions),
        ("sessions", "Sessions opened.", counters.sessions),
        ("over_budget_runs", "Runs that were measured above the budget.", counters.over_budget),
    ):
        yield CounterMetricFamily(f"shoal_agent_{name}", text, value=value)
    full_queues = counters.full_queues | Counter(transfers=counters.traffic.full_queues)
    for name, text, label, values in (
        ("fetched_bytes", "Bytes of fragments fetched.", "source", counters.fetched_bytes),
        ("tasks", "Tasks answered.", "outcome", counters.tasks),
        ("loads", "Loads answered.", "outcome", counters.loads),
        ("transfers_refused", "Activations not taken.", "outcome", counters.transfers_refused),
        ("full_queues", "Times that a queue was full.", "queue", full_queues),
    ):
        family = CounterMetricFamily(f"shoal_agent_{name}", text, labels=[label])
        for key, number in list(values.items()):
            family.add_metric([key], number)
        yield family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(
        f"shoal_agent_{name}", text, buckets=histogram.buckets(), sum_value=histogram.sum_seconds
    )


def serve(
    address: tuple[str, int],
    readiness: Callable[[], str | None],
    collector: AgentCollector,
) -> ExpositionServer:
    """Start the HTTP server; raises `OSError` where the address is taken."""
    registry = CollectorRegistry()
    registry.register(collector)
    host, port = address
    return ExpositionServer(readiness, host=host, port=port, registry=registry)
