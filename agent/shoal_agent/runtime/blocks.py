"""The blocks of a fragment: what they need, what of that is prepared, and how they are opened.

ONNX Runtime maps a block's weights from weights.bin when it opens the block: the ranges of that
file that appear in this process's address space meanwhile are that block's, and stay its own while
it is open. How they run then is in `block_fragment`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final

import onnxruntime

from shoal_agent.runtime.external_data import table_ranges
from shoal_agent.runtime.failures import RuntimeFailed
from shoal_agent.runtime.inputs import InputSpec
from shoal_agent.runtime.mapped_pages import MappedFile, all_mapped, mapped_files, newly_mapped
from shoal_agent.runtime.mapped_weights import Weights, map_weights, packs_floats
from shoal_agent.runtime.open_block import OpenBlock
from shoal_agent.runtime.prepared import PreparedModel
from shoal_agent.runtime.recipes import AS_IT_IS, DEQUANTISING, PREPARED, PREPARED_UNPACKED
from shoal_agent.runtime.sessions import OpenSession
from shoal_agent.runtime.table_rows import Table
from shoal_protocol.blocks import Block, Join, least_bytes
from shoal_protocol.manifest import BLOCKS
from shoal_protocol.units import format_apart

_SPARE_BYTES: Final = 32 << 10
"""Of what is held for a block, what is more than a session takes: enough for the ends of pages."""
_THREADS: Final = 2
_THREAD_BYTES: Final = 112 << 10
"""What each further thread takes of each session, measured: 100 KiB. What is held is reckoned for
two."""


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
    prepared ones those that are `unpacked` are opened so. `tables` are those of which the device
    reads rows by itself, `indices` the inputs of the fragment that say which."""

    folder: Path
    resident_bytes: int
    outputs: tuple[str, ...]
    blocks: tuple[Block, ...]
    joins: tuple[Join, ...] = ()
    prepared: tuple[PreparedModel, ...] = ()
    unpacked: frozenset[int] = frozenset()
    tables: Mapping[str, Table] = field(default_factory=dict)
    indices: tuple[InputSpec, ...] = ()

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

    def tables_of(self, index: int) -> list[tuple[int, int]]:
        """Where in the file of its weights a block has tables of which items read some rows: from
        where on, and up to where, in bytes. Raises `OSError`."""
        if self.prepared:
            model = self.prepared[index].model.read_bytes()
        else:
            model = next(islice(self.models(), index, None))
        return table_ranges(model)


def _open_bytes(block: Block) -> int:
    """Of what is held for a block, what its session may take before it has run: of blocks of image
    and text models it was 0.53 to 0.62."""
    return block.held_bytes * 5 // 8


def _beyond_spare(growth_bytes: int) -> int:
    return min(growth_bytes, max(0, growth_bytes - _SPARE_BYTES))


def open_blocks(source: Blocks, open_session: OpenSession) -> Iterator[OpenBlock]:
    """All of them, in order."""
    last = {name: index for index, block in enumerate(source.blocks) for name in block.reads}
    results = {*source.outputs, *(name for join in source.joins for name in join.parts)}
    opened = _with_files(source, source.open_models(open_session))
    for index, (block, session, mapped, files) in enumerate(opened):
        yield OpenBlock(
            session=session,
            mapped=mapped,
            takes=block.takes,
            gives=block.gives,
            gathers=block.gathers,
            spent=tuple(
                name
                for name in dict.fromkeys((*block.reads, *block.gives))
                if last.get(name, -1) <= index and name not in results
            ),
            weights=tuple(each.pages for each in files),
            files=tuple(files),
        )


def _with_files(
    source: Blocks, opened: Iterable[tuple[Block, onnxruntime.InferenceSession, Weights]]
) -> Iterator[tuple[Block, onnxruntime.InferenceSession, Weights, list[MappedFile]]]:
    """Open blocks, each with what of files its weights are. Prepared ones have files of their own:
    to read what is mapped before and after all of them is enough."""
    if source.prepared:
        files = mapped_files(source.folder)
        sessions, there = list(opened), mapped_files(source.folder)
        for each, model in zip(sessions, source.prepared, strict=True):
            path = str(model.weights.resolve())
            yield *each, newly_mapped(files.get(path, ()), there.get(path, ()))
        return
    before = all_mapped(source.folder)
    for each in opened:
        after = all_mapped(source.folder)
        yield *each, newly_mapped(before, after)
        before = after
