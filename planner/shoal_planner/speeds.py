"""Devices as planning sees them, from what was measured of them.

A document says of its fragments how much they do at each rate that is measured. One from before
says only how many operations they have. For those a device's speed is the mean of what convolutions
and matrix products reach, of which a whole fragment gets a part (`_SUSTAINED`): the rest of its
time goes to operators that compute little.

Weights that are read again come from the disk where the device's memory is limited to its budget:
the limit counts their pages in the page cache too, and those of more weights than fit are gone when
their turn comes. To map them takes processor time besides.

Measurements of equal devices differ by some percent. The search counts devices that are alike, so
rates within `_ALIKE` of one another count as equal (`levelled`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from shoal_planner.costs import (
    ASSUMED_FLOPS_PER_CPU,
    PAGE_BYTES_PER_SECOND,
    RELOAD_BYTES_PER_SECOND,
    PoolDevice,
)
from shoal_planner.explanation import Table
from shoal_protocol.speeds import UNKNOWN_LINK, UNKNOWN_SPEED, Link, Speed
from shoal_protocol.units import Bytes, Nanoseconds, format_bytes, nanoseconds

_SUSTAINED: Final = 0.5
"""Of the rate of single convolutions and products, in whole models: DistilBERT 0.45."""
_DISK_SHARE: Final = 0.5
"""Of the disk's rate, what weights that are read again get: the kernel has to free a page for each,
and fragments and spilled activations go over the same disk."""
_ALIKE: Final = 1.2
_LEVELLED: Final = (
    "flops_per_second",
    "convolutions_per_second",
    "products_per_second",
    "memory_bytes_per_second",
    "page_bytes_per_second",
    "reload_bytes_per_second",
    "link_bytes_per_second",
    "latency_nanoseconds",
)


def measured_device(
    name: str,
    budget_bytes: Bytes,
    speed: Speed = UNKNOWN_SPEED,
    link: Link = UNKNOWN_LINK,
    *,
    single: bool = False,
) -> PoolDevice:
    """A device with what is known of it; what is not is assumed."""
    processors = speed.processors or 1.0
    share = min(1.0, processors)  # one thread maps pages and streams weights
    flops = _mean(speed.convolution_flops_per_second, speed.product_flops_per_second)
    sustained = ASSUMED_FLOPS_PER_CPU if flops is None else flops * _SUSTAINED
    memory, page = speed.memory_bytes_per_second, speed.page_bytes_per_second
    disk = speed.disk_bytes_per_second and speed.disk_bytes_per_second * _DISK_SHARE
    again = PAGE_BYTES_PER_SECOND * share if page is None else _in_turn(page * share, disk)
    reload = RELOAD_BYTES_PER_SECOND * share
    half_way = None if link.round_trip_seconds is None else link.round_trip_seconds / 2
    return PoolDevice(
        name=name,
        budget_bytes=budget_bytes,
        flops_per_second=_whole(sustained * processors),
        convolutions_per_second=_known(speed.convolution_flops_per_second, processors),
        products_per_second=_known(speed.product_flops_per_second, processors),
        memory_bytes_per_second=_known(memory, share),
        page_bytes_per_second=_whole(again),
        reload_bytes_per_second=_whole(reload if disk is None else _in_turn(reload, disk)),
        link_bytes_per_second=_known(link.bytes_per_second),
        latency_nanoseconds=Nanoseconds(0) if half_way is None else nanoseconds(half_way),
        single=single,
    )


def levelled(pool: Sequence[PoolDevice]) -> tuple[PoolDevice, ...]:
    """The devices, with equal numbers where they differ by no more than measurements do."""
    for name in _LEVELLED:
        level = _levels(getattr(each, name) for each in pool)
        rates: list[dict[str, Any]] = [{name: level[getattr(each, name)]} for each in pool]
        pool = [replace(each, **rate) for each, rate in zip(pool, rates, strict=True)]
    return tuple(pool)


def devices_table(pool: Sequence[PoolDevice]) -> Table:
    """What a plan is made with."""
    numbers = ("budget", "computes", "reads weights again", "loads", "link")
    return Table(
        title="Devices",
        headings=("device", *numbers),
        rows=tuple(
            (
                each.name,
                format_bytes(each.budget_bytes),
                f"{each.flops_per_second / 1e9:.3g} GFLOP/s",
                _shown(each.page_bytes_per_second),
                _shown(each.reload_bytes_per_second),
                _shown(each.link_bytes_per_second),
            )
            for each in pool
        ),
        numbers=frozenset(numbers),
    )


def _shown(rate: int | None) -> str:
    return "?" if rate is None else f"{format_bytes(rate)}/s"


def _levels(rates: Iterable[int | None]) -> dict[int | None, int | None]:
    """For each rate the least of those that count as equal to it; what is unknown stays unknown."""
    levels: dict[int | None, int | None] = {None: None}
    least = 0
    for rate in sorted({rate for rate in rates if rate is not None}):
        if rate > least * _ALIKE:
            least = rate
        levels[rate] = least
    return levels


def _mean(*rates: float | None) -> float | None:
    """The harmonic mean of those that are known: as much work at each."""
    known = [rate for rate in rates if rate is not None]
    return len(known) / sum(1 / rate for rate in known) if known else None


def _in_turn(rate: float, other: float | None) -> float:
    """Of work that has to be done twice, at two rates."""
    return rate if other is None else 1 / (1 / rate + 1 / other)


def _known(rate: float | None, share: float = 1.0) -> int | None:
    return None if rate is None else _whole(rate * share)


def _whole(rate: float) -> int:
    return max(1, round(rate))
