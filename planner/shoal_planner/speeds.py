"""Devices as planning sees them, from what was measured of them.

A document says of its fragments how much they do at each rate that is measured. One from before
says only how many operations they have. For those a device's speed is the mean of what convolutions
and matrix products reach, of which a whole fragment gets a part (`_SUSTAINED`): the rest of its
time goes to operators that compute little.

Weights that are read again come from the disk where the device's memory is limited to its budget:
the limit counts their pages in the page cache too, and those of more weights than fit are gone when
their turn comes. To map them takes processor time besides.

Tasks that ran on a device correct what its rates say of them (`refined`). A fragment that has not
run there takes the ratio that it had elsewhere, since most of an error is that of the estimate of
the fragment's work; and one that ran nowhere takes the device's. So a device does not look better
than another only because less is known of it.

Measurements of equal devices differ by some percent. The search counts devices that are alike, so
rates within `_ALIKE` of one another count as equal (`levelled`).

What a task takes in blocks grows with the weights that it reads again. At which rate, the tasks
show that have run in blocks on the device: that takes the place of the calibration's, also for
other grants and other fragments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_high
from typing import Any, Final

from shoal_planner.costs import Costs
from shoal_planner.devices import (
    ASSUMED_FLOPS_PER_CPU,
    COORDINATOR,
    LOADING_NANOSECONDS,
    PAGE_BYTES_PER_SECOND,
    PER_MILLE,
    PREPARING_NANOSECONDS,
    RELOAD_BYTES_PER_SECOND,
    PeerLink,
    PoolDevice,
    Ratios,
    Times,
)
from shoal_planner.explanation import Table
from shoal_planner.loads import paged_bytes, time_of
from shoal_protocol.digests import Digest
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.speeds import UNKNOWN_LINK, UNKNOWN_SPEED, FragmentTimes, Link, Speed
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
    "moved_bytes_per_second",
    "preparing_nanoseconds",
    "loading_nanoseconds",
    "handling_nanoseconds",
    "latency_nanoseconds",
)
_LEAST_RATIO: Final = PER_MILLE // 20
_LARGEST_RATIO: Final = PER_MILLE * 20
"""Of what a task took to what it was to take: beyond these it was disturbed."""
_LITTLE: Final = 10
"""Reading that was to take less than one part in so many of computing is lost in its noise."""
_NEAR: Final = Nanoseconds(1_000_000)
"""Latencies that differ by less are alike."""


def measured_device(  # noqa: PLR0913 - each is known from elsewhere
    name: str,
    budget_bytes: Bytes,
    speed: Speed = UNKNOWN_SPEED,
    link: Link = UNKNOWN_LINK,
    times: FragmentTimes = (),
    *,
    cache_bytes: Bytes | None = None,
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
    moving, overhead = link.transfer_seconds_per_byte, link.handling_seconds
    return PoolDevice(
        name=name,
        budget_bytes=budget_bytes,
        flops_per_second=_whole(sustained * processors),
        convolutions_per_second=_known(speed.convolution_flops_per_second, processors),
        products_per_second=_known(speed.product_flops_per_second, processors),
        memory_bytes_per_second=_known(memory, share),
        page_bytes_per_second=_whole(again),
        reload_bytes_per_second=_whole(reload if disk is None else _in_turn(reload, disk)),
        preparing_nanoseconds=Nanoseconds(int(PREPARING_NANOSECONDS / share)),
        loading_nanoseconds=Nanoseconds(int(LOADING_NANOSECONDS / share)),
        link_bytes_per_second=_known(link.bytes_per_second),
        latency_nanoseconds=_part(link.round_trip_seconds, 2),
        moved_bytes_per_second=None if moving is None else _whole(processors / moving),
        handling_nanoseconds=nanoseconds((overhead or 0.0) / share),
        peers=tuple(_peer_link(name, each) for name, each in link.peers),
        times=_times((each.digest, each.task_seconds) for each in times),
        loads=_times((each.digest, each.load_seconds) for each in times),
        within=tuple(
            (each.digest, Bytes(granted), nanoseconds(took))
            for each in times
            for granted, took in each.within
            if granted
        ),
        cached=tuple(each.digest for each in times if each.cached),
        cache_bytes=cache_bytes,
        single=single,
    )


def _times(of: Iterable[tuple[Digest, float | None]]) -> Times:
    return tuple((digest, nanoseconds(took)) for digest, took in of if took is not None)


def _peer_link(name: str, link: Link) -> PeerLink:
    """A message takes half a round trip; of that the device at the other end has its half."""
    ends = 2 if name == COORDINATOR else 4
    return PeerLink(name, _known(link.bytes_per_second), _part(link.round_trip_seconds, ends))


def _part(round_trip_seconds: float | None, parts: int) -> Nanoseconds:
    return Nanoseconds(0) if round_trip_seconds is None else nanoseconds(round_trip_seconds / parts)


def levelled(pool: Sequence[PoolDevice]) -> tuple[PoolDevice, ...]:
    """The devices, with equal numbers where they differ by no more than measurements do."""
    for name in _LEVELLED:
        level = _levels(getattr(each, name) for each in pool)
        rates: list[dict[str, Any]] = [{name: level[getattr(each, name)]} for each in pool]
        pool = [replace(each, **rate) for each, rate in zip(pool, rates, strict=True)]
    return tuple(replace(each, peers=tuple(_unlike(each))) for each in pool)


def _unlike(device: PoolDevice) -> Iterator[PeerLink]:
    """The links that are not like the device's own."""
    own = device.link_bytes_per_second
    for each in device.peers:
        rate, further = each.bytes_per_second, each.latency_nanoseconds - device.latency_nanoseconds
        alike = rate is None or (own is not None and own / _ALIKE < rate < own * _ALIKE)
        if not alike or abs(further) > _NEAR:
            yield replace(each, bytes_per_second=own) if alike else each


