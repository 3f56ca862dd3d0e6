"""Jobs and devices as clients' messages: submissions in, statuses out.

What a job is never changes while it runs. How it is done may: by a newer plan, and on other terms
(priority, parallelism, deadline).
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import zip_longest
from time import monotonic
from typing import Final

from shoal_coordinator.dispatch.events import Failure, FailureKind
from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.jobs import SHOWN_FAILURES
from shoal_coordinator.dispatch.state import Job, JobPhase, StageQueue
from shoal_coordinator.dispatch.views import KnownDevice
from shoal_coordinator.jobs.values import End, Outcome, Plan, Retry, Submission, Tally, Terms
from shoal_coordinator.server import wire
from shoal_coordinator.server.device_session import DeviceSession
from shoal_coordinator.server.runs import Earlier
from shoal_protocol.digests import Digest
from shoal_protocol.partition import Outgrown, PartitionDocument, outgrown_of
from shoal_protocol.seen_sizes import Sizes, read_sizes, write_sizes
from shoal_protocol.units import Nanoseconds, counted, seconds
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.session_pb2 import PeerLink, Telemetry

_PLAN: Final = ("epoch", "stages", "explanation")
_TERMS: Final = ("priority", "parallelism", "active_deadline_seconds", "end")
_READINGS: Final = ("link_bytes_per_second", "transfer_seconds_per_byte", "handling_seconds")
_MOST_LINKS: Final = 128
_SENTENCES: Final = 16
"""Of a plan's explanation; each has at most `_SENTENCE` characters."""
_SENTENCE: Final = 500


# ---- submissions ---------------------------------------------------------------------------------


def submission_of(request: pb.SubmitJobRequest, document: PartitionDocument) -> Submission:
    """A checked request. Of the partition its fragments and edges count, and not the words: another
    version may have others for the same work.
    """
    rest = deepcopy(request)
    for name in (*_PLAN, *_TERMS, "partition", "retry"):
        rest.ClearField(name)
    edges = sorted((edge.producer, edge.consumer, *edge.tensors) for edge in document.edges)
    content = [document.model_digest, [each.digest for each in document.fragments], edges]
    text = json.dumps(content).encode() + rest.SerializeToString(deterministic=True)
    work = hashlib.sha256(text).hexdigest()
    folders = [request.inputs_uri, request.outputs_uri]
    facts = [document.model_digest, *folders, request.follow, request.lossy]
    results = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return submission_as(work, request, results)


def submission_as(work: str, request: pb.SubmitJobRequest, results: str = "") -> Submission:
    """A request of which `work` and `results` are known."""
    plan = Plan(
        number=request.epoch,
        stages=tuple(tuple(each.devices) for each in request.stages),
        granted_bytes=tuple(tuple(each.granted_bytes) for each in request.stages),
        predicted_seconds=tuple(tuple(each.predicted_seconds) for each in request.stages),
        explanation=tuple(each[:_SENTENCE] for each in request.explanation[:_SENTENCES]),
    )
    return Submission(
        work=work,
        results=results,
        follows=request.follow,
        final_cut=request.final_cut,
        plan=plan,
        terms=Terms(**{name: getattr(request, name) for name in _TERMS}),
        retry=Retry(number=request.retry.number, items=tuple(sorted(set(request.retry.items)))),
    )


def request_of(work: pb.SubmitJobRequest, submission: Submission) -> pb.SubmitJobRequest:
    request, plan = deepcopy(work), submission.plan
    request.epoch = plan.number
    del request.stages[:]
    request.stages.extend(
        pb.StagePlacement(devices=devices, granted_bytes=granted, predicted_seconds=predicted)
        for devices, granted, predicted in zip_longest(
            plan.stages, plan.granted_bytes, plan.predicted_seconds, fillvalue=()
        )
    )
    request.explanation[:] = plan.explanation
    for name in _TERMS:
        setattr(request, name, getattr(submission.terms, name))
    if submission.retry == Retry():
        request.ClearField("retry")
    else:
        retry = pb.Retry(number=submission.retry.number, items=submission.retry.items)
        request.retry.CopyFrom(retry)
    return request


def as_submitted(status: pb.JobStatus, submission: Submission) -> pb.JobStatus:
    """The status, with what the job was submitted with last."""
    status.plan = submission.plan.number
    for name in _TERMS:
        setattr(status.terms, name, getattr(submission.terms, name))
    status.terms.SetInParent()
    status.retry = submission.retry.number
    status.final_cut = submission.final_cut
    return status


