"""How a device's disk cache is shared: a quarter is for activations, the rest for fragments."""

from typing import Final

from shoal_protocol.units import Bytes

MORE_DISK: Final = "raise the cache's size (cache.size of the DevicePool, --cache-size of an agent)"
"""What to do where there is too little of it."""


def for_activations(cache_bytes: int) -> Bytes:
    """What a cache of a size may hold of activations that have no room in memory."""
    return Bytes(cache_bytes // 4)


def for_fragments(cache_bytes: int) -> Bytes:
    """What it may hold of fragments, and of their prepared forms."""
    return Bytes(cache_bytes - for_activations(cache_bytes))
