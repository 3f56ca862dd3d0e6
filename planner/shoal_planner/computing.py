"""What fragments compute, and how long devices take for it by their rates. Pure."""

from collections.abc import Sequence
from functools import cached_property

from shoal_planner.devices import PoolDevice
from shoal_planner.loads import read_bytes, time_of
from shoal_planner.ranges import sums_of
from shoal_protocol.partition import Fragment


class Computing:
    """Of a partition's fragments."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._fragments = fragments

    @cached_property
    def known(self) -> bool:
        """Whether all flops are known, so that computing times can be predicted."""
        return all(fragment.flops is not None for fragment in self._fragments)

    def by_rates(self, start: int, end: int, device: PoolDevice) -> int:
        """Nanoseconds of one item in the fragments `[start, end)`."""
        if self._kinds_of_work is not None and (rates := device.rates) is not None:
            return sum(
                time_of(sums[end] - sums[start], rate)
                for sums, rate in zip(self._kinds_of_work, rates, strict=True)
            )
        compute = time_of(self._work[end] - self._work[start], device.flops_per_second)
        if device.memory_bytes_per_second is None or not self.known:
            return compute
        read = self._read[end] - self._read[start]
        return max(compute, time_of(read, device.memory_bytes_per_second))

    @cached_property
    def _work(self) -> list[int]:
        if self.known:
            return sums_of([fragment.flops or 0 for fragment in self._fragments])
        return sums_of([fragment.resident_bytes for fragment in self._fragments])

    @cached_property
    def _kinds_of_work(self) -> tuple[list[int], list[int], list[int]] | None:
        """FLOPs of convolutions and of products, and bytes moved; None: not known of all."""
        works = [fragment.work for fragment in self._fragments]
        known = [work for work in works if work is not None]
        if len(known) < len(works):
            return None
        return (
            sums_of([work.convolution for work in known]),
            sums_of([work.matrix for work in known]),
            sums_of([work.memory for work in known]),
        )

    @cached_property
    def _read(self) -> list[int]:
        return sums_of(list(map(read_bytes, self._fragments)))