# ---- statuses ------------------------------------------------------------------------------------


def job_status(
    job: Job, place: Callable[[int], str], earlier: Earlier | None = None
) -> pb.JobStatus:
    """A run as the dispatcher sees it; `place` says where an item's input is, `earlier` what is to
    be added to it. The statistics that add up over runs are for `with_tally`."""
    pending = job.phase is JobPhase.PENDING
    earlier = earlier or Earlier(succeeded=len(job.completed))
    status = pb.JobStatus(
        name=job.spec.name,
        state=pb.JobStatus.PENDING if pending else pb.JobStatus.RUNNING,
        items=job.items - earlier.superseded,
        active=len(job.active),
        succeeded=earlier.succeeded + job.succeeded,
        failed=earlier.failed + job.failed,
        resumed=max(0, earlier.succeeded),
        following=job.open_ended,
        epoch=job.spec.epoch,
        failures=[
            *(
                pb.ItemFailure(item=each.item, input=each.input, reason=each.reason)
                for each in earlier.failures
            ),
            *(
                pb.ItemFailure(item=item, input=place(item), reason=wire.failure_text(failure))
                for item, failure in job.failures
                if item not in earlier.retaken
            ),
        ][:SHOWN_FAILURES],
        stages=[
            pb.StageStatus(
                index=queue.stage,
                ready=queue.waiting,
                running=queue.running,
                compute_seconds=seconds(queue.times.quantile(0.5)) if queue.times.total else 0.0,
                devices=queue.devices,
                times=_times(queue),
            )
            for queue in job.queues
        ],
    )
    if job.latency.total:
        status.latency.p50_seconds = seconds(job.latency.quantile(0.5))
        status.latency.p90_seconds = seconds(job.latency.quantile(0.9))
        status.latency.p99_seconds = seconds(job.latency.quantile(0.99))
        status.latency.maximum_seconds = seconds(job.latency.maximum)
    return status


def _times(queue: StageQueue) -> Iterator[pb.TaskTime]:
    predicted = dict(queue.spec.predicted)
    for device, time in sorted(queue.time_on.items()):
        known = predicted.get(device)
        yield pb.TaskTime(
            device=device,
            measured_seconds=seconds(Nanoseconds(time)),
            predicted_seconds=None if known is None else seconds(known),
        )


def with_tally(status: pb.JobStatus, tally: Tally) -> pb.JobStatus:
    """The status, with the statistics of all runs."""
    status.retries = tally.retries
    status.seconds = tally.seconds
    status.started_seconds = tally.started_seconds or 0.0
    status.items_per_second = tally.stored / tally.seconds if tally.seconds > 0 else 0.0
    status.tier_hits.CopyFrom(tier_hits(dict(zip(Tier, tally.tier_hits, strict=False))))
    for stage, finished in zip(status.stages, tally.finished, strict=False):
        stage.finished = finished
    return status


def with_end(status: pb.JobStatus, end: End) -> pb.JobStatus:
    status.state = getattr(pb.JobStatus, end.outcome.name)
    status.reason, status.message = end.reason, end.message
    status.outgrown.extend(
        pb.OutgrownFragment(fragment=each.fragment, need_bytes=each.need_bytes)
        for each in end.outgrown
    )
    write_sizes(status.seen, end.seen)
    return status


def end_of(status: pb.JobStatus) -> End:
    outcome = Outcome[pb.JobStatus.State.Name(status.state)]
    return End(
        outcome=outcome,
        reason=status.reason,
        message=status.message,
        outgrown=outgrown_of(status),
        seen=read_sizes(status.seen),
    )


def run_tally(job: Job, now: Nanoseconds, now_seconds: float) -> Tally:
    """The statistics of one run; `now_seconds` is `now` by the wall clock, since 1970."""
    ran = Nanoseconds(0)
    started_seconds = None
    if job.started_at is not None:
        ran = Nanoseconds((job.ended_at or now) - job.started_at)
        started_seconds = now_seconds - (now - job.started_at) / 1e9
    return Tally(
        stored=job.succeeded,
        retries=job.retries,
        seconds=seconds(ran),
        started_seconds=started_seconds,
        tier_hits=tuple(job.tiers),
        finished=tuple(queue.finished for queue in job.queues),
    )


