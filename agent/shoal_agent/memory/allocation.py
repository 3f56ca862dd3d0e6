"""How memory is divided among the fragments that run in blocks, by what a byte more saves each.

SwapNet (section 6.2, equation 1) divides by need: mostly in proportion to what each model takes,
the rest by urgency times latency over memory. That ignores what a byte is worth: a fragment
streams less with each byte that it is granted, but not evenly (`memory.swapping`), one fragment
runs more often than another, and the last bytes before all is kept are worth the most. So each
fragment has a *curve* here: what a run costs at several grants, the plans for which are made when
it is opened. Seconds per byte are measured where a fragment has run at several grants, and runs
are counted. What urgent jobs wait for counts more, as in that equation.

The division with the least cost takes one point of each curve: a knapsack with classes, which is
solved exactly but for the unit in which grants are counted, one part in `UNITS` of what there is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal_protocol.units import Bytes

UNITS: Final = 1024
SECONDS_PER_BYTE: Final = 1 / (24 << 30)
"""To map pages of the page cache, and to drop them: measured, x86-64. A slow disk takes more."""
_MOST_PRIORITY: Final = 1000
_FORGETTING: Final = 63 / 64
_LEAST_SPREAD: Final = 0.01
_RANGE: Final = (SECONDS_PER_BYTE / 4, SECONDS_PER_BYTE * 1024)


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """Within that many bytes a fragment runs at this cost: bytes that it streams, or seconds."""

    granted: int
    cost: float


def divide(curves: Sequence[Sequence[Point]], available: int) -> tuple[int, ...] | None:
    """What to grant each, so that together they take no more than is available and cost least.

    Of divisions that cost the same, one that grants least. None: not even the least fits.
    """
    unit = max(1, available // UNITS)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for curve in curves:
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for point in curve:
            taken = -(-point.granted // unit)
            for used, (cost, grants) in best.items():
                total = used + taken
                sum_of_costs = cost + point.cost
                if total * unit <= available and (
                    total not in longer or sum_of_costs < longer[total][0]
                ):
                    longer[total] = (sum_of_costs, (*grants, point.granted))
        best = _undominated(longer)
    return min(best.values(), key=lambda each: (each[0], sum(each[1])))[1] if best else None


def _undominated(
    found: dict[int, tuple[float, tuple[int, ...]]],
) -> dict[int, tuple[float, tuple[int, ...]]]:
    """Without those that take as much as another, or more, and cost no less."""
    kept: dict[int, tuple[float, tuple[int, ...]]] = {}
    least = float("inf")
    for total in sorted(found):
        if found[total][0] < least:
            kept[total] = found[total]
            least = found[total][0]
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of a fragment that can run in blocks: it needs `least`, is `granted`, and was loaded for
    `wanted`; `curve` says how many bytes it streams within how much, the last of it all in one. Its
    costs count `urgency` times.

    What is reckoned for it is more than what is granted where it took more than it was granted.
    """

    least: Bytes
    granted: Bytes
    wanted: Bytes
    curve: tuple[Point, ...] = ()
    urgency: float = 1.0

    @property
    def slack(self) -> Bytes:
        """What it can do without."""
        return Bytes(max(0, self.granted - self.least))

    @property
    def lent(self) -> Bytes:
        """What it has beyond what it was loaded for."""
        return Bytes(max(0, self.granted - self.wanted))

    @property
    def useful(self) -> Bytes:
        """The most that is worth lending it: it keeps all weights, and need not be opened anew."""
        most = self.curve[-2].granted if len(self.curve) > 1 else self.granted
        return Bytes(max(self.granted, most))

    def streamed_bytes(self, granted: int) -> float:
        return next((p.cost for p in reversed(self.curve) if p.granted <= granted), 0.0)

    def between(self, low: int, high: int, weight: float) -> list[Point]:
        """Its curve from one grant to another, in costs of that weight."""
        grants = [low, *(p.granted for p in self.curve if low < p.granted < high), high]
        return [Point(each, weight * self.streamed_bytes(each)) for each in dict.fromkeys(grants)]


@dataclass(slots=True)
class Delay:
    """How long runs of a fragment take by the bytes that they stream, as measured (SwapNet,
    section 6.1, fits such a line for each device), and how many there were lately."""

    runs: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def observe(self, streamed_bytes: float, seconds: float) -> None:
        self.runs += 1
        x, y = streamed_bytes, seconds
        new = (1.0, x, y, x * x, x * y)
        self._sums = [_FORGETTING * old + more for old, more in zip(self._sums, new, strict=True)]

    @property
    def seconds_per_byte(self) -> float:
        """The slope; a constant where it ran at about one grant only."""
        count, x, y, xx, xy = self._sums
        if (spread := count * xx - x * x) <= _LEAST_SPREAD * count * xx:
            return SECONDS_PER_BYTE
        lowest, highest = _RANGE
        return min(highest, max(lowest, (count * xy - x * y) / spread))


def urgency_of(priority: int) -> float:
    """How often a second of a job's runs counts (u in SwapNet's equation 1): twice as often with a
    hundred more."""
    return float(2 ** (max(-_MOST_PRIORITY, min(priority, _MOST_PRIORITY)) / 100))


def share_out(
    shares: Mapping[str, Share],
    delays: Mapping[str, Delay],
    low: Mapping[str, int],
    high: Mapping[str, int],
    available: int,
) -> dict[str, int]:
    """What to grant each share, between two bounds, by what runs cost; `low` where not even that is
    available."""
    runs = [delay.runs for delay in delays.values() if delay.runs]
    usual = sum(runs) / len(runs) if runs else 1.0
    curves = []
    for each, share in shares.items():
        delay = delays[each]
        weight = share.urgency * (delay.runs or usual) * delay.seconds_per_byte
        curves.append(share.between(low[each], max(low[each], high[each]), weight))
    grants = divide(curves, available)
    return dict(low) if grants is None else dict(zip(shares, grants, strict=True))
