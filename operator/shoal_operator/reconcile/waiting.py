"""What is said of workers that are waited for, and when one that failed is tried again. Pure."""

from collections.abc import Iterable
from typing import Final

from shoal_operator.api.fields import Condition
from shoal_operator.reconcile.snapshot import Worker
from shoal_operator.reconcile.times import seconds_since
from shoal_operator.reconcile.told import FALSE

SOON_SECONDS: Final = 2.0
LATER_SECONDS: Final = 15.0
RETRY_SECONDS: Final = 600.0
"""After so long, a worker that failed without refusing is made again."""


def worker_named(workers: Iterable[Worker], name: str) -> Worker | None:
    """The worker of that name; None if it is not there."""
    return next((worker for worker in workers if worker.name == name), None)


def worker_text(worker: Worker, otherwise: str) -> str:
    """What a worker or the scheduler said last, else what can be said without them."""
    message = " ".join(worker.message.split())
    return message or f"{otherwise} (worker {worker.name})"


def retry_in(failure: Condition | None, reason: str, now: str) -> float | None:
    """In how many seconds a worker is tried again whose failure the condition tells; 0: now. None:
    the condition does not tell of the failure yet.
    """
    if failure is None or failure.status is not FALSE or failure.reason != reason:
        return None
    return max(0.0, RETRY_SECONDS - seconds_since(failure.last_transition_time, now))
