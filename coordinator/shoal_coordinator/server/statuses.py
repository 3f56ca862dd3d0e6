"""What the coordinator tells about jobs and devices: the dispatcher's views as messages."""

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final, assert_never

from shoal_coordinator.dispatch.events import Failure, FailureKind
from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.views import DevicePhase, DeviceView, JobPhase, JobView
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


def job_status(view: JobView, place: Callable[[int], str], now: Nanoseconds) -> pb.JobStatus:
    """A job as the dispatcher sees it; `place` says where an item's input is."""
    state, reason, message = _outcome(view, place)
    status = pb.JobStatus(
        name=view.name,
        state=state,
        reason=reason,
        message=message,
        items=view.items,
        active=view.active,
        succeeded=view.succeeded,
        failed=view.failed,
        resumed=view.resumed,
        epoch=view.epoch,
        retries=view.retries,
        tier_hits=tier_hits(view.tier_hits),
        failures=[
            pb.ItemFailure(item=item, input=place(item), reason=wire.failure_text(failure))
            for item, failure in view.failures
        ],
        stages=[
            pb.StageStatus(
                index=stage.index,
                ready=stage.ready,
                running=stage.running,
                finished=stage.finished,
                compute_seconds=0.0 if stage.compute is None else seconds(stage.compute),
                devices=stage.devices,
            )
            for stage in view.stages
        ],
    )
    if view.started_at is not None:
        status.seconds = seconds(Nanoseconds((view.ended_at or now) - view.started_at))
    if status.seconds > 0:
        status.items_per_second = (view.succeeded - view.resumed) / status.seconds
    if view.latency is not None:
        status.latency.p50_seconds = seconds(view.latency.p50)
        status.latency.p90_seconds = seconds(view.latency.p90)
        status.latency.p99_seconds = seconds(view.latency.p99)
        status.latency.maximum_seconds = seconds(view.latency.maximum)
    return status


def _outcome(view: JobView, place: Callable[[int], str]) -> tuple[pb.JobStatus.State, str, str]:
    """State, reason and message. As with a `batch/v1` Job, one failed item fails the whole; but
    only once all have ended, and the results of the others stand.
    """
    match view.phase:
        case JobPhase.PENDING:
            return pb.JobStatus.PENDING, "", ""
        case JobPhase.RUNNING:
            return pb.JobStatus.RUNNING, "", ""
        case JobPhase.COMPLETE if view.failed:
            message = f"{view.failed} of {view.items} items failed"
            for item, failure in view.failures[:1]:
                where, why = place(item), wire.failure_text(failure)
                message += (
                    f"; first: {why}" if why.startswith(where) else f"; first: {where}: {why}"
                )
            return pb.JobStatus.FAILED, "ItemsFailed", message
        case JobPhase.COMPLETE:
            return pb.JobStatus.COMPLETE, "", ""
        case JobPhase.FAILED:
            assert view.failure is not None, "a job that failed has a reason"
            return _failed(view.failure)
        case _:
            assert_never(view.phase)


def _failed(failure: Failure) -> tuple[pb.JobStatus.State, str, str]:
    message = wire.failure_text(failure)
    if failure.kind is FailureKind.CANCELLED:
        return pb.JobStatus.CANCELLED, "Cancelled", message
    if failure.kind is FailureKind.DEADLINE:
        return pb.JobStatus.FAILED, "DeadlineExceeded", message
    return pb.JobStatus.FAILED, failure.kind.value, message


def tier_hits(hits: Mapping[Tier, int]) -> pb.TierHits:
    """Tasks by tier."""
    return pb.TierHits(
        resident=hits[Tier.RESIDENT],
        cached=hits[Tier.CACHED],
        idle=hits[Tier.IDLE],
        evict=hits[Tier.EVICT],
    )


def device_status(
    view: DeviceView, known: DeviceSession | None, size_of: Callable[[Digest], int]
) -> pb.DeviceStatus:
    """A device, with what its newest session told; `size_of` knows a fragment's bytes."""
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
        status.silent_seconds = monotonic() - known.heard_at
    return status
