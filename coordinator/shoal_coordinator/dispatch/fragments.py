"""What the answers to Load, Unload and Prefetch change, and fragments that cannot be loaded.

BUDGET teaches what the fragment takes on a device; a full disk keeps the device from fetching for a
while; every other failure is tried again later, on each device at most `load_tries` times in a row.
When no device is left to try, the job fails with the last reason.
"""

from shoal_coordinator.dispatch.backoff import record_failure
from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import Failure, FailureKind, FragmentCached, FragmentResident
from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.jobs import end_job
from shoal_coordinator.dispatch.loading import (
    drop_fragment,
    end_load,
    evict_excess,
    note_cached,
    note_dropped,
    plan_load,
    start_load,
    take_plan,
)
from shoal_coordinator.dispatch.servers import review
from shoal_coordinator.dispatch.services import (
    awaits_homes,
    end_preemption,
    impossible,
    request_provisioning,
    size_on,
)
from shoal_coordinator.dispatch.state import Loading, Prefetching, Service, State, Unloading
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds


def resident(state: State, loading: Loading, event: FragmentResident) -> None:
    """A fragment can run now."""
    device, digest = loading.device, loading.digest
    size = Bytes(max(loading.size, event.resident))
    end_load(state, device)
    device.memory.add(loading, size, state.now)
    device.work.used_at[digest] = state.now  # so that it does not go at once
    device.tally.loads += 1
    device.health.backoffs.pop(digest, None)
    note_cached(state, device, digest)
    for service in state.by_digest.get(digest, ()):
        service.starving_since = None
        if device.preempted_by is service:
            end_preemption(state, service)
    evict_excess(state, device)
    review(state, device)


def unloaded(state: State, unloading: Unloading) -> None:
    """A fragment's memory is back; the load that waited for it follows."""
    device = unloading.device
    device.memory.unloading.pop(unloading.digest, None)
    drop_fragment(state, device, unloading.digest)
    if device.memory.unloading:
        return
    service = take_plan(device)
    if service is not None and service.queues and device.memory.has_room(size_on(device, service)):
        start_load(state, service, device, Tier.EVICT)


def cached(state: State, prefetching: Prefetching, event: FragmentCached) -> None:
    """A fragment is on disk; others may have had to go for it."""
    device = prefetching.device
    device.disk.prefetching = None
    for digest in sorted(event.dropped):
        note_dropped(state, device, digest)
    note_cached(state, device, prefetching.digest)


def prefetch_failed(state: State, prefetching: Prefetching) -> None:
    """It was only a favour: leave the device alone for a while."""
    disk = prefetching.device.disk
    disk.prefetching = None
    disk.prefetch_after = Nanoseconds(state.now + state.limits.retry_delay_most)


def unload_failed(state: State, unloading: Unloading, failure: Failure) -> None:
    """The fragment is still there, unless the device says that it never was."""
    device = unloading.device
    if failure.kind is FailureKind.NOT_RESIDENT:
        unloaded(state, unloading)
        return
    device.memory.unloading.pop(unloading.digest, None)
    service = take_plan(device)
    if service is not None:
        record_failure(state, device, service.digest, failure)
    review(state, device)


def load_failed(state: State, loading: Loading, failure: Failure) -> None:
    """The fragment could not be had, or does not fit."""
    device, digest = loading.device, loading.digest
    end_load(state, device)
    if failure.kind is FailureKind.BUDGET:
        _learn_need(device, loading, failure)
    if failure.kind is FailureKind.DISK_FULL:
        note_dropped(state, device, digest)
        if _clear_disk(state, device, digest):
            return
        device.disk.full_until = Nanoseconds(state.now + 4 * state.limits.retry_delay)
    if failure.kind in {FailureKind.CORRUPT, FailureKind.UNAVAILABLE}:
        note_dropped(state, device, digest)
    if failure.kind is FailureKind.UNAVAILABLE and device.health.fetched_at > loading.since:
        device.health.backoffs.pop(digest, None)  # bytes came, and stay: the next try goes further
    record_failure(state, device, digest, failure)
    for service in list(state.by_digest.get(digest, ())):
        request_provisioning(state, service)
        for job in list(dict.fromkeys(queue.job for queue in service.queues)):
            final = impossible(state, job) or _out_of_tries(state, service)
            if final is not None and job.ended_at is None:
                end_job(state, job, final)


def _clear_disk(state: State, device: Device, digest: Digest) -> bool:
    """Unload what no job uses any more, then load again: a resident fragment's file cannot go."""
    unused = [each for each in device.memory.resident if each not in state.by_digest]
    service = next(iter(state.by_digest.get(digest, ())), None)
    if service is None or not unused or device.draining:
        return False
    plan_load(state, service, device, unused)
    return True


def _learn_need(device: Device, loading: Loading, failure: Failure) -> None:
    """What a refusal says about the fragment's size: nothing, where there was room for it by the
    refusal's own numbers, or where tasks may have been in its way.
    """
    need, have = failure.need, failure.have
    if need is not None and have is not None and need <= have:
        return
    if need is not None and need > loading.size:
        device.memory.sizes[loading.digest] = need
    elif not device.memory.resident and not device.work.queued:
        # Alone, and still too large, whatever the numbers say.
        device.memory.sizes[loading.digest] = Bytes(device.memory.budget + 1)


def _out_of_tries(state: State, service: Service) -> Failure | None:
    """The last failure, when every device that could load it has tried often enough."""
    if service.servers or service.loading or awaits_homes(state, service):
        return None
    last: Failure | None = None
    for device in state.devices.values():
        if device.draining or size_on(device, service) > device.memory.budget:
            continue
        avoided = device.health.backoffs.get(service.digest)
        if avoided is None or avoided.failures_in_a_row < state.limits.load_tries:
            return None
        last = avoided.failure
    return last
