"""In which order the jobs of a pool start. Pure.

The coordinator's dispatcher orders tasks by priority, but only of the jobs that it has. So a job is
prepared and submitted after those of its pool with a higher priority that are about to start. It
waits for none that waits itself for something that may never come, and for none longer than
`PATIENCE_SECONDS`: a job that cannot start holds up nobody.
"""

from typing import Final

from shoal_api.kinds import InferenceJob
from shoal_operator.reconcile.conditions import FALSE, Cause, find
from shoal_operator.reconcile.job_status import has_ended, pool_name
from shoal_operator.reconcile.snapshot import InferenceJobSnapshot
from shoal_operator.reconcile.times import seconds_since

PATIENCE_SECONDS: Final = 300.0
_PASSING: Final = frozenset(
    {"Waiting", "Planning", "ModelNotReady", "PartitionNotReady", "PlacementNotPlanned"}
)
"""Reasons of Planned for a job that gets its plan by itself soon."""


def preceded_by(snapshot: InferenceJobSnapshot) -> Cause | None:
    """The job that starts before this one; None: it is this one's turn."""
    own = snapshot.job.spec.priority
    ahead = [
        job for job in snapshot.rivals if job.spec.priority > own and _starts(job, snapshot.now)
    ]
    if not ahead:
        return None
    first = min(ahead, key=lambda job: (-job.spec.priority, job.metadata.name))
    which = f"InferenceJob {first.metadata.name} on DevicePool {pool_name(snapshot)}"
    return Cause("Queued", f"{which} has priority {first.spec.priority} and starts first")


def _starts(job: InferenceJob, now: str) -> bool:
    """Whether a job is about to start: nothing but its own preparation is missing."""
    if job.spec.suspend or job.metadata.deletion_timestamp is not None:
        return False
    since = job.metadata.creation_timestamp
    if job.status is not None:
        if job.status.items is not None or has_ended(job.status):
            return False
        planned = find(job.status.conditions, "Planned")
        if planned is not None and planned.status is FALSE and planned.reason not in _PASSING:
            return False
        resumed = find(job.status.conditions, "Suspended")
        if resumed is not None and resumed.status is FALSE:
            since = resumed.last_transition_time
    return since is not None and seconds_since(since, now) < PATIENCE_SECONDS
