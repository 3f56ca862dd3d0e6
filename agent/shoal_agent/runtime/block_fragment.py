"""A fragment that runs block after block, in less memory than its weights take.

The sessions of all blocks are open, with their weights mapped (`blocks`). Pages of these come into
memory when the block reads them, and when it has run, those that `memory.swapping` does not keep
are dropped.

Values pass from block to block inside the runtime, without copies, and go after their last use.
Before a block that empties the arena, they are moved out of it, so that nothing is left in it. That
takes time, so it is done within grants only that have no room for an arena that is kept.

Where weights would come from the disk and not from the page cache, the next block's are read in a
thread while one runs. From the page cache that gains nothing, and costs what could be kept. Where
the device has no room for what the kernel would read ahead, each block's are read by themselves.

Each session has threads of its own: the pool that sessions could share spins while it waits, and
burns processor time that the other agents of a machine need.
"""

import gc
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from shoal_agent.memory.eviction import Eviction
from shoal_agent.memory.swapping import SwapPlan, as_granted, keeping_nothing, plan_swapping
from shoal_agent.runtime.arena import WorkingRegion
from shoal_agent.runtime.block_parts import Parts
from shoal_agent.runtime.blocks import Blocks, open_blocks
from shoal_agent.runtime.cold_weights import ColdWeights, cold_weights
from shoal_agent.runtime.destinations import Destinations, Placed
from shoal_agent.runtime.failures import OutOfBudget, RuntimeFailed, Stopper, Terminated
from shoal_agent.runtime.guard import READ_BYTES
from shoal_agent.runtime.mapped_pages import (
    READ_AHEAD_BYTES,
    PageRange,
    are_cold,
    beyond,
    drop,
    files_of,
    newly_mapped,
    populate,
    read_ahead,
    read_in_no_huge_pages,
    read_nothing_ahead,
    size_of,
)
from shoal_agent.runtime.open_block import (
    OpenBlock,
    Values,
    as_value,
    inputs_of,
    move_out,
    put,
    run_block,
)
from shoal_agent.runtime.sessions import OpenSession
from shoal_agent.runtime.table_rows import TableRows
from shoal_protocol.blocks import arena_beside
from shoal_protocol.tensors import Array

_UNREAD_BYTES: Final = 64 << 10
"""A block that maps so much more than it reads, and an eighth, has a table of which it reads rows:
less is the ends of pages."""
_NEARLY: Final = 8
"""Blocks that work with less than the neediest by one part in so many may do with as much."""


@dataclass(frozen=True, slots=True)
class _Adopted:
    """A plan, and which pages of each block are to be dropped by it."""

    plan: SwapPlan
    streamed: tuple[tuple[PageRange, ...], ...]


