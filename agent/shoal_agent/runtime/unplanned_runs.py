"""Runs of which no plan knows what they take: of a fragment that has never run, or of an item that
is larger than those of its trial."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal_agent.runtime.beside_arena import Beside
from shoal_agent.runtime.block_fragment import BlockFragment
from shoal_agent.runtime.failures import Exceeded, RuntimeFailed, Stopper, without_frames
from shoal_agent.runtime.guard import READ_BYTES
from shoal_agent.runtime.mapped_pages import (
    PageRange,
    bring_in,
    drop,
    nothing_read_ahead,
    size_of,
)
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.results import RunResult
from shoal_agent.runtime.runs import OpenFragment, Runs
from shoal_agent.runtime.weights_on_disk import WeightsOnDisk
from shoal_agent.runtime.working_arena import WorkingArena
from shoal_protocol.tensors import Array


@dataclass(frozen=True, slots=True)
class Scratch:
    """What a node takes for itself, outside of the arena, as far as that is known: so much with
    inputs of so many bytes, if these are known."""

    size_bytes: int
    input_bytes: int = 0

    def beside(self, feed: Mapping[str, Array]) -> int:
        """It grows as the inputs do."""
        size = sum(array.nbytes for array in feed.values())
        if not 0 < self.input_bytes < size:
            return self.size_bytes
        return self.size_bytes * size // self.input_bytes


@dataclass(frozen=True, slots=True)
class Unplanned:
    """Such a run. The weights that are `dropped` leave memory before. `scratch_bytes` is what a
    node takes for itself, as far as that is known. `is_known`: what the fragment takes of weights
    is in what was planned, and it keeps those that its plan does."""

    fragment: OpenFragment
    feed: Mapping[str, Array]
    stopper: Stopper
    limit_bytes: int
    dropped: Sequence[PageRange]
    scratch_bytes: int = 0
    is_known: bool = False
    is_larger: bool = False


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

    def run(self, run: Unplanned) -> RunResult:
        """Beside all weights that are in memory at one time. Where an item that is larger has no
        room there, it has the place of weights, which no finer cut would give it: they are read
        from the disk again and again. Raises as `Runs.run_guarded`."""
        fragment = run.fragment
        if run.is_known and isinstance(fragment, BlockFragment):
            return self._in_blocks(run, fragment)
        weights = WeightsOnDisk(fragment.weight_pages(), fragment.weight_files())
        rows = not run.is_known and fragment.reads_rows
        try:
            return self._beside(run, weights if rows and weights.leave() else None)
        except Exceeded as error:
            if not run.is_larger:
                raise
            failure = without_frames(error)  # they hold values of the arena
        self._shrink()
        if not run.stopper.stopped and weights.size_bytes > READ_BYTES and weights.leave():
            return self._beside(run, weights, in_their_place=True)
        try:
            raise failure
        finally:
            del failure  # it has this frame, which holds the inputs

    def _in_blocks(self, run: Unplanned, fragment: BlockFragment) -> RunResult:
        """Beside the weights that its plan keeps. Where these leave too little, it keeps none, and
        says what would have been in memory besides."""
        try:
            return self._beside(run, None)
        except Exceeded:
            if run.stopper.stopped:
                raise
        self._shrink()  # the exception is gone, and the values of the arena that it held
        result = self._beside(replace(run, is_known=False), None)
        return replace(result, unkept_bytes=fragment.kept_bytes)

    def _read_bytes(self, run: Unplanned, on_disk: WeightsOnDisk | None) -> int:
        """Of weights that are in memory at one time, beside what was there when it began. Rows of a
        table come with 15 pages around them, all within a millisecond, where these are in the page
        cache."""
        fragment = run.fragment
        if run.is_known:
            if not isinstance(fragment, BlockFragment):
                return 0
            return fragment.kept_bytes + fragment.weights_at_once()
        if fragment.reads_rows and on_disk is None:
            return size_of(fragment.weight_pages())
        return fragment.weights_at_once()

    def _beside(
        self, run: Unplanned, on_disk: WeightsOnDisk | None, *, in_their_place: bool = False
    ) -> RunResult:
        """Run beside its weights, or in the place of those that are `on_disk`."""
        fragment, arena = run.fragment, self._arena()
        read_bytes = self._read_bytes(run, on_disk)
        if in_their_place:
            read_bytes = min(read_bytes, READ_BYTES)
        placed = {} if run.is_larger else fragment.destinations(run.feed)
        there = {**placed, **fragment.rows(run.feed)}
        beside = Beside(self._meter, run.feed, there, run.dropped, read_bytes, run.scratch_bytes)
        held = beside.held_back(arena.size_bytes, run.limit_bytes, is_larger=run.is_larger)
        if not run.is_known:
            fragment.keep_nothing_once(brings=not in_their_place)
        let_go: Callable[[], None] | None = partial(drop, run.dropped) if run.dropped else None
        if on_disk is not None:
            let_go = on_disk.let_go
        try:
            # What is on its way from the disk cannot be dropped.
            with arena.ballast.hold(held), nothing_read_ahead(fragment.pages_read_ahead):
                bring_in(beside.on_disk)
                return self._runs.run_guarded(
                    *(fragment, run.feed, run.stopper, run.limit_bytes, let_go, placed),
                    come_slowly=on_disk is not None,
                )
        except RuntimeFailed:  # they wait on the disk, and are not what the agent has grown by
            drop(beside.on_disk)
            raise
        finally:  # the arena has the place of weights, which the next run reads
            self._shrink()
