"""A histogram of durations in bounded memory: 16 buckets to each power of two, exact to 6 %."""

from dataclasses import dataclass, field

from shoal_protocol.units import Nanoseconds

_BITS = 4


@dataclass(slots=True)
class Histogram:
    """Counts of durations by bucket. A quantile lies between the least and the greatest of them,
    so that of a single duration is exact."""

    counts: dict[int, int] = field(default_factory=dict)
    total: int = 0
    minimum: Nanoseconds = Nanoseconds(0)
    maximum: Nanoseconds = Nanoseconds(0)

    def add(self, duration: Nanoseconds, times: int = 1) -> None:
        shift = duration.bit_length() - _BITS - 1
        bucket = duration if shift <= 0 else (shift << (_BITS + 1)) + (duration >> shift)
        self.counts[bucket] = self.counts.get(bucket, 0) + times
        self.minimum = min(self.minimum, duration) if self.total else duration
        self.maximum = max(self.maximum, duration)
        self.total += times

    def quantile(self, fraction: float) -> Nanoseconds:
        """The duration below which that fraction of them lies; there must be one."""
        rank = fraction * self.total
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                break
        return Nanoseconds(max(self.minimum, min(_middle(bucket), self.maximum)))


def _middle(bucket: int) -> int:
    shift = bucket >> (_BITS + 1)
    if shift == 0:
        return bucket
    return ((bucket & ((1 << (_BITS + 1)) - 1)) << shift) + (1 << shift >> 1)
