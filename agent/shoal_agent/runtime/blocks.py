"""A fragment that runs block after block, in less memory than its weights take.

The sessions of all blocks are open. ONNX Runtime maps a block's weights from weights.bin when it
opens the block: the ranges of that file that appear in this process's address space meanwhile are
that block's, and stay its own while it is open. Their pages come into memory when the block reads
them, and when it has run, those that `memory.swapping` does not keep are dropped.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Final

import onnxruntime

from shoal_agent.memory.swapping import SwapPlan, as_granted, keeping_nothing, plan_swapping
from shoal_agent.runtime.arena import WorkingRegion
from shoal_agent.runtime.block_parts import Parts
from shoal_agent.runtime.destinations import Destinations, Placed
from shoal_agent.runtime.failures import OutOfBudget, RuntimeFailed, Stopper, Terminated
from shoal_agent.runtime.guard import READ_BYTES
from shoal_agent.runtime.mapped_pages import (
    READ_AHEAD_BYTES,
    PageRange,
    added,
    are_cold,
    beyond,
    drop,
    mapped_files,
    mapped_ranges,
    populate,
    populate_in_pieces,
    read_ahead,
    read_in_no_huge_pages,
    read_nothing_ahead,
    size_of,
)
from shoal_agent.runtime.mapped_weights import Weights, map_weights, packs_floats
from shoal_agent.runtime.open_block import (
    OpenBlock,
    as_value,
    inputs_of,
    move_out,
    put,
    run_block,
)
from shoal_agent.runtime.prepared import PreparedModel
from shoal_agent.runtime.recipes import AS_IT_IS, DEQUANTISING, PREPARED, PREPARED_UNPACKED
from shoal_agent.runtime.sessions import OpenSession
from shoal_protocol.blocks import Block, Join, least_bytes
from shoal_protocol.manifest import BLOCKS
from shoal_protocol.tensors import Array
from shoal_protocol.units import format_apart

_SPARE_BYTES: Final = 32 << 10
"""Of what is held for a block, what is more than a session takes: enough for the ends of pages."""
_THREADS: Final = 2
_THREAD_BYTES: Final = 112 << 10
"""What each further thread takes of each session, measured: 100 KiB. What is held is reckoned for
two."""
_UNREAD_BYTES: Final = 64 << 10
"""A block that maps so much more than it reads, and an eighth, has a table of which it reads rows:
less is the ends of pages."""


class GrantTooSmall(RuntimeFailed):
    """A fragment cannot run in what it was granted, not even in blocks."""

    def __init__(self, need_bytes: int, have_bytes: int) -> None:
        need, have = format_apart(need_bytes, have_bytes)
        super().__init__(f"would need {need} even in blocks, have {have}")
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of a fragment in a folder; `resident_bytes` is what it takes as a whole. Of
    prepared ones those that are `unpacked` are opened so."""

    folder: Path
    resident_bytes: int
    outputs: tuple[str, ...]
    blocks: tuple[Block, ...]
    joins: tuple[Join, ...] = ()
    prepared: tuple[PreparedModel, ...] = ()
    unpacked: frozenset[int] = frozenset()

    @property
    def least_bytes(self) -> int:
        return least_bytes(self.blocks)

    def check(self, granted_bytes: int) -> None:
        """Whether it can run in what it is granted. Raises `GrantTooSmall`."""
        if granted_bytes < self.least_bytes:
            raise GrantTooSmall(self.least_bytes, granted_bytes)

    def with_prepared(self, models: Sequence[PreparedModel], granted_bytes: int) -> "Blocks":
        """The same, with prepared models in place of its own, if they run in what is granted.

        What ONNX Runtime packs and cannot map is held for as long as a block is open. All blocks
        are, so what one of them has to spare is there for another.
        """
        packed = [model.packed for model in models]
        excess = sum(
            max(0, each.anonymous_bytes - _open_bytes(block))
            for block, each in zip(self.blocks, packed, strict=True)
        )
        spare = sum(_SPARE_BYTES - min(_SPARE_BYTES, max(0, each.mapped_growth)) for each in packed)
        first, *others = (
            replace(
                block,
                weight_bytes=max(0, block.weight_bytes + _beyond_spare(each.mapped_growth)),
            )
            for block, each in zip(self.blocks, packed, strict=True)
        )
        first = replace(first, held_bytes=first.held_bytes + max(0, excess - spare))
        blocks = (first, *others)
        held = sum(block.held_bytes for block in blocks)
        opening = max(model.packed.opening_bytes for model in models)
        if max(least_bytes(blocks), held + opening) > granted_bytes:
            return self
        return replace(self, blocks=blocks, prepared=tuple(models))

    def may_pack(self, granted_bytes: int) -> bool:
        """Whether there is room to open each block packed, beside all that are open."""
        held = [block.held_bytes for block in self.blocks]
        opening = max(model.packed.opening_bytes for model in self.prepared)
        return sum(held) + max(held) + opening <= granted_bytes

    def unpacked_first(self, granted_bytes: int) -> "Blocks":
        """The same, unpacked where that opens sooner, if there is room to pack it later: without, a
        run takes about as long, or a fifth longer."""
        if not self.prepared or not self.may_pack(granted_bytes):
            return self
        chosen = (
            index
            for index, (block, model) in enumerate(zip(self.blocks, self.prepared, strict=True))
            if model.unpacked.anonymous_bytes <= _open_bytes(block)
            and model.unpacked.mapped_growth <= max(_SPARE_BYTES, model.packed.mapped_growth)
            and packs_floats(model.model)
        )
        return replace(self, unpacked=frozenset(chosen))

    def with_threads(self, most: int, granted_bytes: int) -> tuple["Blocks", int]:
        """The same with what further threads hold, and for how many of them each session has room
        in what is granted."""
        each = _THREAD_BYTES * len(self.blocks)
        room = max(0, granted_bytes - self.least_bytes)
        further = min(max(0, most - _THREADS), room // each)
        first, *others = self.blocks
        first = replace(first, held_bytes=first.held_bytes + further * each)
        return replace(self, blocks=(first, *others)), min(most, _THREADS + further)

    def open_models(
        self, open_session: OpenSession
    ) -> Iterator[tuple[Block, onnxruntime.InferenceSession, Weights]]:
        """Sessions of the blocks, in order, each with the weights that it refers to."""
        if self.prepared:
            for index, block in enumerate(self.blocks):
                yield block, *self.open_prepared(index, open_session)
            return
        for block, skeleton in zip(self.blocks, self.models(), strict=True):
            recipe = DEQUANTISING if block.dequantises else AS_IT_IS
            yield block, open_session(skeleton, self.folder, recipe, {}), {}

    def open_prepared(
        self, index: int, open_session: OpenSession
    ) -> tuple[onnxruntime.InferenceSession, Weights]:
        """One of the sessions, and its weights."""
        model = self.prepared[index]
        recipe = PREPARED_UNPACKED if index in self.unpacked else PREPARED
        weights = {} if model.reads_rows else map_weights(model.model)
        return open_session(str(model.model), None, recipe, weights), weights

    def models(self) -> Iterator[bytes]:
        """The models of the blocks as they were cut."""
        with (self.folder / BLOCKS).open("rb") as file:
            for block in self.blocks:
                file.seek(block.model_offset)
                yield file.read(block.model_bytes)


def _open_bytes(block: Block) -> int:
    """Of what is held for a block, what its session may take before it has run: of blocks of image
    and text models it was 0.53 to 0.62."""
    return block.held_bytes * 5 // 8


def _beyond_spare(growth_bytes: int) -> int:
    return min(growth_bytes, max(0, growth_bytes - _SPARE_BYTES))


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
        self._open = tuple(_open_blocks(source, open_session))
        self._reads_ahead = self._keeps_nothing = False
        read_nothing_ahead(self.weight_pages())
        self._prefetcher = ThreadPoolExecutor(1, "prefetch")
        self._prefetches: dict[int, Future[None]] = {}
        self.inputs = tuple(inputs_of(self._open))
        self.outputs = source.outputs
        self._joins = {name: join for join in source.joins for name in join.parts}
        sessions = [block.session for block in self._open]
        self._places, self._destinations = True, Destinations(sessions, self.outputs)
        self.grant(granted_bytes)

    def runs_in(self, granted_bytes: int) -> bool:
        """Whether it does, as it is open: prepared blocks may need more than others."""
        return granted_bytes >= self._source.least_bytes

    def grant(self, granted_bytes: int) -> None:
        """Run within so many bytes from now on. Raises `GrantTooSmall`."""
        self._source.check(granted_bytes)
        self._granted_bytes = granted_bytes
        pairs = enumerate(zip(self._open, self._source.blocks, strict=True))
        self._rows = {
            index
            for index, (block, described) in pairs
            if size_of(block.weights) > described.weight_bytes * 9 // 8 + _UNREAD_BYTES
        }
        blocks = as_granted(self._source.blocks, granted_bytes)
        self._parts = Parts(blocks, granted_bytes, self._region)
        blocks = self._parts.blocks
        warm = plan_swapping(blocks, granted_bytes, rows=self._rows)
        cold = plan_swapping(blocks, granted_bytes, rows=self._rows, prefetch=True)
        assert warm is not None, "the least that it needs was granted"
        self._warm = self._adopt(warm)
        self._cold = None if cold is None else self._adopt(cold)
        streamed = filter(None, self._warm.streamed)
        self._samples = [max(pages, key=attrgetter("size")) for pages in streamed]
        self._follow(self._warm)

    def read_ahead(self, free_bytes: int) -> None:
        """So much is free now beside what it was granted: have the kernel read ahead where that is
        enough for what it holds meanwhile, and not where it is less. Between two runs."""
        if self._reads_ahead == (free_bytes >= READ_AHEAD_BYTES):
            return
        self._reads_ahead = not self._reads_ahead
        for index, block in enumerate(self._open):
            if self._reads_ahead:
                read_ahead(block.weights, huge_pages=index not in self._rows)
            else:
                read_nothing_ahead(block.weights)
                read_in_no_huge_pages(block.weights)

    @property
    def is_prepared(self) -> bool:
        """Whether its blocks were optimised for this processor."""
        return bool(self._source.prepared)

    @property
    def may_pack(self) -> bool:
        """Whether a block is left to `pack_one`, and what is granted now has room for it."""
        return bool(self._source.unpacked) and self._source.may_pack(self._granted_bytes)

    def pack_one(self) -> None:
        """Open one more block as it runs fastest, between two runs. All is as before where that
        fails: raises `RuntimeFailed`, `OSError`, `ValueError`."""
        index = min(self._source.unpacked)
        source = replace(self._source, unpacked=self._source.unpacked - {index})
        drop(self.weight_pages())
        self._region.empty()
        session, mapped = source.open_prepared(index, self._open_session)
        block = replace(self._open[index], session=session, mapped=mapped, weights=())
        self._open = (*self._open[:index], block, *self._open[index + 1 :])
        gc.collect()  # the other session goes now, and what it mapped
        path = str(source.prepared[index].weights.resolve())
        pages = tuple(sorted(mapped_files(source.folder).get(path, ())))
        self._open = (*self._open[:index], replace(block, weights=pages), *self._open[index + 1 :])
        self._source = source
        self.grant(self._granted_bytes)
        if self._reads_ahead:
            read_ahead(pages, huge_pages=index not in self._rows)
        else:
            read_nothing_ahead(pages)

    def run(
        self, feed: Mapping[str, Array], stopper: Stopper, placed: Placed | None = None
    ) -> list[Array]:
        """As `WholeFragment.run`."""
        adopted, self._keeps_nothing = self._choose(), False
        if adopted is not self._followed:
            self._follow(adopted)
        values = {name: as_value(array) for name, array in feed.items()}
        placed = self.destinations(feed) if placed is None else placed
        self._parts.begin(feed)
        own: dict[str, Array] = {}  # results that are in this process's own memory
        try:
            for index, block in enumerate(self._open):
                if self._parts.begins_at(index):
                    moved = move_out(values, feed.keys() | own.keys()).items()
                    own.update((name, array) for name, array in moved if name in self.outputs)
                    del moved  # the others go after their last use
                    self._parts.make_room(index)
                self._bring(index)
                if adopted.plan.prefetches:
                    self._prefetch(index + 1)
                try:
                    run_block(block, values, stopper, placed)
                except (Terminated, OutOfBudget):
                    raise
                except RuntimeFailed:
                    if placed.keys().isdisjoint(block.gives):
                        raise
                    self._places, placed = False, {}
                    run_block(block, values, stopper, placed)
                own.update((name, placed[name]) for name in placed.keys() & set(block.gives))
                for name in self._joins.keys() & set(block.gives):
                    put(values.pop(name).numpy(), name, self._joins[name], own)
                self._drop(index, adopted)
        except RuntimeFailed:
            self._follow(adopted)
            self._parts.forget()
            raise
        self._parts.end()
        return [own[name] if name in own else values[name].numpy() for name in self.outputs]

    @property
    def streamed_bytes(self) -> int:
        """Weights that the last run has mapped again, unless they were prefetched."""
        adopted = self._followed
        return 0 if adopted.plan.prefetches else sum(map(size_of, adopted.streamed))

    def keep_nothing_once(self) -> int:
        """Have the next run keep no weights from one block to the next. What it has of them at
        most: those of a block, and of tables what it may read before a guard drops them."""
        self._keeps_nothing = True
        sizes = enumerate(size_of(block.weights) for block in self._open)
        return max(min(size, READ_BYTES) if i in self._rows else size for i, size in sizes)

    def weight_pages(self) -> list[PageRange]:
        """Where its weights are mapped."""
        return [pages for block in self._open for pages in block.weights]

    def destinations(self, feed: Mapping[str, Array]) -> Placed:
        """As of `WholeFragment`."""
        return self._destinations.of(feed) if self._places else {}

    # ---- inside ------------------------------------------------------------------------------

    def _adopt(self, plan: SwapPlan) -> _Adopted:
        pairs = zip(self._open, plan.kept_bytes, strict=True)
        return _Adopted(plan, tuple(beyond(block.weights, kept) for block, kept in pairs))

    def _choose(self) -> _Adopted:
        """The plan that prefetches, where there is one and something has to come from the disk."""
        if self._keeps_nothing:
            return self._adopt(keeping_nothing(len(self._open)))
        if self._cold is not None and are_cold(self._samples):
            return self._cold
        return self._warm

    def _follow(self, adopted: _Adopted) -> None:
        """Have no more in memory than a plan keeps."""
        self._followed = adopted
        for index in range(len(self._open)):
            self._drop(index, adopted)

    def _drop(self, index: int, adopted: _Adopted) -> None:
        if (prefetch := self._prefetches.pop(index, None)) is not None:
            prefetch.result()
        drop(adopted.streamed[index])

    def _bring(self, index: int) -> None:
        """Where nothing is read ahead, a block would read its weights page by page."""
        if self._reads_ahead:
            return
        self._prefetch(index)
        if (prefetch := self._prefetches.pop(index, None)) is not None:
            prefetch.result()

    def _prefetch(self, index: int) -> None:
        if index < len(self._open) and index not in self._rows | self._prefetches.keys():
            weights = self._open[index].weights
            if are_cold(weights):
                bring = populate if self._reads_ahead else populate_in_pieces
                self._prefetches[index] = self._prefetcher.submit(bring, weights)


def _open_blocks(source: Blocks, open_session: OpenSession) -> Iterator[OpenBlock]:
    last = {name: index for index, block in enumerate(source.blocks) for name in block.takes}
    results = {*source.outputs, *(name for join in source.joins for name in join.parts)}
    opened = _with_pages(source, source.open_models(open_session))
    for index, (block, session, mapped, pages) in enumerate(opened):
        yield OpenBlock(
            session=session,
            mapped=mapped,
            takes=block.takes,
            gives=block.gives,
            spent=tuple(
                name
                for name in dict.fromkeys((*block.takes, *block.gives))
                if last.get(name, -1) <= index and name not in results
            ),
            weights=pages,
        )


def _with_pages(
    source: Blocks, opened: Iterable[tuple[Block, onnxruntime.InferenceSession, Weights]]
) -> Iterator[tuple[Block, onnxruntime.InferenceSession, Weights, tuple[PageRange, ...]]]:
    """Open blocks, each with the pages of its weights. Prepared ones have files of their own: to
    read once what is mapped is enough."""
    if source.prepared:
        sessions = list(opened)
        files = mapped_files(source.folder)
        for each, model in zip(sessions, source.prepared, strict=True):
            yield *each, tuple(sorted(files.get(str(model.weights.resolve()), ())))
        return
    before = mapped_ranges(source.folder)
    for each in opened:
        after = mapped_ranges(source.folder)
        yield *each, added(before, after)
        before = after
