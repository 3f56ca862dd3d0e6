"""The workers: each takes a key from the queue, reconciles its object, and carries that out."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from shoal_api.kinds import InferenceJob
from shoal_operator.controller.actions import Actions, NotLeading
from shoal_operator.controller.api import ApiError, Conflict, Gone
from shoal_operator.controller.cache import ObjectName, Own
from shoal_operator.controller.children import NameTaken, StillThere
from shoal_operator.controller.event_router import EventRouter
from shoal_operator.controller.open_calls import CoordinatorFailed
from shoal_operator.controller.planning import Asker, Haste, Planning
from shoal_operator.controller.snapshots import Snapshots
from shoal_operator.controller.telemetry import OperatorMetrics
from shoal_operator.reconcile.deciding import decide
from shoal_operator.reconcile.placement import question_of, with_answer
from shoal_operator.reconcile.snapshot import PlacementSnapshot

logger = logging.getLogger(__name__)

WORKERS: Final = 8
CONFLICT_SECONDS: Final = 0.1
"""Time for the watch to bring what somebody else has written."""
COLLECTED_SECONDS: Final = 2.0
"""How often it is asked whether Kubernetes has collected what is in the way, or the watch has
brought that the object itself was deleted: it takes a while."""


@dataclass(slots=True)
class Controller:
    """Reconciles what the router has enqueued, `WORKERS` objects at a time. `is_seen`: whether all
    objects of a namespace are known; nothing is decided with a part of them.
    """

    event_router: EventRouter
    snapshots: Snapshots
    actions: Actions
    planning: Planning
    metrics: OperatorMetrics
    is_seen: Callable[[str], bool] = field(kw_only=True)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(WORKERS):
                group.create_task(self._work(), name=f"worker {number}")

    async def _work(self) -> None:
        queue, metrics = self.event_router.queue, self.metrics
        while True:
            name = await queue.take()
            metrics.queue_seconds.observe(queue.waited_seconds(name))
            seconds = metrics.reconcile_seconds.labels(kind=name[0])
            try:
                with metrics.workers.track_inprogress(), seconds.time():
                    failed = await self._attempt(name)
            finally:
                queue.done(name)
            if failed:
                metrics.reconcile_failures.labels(kind=name[0]).inc()
                queue.failed(name)
            else:
                queue.succeeded(name)

    async def _attempt(self, name: ObjectName) -> bool:
        """Reconcile one object; whether that failed and is to be tried again."""
        if not self.is_seen(name[1]):
            return False  # it is enqueued again when all of its namespace is known
        try:
            await self._reconcile(name)
        except Conflict as error:
            logger.debug("%s: %s", _text(name), error)
            collected = isinstance(error, StillThere | Gone)
            delay = COLLECTED_SECONDS if collected else CONFLICT_SECONDS
            self.event_router.queue.add(name, delay)
        except NotLeading:
            logger.debug("%s: another operator leads", _text(name))
        except (ApiError, CoordinatorFailed, NameTaken) as error:
            logger.warning("%s: %s", _text(name), error)
            return True
        except Exception:
            # One object that nobody was prepared for must not keep the others waiting.
            logger.exception("%s: a fault of the operator", _text(name))
            return True
        return False

    async def _reconcile(self, name: ObjectName) -> None:
        own = self.event_router.cache.state(*name)
        if not isinstance(own, Own):
            self.event_router.forget(name)
            self.actions.forget(name)
            self.planning.forget(name)
            return
        if own.value is None:
            await self.actions.refuse(own)
            return
        leaving = own.value.metadata.deletion_timestamp is not None
        if leaving and not isinstance(own.value, InferenceJob):
            # Its children are on their way out as well; a job has a run that must be stopped.
            return
        reader = self.event_router.reader(name)
        snapshot = await self.snapshots.build(own.value, reader)
        self.event_router.has_read(name, reader)
        if isinstance(snapshot, PlacementSnapshot):
            asker = Asker(name, _haste(snapshot), partial(self.event_router.queue.add, name))
            while (question := question_of(snapshot)) is not None:
                answer = self.planning.answer(question, asker)
                if answer is None:
                    return
                snapshot = with_answer(snapshot, answer)
        decision = decide(snapshot, self.actions.applied(own))
        changed = await self.actions.carry_out(own, decision)
        for seconds in (decision.requeue_seconds, reader.requeue_seconds):
            if seconds is not None:
                self.event_router.queue.add(name, max(seconds, 0.01))
        if changed:
            self.event_router.queue.add(name)


def _haste(snapshot: PlacementSnapshot) -> Haste:
    if snapshot.job_ended:
        return Haste.ENDED
    runs = snapshot.placement.holds("Planned") and snapshot.placement.holds("Ready")
    return Haste.PLANNED if runs else Haste.UNPLANNED


def _text(name: ObjectName) -> str:
    kind, namespace, own = name
    return f"{kind} {namespace}/{own}"
