"""Whether the operator makes progress, as its probes and its metrics report it.

The thread of the HTTP server calls `problem` and `hung`, so they only read numbers and also notice
an event loop that is stuck. A loop that is stuck for long will not recover: then the liveness probe
fails as well, and the kubelet restarts the operator.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_operator.controller.event_router import EventRouter
from shoal_operator.controller.lease import Lease
from shoal_operator.controller.telemetry import Telemetry
from shoal_operator.reconcile.resources import WATCHED


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """Beyond these, in seconds, the operator is not ready."""

    watch_age: float = 120.0
    queue: float = 60.0
    worker: float = 300.0
    loop: float = 15.0
    hung: float = 60.0
    lease: float = 60.0
    heartbeat: float = 1.0


@dataclass(slots=True)
class Health:
    """Health of one operator. `clock` counts seconds, the same as the loop's; `unseen` says which
    objects the informers still lack.
    """

    event_router: EventRouter
    lease: Lease
    telemetry: Telemetry
    clock: Callable[[], float] = field(kw_only=True)
    limits: HealthLimits = field(kw_only=True)
    unseen: Callable[[], str | None] = field(kw_only=True)
    _heartbeat_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._heartbeat_at = self.clock()

    async def heartbeat(self) -> None:
        """Record that the event loop runs, and update the gauges, until cancelled."""
        metrics, queue = self.telemetry.metrics, self.event_router.queue
        while True:
            before = self.clock()
            await asyncio.sleep(self.limits.heartbeat)
            self._heartbeat_at = self.clock()
            metrics.loop_lag.set(self._heartbeat_at - before - self.limits.heartbeat)
            metrics.leader.set(self.lease.leads)
            metrics.queue_depth.set(queue.depth)
            metrics.queue_waiting.set(queue.waiting)
            for resource in WATCHED:
                count = self.event_router.cache.count(resource.kind)
                metrics.objects.labels(kind=resource.kind).set(count)
            for kind, seconds in self.telemetry.watch_ages().items():
                metrics.watch_age.labels(kind=kind).set(seconds)

    def hung(self) -> str | None:
        """Why the operator must be restarted; None while it need not."""
        stuck = self.clock() - self._heartbeat_at
        return _stuck_text(stuck) if stuck > self.limits.hung else None

    def problem(self) -> str | None:
        """Why the operator is not ready; None when it is."""
        limits, now = self.limits, self.clock()
        stuck = now - self._heartbeat_at
        if stuck > limits.loop:
            return _stuck_text(stuck)
        silent = now - self.lease.answered_at
        if silent > limits.lease:
            return f"the API server has not answered about the lease for {silent:.0f} s"
        ages = self.telemetry.watch_ages()
        old = max(ages, key=lambda kind: ages[kind], default=None)
        if old is not None and ages[old] > limits.watch_age:
            return self.unseen() or f"the watch of {old} has been silent for {ages[old]:.0f} s"
        if not self.lease.leads:
            # One that waits for its turn is as ready as it can be; one that lost it is not.
            return "it has lost the lease" if ages else None
        return self.unseen() or self._stuck()

    def _stuck(self) -> str | None:
        queue, limits = self.event_router.queue, self.limits
        waiting, working = queue.stuck_seconds(), queue.longest_taken_seconds()
        if waiting > limits.queue:
            return f"objects have waited in the queue for {waiting:.0f} s"
        if working > limits.worker:
            return f"a worker has been at one object for {working:.0f} s"
        return None


def _stuck_text(seconds: float) -> str:
    return f"the event loop has not moved for {seconds:.0f} s"
