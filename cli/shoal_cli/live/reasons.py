"""Why a job does not start, is slow, or has failed, in sentences. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal_cli.live.view import DeviceView, ItemView, JobView, StageView, View
from shoal_protocol.units import counted, format_bytes, format_need, format_number

_LOADED_SHARE = 0.05
"""So many tasks may load a fragment first before it is worth a sentence."""
_LIMITS_SHARE = 1.2
"""A stage limits the others when the next slowest takes so much less."""
_BUSY_SHARE = 0.5
"""And when its devices compute for so much of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What there is to say about a job: first the one sentence that matters most, then the rest.
    `stages` are those that no device serves, with what each device lacks; `plan` says why the plan
    is as it is."""

    headline: str
    findings: tuple[str, ...]
    stages: tuple[StageView, ...] = ()
    items: tuple[ItemView, ...] = ()
    plan: tuple[str, ...] = ()


def why(job: JobView, view: View) -> Why:
    """Why a job is where it is."""
    unserved = () if job.has_ended else tuple(filter(_is_unserved, job.stages))
    return Why(
        headline=_headline(job, view, unserved),
        findings=tuple(_findings(job, view)),
        stages=unserved,
        items=job.oldest + job.slowest,
        plan=job.explanation,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """What the objects of a cluster say of an InferenceJob. `pool` is None while it is not known,
    `ended` empty until it has; `problems` are what is not well, one line each."""

    pool: str | None
    ended: str
    problems: tuple[str, ...]
    plan: tuple[str, ...]


def on_cluster(name: str, job: ClusterJob, reasons: Why | None) -> Why:
    """With what the objects of a cluster say; `reasons` are the coordinator's, None where it does
    not have the job (yet, or any more)."""
    if job.ended:
        headline, findings = f"{name} is {job.ended}", job.problems
    elif reasons is not None:
        headline, findings = reasons.headline, (*job.problems, *reasons.findings)
    else:
        first, *rest = job.problems or ("its coordinator does not have it yet",)
        headline, findings = f"{name} does not run: {first}", tuple(rest)
    known = reasons or Why(headline=headline, findings=findings)
    return replace(known, headline=headline, findings=findings, plan=job.plan)


def _is_unserved(stage: StageView) -> bool:
    """Whether it has work, and no device that does it."""
    return not stage.devices and bool(stage.ready or stage.starving_seconds)


# ---- the one sentence ----------------------------------------------------------------------------


def _headline(job: JobView, view: View, unserved: Sequence[StageView]) -> str:
    return f"{job.name} {next(_situations(job, view, unserved))}"


def _situations(job: JobView, view: View, unserved: Sequence[StageView]) -> Iterator[str]:
    """What can be said of the job, the most important first."""
    if job.has_ended:
        yield f"is {job.state}{f': {job.message}' if job.message else ''}"
    if job.completing:
        yield "has ended all items and completes its results"
    if not view.devices:
        yield "waits: no device has ever connected to this coordinator"
    if not any(device.state == "Ready" for device in view.devices):
        known = ", ".join(map(_whether_there, view.devices))
        yield f"waits: no device is ready ({known})"
    done = f"{job.succeeded + job.failed} of {counted(job.items, 'item')}"
    if unserved:
        yield f"waits, {done}: {_unserved(unserved[0], len(job.stages))}"
    if job.state == "Pending" and not job.items:
        yield "is pending: its inputs are being opened"
    if limiting := _limiting(job):
        yield f"runs, {done}: {limiting}"
    yield f"runs, {done}"


def _unserved(stage: StageView, stages: int) -> str:
    need = format_need(stage.least_bytes, stage.resident_bytes)
    what = f"stage {stage.index} of {stages} (fragment {stage.digest[:19]}) needs {need}"
    if stage.loading:
        return f"{what}, and is being loaded on {', '.join(stage.loading)}"
    return f"{what}, and no device serves it"


def _limiting(job: JobView) -> str:
    """The stage that takes longest, where it takes clearly longer than the next, and most of the
    time between two items."""
    slowest = next((stage for stage in job.stages if stage.limits), None)
    if slowest is None or slowest.period_seconds is None:
        return ""
    others = [stage.period_seconds or 0.0 for stage in job.stages if stage is not slowest]
    fastest = 1 / slowest.period_seconds
    busy = (job.items_per_second or 0.0) / fastest
    if slowest.period_seconds < _LIMITS_SHARE * max(others, default=0.0) or busy < _BUSY_SHARE:
        return ""
    return (
        f"stage {slowest.index} on {', '.join(slowest.devices)} sets the pace, "
        f"{format_number(fastest)} items/s at most"
    )


# ---- the rest ------------------------------------------------------------------------------------


def _findings(job: JobView, view: View) -> Iterator[str]:
    yield from _about_work(job)
    yield from _about_stages(job)
    if not job.has_ended:
        serving = {name for stage in job.stages for name in (*stage.devices, *stage.planned)}
        for device in view.devices:
            if device.name in serving or not serving:
                yield from _about_device(device)


def _about_work(job: JobView) -> Iterator[str]:
    for failure in job.failures[:3]:
        yield f"failed: {failure}"
    if job.failed > 3:
        yield f"{counted(job.failed - 3, 'more item')} failed"
    if job.retries:
        again = counted(job.retries, "task")
        why = "after a device was lost, had failed or could not reach another"
        yield f"{again} had to be given again, {why}"
    hits = job.tier_hits
    loaded = hits.cached + hits.idle + hits.evict
    total = loaded + hits.resident
    # Each device loads its fragment once anyway. Of a job that was let go nobody knows how many.
    first = sum(len(stage.devices) for stage in job.stages) or loaded - hits.evict
    if loaded > first and loaded / total > _LOADED_SHARE:
        yield (
            f"{loaded} of {counted(total, 'task')} ({loaded / total:.0%}) had to load their "
            f"fragment first, {hits.evict} of them after another was evicted: the devices hold too "
            "few fragments at once; more memory, more devices or a finer cut would help"
        )
    if job.slowest:
        yield _where_time_went(job.slowest)


def _where_time_went(items: Sequence[ItemView]) -> str:
    """Of the slowest items, as shares."""
    total = sum(item.seconds for item in items) or 1.0
    shares = (
        ("waiting for a free place on a device", sum(item.waited_seconds for item in items)),
        ("travelling, or waiting there for a turn", sum(item.moved_seconds for item in items)),
        ("computing", sum(item.computed_seconds for item in items)),
        ("storing results", sum(item.stored_seconds for item in items)),
    )
    largest_first = sorted(shares, key=lambda share: -share[1])
    parts = [f"{spent / total:.0%} {what}" for what, spent in largest_first if spent / total > 0.01]
    return f"the slowest items spent their time so: {', '.join(parts)}"


def _about_stages(job: JobView) -> Iterator[str]:
    if job.has_ended:
        return
    for stage in job.stages:
        missing = [name for name in stage.planned if name not in stage.devices]
        if missing and stage.devices:
            yield (
                f"stage {stage.index}: the plan names {', '.join(stage.planned)}; "
                f"{', '.join(missing)} {'does' if len(missing) == 1 else 'do'} not serve it now"
            )
        elif stage.planned and not set(stage.planned) & set(stage.devices) and stage.devices:
            yield f"stage {stage.index}: none of the plan's devices is there; others do its work"
        blocks = [
            f"{name} with {format_bytes(granted)}"
            for name, granted in zip(stage.planned, stage.granted_bytes, strict=False)
            if granted < stage.resident_bytes
        ]
        if blocks:
            need = format_bytes(stage.resident_bytes)
            yield (
                f"stage {stage.index} needs {need} and runs in blocks on {', '.join(blocks)}: it "
                "reads weights from the disk again"
            )


def _whether_there(device: DeviceView) -> str:
    return f"{device.name} {'has left' if device.state == 'Left' else f'is {device.state}'}"


def _about_device(device: DeviceView) -> Iterator[str]:
    name = device.name
    if device.state == "Silent":
        yield f"{name} has given no sign of life for {device.silent_seconds:.0f} s"
    elif device.state == "Lost":
        yield f"{name} is lost: its agent is gone, or cannot reach the coordinator"
    elif device.state == "Left":
        yield f"{name} has left in order: its agent was told to stop"
    elif device.state == "Draining":
        yield f"{name} is leaving, and gets nothing new"
    if device.over_budget:
        peak, budget = (
            format_bytes(device.peak_bytes),
            format_bytes(device.budget_bytes),
        )
        yield f"{name} was measured at {peak} of its {budget}: over its budget"
    if device.relayed_to:
        others = ", ".join(device.relayed_to)
        yield f"{name} cannot reach {others}: what it sends there goes through the coordinator"
    for held in device.fragments:
        if held.failures:
            again = f"; again in {held.retry_seconds:.0f} s" if held.retry_seconds else ""
            times = counted(held.failures, "time")
            yield f"{name} failed {times} with {held.name}: {held.failure}{again}"
