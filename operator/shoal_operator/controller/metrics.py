"""What the operator measures about itself, for Prometheus. No object is named in any label."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class OperatorMetrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.reconcile_seconds = Histogram(
            "shoal_operator_reconcile_seconds",
            "Time from taking an object to having carried out what was decided.",
            ["kind"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.reconcile_failures = self._counter(
            "reconcile_failures", "Looks at an object that ended in trouble.", ["kind"]
        )
        self.requests = self._counter(
            "api_requests", "Requests to the API server.", ["verb", "code"]
        )
        self.events = self._counter("watch_events", "Changes seen in watches.", ["kind"])
        self.calls = self._counter(
            "coordinator_calls", "Calls of coordinators.", ["method", "code"]
        )
        self.queue_depth = self._gauge("queue_depth", "Objects that could be looked at now.")
        self.queue_waiting = self._gauge("queue_waiting", "Objects to be looked at later.")
        self.workers = self._gauge("workers_busy", "Workers that look at an object.")
        self.leader = self._gauge("leader", "1 while this operator leads.")
        self.loop_lag = self._gauge("loop_lag_seconds", "How late the event loop was last.")
        self.objects = Gauge(
            "shoal_operator_objects", "Objects by kind.", ["kind"], registry=self.registry
        )
        self.watch_age = Gauge(
            "shoal_operator_watch_age_seconds",
            "Since the watch of a kind was last known to be alive.",
            ["kind"],
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"shoal_operator_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"shoal_operator_{name}", text, registry=self.registry)
