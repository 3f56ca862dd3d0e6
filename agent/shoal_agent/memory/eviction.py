"""Whether weights that a block has read are to leave the page cache when it has run.

A device reads its blocks in the same order for each input. What it reads does not fit into its
memory together with what the kernel has cached of the blocks before, so the kernel makes room: with
what was read longest ago, which is what comes next, or with what has been read once only, which is
what the block needs now. A cache that is too small for a cycle gives nothing back and costs reading
twice. So once it has shown that it loses what was read, weights leave it when their block has run.

Room may come: so now and then they stay for one run, and the next one sees what is left of them.
"""

from typing import Final

_FIRST_RUNS: Final = 4
_MOST_RUNS: Final = 64


class Eviction:
    """Of the weights of one fragment."""

    def __init__(self) -> None:
        self._runs, self._left_runs = _FIRST_RUNS, 0
        self._stayed = False

    def next_run(self, *, cold: bool) -> bool:
        """Whether weights leave the page cache in the run that begins; `cold`: some of them have to
        come from the disk."""
        if self._left_runs:
            self._left_runs -= 1
        elif not cold:
            self._runs, self._stayed = _FIRST_RUNS, True
        elif not self._stayed:  # nobody knows yet whether the cache keeps them
            self._stayed = True
        else:
            self._left_runs, self._stayed = self._runs, False
            self._runs = min(2 * self._runs, _MOST_RUNS)
        return not self._stayed
