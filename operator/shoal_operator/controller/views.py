"""What a coordinator answers, as reconcilers see it, and what has changed since the last poll.

Topics: `(VIEW, NAMESPACE, "POOL/...")` with `reach` (whether it answers), `devices` (all of them),
`fleet` (those to plan with), `lost` (those given up), `excesses` (those over their budgets),
`fragments`, `runs` (which there are, which
have results, and which have ended), `run/JOB` (one of them), `end/JOB` (whether it is there, and
whether it has ended), `placed/PLACEMENT` (where its fragments are).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Final

from shoal_api.kinds.placement import NearState
from shoal_operator.controller.cache import Topic
from shoal_operator.reconcile.decision import Terms
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    CoordinatorView,
    DeviceState,
    Excess,
    Placed,
    Run,
    RunState,
    Unreachable,
)
from shoal_operator.reconcile.volumes import StoreRoom
from shoal_protocol.copying import copied
from shoal_protocol.partition import outgrown_of
from shoal_protocol.seen_sizes import read_sizes
from shoal_protocol.speeds import FragmentTimes, Link, Speed, fragment_times_of, link_of, speed_of
from shoal_protocol.v1 import coordinator_pb2 as pb

VIEW: Final = "View"
REACH: Final = "reach"
DEVICES: Final = "devices"
FLEET: Final = "fleet"
LOST: Final = "lost"
EXCESSES: Final = "excesses"
FRAGMENTS: Final = "fragments"
RUNS: Final = "runs"
MAX_FAILURES: Final = 8

_STATES: Final = {pb.JobStatus.State.Value(each.name): each for each in RunState}
_NEAR: Final = {pb.PlacedFragment.State.Value(each.name): each for each in NearState}
_DEVICES: Final = {pb.DeviceStatus.State.Value(each.name): each for each in DeviceState}

View = CoordinatorView | Unreachable


def run_of(status: pb.JobStatus) -> Run:
    """A job of the coordinator."""
    hits = status.tier_hits
    return copied(
        Run,
        status,
        job=status.name,
        # A coordinator of another version may have a state more; its end is none of these.
        state=_STATES.get(status.state, RunState.RUNNING),
        terms=copied(Terms, status.terms),
        latency_p50_seconds=status.latency.p50_seconds,
        tier_hits=(hits.resident, hits.cached, hits.idle, hits.evict),
        failures=tuple(
            (each.item, each.input, each.reason) for each in status.failures[:MAX_FAILURES]
        ),
        devices=tuple(sorted({time.device for each in status.stages for time in each.times})),
        fragment_seconds=tuple(
            (each.index, each.compute_seconds) for each in status.stages if each.finished
        ),
        outgrown=outgrown_of(status),
        seen=read_sizes(status.seen),
    )


def placed_of(answer: pb.PlacedFragments) -> Placed:
    """Where the fragments of a Placement are."""
    return Placed(
        fragments=tuple(
            (each.fragment, each.device, _NEAR.get(each.state, NearState.ABSENT))
            for each in answer.fragments
        ),
        problem=answer.problem,
    )


def device_of(status: pb.DeviceStatus) -> ConnectedDevice:
    """A device of the coordinator."""
    excess = status.budget_excess if status.HasField("budget_excess") else None
    return copied(
        ConnectedDevice,
        status,
        # A coordinator of another version may have a state more; nothing is begun or taken for it.
        state=_DEVICES.get(status.state, DeviceState.SILENT),
        excess=None if excess is None else copied(Excess, excess),
        speed=speed_of(status.speed),
        link=link_of(status),
        times=fragment_times_of(status),
    )


def store_of(answer: pb.ListFragmentsResponse) -> StoreRoom | None:
    """What a coordinator's store has room for; None: it does not say."""
    if not answer.HasField("free_bytes"):
        return None
    there = range(len(answer.digests))
    return StoreRoom(
        size_bytes=answer.size_bytes,
        free_bytes=answer.free_bytes,
        removable_bytes=answer.removable_bytes,
        unused=frozenset(answer.digests[place] for place in answer.unused if place in there),
    )


