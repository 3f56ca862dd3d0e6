"""From what was seen of a run to its report."""

from shoal_cli.local.pool import PlannedJob, PoolRun
from shoal_cli.local.report import (
    DeviceReport,
    FailedItem,
    FragmentHeld,
    JobReport,
    Latency,
    StageReport,
    TierHits,
    Verification,
)
from shoal_cli.local.watch import DeviceTally
from shoal_protocol.v1 import coordinator_pb2 as pb


def job_report(pool: PoolRun, job: PlannedJob, verified: Verification | str | None) -> JobReport:
    """A job of a pool, as it was last seen; one that was never seen is Pending.

    `verified`: the comparison, or why there is none, or None where none was asked for.
    """
    status = pool.watch.jobs.get(job.order.name, pb.JobStatus(name=job.order.name))
    hits, latency = status.tier_hits, status.latency
    return JobReport(
        name=job.order.name,
        state=pb.JobStatus.State.Name(status.state).capitalize(),
        reason=status.reason,
        message=status.message,
        model=job.order.plan.cut.model,
        model_digest=job.prepared.document.model_digest,
        partition=job.order.plan.cut.name,
        items=status.items,
        succeeded=status.succeeded,
        failed=status.failed,
        resumed=status.resumed,
        retries=status.retries,
        seconds=status.seconds,
        items_per_second=status.items_per_second,
        latency=Latency(
            p50_seconds=latency.p50_seconds,
            p90_seconds=latency.p90_seconds,
            p99_seconds=latency.p99_seconds,
            maximum_seconds=latency.maximum_seconds,
        ),
        tier_hits=TierHits(
            resident=hits.resident, cached=hits.cached, idle=hits.idle, evict=hits.evict
        ),
        stages=tuple(
            StageReport(
                index=stage.index,
                devices=tuple(map(pool.label, stage.devices)),
                finished=stage.finished,
                compute_seconds=stage.compute_seconds,
            )
            for stage in status.stages
        ),
        failures=tuple(
            FailedItem(item=each.item, input=each.input, reason=each.reason)
            for each in status.failures
        ),
        outputs=str(job.order.outputs),
        verification=verified if isinstance(verified, Verification) else None,
        verification_error=verified if isinstance(verified, str) else "",
    )


def device_reports(pool: PoolRun, restarts: dict[str, int]) -> list[DeviceReport]:
    """The pool's devices, in the manifest's order; `restarts` by device."""
    names: dict[str, FragmentHeld] = {}
    for job in pool.jobs:
        for fragment in job.prepared.document.fragments:
            names.setdefault(
                fragment.digest,
                FragmentHeld(
                    partition=job.order.plan.cut.name,
                    index=fragment.index,
                    digest=fragment.digest,
                ),
            )
    reports = []
    for device in pool.devices:
        tally = pool.watch.devices.get(device.name, DeviceTally())
        held = [names[digest] for digest in tally.held if digest in names]
        group = pool.groups.get(device.name)
        pressure = None if group is None else group.pressure()
        reports.append(
            DeviceReport(
                name=pool.label(device.name),
                budget_bytes=device.memory,
                floor_bytes=tally.floor_bytes,
                peak_bytes_above_floor=tally.peak_bytes,
                fragments=tuple(sorted(held, key=lambda each: (each.partition, each.index))),
                tier_hits=tally.tier_hits,
                restarts=restarts.get(device.name, 0),
                limit_bytes=pool.limits.get(device.name),
                limit_failures=0 if pressure is None else pressure.failures,
                out_of_memory_kills=0 if pressure is None else pressure.out_of_memory_kills,
                **tally.counts,
            )
        )
    return reports
