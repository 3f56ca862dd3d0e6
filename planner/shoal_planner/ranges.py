"""Sums and maxima of consecutive amounts: of however many at the price of two. Pure."""

from collections.abc import Sequence
from itertools import accumulate


def sums_of(amounts: Sequence[int]) -> list[int]:
    """Of those before each, and of all: those in `[start, end)` are the difference of two."""
    return [0, *accumulate(amounts)]


class Maxima:
    """Of any consecutive ones among these amounts. Row `n` has the largest of 2**n from each on."""

    def __init__(self, amounts: Sequence[int]) -> None:
        self._rows = [list(amounts)]
        width = 1
        while 2 * width <= len(amounts):
            row = self._rows[-1]
            self._rows.append(list(map(max, row, row[width:])))
            width *= 2

    def of(self, start: int, end: int) -> int:
        """Of those in `[start, end)`, one at least."""
        row = (end - start).bit_length() - 1
        return max(self._rows[row][start], self._rows[row][end - (1 << row)])