def run_end(job: Job, status: pb.JobStatus, *, follows: bool) -> End:
    """How a run has ended, whose last status this is. As with a `batch/v1` Job, one failed item
    fails the whole; but only once all have ended, and the results of the others stay. Where an item
    that the plan covers fitted on no device, the reason is that of a fragment that fits on none,
    which is divided then; a run that `follows` its inputs is not made again for it.
    """
    if job.failure is not None:
        return _failed(job.failure, job.seen)
    if not status.failed:
        return End(outcome=Outcome.COMPLETE)
    message = f"{status.failed} of {counted(status.items, 'item')} failed"
    for failure in status.failures[:1]:
        where, why = failure.input, failure.reason
        message += f"; first: {why}" if why.startswith(where) else f"; first: {where}: {why}"
    if not job.outgrown or follows:
        return End(outcome=Outcome.FAILED, reason="ItemsFailed", message=message)
    outgrown = tuple(
        Outgrown(fragment=fragment, need_bytes=need) for fragment, need in job.outgrown.items()
    )
    return End(
        outcome=Outcome.FAILED,
        reason=_BUDGET,
        message=message,
        outgrown=outgrown,
        seen=job.seen,
    )


_BUDGET: Final = FailureKind.BUDGET.value
_REASONS: Final = {FailureKind.CANCELLED: "Cancelled", FailureKind.DEADLINE: "DeadlineExceeded"}


def _failed(failure: Failure, seen: Sizes) -> End:
    cancelled = failure.kind is FailureKind.CANCELLED
    return End(
        outcome=Outcome.CANCELLED if cancelled else Outcome.FAILED,
        reason=_REASONS.get(failure.kind, failure.kind.value),
        message=wire.failure_text(failure),
        outgrown=failure.outgrown,
        seen=seen if failure.outgrown else {},
    )


def tier_hits(hits: Mapping[Tier, int]) -> pb.TierHits:
    return pb.TierHits(**{tier.name.lower(): count for tier, count in hits.items()})


def device_status(
    view: KnownDevice,
    known: DeviceSession | None,
    excess: pb.BudgetExcess | None,
    size_of: Callable[[Digest], int],
) -> pb.DeviceStatus:
    """A device, with what its newest session reported; `size_of` knows a fragment's bytes."""
    tally, device = view.tally, view.device
    status = pb.DeviceStatus(
        name=view.name,
        state=view.phase.name,
        has_left=tally.has_left,
        budget_bytes=tally.budget,
        loads=tally.loads,
        evictions=tally.evictions,
        tier_hits=tier_hits(dict(zip(Tier, tally.tiers, strict=True))),
        tasks=tally.tasks,
        budget_excess=excess,
    )
    on_disk: Collection[Digest] = ()
    if device is not None:
        status.resident_bytes = device.memory.resident_bytes
        status.resident.extend(sorted(device.memory.resident))
        status.queued = device.work.queued + device.work.travelling
        on_disk = device.disk.cached
    if known is not None:
        hello, telemetry = known.hello, known.telemetry
        sizes = {fragment.digest: fragment.bytes for fragment in hello.cached}
        cached = [sizes.get(digest) or size_of(digest) for digest in on_disk]
        status.architecture = hello.capabilities.architecture
        status.floor_bytes = wire.size(hello.floor_bytes)
        status.cache_bytes = wire.size(hello.cache_bytes)
        status.cached_fragments = len(cached)
        status.cached_bytes = sum(cached)
        for name in ("used_bytes", "peak_bytes", "sent_bytes", "received_bytes", "fetched_bytes"):
            setattr(status, name, wire.size(getattr(telemetry, name)))
        status.silent_seconds = monotonic() - known.received_at
        if hello.HasField("speed"):
            status.speed.CopyFrom(hello.speed)
        if telemetry.HasField("link_round_trip_seconds"):
            status.round_trip_seconds = telemetry.link_round_trip_seconds
        set_readings(status, telemetry, _READINGS)
        status.links.extend(_links(telemetry))
        status.times.extend(known.times.read(on_disk))
    return status


def _links(telemetry: Telemetry) -> Iterable[PeerLink]:
    """The links that a device tells of, each once; that to the coordinator has no name."""
    named = {
        each.device: each
        for each in telemetry.links[:_MOST_LINKS]
        if not each.device or wire.is_device(each.device)
    }
    return named.values()


def set_readings(
    target: pb.DeviceStatus | pb.DeviceOverview, telemetry: Telemetry, names: Iterable[str]
) -> None:
    """Say what the telemetry says, as far as it does."""
    for name in names:
        if telemetry.HasField(name):
            setattr(target, name, getattr(telemetry, name))
