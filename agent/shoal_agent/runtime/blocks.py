"""A fragment that runs block after block, in less memory than its weights take.

The sessions of all blocks are open. ONNX Runtime maps a block's weights from weights.bin when it
opens the block: the ranges of that file that appear in this process's address space meanwhile are
that block's, and stay its own while it is open. Their pages come into memory when the block reads
them, and when it has run, those that `memory.swapping` does not keep are dropped.

Values pass from block to block inside the runtime, without copies, and go after their last use.
Before a block that empties the arena, they are moved out of it, so that nothing is left in it. That
takes time, so it is done within grants only that have no room for an arena that is kept.

Where weights would come from the disk and not from the page cache, the next block's are read in a
thread while one runs. From the page cache that gains nothing, and costs what could be kept.

Each session has threads of its own: the pool that sessions could share spins while it waits, and
burns processor time that the other agents of a machine need.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Final

import onnxruntime

from shoal_agent.memory.swapping import SwapPlan, as_granted, plan_swapping
from shoal_agent.runtime.destinations import destinations
from shoal_agent.runtime.failures import (
    OutOfBudget,
    RuntimeFailed,
    Stopper,
    Terminated,
)
from shoal_agent.runtime.inputs import InputSpec, input_spec
from shoal_agent.runtime.mapped_pages import (
    READ_AHEAD_BYTES,
    PageRange,
    added,
    are_cold,
    beyond,
    cache_in_huge_pages,
    drop,
    mapped_files,
    mapped_ranges,
    populate,
    size_of,
)
from shoal_agent.runtime.mapped_weights import Weights, map_weights
from shoal_agent.runtime.open_block import OpenBlock, as_value, move_out, put, run_block
from shoal_agent.runtime.prepared import PreparedModel
from shoal_agent.runtime.recipes import AS_IT_IS, PREPARED, Recipe
from shoal_protocol.blocks import Block, Join, blocks_from_json, joins_from_json, least_bytes
from shoal_protocol.manifest import BLOCKS, IN_ORDER, JOINS, MANIFEST, FragmentDamaged
from shoal_protocol.tensors import Array
from shoal_protocol.units import format_bytes, format_upwards

OpenSession = Callable[[bytes | str, Path | None, Recipe, Weights], onnxruntime.InferenceSession]
"""Opens a model, whose weights are in files of a folder, beside it where that is None, but for
those that are mapped already; raises `RuntimeFailed`."""

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
        super().__init__(
            f"would need {format_upwards(need_bytes)} even in blocks, "
            f"have {format_bytes(have_bytes)}"
        )
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of a fragment in a folder; `resident_bytes` is what it takes as a whole,
    `spare_bytes` what the device has free beyond its grant."""

    folder: Path
    resident_bytes: int
    outputs: tuple[str, ...]
    blocks: tuple[Block, ...]
    joins: tuple[Join, ...] = ()
    prepared: tuple[PreparedModel, ...] = ()
    spare_bytes: int = 0

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
            for block, model in zip(self.blocks, self.prepared, strict=True):
                weights = {} if model.reads_rows else map_weights(model.model)
                yield block, open_session(str(model.model), None, PREPARED, weights), weights
            return
        for block, skeleton in zip(self.blocks, self.models(), strict=True):
            yield block, open_session(skeleton, self.folder, AS_IT_IS, {}), {}

    def models(self) -> Iterator[bytes]:
        """The models of the blocks as they were cut."""
        with (self.folder / BLOCKS).open("rb") as file:
            for block in self.blocks:
                file.seek(block.model_offset)
                yield file.read(block.model_bytes)


def read_blocks(folder: Path) -> Blocks | None:
    """What a fragment's manifest says of its blocks; None: it has none. Raises `FragmentDamaged`,
    `OSError`."""
    if not (folder / BLOCKS).exists():
        return None
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        blocks = blocks_from_json(document["blocks"], (folder / BLOCKS).stat().st_size)
        resident_bytes = int(document["resident_bytes"])
        known = {str(each["name"]) for each in document["inputs"]}
        outputs = tuple(str(each["name"]) for each in document["outputs"])
        joins = joins_from_json(document.get(JOINS))
    except (ValueError, KeyError, TypeError) as error:
        raise FragmentDamaged(f"{folder / MANIFEST} describes no blocks: {error}") from error
    for index, block in enumerate(blocks):
        if missing := set(block.takes) - known:
            raise FragmentDamaged(f"block {index} takes {min(missing)!r}, which nothing gives")
        known.update(block.gives)
    known.update(join.output for join in joins if known.issuperset(join.parts))
    if missing := set(outputs) - known:
        raise FragmentDamaged(f"no block gives the output {min(missing)!r}")
    return Blocks(
        folder=folder.resolve(),
        resident_bytes=resident_bytes,
        outputs=outputs,
        blocks=blocks,
        joins=joins,
    )


def _open_bytes(block: Block) -> int:
    """Of what is held for a block, what its session may take before it has run: of blocks of image
    and text models it was 0.53 to 0.62."""
    return block.held_bytes * 5 // 8


def _beyond_spare(growth_bytes: int) -> int:
    return min(growth_bytes, max(0, growth_bytes - _SPARE_BYTES))


