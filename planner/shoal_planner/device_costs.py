"""What a stage costs on one device, and on several that share its items. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import ceil, inf
from typing import Final

from shoal_protocol.units import Nanoseconds

_SCALE: Final = 10**24

Waits = tuple[tuple[int, int], ...]
"""What an item may wait for, one of these: until weights are fetched, and then so long."""


class Holding(StrEnum):
    """How a device holds the fragments of a span; the text of `costs` says when it is which."""

    WHOLE = "whole"
    IN_BLOCKS = "in blocks"
    RELOADED = "reloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCost:
    """What one item of a span costs on one device. `read` is weights from the page cache or, where
    fragments are reloaded, an item's part of their loads. The first item waits besides until they
    are fetched, with which the device begins at once, and for their `load`. `move` is processor
    time for tasks and transfers; `delay` is the links' latency. `overlap` is what of receiving and
    sending goes on while the first and the last fragment compute, where fragments are reloaded."""

    holding: Holding
    compute: Nanoseconds
    read: Nanoseconds
    fetch: Nanoseconds
    load: Nanoseconds
    move: Nanoseconds
    receive: Nanoseconds
    send: Nanoseconds
    delay: Nanoseconds
    overlap: Nanoseconds

    @property
    def busy(self) -> Nanoseconds:
        """How long the processor has to do with an item."""
        return Nanoseconds(self.compute + self.read + self.move)

    @property
    def link(self) -> Nanoseconds:
        """How long an item takes the device's link, in the direction that it takes longer."""
        return Nanoseconds(max(self.receive, self.send))

    @property
    def transfer(self) -> Nanoseconds:
        return Nanoseconds(self.move + self.receive + self.send + self.delay)

    @property
    def period(self) -> Nanoseconds:
        """Where fragments are loaded in turn, items come and go together: only while the first
        fragment computes do they come, and while the last one does, go."""
        if self.holding is Holding.RELOADED:
            return Nanoseconds(max(self.busy + self.receive + self.send - self.overlap, 1))
        return Nanoseconds(max(self.busy, self.link, 1))

    @property
    def latency(self) -> Nanoseconds:
        """Of the first item, when everything is fetched."""
        return Nanoseconds(self.compute + self.read + self.load + self.transfer)


def shared_period(periods: Sequence[int]) -> Nanoseconds:
    """The period of replicas that share the items as fast as each can: their rates added."""
    if len(periods) == 1:
        return Nanoseconds(periods[0])
    return Nanoseconds(max(1, _SCALE // sum(_SCALE // period for period in periods)))


def mean_period(costs: Sequence[DeviceCost], items: int) -> Nanoseconds:
    """As `shared_period`, in the mean of the first so many items: each device counts from when it
    has loaded."""
    begins = sorted((each.fetch + each.load, each.period) for each in costs)
    first, rate, missed = begins[0][0], Fraction(0), Fraction(0)
    ends: Fraction | float = inf
    for begin, period in begins:
        if begin >= ends:
            break  # when the others have done all of it
        rate += Fraction(1, period)
        missed += Fraction(begin - first, period)
        ends = first + (items + missed) / rate
    return Nanoseconds(max(1, ceil((ends - first) / items)))


def after(begin: int, waits: Waits) -> int:
    """When an item that comes at `begin` has waited."""
    return min([max(begin, fetched) + latency for fetched, latency in waits])
