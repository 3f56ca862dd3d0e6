"""What it takes to make a fragment resident on a device, from its disk cache or from nothing. Pure.

From the cache, weights are mapped from a form that was prepared before, and read by the first item.
From nothing, they come over the device's link first, and a process of its own prepares that form,
which takes a processor a while however small the fragment; one with few weights is not prepared.
Where that process has no room, the agent opens the fragment as it was cut, and tries it.
"""

from fractions import Fraction
from typing import Final

from shoal_planner.devices import PREPARING_NANOSECONDS, PoolDevice
from shoal_protocol.partition import Fragment
from shoal_protocol.preparing import WORTH_PREPARING_BYTES, preparing_bytes
from shoal_protocol.units import NANOSECONDS_PER_SECOND

_TRYING: Final = Fraction(3, 5)
"""Of the time that preparing takes, what a first load takes more where the fragment is opened as it
was cut: 180 ms of a core. Opening and trying are 26 to 95 ms of these, of four models with 0 to 118
MiB in a fragment; the rest is what fetching takes besides what links and processors are known for.
"""
TRYING_NANOSECONDS: Final = int(_TRYING * PREPARING_NANOSECONDS)


def from_cache(fragment: Fragment, device: PoolDevice) -> int:
    """Nanoseconds."""
    mapped = time_of(read_bytes(fragment), device.reload_bytes_per_second)
    return device.loading_nanoseconds + mapped


def fetched(fragment: Fragment, device: PoolDevice) -> int:
    """Nanoseconds until it is on the device's disk, over a link that carries nothing else."""
    return 0 if fragment.digest in device.cached else fetched_again(fragment, device)


def fetched_again(fragment: Fragment, device: PoolDevice) -> int:
    """Nanoseconds where the device's disk has dropped it."""
    rates = (device.link_bytes_per_second, device.moved_bytes_per_second)
    return max((time_of(fragment.weight_bytes, rate) for rate in rates if rate), default=0)


def prepared(fragment: Fragment, device: PoolDevice) -> int:
    """Nanoseconds to prepare it, or to try it where it cannot be prepared. What is on the disk has
    most often been loaded before, and is prepared."""
    size = fragment.weight_bytes
    if fragment.digest in device.cached or size < WORTH_PREPARING_BYTES:
        return 0
    is_whole = fragment.resident_bytes <= device.budget_bytes
    at_once = size if is_whole else min(size, fragment.least_bytes)  # else block by block
    if device.budget_bytes < preparing_bytes(at_once):
        return int(_TRYING * device.preparing_nanoseconds)
    return device.preparing_nanoseconds + time_of(size, device.reload_bytes_per_second)


def read_bytes(fragment: Fragment) -> int:
    """Weights that an item reads: of a table, which counts by rows as resident, only some."""
    return min(fragment.weight_bytes, fragment.resident_bytes)


def paged_bytes(fragment: Fragment, granted: int) -> int:
    """Weights of a fragment that are read again for each item, by what it is granted."""
    if granted >= fragment.resident_bytes:
        return 0
    swapped = _swapped_bytes(fragment)
    lacking = max(0, fragment.least_bytes + swapped - granted)
    paged = -(-_streamed_bytes(fragment) * lacking // swapped) if lacking else 0
    return fragment.row_bytes + paged


def saving_per_byte(fragment: Fragment) -> Fraction:
    """Weights that need not be read again, for each byte that is granted beyond the least."""
    swapped = _swapped_bytes(fragment)
    return Fraction(_streamed_bytes(fragment), swapped) if swapped else Fraction(0)


def _streamed_bytes(fragment: Fragment) -> int:
    """Weights that are read for each item in blocks, where nothing is kept, without rows of tables:
    none of those are."""
    return min(read_bytes(fragment), fragment.weight_bytes - fragment.gathered_bytes)


def _swapped_bytes(fragment: Fragment) -> int:
    """What a grant in blocks may have beyond the least, and keep weights in. As a whole, a fragment
    has tables in memory that it has not in blocks."""
    swapped = fragment.resident_bytes - fragment.least_bytes
    return min(swapped, _streamed_bytes(fragment)) if fragment.gathered_bytes else swapped


def time_of(amount: int, per_second: int) -> int:
    """Nanoseconds, rounded up."""
    return -(-amount * NANOSECONDS_PER_SECOND // per_second)