class BlockFragment:
    """All blocks open. Used like a whole fragment, by the same thread."""

    def __init__(
        self,
        source: Blocks,
        granted_bytes: int,
        open_session: OpenSession,
        region: WorkingRegion,
    ) -> None:
        """Raises `GrantTooSmall`, `RuntimeFailed`, `OSError`."""
        source.check(granted_bytes)
        self._open_session = open_session
        self._region = region
        self._source = source
        self._tables = TableRows(source.folder, source.tables)
        self._open = tuple(open_blocks(source, open_session))
        self._reads_ahead = self._keeps_nothing = False
        self._brings = True
        self._prefetcher = ThreadPoolExecutor(1, "prefetch")
        self._prefetches: dict[int, Future[None]] = {}
        self.inputs = tuple(inputs_of(self._open, source.indices))
        self.outputs = source.outputs
        self._given = frozenset(name for block in self._open for name in block.gives)
        self._joins = {name: join for join in source.joins for name in join.parts}
        sessions = [block.session for block in self._open]
        self._places, self._destinations = True, Destinations(sessions, self.outputs, source.joins)
        self._rows = self._with_tables()
        self._cold_weights = [self._cold_weights_of(index) for index in range(len(self._open))]
        self.grant(granted_bytes)
        for index in range(len(self._open)):
            self._advise(index)

    def runs_in(self, granted_bytes: int) -> bool:
        """Whether it does, as it is open: prepared blocks may need more than others."""
        return granted_bytes >= self._source.least_bytes

    def grant(self, granted_bytes: int) -> None:
        """Run within so many bytes from now on. Raises `GrantTooSmall`."""
        self._source.check(granted_bytes)
        self.granted_bytes = granted_bytes
        self._eviction, self._evicts = Eviction(), False
        blocks = as_granted(self._source.blocks, granted_bytes)
        self._parts = Parts(blocks, granted_bytes, self._region)
        blocks = self._parts.blocks
        warm = plan_swapping(blocks, granted_bytes, rows=self._rows)
        cold = plan_swapping(blocks, granted_bytes, rows=self._rows, prefetch=True)
        assert warm is not None, "the least that it needs was granted"
        self._warm = self._adopt(warm)
        self._cold = None if cold is None else self._adopt(cold)
        self._samples = [
            max(pages, key=attrgetter("size"))
            for index, streamed in enumerate(self._warm.streamed)
            if (pages := self._cold_weights[index].pages if index in self._rows else streamed)
        ]
        self._follow(self._warm)

    def read_ahead(self, free_bytes: int) -> None:
        """So much is free now beside what it was granted: have the kernel read ahead where that is
        enough for what it holds meanwhile, and not where it is less. Between two runs."""
        if self._reads_ahead == (free_bytes >= READ_AHEAD_BYTES):
            return
        self._reads_ahead = not self._reads_ahead
        for index in range(len(self._open)):
            self._advise(index)

    reads_rows = False
    """Of tables, it reads them from the file, into memory of its own."""
    pages_read_ahead: tuple[PageRange, ...] = ()
    """As of `WholeFragment`; it decides that itself, run by run."""

    @property
    def is_prepared(self) -> bool:
        """Whether its blocks were optimised for this processor."""
        return bool(self._source.prepared)

    @property
    def may_pack(self) -> bool:
        """Whether a block is left to `pack_one`, and what is granted now has room for it."""
        return bool(self._source.unpacked) and self._source.may_pack(self.granted_bytes)

    def pack_one(self) -> None:
        """Open one more block as it runs fastest, between two runs. All is as before where that
        fails: raises `RuntimeFailed`, `OSError`, `ValueError`."""
        index = min(self._source.unpacked)
        source = replace(self._source, unpacked=self._source.unpacked - {index})
        drop(self.weight_pages())
        self._region.empty()
        files = [source.prepared[index].weights.resolve()]
        before = files_of(files)
        session, mapped = source.open_prepared(index, self._open_session)
        new = newly_mapped(before, files_of(files))
        pages = tuple(each.pages for each in new)
        block = replace(
            self._open[index], session=session, mapped=mapped, weights=pages, files=tuple(new)
        )
        self._open = (*self._open[:index], block, *self._open[index + 1 :])
        gc.collect()  # the other session goes now, and what it mapped
        self._source = source
        self._rows = self._with_tables()
        self._cold_weights[index] = self._cold_weights_of(index)
        self.grant(self.granted_bytes)
        self._advise(index)

    def run(
        self, feed: Mapping[str, Array], stopper: Stopper, placed: Placed | None = None
    ) -> list[Array]:
        """As `WholeFragment.run`."""
        if self._brings:
            return self._run(feed, stopper, placed)
        for block in self._open:
            read_nothing_ahead(block.weights)
            read_in_no_huge_pages(block.weights)
        try:
            return self._run(feed, stopper, placed)
        finally:
            self._brings = True
            for index in range(len(self._open)):
                self._advise(index)

    def _run(
        self, feed: Mapping[str, Array], stopper: Stopper, placed: Placed | None
    ) -> list[Array]:
        adopted, self._keeps_nothing = self._choose(), False
        if adopted is not self._followed:
            self._follow(adopted)
        values = {name: as_value(array) for name, array in feed.items()}
        placed = self.destinations(feed) if placed is None else placed
        self._parts.begin(feed)
        own: dict[str, Array] = {}  # results that are in this process's own memory
        rows: dict[str, int] = {}  # bytes of what was read of tables, which is, too
        try:
            for index, block in enumerate(self._open):
                if self._parts.begins_at(index):
                    moved = move_out(values, feed.keys() | own.keys() | rows.keys())
                    outside = sum(each.nbytes for each in {**placed, **own, **moved}.values())
                    outside += sum(size for name, size in rows.items() if name in values)
                    own.update((name, each) for name, each in moved.items() if name in self.outputs)
                    del moved  # the others go after their last use
                    self._parts.make_room(index, outside)
                self._bring(index)
                if adopted.plan.prefetches:
                    self._prefetch(index + 1)
                rows |= self._gather(block, values, own, stopper)
                try:
                    run_block(block, values, stopper, placed)
                except (Terminated, OutOfBudget):
                    raise
                except RuntimeFailed:
                    if placed.keys().isdisjoint(block.gives):
                        raise
                    self._places, placed = False, {}
                    run_block(block, values, stopper, placed)
                if placed or self._joins:
                    self._keep_results(block, values, own, placed)
                self._drop(index, adopted)
        except RuntimeFailed:
            self._follow(adopted)
            self._parts.forget()
            raise
        self._parts.end()
        return [own[name] if name in own else values[name].numpy() for name in self.outputs]

    def _gather(
        self, block: OpenBlock, values: Values, own: dict[str, Array], stopper: Stopper
    ) -> dict[str, int]:
        """Read the rows that a block takes; the bytes of those that go after their last use. What a
        block hands through has the memory of what it took, which stays until the end."""
        sizes = {}
        for each in block.gathers:
            rows = self._tables.gather(each, values, stopper)
            if each.rows in self._given:
                own[each.rows] = rows
            else:
                sizes[each.rows] = rows.nbytes
        return sizes

    def _keep_results(
        self, block: OpenBlock, values: Values, own: dict[str, Array], placed: Placed
    ) -> None:
        """Of what a block gave: what was written where it belongs, and parts of outputs."""
        gives = set(block.gives)
        own.update((name, placed[name]) for name in placed.keys() & gives)
        for name in self._joins.keys() & gives:
            put(values.pop(name).numpy(), name, self._joins[name], own, placed)

    @property
    def streamed_bytes(self) -> int:
        """Weights that the last run has mapped again, unless they were prefetched."""
        adopted = self._followed
        return 0 if adopted.plan.prefetches else sum(map(size_of, adopted.streamed))

    def keep_nothing_once(self, *, brings: bool = True) -> None:
        """Have the next run keep no weights from one block to the next; without `brings`, it reads
        each page as it needs it."""
        self._keeps_nothing, self._brings = True, brings

    @property
    def kept_bytes(self) -> int:
        """Weights that a run keeps by its plan, from one block to the next."""
        plans = (self._warm, self._cold or self._warm)
        return max(sum(each.plan.kept_bytes) for each in plans)

    @property
    def streamed_at_most_work(self) -> int:
        """Of weights, what such a run has in memory besides while a block works with the most, or
        nearly. The one with most weights need not be one of those."""
        blocks, kept = self._parts.blocks, self._warm.plan.kept_bytes
        beside = arena_beside(blocks)
        least = max(beside) * (_NEARLY - 1) // _NEARLY
        sizes = (block.weight_bytes - size for block, size in zip(blocks, kept, strict=True))
        return max(size for size, work in zip(sizes, beside, strict=True) if work >= least)

    def weights_at_once(self) -> int:
        """Of weights, what such a run has in memory at most: those of a block, and of tables what
        it may read before a guard drops them."""
        most = 0
        for index, block in enumerate(self._open):
            size = size_of(block.weights)
            tables = size - size_of(self._cold_weights[index].pages) if index in self._rows else 0
            most = max(most, size - tables + min(tables, READ_BYTES))
        return most

    def weight_pages(self) -> list[PageRange]:
        """Where its weights are mapped."""
        return [pages for block in self._open for pages in block.weights]

    def weight_files(self) -> frozenset[str]:
        """What these are mapped from."""
        return frozenset(each.path for block in self._open for each in block.files)

    def destinations(self, feed: Mapping[str, Array]) -> Placed:
        """As of `WholeFragment`."""
        return self._destinations.of({**feed, **self.rows(feed)}) if self._places else {}

    def rows(self, feed: Mapping[str, Array]) -> Mapping[str, Array]:
        """What a run has of tables beside its inputs, as far as these say it: arrays like it, which
        take no memory."""
        gathers = (each for block in self._open for each in block.gathers)
        return self._tables.shaped(feed, gathers)

    # ---- inside ------------------------------------------------------------------------------

    def _with_tables(self) -> set[int]:
        """The blocks that have a table of which they read rows."""
        pairs = enumerate(zip(self._open, self._source.blocks, strict=True))
        return {
            index
            for index, (block, described) in pairs
            if size_of(block.weights) > described.weight_bytes * 9 // 8 + _UNREAD_BYTES
        }

    def _cold_weights_of(self, index: int) -> ColdWeights:
        tables = self._source.tables_of(index) if index in self._rows else ()
        return cold_weights(self._open[index].files, tables)

    def _advise(self, index: int) -> None:
        """Say how the kernel is to read a block's weights: of a table, the rows that are read."""
        weights = self._open[index].weights
        if self._reads_ahead:
            read_ahead(weights, huge_pages=index not in self._rows)
        else:
            read_nothing_ahead(weights)
            read_in_no_huge_pages(weights)
            self._cold_weights[index].advise()

    def _adopt(self, plan: SwapPlan) -> _Adopted:
        pairs = zip(self._open, plan.kept_bytes, strict=True)
        return _Adopted(plan, tuple(beyond(block.weights, kept) for block, kept in pairs))

    def _choose(self) -> _Adopted:
        """The plan that prefetches, where there is one and something has to come from the disk."""
        cold = are_cold(self._samples)
        self._evicts = self._eviction.next_run(cold=cold)
        if self._keeps_nothing:
            return self._adopt(keeping_nothing(len(self._open)))
        return self._cold if self._cold is not None and cold else self._warm

    def _follow(self, adopted: _Adopted) -> None:
        """Have no more in memory than a plan keeps."""
        self._followed = adopted
        for index in range(len(self._open)):
            self._drop(index, adopted)

    def _drop(self, index: int, adopted: _Adopted) -> None:
        if self._prefetches and (prefetch := self._prefetches.pop(index, None)) is not None:
            prefetch.result()
        drop(adopted.streamed[index])
        if self._evicts:
            self._cold_weights[index].uncache()

    def _bring(self, index: int) -> None:
        """Where nothing is read ahead, a block would read its weights page by page."""
        if self._reads_ahead or not self._brings:
            return
        self._prefetch(index)
        if (prefetch := self._prefetches.pop(index, None)) is not None:
            prefetch.result()

    def _prefetch(self, index: int) -> None:
        if index < len(self._open) and index not in self._prefetches:
            cold = self._cold_weights[index]
            if are_cold(pages := cold.pages):
                if self._reads_ahead:
                    bring = self._prefetcher.submit(populate, pages)
                else:
                    bring = self._prefetcher.submit(cold.bring)
                self._prefetches[index] = bring
