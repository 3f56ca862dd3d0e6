"""What the coordinator measures about itself, for Prometheus. No job is named in any label."""

from collections import Counter as Counts
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.process_collector import ProcessCollector

from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.dispatch import views
from shoal_coordinator.dispatch.events import FailureKind
from shoal_coordinator.dispatch.state import State
from shoal_coordinator.jobs.state import Job
from shoal_coordinator.jobs.values import Outcome
from shoal_coordinator.server.exchange import ExchangeHub
from shoal_coordinator.storage.volume import Volume
from shoal_protocol.certificate_times import expiration_seconds
from shoal_protocol.channels import Credentials
from shoal_protocol.exposition import HistogramCollector, Reading
from shoal_protocol.histograms import Histogram
from shoal_protocol.units import Nanoseconds, seconds

_NAMESPACE: Final = "shoal_coordinator"
_SHOWN: Final = 12
"""Digits of a fragment's digest."""
_STEP_BUCKETS: Final = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 0.1, 1)
_TASK_BUCKETS: Final = (1e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITEM_BUCKETS: Final = (*_TASK_BUCKETS[1:], 300, 600)
_JOB_BUCKETS: Final = (1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400)


class CoordinatorMetrics:
    def __init__(
        self, volume: Volume | None = None, credentials: Credentials | None = None
    ) -> None:
        """`volume` is the one whose space is measured."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._counted: Counts[Counter] = Counts()
        self._declare_work()
        self._declare_traffic()
        self._declare_state()
        for name, text, read in (
            *_of_volume(volume),
            (
                "certificate_expiration_timestamp_seconds",
                "When the coordinator's certificate expires, in seconds since 1970.",
                None
                if credentials is None
                else partial(expiration_seconds, credentials.certificate),
            ),
        ):
            self.registry.register(Reading(f"{_NAMESPACE}_{name}", text, read))

    def _declare_work(self) -> None:
        """What has been done, and how long it took."""
        jobs = self._counter("jobs_ended", "Jobs that ended, by how.", "outcome")
        self._jobs_ended = {each: jobs.labels(outcome=each.lower()) for each in Outcome}
        self._job_seconds = self._histogram(
            "job_seconds", "Time of a job from its submission to its end.", _JOB_BUCKETS
        )
        self._job_wait_seconds = self._histogram(
            "job_wait_seconds",
            "Time of a job from its submission to the start of its first task.",
            _JOB_BUCKETS,
        )
        items = self._counter("items_ended", "Items that ended, by how.", "outcome")
        self._items_succeeded = items.labels(outcome="succeeded")
        self._items_failed = items.labels(outcome="failed")
        failures = self._counter("item_failures", "Items that failed, by why.", "reason")
        self._item_failures = {each: failures.labels(reason=each.value) for each in FailureKind}
        self._item_seconds = self._histogram(
            "item_seconds",
            "Time of an item from the start of its first task to its stored result.",
            _ITEM_BUCKETS,
        )
        tasks = self._counter(
            "tasks", "Tasks given to devices, by what the device had to do first.", "tier"
        )
        self._tasks = {tier: tasks.labels(tier=tier.name.lower()) for tier in ins.Tier}
        self._retries = self._counter(
            "task_retries", "Tasks given again, after a failure or the loss of a device."
        )
        self._task_wait_seconds = self._histogram(
            "task_wait_seconds",
            "Time that a task with all its inputs waited for a device.",
            _TASK_BUCKETS,
        )
        self.compute_seconds = self._histogram(
            "task_compute_seconds",
            "Time of a task in the runtime, as devices report it.",
            _TASK_BUCKETS,
        )
        self.step_seconds = self._histogram(
            "step_seconds", "Time of one step of the dispatcher.", _STEP_BUCKETS
        )
        self.loads = self._counter("loads", "Fragments made resident.")
        self.evictions = self._counter("evictions", "Fragments unloaded to make room.")
        self._failures = self._counter(
            "failures",
            "Errors inside the coordinator that were contained, by the part that raised them.",
            "part",
        )

    def _declare_traffic(self) -> None:
        self._relayed = self._counter("relayed_bytes", "Activations passed on between devices.")
        self._received = self._counter("received_bytes", "Bulk bytes received from devices.")
        self._sent = self._counter("sent_bytes", "Bulk bytes sent to devices.")
        self._full = self._counter(
            "full_queues", "Transfers that had to wait because a device's queue was full."
        )

        spans = self._counter("trace_spans", "Spans of traces, by what became of them.", "outcome")
        self._spans_delivered = spans.labels(outcome="delivered")
        self._spans_lost = spans.labels(outcome="lost")

    def _declare_state(self) -> None:
        """What is so now."""
        text = "Devices by state; one that has left in order, as its pod was deleted, has none."
        self._devices = self._gauge("devices", text, "state")
        self._jobs = self._gauge("jobs", "Jobs that run.")
        self._ready = self._gauge("ready_tasks", "Tasks that could run and wait for a device.")
        self._running = self._gauge("running_tasks", "Tasks given to devices and not ended.")
        self._active = self._gauge("active_items", "Items admitted and not ended.")
        self.waiting_files = self._gauge(
            "waiting_files", "Files in followed folders that were not taken yet."
        )
        self._inputs = self._gauge("input_bytes_in_flight", "Inputs read and not delivered yet.")
        self._results = self._gauge("result_bytes_in_flight", "Results being received.")
        measured, predicted = "measured by its device", "predicted by the plan"
        self._task_seconds = {
            name: self._gauge(
                f"task_{name}_seconds", f"Time of a task, as {text}.", "device", "fragment"
            )
            for name, text in (("measured", measured), ("predicted", predicted))
        }

    def count_task(self, order: ins.Execute) -> None:
        self._tasks[order.tier].inc()
        self._task_wait_seconds.observe(seconds(order.waited))
        if order.attempt > 1:
            self._retries.inc()

    def count_travels(self, tasks: int) -> None:
        """Items travel, through so many stages in all."""
        self._tasks[ins.Tier.RESIDENT].inc(tasks)

    def count_stored(self, took: Sequence[Nanoseconds]) -> None:
        """The results of items are stored that took so long."""
        self._items_succeeded.inc(len(took))
        for each in took:
            self._item_seconds.observe(seconds(each))

    def count_failed(self, kind: FailureKind) -> None:
        """An item has failed."""
        self._items_failed.inc()
        self._item_failures[kind].inc()

    def count_spans(self, number: int, delivered: bool) -> None:
        """The collector of traces took them, or did not. Called from its threads."""
        (self._spans_delivered if delivered else self._spans_lost).inc(number)

    def count_job(self, job: Job, now_seconds: float) -> None:
        """A job has ended, by the wall clock."""
        assert job.end is not None, "it has ended"
        self._jobs_ended[job.end.outcome].inc()
        self._job_seconds.observe(max(0.0, now_seconds - job.submitted_seconds))
        if (started := job.tally.started_seconds) is not None:
            self._job_wait_seconds.observe(max(0.0, started - job.submitted_seconds))

    def count_failure(self, part: str) -> None:
        self._failures.labels(part=part).inc()

    def refresh(self, state: State, hub: ExchangeHub, input_bytes: int) -> None:
        """Bring the gauges up to date; called from the thread that owns the state."""
        jobs = [job for job in state.jobs.values() if not job.spec.holds]
        self._jobs.set(len(jobs))
        self._active.set(sum(len(job.active) for job in jobs))
        self._ready.set(sum(queue.waiting for job in jobs for queue in job.queues))
        self._running.set(sum(queue.running for job in jobs for queue in job.queues))
        draining = sum(device.draining for device in state.devices.values())
        silent = sum(device.health.probed_at is not None for device in state.devices.values())
        left = sum(tally.has_left for tally in state.tallies.values())
        counts = {
            views.DevicePhase.READY: len(state.devices) - draining - silent,
            views.DevicePhase.SILENT: silent,
            views.DevicePhase.DRAINING: draining,
            views.DevicePhase.LOST: len(state.tallies) - len(state.devices) - left,
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
        return Counter(name, text, labels, namespace=_NAMESPACE, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=_NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(tuple(map(float, bounds)))
        self.registry.register(HistogramCollector(f"{_NAMESPACE}_{name}", text, histogram))
        return histogram


def _of_volume(volume: Volume | None) -> Sequence[tuple[str, str, Callable[[], float] | None]]:
    """Name, text and reading of what is measured of a volume."""
    texts = (
        ("free", "Bytes that may be written to the volume of fragments, inputs and results."),
        ("removable", "Bytes of fragments there that no job uses: they go where room is needed."),
        ("used", "Bytes that its files take; where it has no size, all that its disk holds."),
        ("size", "What may be on it: its size, or that of its disk where that is smaller."),
    )
    return [
        (f"volume_{name}_bytes", text, None if volume is None else partial(_read, volume, name))
        for name, text in texts
    ]


def _read(volume: Volume, name: str) -> float:
    room = volume.room() if name == "removable" else volume.space.room()
    values = {
        "free": room.free_bytes,
        "removable": room.removable_bytes,
        "used": room.used_bytes,
        "size": room.size_bytes,
    }
    return values[name]