def topic(namespace: str, pool: str, part: str) -> Topic:
    """A part of what a pool's coordinator says."""
    return (VIEW, namespace, f"{pool}/{part}")


run_part = "run/{}".format
"""One run."""
placed_part = "placed/{}".format
"""Where the fragments of a Placement are that prefetches."""
end_part = "end/{}".format
"""Whether a run is there, and how it has ended."""
count_part = "count/{}".format
"""How many items a run has."""


def differences(old: View, new: View) -> frozenset[str]:
    """The parts that changed; time that has passed is no change."""
    if isinstance(old, Unreachable) or isinstance(new, Unreachable):
        return frozenset() if old == new else frozenset({REACH})
    changed = {part for part, read in _PARTS.items() if read(old) != read(new)}
    for job in old.runs.keys() | new.runs.keys():
        changed.update(run_differences(job, old.runs.get(job), new.runs.get(job)))
    return frozenset(changed)


def run_differences(job: str, old: Run | None, new: Run | None) -> Iterator[str]:
    """The parts that changed with one run."""
    ended = _end(old) != _end(new)
    if ended or _has_results(old) != _has_results(new):
        yield RUNS
    if ended:
        yield end_part(job)
    if new is not None and _count(old) != _count(new):
        yield count_part(job)
    if _timeless(old) != _timeless(new):
        yield run_part(job)


def progress(old: View, new: View) -> Iterator[str]:
    """The parts of runs that have only come further: more items, and nothing that failed."""
    if isinstance(old, Unreachable) or isinstance(new, Unreachable):
        return
    for job, run in new.runs.items():
        before = old.runs.get(job)
        if before is None or _timeless(before) == _timeless(run):
            continue
        if before.succeeded and _milestone(before) == _milestone(run):
            yield run_part(job)


def _milestone(run: Run) -> Run:
    """A run without what grows all the time."""
    return replace(
        run,
        devices=(),
        active=0,
        succeeded=0,
        seconds=0.0,
        items_per_second=0.0,
        latency_p50_seconds=0.0,
        tier_hits=(0, 0, 0, 0),
    )


def _still(view: CoordinatorView) -> list[ConnectedDevice]:
    return [replace(device, silent_seconds=0.0, excess=None, times=()) for device in view.devices]


def _excesses(view: CoordinatorView) -> list[tuple[str, int, bool]]:
    """Devices that were over their budgets, with their peaks, and whether they still count so."""
    found = ((each.name, each.excess) for each in view.devices)
    return [(name, excess.peak_bytes, excess.is_recent) for name, excess in found if excess]


def _fleet(view: CoordinatorView) -> list[tuple[str, int, int, Speed, Link, FragmentTimes]]:
    """Devices that a plan may use, with what it depends on; one that is silent for a moment still
    counts."""
    there = (DeviceState.READY, DeviceState.SILENT)
    return [
        (each.name, each.budget_bytes, each.cache_bytes, each.speed, each.link, each.times)
        for each in view.devices
        if each.state in there
    ]


def _lost(view: CoordinatorView) -> set[str]:
    return {each.name for each in view.devices if each.state is DeviceState.LOST}


_PARTS: Final[Mapping[str, Callable[[CoordinatorView], object]]] = {
    DEVICES: _still,
    FLEET: _fleet,
    LOST: _lost,
    EXCESSES: _excesses,
    FRAGMENTS: attrgetter("fragments"),
}


def _has_results(run: Run | None) -> bool:
    return run is not None and run.succeeded > 0


def _end(run: Run | None) -> RunState | bool:
    """Whether there is a run, and how it has ended."""
    if run is None:
        return False
    return run.state if run.state.is_over else True


def _count(run: Run | None) -> int | None:
    return None if run is None else run.known_items


def _timeless(run: Run | None) -> Run | None:
    return None if run is None else replace(run, seconds=0.0, items_per_second=0.0)