def runs_in_order(folder: Path) -> bool:
    """Whether a fragment's nodes are to run in the order of the file. Raises `FragmentDamaged`,
    `OSError`."""
    return description(folder).get(IN_ORDER) is True


def description(folder: Path) -> dict[str, object]:
    """What a fragment's manifest says of it. Raises `FragmentDamaged`, `OSError`."""
    try:
        description: object = json.loads((folder / MANIFEST).read_bytes())
    except ValueError as error:
        raise FragmentDamaged(f"{folder / MANIFEST} is no manifest: {error}") from error
    return description if isinstance(description, dict) else {}


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
        empty_arena: Callable[[], None],
    ) -> None:
        """Raises `GrantTooSmall`, `RuntimeFailed`, `OSError`."""
        source.check(granted_bytes)
        self._empty_arena = empty_arena
        self._source = source
        self._open = tuple(_open_blocks(source, open_session))
        self._rows = {
            index
            for index, (block, described) in enumerate(zip(self._open, source.blocks, strict=True))
            if size_of(block.weights) > described.weight_bytes * 9 // 8 + _UNREAD_BYTES
        }
        for index, block in enumerate(self._open):
            if index not in self._rows and source.spare_bytes >= READ_AHEAD_BYTES:
                cache_in_huge_pages(block.weights)
        self._prefetcher = ThreadPoolExecutor(1, "prefetch")
        self._prefetches: dict[int, Future[None]] = {}
        self.inputs = tuple(_inputs(self._open))
        self.outputs = source.outputs
        self._joins = {name: join for join in source.joins for name in join.parts}
        self._places = True
        self.grant(granted_bytes)

    def runs_in(self, granted_bytes: int) -> bool:
        """Whether it does, as it is open: prepared blocks may need more than others."""
        return granted_bytes >= self._source.least_bytes

    def grant(self, granted_bytes: int) -> None:
        """Run within so many bytes from now on. Raises `GrantTooSmall`."""
        self._source.check(granted_bytes)
        blocks = as_granted(self._source.blocks, granted_bytes)
        self._empties = [each.empties_arena for each in blocks]
        warm = plan_swapping(blocks, granted_bytes, rows=self._rows)
        cold = plan_swapping(blocks, granted_bytes, rows=self._rows, prefetch=True)
        assert warm is not None, "the least that it needs was granted"
        self._warm = self._adopt(warm)
        self._cold = None if cold is None else self._adopt(cold)
        self._samples = [
            max(pages, key=attrgetter("size")) for pages in self._warm.streamed if pages
        ]
        self._follow(self._warm)

    def run(self, feed: Mapping[str, Array], stopper: Stopper) -> list[Array]:
        """One item, as arrays of its own or views into the arena; raises `RuntimeFailed` and its
        kinds."""
        adopted = self._choose()
        if adopted is not self._followed:
            self._follow(adopted)
        values = {name: as_value(array) for name, array in feed.items()}
        placed = self._destinations(feed) if self._places else {}
        joined: dict[str, Array] = {}
        try:
            for index, block in enumerate(self._open):
                if self._empties[index]:
                    move_out(values, feed.keys() | placed.keys())
                    self._empty_arena()
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
                for name in self._joins.keys() & set(block.gives):
                    put(values.pop(name).numpy(), name, self._joins[name], joined)
                self._drop(index, adopted)
        except RuntimeFailed:
            self._follow(adopted)
            raise
        own = placed | joined
        return [own[name] if name in own else values[name].numpy() for name in self.outputs]

    @property
    def streamed_bytes(self) -> int:
        """Weights that the last run has mapped again, unless they were prefetched."""
        adopted = self._followed
        return 0 if adopted.plan.prefetches else sum(map(size_of, adopted.streamed))

    def weight_pages(self) -> list[PageRange]:
        """Where its weights are mapped."""
        return [pages for block in self._open for pages in block.weights]

    # ---- inside ------------------------------------------------------------------------------

    def _adopt(self, plan: SwapPlan) -> _Adopted:
        pairs = zip(self._open, plan.kept_bytes, strict=True)
        return _Adopted(plan, tuple(beyond(block.weights, kept) for block, kept in pairs))

    def _destinations(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        sessions = [block.session for block in self._open]
        inputs = [value for each in sessions for value in each.get_inputs()]
        outputs = [value for each in sessions for value in each.get_outputs()]
        return destinations(inputs, (each for each in outputs if each.name in self.outputs), feed)

    def _choose(self) -> _Adopted:
        """The plan that prefetches, where there is one and something has to come from the disk."""
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

    def _prefetch(self, index: int) -> None:
        if index < len(self._open) and index not in self._rows:
            weights = self._open[index].weights
            if are_cold(weights):
                self._prefetches[index] = self._prefetcher.submit(populate, weights)


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


def _inputs(blocks: Sequence[OpenBlock]) -> Iterator[InputSpec]:
    """Of the fragment: what blocks take and none gives. Raises `RuntimeFailed`."""
    seen: set[str] = set()
    for block in blocks:
        for value in block.session.get_inputs():
            if value.name not in seen:
                seen.add(value.name)
                spec = input_spec(value)
                if spec.dtype.hasobject:
                    raise RuntimeFailed(f"input {spec.name} is text, which blocks do not take")
                yield spec
        seen.update(block.gives)
