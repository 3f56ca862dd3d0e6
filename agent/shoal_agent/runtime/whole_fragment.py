"""A fragment that runs as one session."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest
from operator import attrgetter
from pathlib import Path
from typing import Final

import onnxruntime

from shoal_agent.cache.folders import drop_cached_pages
from shoal_agent.runtime.cold_weights import beside_tables
from shoal_agent.runtime.described import dequantises, runs_in_order
from shoal_agent.runtime.destinations import Destinations, Placed
from shoal_agent.runtime.external_data import table_bytes, table_ranges
from shoal_agent.runtime.failures import OutOfBudget, Stopper, Terminated, failure_of
from shoal_agent.runtime.guard import READ_BYTES
from shoal_agent.runtime.inputs import input_spec
from shoal_agent.runtime.mapped_pages import (
    MappedFile,
    PageRange,
    added,
    are_cold,
    cached_bytes,
    common,
    files_of,
    newly_mapped,
    populate_in_pieces,
    read_nothing_ahead,
    size_of,
    unused_parts,
)
from shoal_agent.runtime.open_block import as_value, run_bound
from shoal_agent.runtime.prepared import PreparedModel
from shoal_agent.runtime.process_memory import clean_pages
from shoal_agent.runtime.recipes import AS_IT_IS, DEQUANTISING, PREPARED, UNPREPARED, Recipe
from shoal_agent.runtime.sessions import open_session, options_of
from shoal_agent.runtime.weights_on_disk import WeightsOnDisk
from shoal_protocol.manifest import MODEL, weight_files
from shoal_protocol.tensors import Array

_GRAPH_FACTOR: Final = 12
"""Memory to open a graph that is not prepared, over the size of its file."""
_SAMPLES: Final = 4
"""Of its largest weights, for whether they are in the page cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """How a fragment is opened as one session. `weights` are the files that are mapped, of which
    `weight_bytes` are weights, and the others packed copies. While it is opened it takes
    `opening_bytes` at most, and its weights are read by runs only."""

    model: Path
    recipe: Recipe
    weights: tuple[Path, ...]
    weight_bytes: int
    in_order: bool
    opening_bytes: int

    @property
    def prepared(self) -> bool:
        return self.recipe not in UNPREPARED

    def options(self, threads: int) -> onnxruntime.SessionOptions:
        return options_of(self.recipe, threads, in_order=self.in_order)

    def open(self, options: onnxruntime.SessionOptions) -> "WholeFragment":
        """Raises `RuntimeFailed`."""
        before = self._mapped()
        session = open_session(str(self.model), options, self.recipe)
        return WholeFragment(self, session, newly_mapped(before, self._mapped()))

    def _mapped(self) -> list[MappedFile]:
        """Where its files are mapped, also by sessions that are about to end."""
        with suppress(OSError):  # a hardened container
            return files_of(self.weights)
        return []


def whole_of(
    folder: Path, prepared: PreparedModel | None, granted_bytes: int | None, spare_bytes: int
) -> Whole:
    """How a fragment in a folder is opened where it is granted so much, beside `spare_bytes`.

    Raises `FragmentDamaged`, `OSError`."""
    files = weight_files(folder)
    size, model = sum(each.stat().st_size for each in files), folder / MODEL
    recipe = None
    if prepared is not None:
        recipe = prepared.recipe_for_whole(size, granted_bytes, spare_bytes)
    if prepared is None or recipe is None:
        recipe = DEQUANTISING if dequantises(folder) else AS_IT_IS
        opening_bytes = _GRAPH_FACTOR * model.stat().st_size
    else:
        opened = prepared.packed if recipe is PREPARED else prepared.unpacked
        model, files, opening_bytes = prepared.model, [prepared.weights], opened.opening_bytes
    return Whole(
        model=model,
        recipe=recipe,
        weights=tuple(each.resolve() for each in files),
        weight_bytes=size,
        in_order=runs_in_order(folder),
        opening_bytes=opening_bytes,
    )


