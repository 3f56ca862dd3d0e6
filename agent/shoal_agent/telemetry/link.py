"""What this device's links carry: to the coordinator, and to each peer that it exchanges data with.

Transfers measure a link, where they are large; where there are none of late, a probe does
(`shoal_agent.transport.probing`). A transfer may have waited for others, or for its receiver. So
the fastest of the last minutes counts, and the shortest of the round trips. What was measured ages:
a link that was moved elsewhere shows within minutes. A report changes only when the link has: plans
are made anew for it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from shoal_agent.telemetry.handling import HandlingMeter
from shoal_protocol.speeds import Link

LARGE_BYTES: Final = 256 << 10
"""A smaller transfer measures the round trip rather than the rate."""
AGE_SECONDS: Final = 600.0
COORDINATOR: Final = ""
"""The other end of a link that is none of a peer."""
MAXIMUM_LINKS: Final = 128
_SLOTS: Final = 10
"""Into which that time is divided: of each only its best sample is kept, for a device that is busy
has many a second."""
_CHANGE: Final = 1.25


@dataclass(slots=True)
class _Best:
    """The least of the samples that count, as it was reported when it last changed much. `slots`:
    when each began, and its least."""

    clock: Callable[[], float]
    slots: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_SLOTS + 1))
    newest: float = -AGE_SECONDS
    reported: float | None = None

    def add(self, value: float) -> None:
        now = self.clock()
        self.newest = now
        began, least = self.slots[-1] if self.slots else (-AGE_SECONDS, value)
        if now - began < AGE_SECONDS / _SLOTS:
            self.slots[-1] = (began, min(least, value))
        else:
            self.slots.append((now, value))

    def read(self) -> float | None:
        oldest = self.clock() - AGE_SECONDS
        slots = tuple(self.slots)  # others are added meanwhile: `/metrics` has a thread
        least = min((value for began, value in slots if began >= oldest), default=None)
        if (
            least is None
            or self.reported is None
            or not 1 / _CHANGE < least / self.reported < _CHANGE
        ):
            self.reported = least
        return self.reported

    @property
    def ages(self) -> bool:
        """Whether there is no sample from the second half of the time for which they count."""
        return self.clock() - self.newest > AGE_SECONDS / 2


class LinkMeter:
    """The link to one other end."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """`clock` counts seconds."""
        self._seconds_per_byte = _Best(clock)
        self._round_trip = _Best(clock)

    def transferred(self, size_bytes: int, seconds: float) -> None:
        """So many bytes were sent and acknowledged, or fetched."""
        if size_bytes >= LARGE_BYTES and seconds > 0:
            self._seconds_per_byte.add(seconds / size_bytes)

    def pinged(self, seconds: float) -> None:
        if seconds > 0:
            self._round_trip.add(seconds)

    @property
    def ages(self) -> bool:
        """Whether its rate should be measured, if nothing large is transferred."""
        return self._seconds_per_byte.ages

    def read(self) -> Link:
        """What is known now."""
        least = self._seconds_per_byte.read()
        return Link(
            bytes_per_second=None if least is None else 1 / least,
            round_trip_seconds=self._round_trip.read(),
        )


class LinkMeters:
    """The links of one device."""

    def __init__(
        self, clock: Callable[[], float] = monotonic, handling: HandlingMeter | None = None
    ) -> None:
        """`clock` counts seconds; `handling` knows what tasks cost the processor."""
        self._clock = clock
        self._handling = handling or HandlingMeter()
        self._probed = _Best(clock)
        self._meters: OrderedDict[str, LinkMeter] = OrderedDict()

    def to(self, peer: str) -> LinkMeter:
        """The link to a peer, or to the `COORDINATOR`."""
        if peer not in self._meters:
            while len(self._meters) >= MAXIMUM_LINKS:
                self._meters.popitem(last=False)
            self._meters[peer] = LinkMeter(self._clock)
        self._meters.move_to_end(peer)
        return self._meters[peer]

    def handled(self, size_bytes: int, processor_seconds: float) -> None:
        """So many bytes took so much of the processor to be sent or received."""
        if processor_seconds > 0:
            self._probed.add(processor_seconds / size_bytes)

    def read(self) -> Link:
        """The device's own link, as its fastest peer sees it, and those to its peers."""
        known = {name: meter.read() for name, meter in tuple(self._meters.items())}
        rates = [each.bytes_per_second for each in known.values() if each.bytes_per_second]
        coordinator = known.get(COORDINATOR, Link())
        handling = self._handling.read(self._probed.read())
        return Link(
            bytes_per_second=max(rates, default=None),
            round_trip_seconds=coordinator.round_trip_seconds,
            transfer_seconds_per_byte=None if handling is None else handling.seconds_per_byte,
            handling_seconds=None if handling is None else handling.seconds,
            peers=tuple((name, known[name]) for name in sorted(known) if known[name] != Link()),
        )