def refined(document: PartitionDocument, pool: Sequence[PoolDevice]) -> tuple[PoolDevice, ...]:
    """The devices as this document sees them: corrected by the times that tasks and loads took, and
    with those of its fragments that they have. Ratios of devices that differ as measurements do are
    equal."""
    its = {fragment.digest for fragment in document.fragments}
    pool = [replace(each, cached=tuple(sorted(its.intersection(each.cached)))) for each in pool]
    if not any(device.times or device.loads or device.within for device in pool):
        return tuple(pool)
    costs = Costs(document)
    tasks = [_ratios(costs, device, device.times, costs.by_rates) for device in pool]
    loads = [_ratios(costs, device, device.loads, costs.load_by_rate) for device in pool]
    corrected = [
        replace(device, times=(), loads=(), ratios=ratios, load_ratios=load_ratios)
        for device, ratios, load_ratios in zip(
            pool, _likely(document, tasks), _likely(document, loads), strict=True
        )
    ]
    rates = [_reading_again(document, device) for device in pool]
    level = _levels(rates)
    return tuple(
        replace(device, within=(), page_bytes_per_second=level[rate] or rate)
        for device, rate in zip(corrected, rates, strict=True)
    )


def _reading_again(document: PartitionDocument, device: PoolDevice) -> int:
    """The rate at which weights are read again, as tasks have shown that ran in blocks there: by
    the median of what they took beyond computing, where that was to be more than noise."""
    its, computing = {each.digest: each for each in document.fragments}, dict(device.times)
    rate, ratios = device.page_bytes_per_second, []
    for digest, granted, took in device.within:
        fragment, computed = its.get(digest), computing.get(digest)
        if fragment is not None and computed is not None:
            held = min(max(granted, fragment.least_bytes), fragment.resident_bytes)
            reading = time_of(paged_bytes(fragment, held), rate)
            if reading > computed // _LITTLE:
                ratio = PER_MILLE * (took - computed) // reading
                ratios.append(min(max(ratio, _LEAST_RATIO), _LARGEST_RATIO))
    return max(1, rate * PER_MILLE // (_median(ratios) or PER_MILLE))


def _likely(
    document: PartitionDocument, by_device: Sequence[Mapping[Digest, int]]
) -> Iterator[Ratios]:
    """The ratios of each device, also of fragments that it does not know."""
    found: list[dict[Digest, int]] = [{} for _ in by_device]
    for digest in dict.fromkeys(fragment.digest for fragment in document.fragments):
        elsewhere = [ratios[digest] for ratios in by_device if digest in ratios]
        likely = [
            ratios.get(digest) or _median(elsewhere) or _median([*ratios.values()])
            for ratios in by_device
        ]
        level = _levels(likely)
        for ratio, its in zip(likely, found, strict=True):
            if (levelled := level[ratio]) is not None:
                its[digest] = levelled
    yield from (tuple(ratios.items()) for ratios in found)


def _ratios(
    costs: Costs, device: PoolDevice, times: Times, by_rate: Callable[[int, PoolDevice], int]
) -> dict[Digest, int]:
    """Of the fragments of which times are known there, in thousandths."""
    known, ratios = dict(times), {}
    for fragment in costs.document.fragments if costs.known else ():
        expected = by_rate(fragment.index, device)
        if expected and (took := known.get(fragment.digest)) is not None:
            ratio = PER_MILLE * took // expected
            ratios[fragment.digest] = min(max(ratio, _LEAST_RATIO), _LARGEST_RATIO)
    return ratios


def _median(ratios: Sequence[int]) -> int | None:
    return median_high(ratios) if ratios else None


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


def link_tables(pool: Sequence[PoolDevice]) -> tuple[Table, ...]:
    """The links that are not like the device's own; none where there are none."""
    rows = tuple(
        (
            device.name,
            each.name or "the coordinator",
            _shown(each.bytes_per_second),
            f"{each.latency_nanoseconds / 1e6:.3g} ms",
        )
        for device in pool
        for each in device.peers
    )
    numbers = ("carries", "delays by")
    headings = ("device", "to", *numbers)
    table = Table(title="Links", headings=headings, rows=rows, numbers=frozenset(numbers))
    return (table,) if rows else ()


def _shown(rate: int | None) -> str:
    return "?" if rate is None else f"{format_bytes(rate)}/s"


def _levels(rates: Iterable[int | None]) -> dict[int | None, int | None]:
    """For each rate the mean of those that count as equal to it; what is unknown stays unknown."""
    groups: list[list[int]] = []
    for rate in sorted({rate for rate in rates if rate is not None}):
        if not groups or rate > groups[-1][0] * _ALIKE:
            groups.append([])
        groups[-1].append(rate)
    levels: dict[int | None, int | None] = {None: None}
    levels.update({rate: sum(group) // len(group) for group in groups for rate in group})
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
