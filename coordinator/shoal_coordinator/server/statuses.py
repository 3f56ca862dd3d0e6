"""The status of jobs and devices as messages, from the dispatcher's views."""

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

from shoal_coordinator.dispatch.events import Failure, FailureKind
from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.views import DevicePhase, DeviceView, JobPhase, JobView
from shoal_coordinator.jobs.values import End, Outcome, Tally
from shoal_coordinator.server import wire
from shoal_coordinator.server.sessions import DeviceSession
from shoal_protocol.digests import Digest
from shoal_protocol.units import Nanoseconds, seconds
from shoal_protocol.v1 import coordinator_pb2 as pb

_DEVICE_STATES: Final[Mapping[DevicePhase, pb.DeviceStatus.State]] = {
    DevicePhase.READY: pb.DeviceStatus.READY,
    DevicePhase.SILENT: pb.DeviceStatus.SILENT,
    DevicePhase.DRAINING: pb.DeviceStatus.DRAINING,
    DevicePhase.LOST: pb.DeviceStatus.LOST,
}
_OUTCOMES: Final[Mapping[Outcome, pb.JobStatus.State]] = {
    Outcome.COMPLETE: pb.JobStatus.COMPLETE,
    Outcome.FAILED: pb.JobStatus.FAILED,
    Outcome.CANCELLED: pb.JobStatus.CANCELLED,
}


def job_status(view: JobView, place: Callable[[int], str]) -> pb.JobStatus:
    """A run as the dispatcher sees it; `place` says where an item's input is. The statistics that
    add up over runs are for `with_tally`."""
    pending = view.phase is JobPhase.PENDING
    status = pb.JobStatus(
        name=view.name,
        state=pb.JobStatus.PENDING if pending else pb.JobStatus.RUNNING,
        items=view.items,
        active=view.active,
        succeeded=view.succeeded,
        failed=view.failed,
        resumed=view.resumed,
        epoch=view.epoch,
        failures=[
            pb.ItemFailure(item=item, input=place(item), reason=wire.failure_text(failure))
            for item, failure in view.failures
        ],
        stages=[
            pb.StageStatus(
                index=stage.index,
                ready=stage.ready,
                running=stage.running,
                compute_seconds=0.0 if stage.compute is None else seconds(stage.compute),
                devices=stage.devices,
            )
            for stage in view.stages
        ],
    )
    if view.latency is not None:
        status.latency.p50_seconds = seconds(view.latency.p50)
        status.latency.p90_seconds = seconds(view.latency.p90)
        status.latency.p99_seconds = seconds(view.latency.p99)
        status.latency.maximum_seconds = seconds(view.latency.maximum)
    return status


def with_tally(status: pb.JobStatus, tally: Tally) -> pb.JobStatus:
    """The status, with the statistics of all runs."""
    status.retries = tally.retries
    status.seconds = tally.seconds
    status.started_seconds = tally.started_seconds or 0.0
    status.items_per_second = tally.stored / tally.seconds if tally.seconds > 0 else 0.0
    hits = dict(zip(Tier, tally.tier_hits, strict=False))
    status.tier_hits.CopyFrom(tier_hits({tier: hits.get(tier, 0) for tier in Tier}))
    for stage, finished in zip(status.stages, tally.finished, strict=False):
        stage.finished = finished
    return status


def with_end(status: pb.JobStatus, end: End) -> pb.JobStatus:
    status.state = _OUTCOMES[end.outcome]
    status.reason, status.message = end.reason, end.message
    return status


def end_of(status: pb.JobStatus) -> End:
    (outcome,) = (key for key, state in _OUTCOMES.items() if state == status.state)
    return End(outcome=outcome, reason=status.reason, message=status.message)


def run_tally(view: JobView, now: Nanoseconds, now_seconds: float) -> Tally:
    """The statistics of one run; `now_seconds` is `now` by the wall clock, since 1970."""
    ran = Nanoseconds(0)
    started_seconds = None
    if view.started_at is not None:
        ran = Nanoseconds((view.ended_at or now) - view.started_at)
        started_seconds = now_seconds - (now - view.started_at) / 1e9
    return Tally(
        stored=view.succeeded - view.resumed,
        retries=view.retries,
        seconds=seconds(ran),
        started_seconds=started_seconds,
        tier_hits=tuple(view.tier_hits[tier] for tier in Tier),
        finished=tuple(stage.finished for stage in view.stages),
    )


def run_end(view: JobView, place: Callable[[int], str]) -> End:
    """How a run has ended. As with a `batch/v1` Job, one failed item fails the whole; but only once
    all have ended, and the results of the others stay.
    """
    if view.failure is not None:
        return _failed(view.failure)
    if not view.failed:
        return End(outcome=Outcome.COMPLETE)
    message = f"{view.failed} of {view.items} items failed"
    for item, failure in view.failures[:1]:
        where, why = place(item), wire.failure_text(failure)
        message += f"; first: {why}" if why.startswith(where) else f"; first: {where}: {why}"
    return End(outcome=Outcome.FAILED, reason="ItemsFailed", message=message)


def _failed(failure: Failure) -> End:
    message = wire.failure_text(failure)
    match failure.kind:
        case FailureKind.CANCELLED:
            return End(outcome=Outcome.CANCELLED, reason="Cancelled", message=message)
        case FailureKind.DEADLINE:
            return End(outcome=Outcome.FAILED, reason="DeadlineExceeded", message=message)
        case kind:
            return End(outcome=Outcome.FAILED, reason=kind.value, message=message)


def tier_hits(hits: Mapping[Tier, int]) -> pb.TierHits:
    return pb.TierHits(
        resident=hits[Tier.RESIDENT],
        cached=hits[Tier.CACHED],
        idle=hits[Tier.IDLE],
        evict=hits[Tier.EVICT],
    )


def device_status(
    view: DeviceView, known: DeviceSession | None, size_of: Callable[[Digest], int]
) -> pb.DeviceStatus:
    """A device, with what its newest session reported; `size_of` knows a fragment's bytes."""
    status = pb.DeviceStatus(
        name=view.name,
        state=_DEVICE_STATES[view.phase],
        budget_bytes=view.budget,
        resident_bytes=view.resident_bytes,
        resident=sorted(view.resident),
        loads=view.loads,
        evictions=view.evictions,
        tier_hits=tier_hits(view.tier_hits),
        tasks=view.tasks,
        queued=view.queued,
    )
    if known is not None:
        hello, telemetry = known.hello, known.telemetry
        sizes = {fragment.digest: fragment.bytes for fragment in hello.cached}
        cached = sum(sizes.get(digest) or size_of(digest) for digest in view.cached)
        status.architecture = hello.capabilities.architecture
        status.floor_bytes = hello.floor_bytes
        status.used_bytes = telemetry.used_bytes
        status.peak_bytes = telemetry.peak_bytes
        status.cached_fragments = len(view.cached)
        status.cached_bytes = cached
        status.sent_bytes = telemetry.sent_bytes
        status.received_bytes = telemetry.received_bytes
        status.fetched_bytes = telemetry.fetched_bytes
        status.silent_seconds = monotonic() - known.received_at
    return status
