"""What a status says of workers, and when one that failed is tried again. Pure."""

from collections.abc import Iterable
from typing import Final

from shoal_operator.reconcile.snapshot import Worker
from shoal_operator.reconcile.times import seconds_since

SOON_SECONDS: Final = 2.0
LATER_SECONDS: Final = 15.0
RUNNING_SECONDS: Final = 60.0
"""While a job runs, its coordinator reports changes; this is for the rate, which always changes."""
RETRY_SECONDS: Final = 600.0
"""After so long, a worker that failed without refusing its input is created again."""


def worker_named(workers: Iterable[Worker], name: str) -> Worker | None:
    """The worker of that name; None if it is not there."""
    return next((worker for worker in workers if worker.name == name), None)


def worker_text(worker: Worker, otherwise: str) -> str:
    """What a worker or the scheduler said last, else what can be said without them."""
    message = " ".join(worker.message.split())
    return message or f"{otherwise} (worker {worker.name})"


def retry_in(worker: Worker, now: str) -> float:
    """In how many seconds a worker that failed is made again; 0: now."""
    if worker.ended_at is None:
        return RETRY_SECONDS
    return max(0.0, RETRY_SECONDS - seconds_since(worker.ended_at, now))