class WholeFragment:
    """One session. It maps its weights, and they stay in memory once they have been read."""

    streamed_bytes = granted_bytes = 0

    def __init__(
        self,
        source: Whole,
        session: onnxruntime.InferenceSession,
        mapped: Sequence[MappedFile],
    ) -> None:
        """`mapped` is where the session has its own weights. Raises `RuntimeFailed`."""
        self._source = source
        self._session = session
        self._mapped = mapped
        self.inputs = tuple(input_spec(value) for value in session.get_inputs())
        self.outputs = tuple(value.name for value in session.get_outputs())
        self._singly: list[PageRange] = []  # what is to be read page by page
        self._brought: list[PageRange] = []  # what of that a run reads as a whole
        self._samples: list[PageRange] = []
        self._brings = True
        self._destinations = Destinations([session], self.outputs)
        self._places = True  # what the model says of the shapes of large outputs is so

    @property
    def prepared(self) -> bool:
        return self._source.prepared

    @property
    def weight_bytes(self) -> int:
        """Without packed copies."""
        return self._source.weight_bytes

    @cached_property
    def table_bytes(self) -> int:
        """Of weights of which items read rows. Raises `OSError`."""
        return table_bytes(self._source.model.read_bytes())

    @property
    def reads_rows(self) -> bool:
        """Whether it has large tables of which it maps the rows that it reads. Raises `OSError`."""
        return self.table_bytes > READ_BYTES

    def run(
        self, feed: Mapping[str, Array], stopper: Stopper, placed: Placed | None = None
    ) -> list[Array]:
        """One item, as arrays of its own or views into the arena; `placed` has those that outputs
        are written into, by default `destinations`. Raises `RuntimeFailed` and its kinds."""
        self._bring(stopper)
        if placed := self.destinations(feed) if placed is None else placed:
            try:
                return self._run_placed(feed, stopper, placed)
            except Exception as error:  # the runtime's exceptions have no common base but this
                failure = failure_of(error, stopped=stopper.stopped)
                if isinstance(failure, Terminated | OutOfBudget):
                    raise failure from error
                self._places = False
        try:
            # As the session's own method does, but for looks at the feed, which has been checked.
            return list(self._session._sess.run(self.outputs, feed, stopper.options))
        except Exception as error:  # as above
            raise failure_of(error, stopped=stopper.stopped) from error

    def _bring(self, stopper: Stopper) -> None:
        """Where its weights would come page by page and wait for a disk."""
        brings, self._brings = self._brings, True
        if not brings or not are_cold(self._samples):
            return
        for each in self._brought:
            if stopper.stopped:
                break
            populate_in_pieces([each])

    def _run_placed(
        self, feed: Mapping[str, Array], stopper: Stopper, placed: Placed
    ) -> list[Array]:
        taken = {name: as_value(array) for name, array in feed.items()}
        made = run_bound(self._session, taken, self.outputs, stopper, placed)
        return [
            placed[name] if name in placed else onnxruntime.OrtValue(value).numpy()
            for name, value in zip(self.outputs, made, strict=True)
        ]

    def destinations(self, feed: Mapping[str, Array]) -> Placed:
        """Where a run may write large outputs: they take memory outside of the arena."""
        return self._destinations.of(feed) if self._places else {}

    def rows(self, feed: Mapping[str, Array]) -> Mapping[str, Array]:
        """As of `BlockFragment`: its tables are mapped."""
        del feed
        return {}

    def keep_nothing_once(self, *, brings: bool = True) -> None:
        """As of `BlockFragment`, but for that it keeps what it has read."""
        self._brings = brings

    def weights_at_once(self) -> int:
        """Weights that a run has in memory at most: all, and of tables what it may read before a
        guard drops them. Raises `OSError`."""
        size = size_of(self.weight_pages())
        tables = min(size, self.table_bytes)
        return size - tables + min(tables, READ_BYTES)

    def keep_within(self, room_bytes: int) -> None:
        """Where its weights take more than there is, since it reads rows of tables, these are to
        come page by page: else each brings what lies around it, from the disk or the page cache.
        The other weights are brought before a run, in requests that suit a disk. Raises
        `OSError`."""
        if size_of(pages := self.weight_pages()) > room_bytes:
            self._read_page_by_page(pages)
            tables = table_ranges(self._source.model.read_bytes())
            mapped = sorted(self._mapped, key=attrgetter("path", "offset"))
            parts = (part for each in mapped for part in beside_tables(each, tables))
            self._brought = [each.pages for each in parts]
            self._samples = nlargest(_SAMPLES, self._brought, attrgetter("size"))
            if cached_bytes(pages) > room_bytes:
                WeightsOnDisk(pages, self.weight_files()).let_go()

    def uncache_unused(self, folder: Path, room_bytes: int) -> None:
        """After a trial: what that has not used of the weights, such as most rows of a table, is to
        leave memory where there is no room for it, and to be read page by page from then on. Else
        the kernel would make room for it, and for what it reads ahead, with what is in use."""
        with suppress(OSError):  # a hardened container
            unused = unused_parts(self.weight_pages())
            if size_of(unused) > room_bytes:
                self._read_page_by_page(unused)
                drop_cached_pages(folder)

    @property
    def pages_read_ahead(self) -> tuple[PageRange, ...]:
        """Its weights, but for what is read page by page."""
        return added(self._singly, self.weight_pages())

    def _read_page_by_page(self, pages: Sequence[PageRange]) -> None:
        read_nothing_ahead(pages)
        self._singly += pages

    def weight_pages(self) -> list[PageRange]:
        """Where its weights are mapped, but for mappings that were written to."""
        own = [each.pages for each in self._mapped]
        return common(clean_pages(self._source.weights), own)

    def weight_files(self) -> frozenset[str]:
        """What these are mapped from."""
        return frozenset(map(str, self._source.weights))
