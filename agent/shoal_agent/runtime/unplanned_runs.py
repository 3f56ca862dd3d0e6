"""Runs of which no plan knows what they take: of a fragment that has never run, or of an item that
is larger than those of its trial."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from shoal_agent.runtime.beside_arena import Beside
from shoal_agent.runtime.block_fragment import BlockFragment
from shoal_agent.runtime.failures import Exceeded, Stopper, without_frames
from shoal_agent.runtime.guard import READ_BYTES
from shoal_agent.runtime.mapped_pages import PageRange, bring_in, drop, nothing_read_ahead
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.results import RunResult
from shoal_agent.runtime.runs import OpenFragment, Runs
from shoal_agent.runtime.weights_on_disk import WeightsOnDisk
from shoal_agent.runtime.working_arena import WorkingArena
from shoal_protocol.tensors import Array


class UnplannedRuns:
    """Each gets what is left of the arena, which is empty, beside what else is in memory."""

    def __init__(
        self,
        meter: MemoryMeter,
        runs: Runs,
        arena: Callable[[], WorkingArena],
        shrink: Callable[[], None],
    ) -> None:
        """`shrink` gives back what nobody holds."""
        self._meter = meter
        self._runs = runs
        self._arena = arena
        self._shrink = shrink

    def run(
        self,
        fragment: OpenFragment,
        feed: Mapping[str, Array],
        stopper: Stopper,
        limit_bytes: int,
        dropped: Sequence[PageRange],
        *,
        is_known: bool,
    ) -> RunResult:
        """A fragment that was not tried; it `is_known` what it takes as a whole. The weights that
        are `dropped` leave memory before. Raises as `Runs.run_guarded`."""
        read_bytes = 0 if is_known else fragment.weights_at_once()
        placed = fragment.destinations(feed)
        there = {**placed, **fragment.rows(feed)}
        beside = Beside(self._meter, feed, there, dropped, read_bytes)
        held = beside.held_back(self._arena().size_bytes, limit_bytes, is_larger=False)
        let_go = partial(drop, dropped) if dropped else None
        if not is_known:
            fragment.keep_nothing_once()
        run = partial(self._runs.run_guarded, fragment, feed, stopper, limit_bytes, let_go, placed)
        return self._holding(fragment, beside, held, run)

    def run_larger(
        self,
        fragment: OpenFragment,
        feed: Mapping[str, Array],
        stopper: Stopper,
        limit_bytes: int,
        dropped: Sequence[PageRange],
    ) -> RunResult:
        """An item that is larger than those of the trial. Where what it computes has no room beside
        the weights that are in memory at one time, it has the place of weights, which no finer cut
        would give it: they are read from the disk again and again. Raises as `run`."""
        larger = partial(self._larger, fragment, feed, stopper, limit_bytes, dropped)
        try:
            return larger(None)
        except Exceeded as error:  # its frames hold values of the arena
            failure = without_frames(error)
        self._shrink()
        with WeightsOnDisk(fragment.weight_pages(), fragment.weight_files()) as weights:
            if not stopper.stopped and weights.size_bytes > READ_BYTES and weights.leave():
                return larger(weights)
        try:
            raise failure
        finally:
            del failure  # it has this frame, which holds the inputs

    def _larger(
        self,
        fragment: OpenFragment,
        feed: Mapping[str, Array],
        stopper: Stopper,
        limit_bytes: int,
        dropped: Sequence[PageRange],
        on_disk: WeightsOnDisk | None,
    ) -> RunResult:
        read_bytes = fragment.weights_at_once()
        let_go: Callable[[], None] = partial(drop, dropped)
        if on_disk is not None:
            read_bytes, let_go = min(read_bytes, READ_BYTES), on_disk.let_go
        beside = Beside(self._meter, feed, fragment.rows(feed), dropped, read_bytes)
        held = beside.held_back(self._arena().size_bytes, limit_bytes, is_larger=True)
        fragment.keep_nothing_once(brings=on_disk is None)
        guarded = partial(self._runs.run_guarded, come_slowly=on_disk is not None)
        run = partial(guarded, fragment, feed, stopper, limit_bytes, let_go, {})
        return self._holding(fragment, beside, held, run)

    def _holding(
        self, fragment: OpenFragment, beside: Beside, held_bytes: int, run: Callable[[], RunResult]
    ) -> RunResult:
        """Run with so much of the arena held back."""
        # Blocks decide that themselves. What is on its way from the disk cannot be dropped.
        whole = () if isinstance(fragment, BlockFragment) else fragment.weight_pages()
        try:
            with self._arena().ballast.hold(held_bytes), nothing_read_ahead(whole):
                bring_in(beside.on_disk)
                return run()
        finally:  # the arena has the place of weights, which the next run reads
            self._shrink()
