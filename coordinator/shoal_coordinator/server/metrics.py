"""What the coordinator measures about itself, for Prometheus. No job is named in any label."""

from collections import Counter as Counts
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector

from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.dispatch import views
from shoal_coordinator.dispatch.state import State
from shoal_coordinator.server.exchange import ExchangeHub
from shoal_protocol.units import Nanoseconds, seconds

_SHOWN: Final = 12
"""Digits of a fragment's digest."""
_STEP_BUCKETS: Final = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 0.1, 1)


class CoordinatorMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._tasks = self._counter(
            "tasks", "Tasks given to devices, by what the device had to do first.", "tier"
        )
        self.loads = self._counter("loads", "Fragments made resident.")
        self.evictions = self._counter("evictions", "Fragments unloaded to make room.")
        self._relayed = self._counter("relayed_bytes", "Activations passed on between devices.")
        self._received = self._counter("received_bytes", "Bulk bytes received from devices.")
        self._sent = self._counter("sent_bytes", "Bulk bytes sent to devices.")
        self._failures = self._counter(
            "failures",
            "Errors inside the coordinator that were contained, by the part that raised them.",
            "part",
        )
        self.step_seconds = Histogram(
            "shoal_coordinator_step_seconds",
            "Time of one step of the dispatcher.",
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self.compute_seconds = Histogram(
            "shoal_coordinator_task_compute_seconds",
            "Time of a task in the runtime, as devices report it.",
            registry=self.registry,
        )
        self._devices = self._gauge("devices", "Devices by state.", "state")
        self._jobs = self._gauge("jobs", "Jobs that run.")
        self._ready = self._gauge("ready_tasks", "Tasks that could run and wait for a device.")
        self._running = self._gauge("running_tasks", "Tasks given to devices and not ended.")
        self._active = self._gauge("active_items", "Items admitted and not ended.")
        self._inputs = self._gauge("input_bytes_in_flight", "Inputs read and not delivered yet.")
        self._results = self._gauge("result_bytes_in_flight", "Results being received.")
        self._by_tier = {tier: self._tasks.labels(tier=tier.name.lower()) for tier in ins.Tier}
        measured, predicted = "measured by its device", "predicted by the plan"
        self._task_seconds = {
            name: self._gauge(
                f"task_{name}_seconds", f"Time of a task, as {text}.", "device", "fragment"
            )
            for name, text in (("measured", measured), ("predicted", predicted))
        }
        self._full = self._counter(
            "full_queues", "Transfers that had to wait because a device's queue was full."
        )
        self._counted: Counts[Counter] = Counts()

    def count_task(self, order: ins.Execute) -> None:
        self._by_tier[order.tier].inc()

    def count_failure(self, part: str) -> None:
        self._failures.labels(part=part).inc()

    def refresh(self, state: State, hub: ExchangeHub, input_bytes: int) -> None:
        """Bring the gauges up to date; called from the thread that owns the state."""
        jobs = state.jobs.values()
        self._jobs.set(len(jobs))
        self._active.set(sum(len(job.active) for job in jobs))
        self._ready.set(sum(queue.waiting for job in jobs for queue in job.queues))
        self._running.set(sum(queue.running for job in jobs for queue in job.queues))
        draining = sum(device.draining for device in state.devices.values())
        silent = sum(device.health.probed_at is not None for device in state.devices.values())
        counts = {
            views.DevicePhase.READY: len(state.devices) - draining - silent,
            views.DevicePhase.SILENT: silent,
            views.DevicePhase.DRAINING: draining,
            views.DevicePhase.LOST: len(state.tallies) - len(state.devices),
        }
        for phase, count in counts.items():
            self._devices.labels(state=phase.value).set(count)
        self._compare_times(state)
        self._inputs.set(input_bytes)
        self._results.set(hub.receiving_bytes)
        traffic = hub.traffic
        for counter, total in (
            (self._relayed, hub.relayed_bytes),
            (self._received, traffic.received_bytes),
            (self._sent, traffic.sent_bytes),
            (self._full, traffic.full_queues),
        ):
            counter.inc(total - self._counted[counter])
            self._counted[counter] = total

    def _compare_times(self, state: State) -> None:
        """What plans predict beside what devices measure, of the fragments of jobs that run."""
        measured, predicted = self._task_seconds["measured"], self._task_seconds["predicted"]
        measured.clear()
        predicted.clear()
        for queue in (queue for job in state.jobs.values() for queue in job.queues):
            fragment = queue.spec.digest.removeprefix("sha256:")[:_SHOWN]
            for device, time in queue.time_on.items():
                measured.labels(device=device, fragment=fragment).set(seconds(Nanoseconds(time)))
            for device, time in queue.spec.predicted:
                predicted.labels(device=device, fragment=fragment).set(seconds(time))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"shoal_coordinator_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"shoal_coordinator_{name}", text, labels, registry=self.registry)
