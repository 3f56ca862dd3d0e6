"""Devices and their links, as planning sees them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds

PER_MILLE: Final = 1000
COORDINATOR: Final = ""
"""The other end of a link that is no device."""

ASSUMED_FLOPS_PER_CPU: Final = 40_000_000_000
"""Until a device is measured: what one core of a PC does in ONNX Runtime. A small ARM board does a
fifth, a server's core twice as much."""

RELOAD_BYTES_PER_SECOND: Final = 200_000_000
"""A fragment's weights from the disk cache, prepared again by one core; an SD card is slower, a
page cache faster."""

PREPARING_NANOSECONDS: Final = Nanoseconds(300_000_000)
"""What the process that prepares a fragment takes of one core, besides its weights."""

LOADING_NANOSECONDS: Final = Nanoseconds(60_000_000)
"""What a load takes of one core, besides the fragment's weights: its files are looked at, its graph
is read and made ready."""

PAGE_BYTES_PER_SECOND: Final = 1_000_000_000
"""Weights that one core maps again. A limit at the budget leaves no page cache for them: they come
from an SSD."""

Times = tuple[tuple[Digest, Nanoseconds], ...]
"""By fragment what something takes."""
Ratios = tuple[tuple[Digest, int], ...]
"""By fragment what something took, in thousandths of what it was to take by a device's rates."""
Within = tuple[tuple[Digest, Bytes, Nanoseconds], ...]
"""By fragment and what it was granted in blocks, what a task took."""


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A device's link to one other end. The latency is the device's half of a message's way."""

    name: str
    bytes_per_second: int | None
    latency_nanoseconds: Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDevice:
    """A device as planning sees it. What is None never limits; `single` is residency Single.

    `convolutions_per_second` and `products_per_second` are FLOPs of such operators.
    `moved_bytes_per_second` is what its processor sends and receives, and `handling_nanoseconds`
    what it takes besides for each task and transfer. `peers` are the links that differ from its
    own, `times` and `loads` what tasks and loads take there by fragment, and `within` what tasks
    took in blocks; see `speeds.refined`. `cached` are fragments on its disk, which may hold
    `cache_bytes` of them.
    """

    name: str
    budget_bytes: Bytes
    flops_per_second: int = ASSUMED_FLOPS_PER_CPU
    convolutions_per_second: int | None = None
    products_per_second: int | None = None
    memory_bytes_per_second: int | None = None
    page_bytes_per_second: int = PAGE_BYTES_PER_SECOND
    reload_bytes_per_second: int = RELOAD_BYTES_PER_SECOND
    preparing_nanoseconds: Nanoseconds = PREPARING_NANOSECONDS
    loading_nanoseconds: Nanoseconds = LOADING_NANOSECONDS
    link_bytes_per_second: int | None = None
    latency_nanoseconds: Nanoseconds = Nanoseconds(0)
    moved_bytes_per_second: int | None = None
    handling_nanoseconds: Nanoseconds = Nanoseconds(0)
    peers: tuple[PeerLink, ...] = ()
    times: Times = ()
    loads: Times = ()
    within: Within = ()
    ratios: Ratios = ()
    load_ratios: Ratios = ()
    cached: tuple[Digest, ...] = ()
    cache_bytes: Bytes | None = None
    single: bool = False

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PoolDevice":
        """Of what `asdict` has made and JSON has carried: its lists are tuples again."""
        names = ("times", "loads", "within", "ratios", "load_ratios")
        of_fragments = {name: tuple(map(tuple, values[name])) for name in names}
        peers = tuple(PeerLink(**each) for each in values["peers"])
        cached = tuple(values["cached"])
        return cls(**{**values, **of_fragments, "peers": peers, "cached": cached})

    @property
    def rates(self) -> tuple[int, int, int] | None:
        """Of convolutions, products and traffic; None: not all of them were measured."""
        convolutions, products = self.convolutions_per_second, self.products_per_second
        memory = self.memory_bytes_per_second
        if convolutions is None or products is None or memory is None:
            return None
        return convolutions, products, memory

    @property
    def link(self) -> PeerLink:
        """Its own, to whoever is not among its peers."""
        return PeerLink("", self.link_bytes_per_second, self.latency_nanoseconds)

    def __post_init__(self) -> None:
        assert self.flops_per_second > 0, f"{self.name} computes nothing"
        assert self.link_bytes_per_second is None or self.link_bytes_per_second > 0, self.name
