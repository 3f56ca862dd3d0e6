"""Devices that fail with a fragment: left alone with it, for longer each time in a row."""

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import Failure
from shoal_coordinator.dispatch.servers import review
from shoal_coordinator.dispatch.services import count_all_homes, request_provisioning
from shoal_coordinator.dispatch.state import State
from shoal_protocol.digests import Digest
from shoal_protocol.units import Nanoseconds


def record_failure(
    state: State, device: Device, digest: Digest, failure: Failure, free: int = 0
) -> None:
    """Start the next backoff; the first `free` failures in a row have none."""
    backoff = device.health.record_failure(digest, failure, state.now)
    again = backoff.failures_in_a_row - free - 1
    if again < 0:
        return
    limits = state.limits
    delay = min(limits.retry_delay << min(again, 16), limits.retry_delay_most)
    backoff.until = Nanoseconds(state.now + delay)
    review(state, device)
    count_all_homes(state, device, digest)
    for service in state.by_digest.get(digest, ()):
        request_provisioning(state, service)


def expire_backoffs(state: State) -> None:
    """Devices whose backoff has expired may serve the fragment again."""
    oldest = state.now - 2 * state.limits.retry_delay_most
    for device in state.devices.values():
        for digest, backoff in device.health.backoffs.items():
            if oldest < backoff.until <= state.now:
                if digest in device.memory.resident:
                    review(state, device)
                count_all_homes(state, device, digest)
