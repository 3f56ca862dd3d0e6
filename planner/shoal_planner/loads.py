"""What it takes to make a fragment resident on a device, from its disk cache or from nothing. Pure.

From the cache, weights are mapped from a form that was prepared before, and read by the first item.
From nothing, they come over the device's link first, and a process of its own prepares that form,
which takes a processor a while however small the fragment; one with few weights is not prepared.
"""

from typing import Final

from shoal_planner.devices import PoolDevice
from shoal_protocol.partition import Fragment
from shoal_protocol.units import NANOSECONDS_PER_SECOND

_PREPARED_BYTES: Final = 4 << 20
"""Of what has fewer weights nothing is prepared."""


def from_cache(fragment: Fragment, device: PoolDevice) -> int:
    """Nanoseconds."""
    mapped = time_of(read_bytes(fragment), device.reload_bytes_per_second)
    return device.loading_nanoseconds + mapped


def fetched(fragment: Fragment, device: PoolDevice) -> int:
    """Nanoseconds until it is on the device's disk, over a link that carries nothing else."""
    if fragment.digest in device.cached:
        return 0
    rates = (device.link_bytes_per_second, device.moved_bytes_per_second)
    return max((time_of(fragment.weight_bytes, rate) for rate in rates if rate), default=0)


def prepared(fragment: Fragment, device: PoolDevice) -> int:
    """Nanoseconds of the process that prepares it. What is on the disk has most often been loaded
    before, and is prepared."""
    size = fragment.weight_bytes
    if fragment.digest in device.cached or size < _PREPARED_BYTES:
        return 0
    return device.preparing_nanoseconds + time_of(size, device.reload_bytes_per_second)


def read_bytes(fragment: Fragment) -> int:
    """Weights that an item reads: of a table, which counts by rows as resident, only some."""
    return min(fragment.weight_bytes, fragment.resident_bytes)


def paged_bytes(fragment: Fragment, granted: int) -> int:
    """Weights of a fragment that are read again for each item, by what it is granted."""
    lacking = fragment.resident_bytes - granted
    swapped = fragment.resident_bytes - fragment.least_bytes
    return -(-read_bytes(fragment) * lacking // swapped) if lacking else 0


def time_of(amount: int, per_second: int) -> int:
    """Nanoseconds, rounded up."""
    return -(-amount * NANOSECONDS_PER_SECOND // per_second)
