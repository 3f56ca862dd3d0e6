"""A histogram of durations in bounded memory: 16 buckets to each power of two, exact to 6 %."""

from dataclasses import dataclass, field

_BITS = 4


@dataclass(slots=True)
class Histogram:
    """Counts of non-negative integers (nanoseconds) by bucket."""

    counts: dict[int, int] = field(default_factory=dict)
    total: int = 0
    maximum: int = 0

    def add(self, value: int) -> None:
        """Count one value."""
        shift = value.bit_length() - _BITS - 1
        bucket = value if shift <= 0 else (shift << (_BITS + 1)) + (value >> shift)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.total += 1
        self.maximum = max(self.maximum, value)

    def quantile(self, fraction: float) -> int | None:
        """The value below which that fraction of the values lies; None when there is none."""
        if not self.total:
            return None
        rank = fraction * self.total
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return min(_middle(bucket), self.maximum)
        return self.maximum


def _middle(bucket: int) -> int:
    shift = bucket >> (_BITS + 1)
    if shift == 0:
        return bucket
    return ((bucket & ((1 << (_BITS + 1)) - 1)) << shift) + (1 << shift >> 1)
