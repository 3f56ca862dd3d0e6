"""Fragments in ONNX Runtime, executed from memory-mapped weights.

How the weights stay off the heap (measured for ONNX Runtime 1.31):

- The session is opened from the *path* of model.onnx, whose weights are external data: the
  runtime maps them and owns the mapping. Weights of a prepared model are mapped in one piece
  (`mapped_weights`), which saves most page faults.
- Prepacking is off: it makes a second, anonymous copy of every MatMul's weights.
- Optimisation stops at "extended": the level above re-orders convolutions' weights into copies
  (88 MiB for 36 MiB of weights). Optimizers that fold or fuse weights into copies are
  switched off one by one. What is left after opening a session is 0.2 to 0.4 MiB of heap.
- One arena for activations, shared by all sessions. It reserves large regions, of which only what
  is touched is resident, so that blocks merge again (19 MiB instead of 26 for one that grows by
  what is asked for). Tensors lie in them as plans reckon (`arena_regions`).
- A prepared fragment (`preparation`) has what would be copied in a model of its own, and maps it.

Sessions are opened, run and destroyed in one thread; the interpreter's lock is released meanwhile.
Memory is back when `close` returns.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Final

import onnxruntime

from shoal_agent.memory.allocation import Point
from shoal_agent.memory.residency import short
from shoal_agent.memory.swapping import grant_curve
from shoal_agent.runtime import rehearsal_model
from shoal_agent.runtime.ballast import Room
from shoal_agent.runtime.beside_arena import weights_to_come
from shoal_agent.runtime.block_fragment import BlockFragment
from shoal_agent.runtime.blocks import Blocks
from shoal_agent.runtime.described import beside_bytes_of, read_blocks, runs_in_order
from shoal_agent.runtime.failures import Exceeded, NotOpen, RuntimeFailed, Stopper
from shoal_agent.runtime.guard import TRIAL_SECONDS
from shoal_agent.runtime.in_passing import InPassing
from shoal_agent.runtime.inputs import InputMismatch, check_inputs, feed_of
from shoal_agent.runtime.largest_inputs import NotTried, Tried, largest_inputs, tried_inputs
from shoal_agent.runtime.mapped_pages import drop, size_of
from shoal_agent.runtime.open_block import run_both_ways
from shoal_agent.runtime.prepared import NOTHING_PREPARED, Prepared
from shoal_agent.runtime.process_memory import LOADING_BYTES, MemoryMeter
from shoal_agent.runtime.recipes import AS_IT_IS
from shoal_agent.runtime.results import Passed, RunResult
from shoal_agent.runtime.runs import OpenFragment, Runs
from shoal_agent.runtime.sessions import open_session, opens, options_of
from shoal_agent.runtime.unplanned_runs import Scratch, Unplanned, UnplannedRuns
from shoal_agent.runtime.whole_fragment import Whole, WholeFragment, whole_of
from shoal_agent.runtime.widening import Widening
from shoal_agent.runtime.working_arena import WorkingArena
from shoal_agent.telemetry.logs import log
from shoal_protocol.tensors import Array

_KNOWN_FRAGMENTS: Final = 1024
"""Of so many it is known that they were opened before."""
_PACKING_SECONDS: Final = 0.03
"""An input may wait for so long while blocks are packed; one block may take longer."""


class Runtime:
    """The fragments that are open. Not thread-safe: use one thread."""

    def __init__(
        self,
        meter: MemoryMeter,
        *,
        threads: int,
        limit_bytes: int,
        free: Callable[[], int] | None = None,
        held: Callable[[], int] = lambda: 0,
    ) -> None:
        """`limit_bytes` is the largest budget before `enlarge`; `free` says what of the present one
        nobody was granted; None: what is not in use; `held` what work has besides fragments."""
        self._meter = meter
        self.threads = threads
        self._processor_clock = thread_time if threads == 1 else process_time
        self._open: dict[str, OpenFragment] = {}
        self._prepared: dict[str, Prepared] = {}
        self._blocks: dict[str, Blocks] = {}
        self._scratch: dict[str, Scratch] = {}
        self._widening = Widening(threads)
        self._opened_once: set[str] = set()
        self._passing = InPassing(meter)
        self._runs = Runs(meter, self._processor_clock, self._passing.begin_peak, self.shrink)
        onnxruntime.set_default_logger_severity(4)
        self._held = held
        self._free = free or (lambda: self.limit_bytes - meter.used_at_most_bytes())
        self._arena = WorkingArena(meter, limit_bytes, threads, self._widening)
        self._unplanned = UnplannedRuns(meter, self._runs, lambda: self._arena, self.shrink)
        self.shrink()

    @property
    def limit_bytes(self) -> int:
        """The largest budget that there may be."""
        return self._arena.limit_bytes

    def enlarge(self, limit_bytes: int) -> None:
        """Have room for a larger budget, while no fragment is open."""
        self._arena = self._arena.enlarged(limit_bytes)
        self.shrink()

    def rehearse(self) -> None:
        """Run a model of what most models are made of, as whole and as blocks, and let it go;
        raises `RuntimeFailed`."""
        session = open_session(rehearsal_model.model(), options_of(AS_IT_IS, self.threads))
        run_both_ways(session, rehearsal_model.feed())
        del session
        gc.collect()
        self.shrink()

    def open(
        self,
        digest: str,
        folder: Path,
        granted_bytes: int | None = None,
        prepared: Prepared = NOTHING_PREPARED,
        *,
        soon: bool = False,
    ) -> tuple[Point, ...]:
        """Make a fragment ready to run within `granted_bytes` (None: whatever it takes). What it
        streams at several grants, from the least that it can run in; empty: it has no blocks.
        `soon`: what takes long and can be done later is left to `pack`.

        Raises `RuntimeFailed`, `FragmentDamaged`, `OSError`.
        """
        if not self._opened_once:  # from then on, closing says what has grown
            self.note_growth(LOADING_BYTES)
        blocks = read_blocks(folder)
        if blocks is not None and granted_bytes is not None:
            blocks.check(granted_bytes)
        try:
            fragment = self._fragment(folder, blocks, granted_bytes, prepared, soon=soon)
        except (RuntimeFailed, OSError, ValueError) as error:
            if prepared == NOTHING_PREPARED:
                raise
            # Its files may have made room for others meanwhile.
            log.warning("%s is opened unprepared: %s", short(digest), error)
            fragment = self._fragment(folder, blocks, granted_bytes, NOTHING_PREPARED)
        if isinstance(fragment, WholeFragment) and granted_bytes is not None:
            fragment.keep_within(granted_bytes + max(0, self._free()))
        self._open[digest], self._prepared[digest] = fragment, prepared
        self._scratch.setdefault(digest, Scratch(beside_bytes_of(folder)))
        # Parsing and optimising leave freed heap and pages of code behind, packing some arena. What
        # runs need of code returns in some milliseconds: too much for fragments that take turns.
        self.shrink()
        self._meter.give_back(still_in_use=digest in self._opened_once)
        if len(self._opened_once) >= _KNOWN_FRAGMENTS:
            self._opened_once.clear()
        self._opened_once.add(digest)
        if blocks is None:
            return ()
        self._blocks[digest] = blocks
        return grant_curve(blocks.blocks, blocks.resident_bytes)

    def _fragment(
        self,
        folder: Path,
        blocks: Blocks | None,
        granted_bytes: int | None,
        prepared: Prepared,
        *,
        soon: bool = False,
    ) -> OpenFragment:
        most_bytes = 0 if blocks is None else blocks.resident_bytes
        if blocks is not None and granted_bytes is not None and granted_bytes < most_bytes:
            if prepared.blocks is not None:
                blocks = blocks.with_prepared(prepared.blocks, granted_bytes)
            blocks, threads = blocks.with_threads(self.threads, granted_bytes)
            if soon:
                blocks = blocks.unpacked_first(granted_bytes)
            sessions = opens(threads, in_order=runs_in_order(folder))
            return BlockFragment(blocks, granted_bytes, sessions, self._arena.region)
        whole = self._whole(folder, granted_bytes, prepared)
        return whole.open(whole.options(self.threads))

    def _whole(self, folder: Path, granted_bytes: int | None, prepared: Prepared) -> Whole:
        spare_bytes = self.limit_bytes - (granted_bytes or 0)
        return whole_of(folder, prepared.whole, granted_bytes, spare_bytes)

    def grant(self, digest: str, granted_bytes: int) -> None:
        """Run a fragment within so many bytes from now on; what can be done later is left to
        `widen` and `pack`. It is not open any more where that fails; raises as `open`."""
        fragment, blocks = self._open.get(digest), self._blocks.get(digest)
        if fragment is None or blocks is None:
            return
        if self._widening.discard(digest):
            self.shrink()
        prepared, beside_bytes, whole = self._prepared[digest], 0, None
        if granted_bytes >= blocks.resident_bytes:
            if isinstance(fragment, WholeFragment):
                return
            whole = self._whole(blocks.folder, granted_bytes, prepared)
            if fragment.is_prepared and not whole.prepared:
                whole = None  # it would run slower than its blocks
            else:
                beside_bytes = whole.opening_bytes
        if isinstance(fragment, BlockFragment) and fragment.runs_in(granted_bytes - beside_bytes):
            fragment.grant(granted_bytes - beside_bytes)
            if whole is not None:
                self._widening.want(digest, whole)
            return
        del fragment
        scratch = self._scratch[digest]
        self.close(digest)
        self._scratch[digest] = scratch
        self.open(digest, blocks.folder, granted_bytes, prepared, soon=True)

    def widen(self, digest: str) -> Future[bool] | None:
        """Have a fragment whose grant has grown take the place of its blocks, if it is open by now;
        else what will say whether it is, when that has been tried. None: nothing is left to do."""
        try:
            opened = self._widening.step(digest)
        except RuntimeFailed as error:
            log.warning("%s runs in blocks still: %s", short(digest), error)
            return None
        if not isinstance(opened, WholeFragment):
            return opened
        self._open[digest] = opened
        gc.collect()  # the blocks go now
        self.shrink()
        self._meter.give_back(still_in_use=True)
        return None

    @property
    def opens_beside(self) -> bool:
        """Whether a fragment is being opened while its blocks run."""
        return self._widening.under_way

    def pack(self, digest: str) -> bool:
        """Do a part of what was left when a grant was adopted: one block, and others for as long as
        an input may wait for them; whether there is more to do."""
        fragment, until = self._open.get(digest), perf_counter() + _PACKING_SECONDS
        if not isinstance(fragment, BlockFragment) or not fragment.may_pack:
            return False
        if self._widening.wants(digest):
            return False  # `widen` comes first
        try:
            fragment.pack_one()
            while fragment.may_pack and perf_counter() < until:
                fragment.pack_one()
        except (RuntimeFailed, OSError, ValueError) as error:
            log.warning("%s runs with blocks that are not packed: %s", short(digest), error)
            return False
        finally:
            self.shrink()
        self._meter.give_back(still_in_use=True)
        return fragment.may_pack

    def run(  # noqa: PLR0913 - what is known of a run
        self,
        digest: str,
        tensors: Mapping[str, Array],
        stopper: Stopper,
        limit_bytes: int | None = None,
        *,
        is_known: bool = True,
        is_tried: bool = True,
        is_larger: bool = False,
        planned_bytes: int = 0,
    ) -> RunResult:
        """Run a fragment; raises `InputMismatch`, or `RuntimeFailed` and its kinds. With a limit it
        is stopped where this process takes more: `Exceeded`; but not as long as it takes what was
        planned, if it was tried. Untried, or with an item larger than in its trial, it gets no more
        of the arena than is left beside the weights that it has in memory at one time. Where that
        is too little for a larger item, it takes the place of weights, which no finer cut would
        give it."""
        fragment = self._opened(digest)
        feed = feed_of(fragment.inputs, tensors)
        if limit_bytes is not None:
            self._widening.stop()
            self.shrink()  # what other items have left in the arena is not this one's
            if is_tried and not is_larger:
                return self._runs.run_guarded(
                    fragment, feed, stopper, limit_bytes, planned_bytes=planned_bytes
                )
            known = is_known and not is_larger
            in_blocks = isinstance(fragment, BlockFragment)
            dropped = () if known and not in_blocks else self._open.values()
            weights = [pages for each in dropped for pages in each.weight_pages()]
            return self._unplanned.run(
                Unplanned(
                    *(fragment, feed, stopper, limit_bytes, weights),
                    scratch_bytes=self._scratch[digest].beside(feed),
                    is_known=known,
                    is_larger=is_larger,
                )
            )
        return self._runs.run(fragment, feed, stopper, self.limit_bytes)

    def open_and_try(  # noqa: PLR0913 - what is known of a run
        self,
        digest: str,
        folder: Path,
        granted_bytes: int,
        prepared: Prepared,
        limit_bytes: int,
        coming_bytes: int = 0,
        *,
        goes_on: Callable[[], None] | None = lambda: None,
    ) -> tuple[tuple[Point, ...], Tried]:
        """`open`, and run it with inputs of the largest shapes that were planned for, before there
        is work, while so much is on its way here; `goes_on` as in `Ballast.least_peak`. Raises as
        `open`."""
        self._widening.stop()
        self.shrink()
        before = self._meter.used_bytes()
        curve = self.open(digest, folder, granted_bytes, prepared)
        fragment = self._opened(digest)
        fixed = self._meter.used_bytes() - before + size_of(fragment.weight_pages())
        is_prepared = self.runs_prepared(digest)
        try:
            feed = largest_inputs(folder, fragment.inputs, granted_bytes)
            size = sum(array.nbytes for array in feed.values())
            self._scratch[digest] = replace(self._scratch[digest], input_bytes=size)
            check_inputs(fragment.inputs, feed)
            placed_bytes = sum(each.nbytes for each in fragment.destinations(feed).values())
            self.shrink()
            room = Room(
                limit_bytes=limit_bytes,
                planned_bytes=before + granted_bytes,
                used_bytes=self._meter.used_bytes() + placed_bytes,
                coming_bytes=coming_bytes,
                weight_bytes=weights_to_come(fragment),
                in_blocks=isinstance(fragment, BlockFragment),
                beside_bytes=self._scratch[digest].size_bytes,
            )
            run = partial(self._try, fragment, tried_inputs(feed))
            peak = self._arena.ballast.least_peak(run, room, goes_on)
        except Exceeded as error:
            taken = error.peak_bytes - before
            return curve, Tried(taken_bytes=taken, stopped=True, prepared=is_prepared)
        except (NotTried, InputMismatch, RuntimeFailed) as error:
            # What was made up need not suit what the fragment computes: work will show.
            return curve, Tried(reason=str(error))
        finally:
            self.shrink()
        if isinstance(fragment, WholeFragment):
            fragment.uncache_unused(folder, limit_bytes - peak.size_bytes)
        return curve, Tried(
            taken_bytes=peak.size_bytes - before,
            fixed_bytes=fixed,
            input_bytes=size,
            prepared=is_prepared,
            bounded=peak.bounded,
        )

    def _try(
        self,
        fragment: OpenFragment,
        feeds: Sequence[Mapping[str, Array]],
        limit_bytes: int,
        planned_bytes: int,
    ) -> RunResult:
        """The run that took the most, of those that take one branch or another."""
        stopper, results = Stopper(TRIAL_SECONDS), list[RunResult]()
        run = partial(self._runs.run_guarded, fragment, planned_bytes=planned_bytes)
        for each in feeds:
            ran = run(each, stopper, limit_bytes)
            ran.outputs.clear()  # nothing of them beside the next one
            results.append(ran)
        return max(results, key=attrgetter("peak_bytes"))

    def run_in_passing(self, digest: str, items: Sequence[Mapping[str, Array]]) -> Passed | None:
        """Run a fragment that takes next to no time, on items one after the other, in the event
        loop's own thread, while nothing else runs. None: it took long for once, or much, and is to
        be run the other way. Raises as `run`, because of any of the items."""
        fragment = self._opened(digest)
        feeds = [feed_of(fragment.inputs, tensors) for tensors in items]
        ran = self._passing.run(fragment.run, feeds, self._processor_clock)
        if ran is None:
            return None
        outputs, seconds, processor_seconds = ran
        named = [dict(zip(fragment.outputs, each, strict=True)) for each in outputs]
        streamed, granted = fragment.streamed_bytes, fragment.granted_bytes
        return Passed(named, seconds, processor_seconds, streamed, granted)

    def peak_in_passing(self, digest: str) -> int:
        """The peak after runs of a fragment in passing: since the last run of the other kind, and
        not always the newest."""
        return self._passing.peak_bytes(self.weight_bytes(digest))

    def has_room_for(self, peak_bytes: int, limit_bytes: int) -> bool:
        """Whether a run that takes so much in an empty arena keeps the limit in this one, where it
        may take other regions than runs before, which are in memory still."""
        spreads = self._arena.spreads(peak_bytes)
        return not spreads or self._meter.used_at_most_bytes() + peak_bytes <= limit_bytes

    def _opened(self, digest: str) -> OpenFragment:
        """A fragment that is to run now."""
        if (fragment := self._open.get(digest)) is None:
            raise NotOpen(f"{digest} is not resident any more")
        if isinstance(fragment, BlockFragment):
            fragment.read_ahead(self._free())
        return fragment

    def close(self, digest: str) -> int:
        """Give a fragment up; the bytes that came back. Its memory is back on return."""
        before = self._meter.used_bytes()
        self._widening.discard(digest)
        for known in (self._open, self._prepared, self._blocks, self._scratch):
            known.pop(digest, None)
        gc.collect()  # the session goes now, not when a cycle through it is found
        self.shrink()
        self._meter.give_back()
        freed = max(0, before - self._meter.used_bytes())
        self.note_growth()
        return freed

    def note_growth(self, passing_bytes: int = 0) -> None:
        """Tell apart what it has grown by itself, not for a moment, where no fragment is open."""
        if not self._open:
            self._meter.note_growth(self._held() + passing_bytes)

    @property
    def grown_bytes(self) -> int:
        """Of that, what is in no reserve."""
        return self._meter.beyond_reserve_bytes

    def runs_prepared(self, digest: str) -> bool:
        """Whether a fragment is open as a whole, in the form prepared for it."""
        fragment = self._open.get(digest)
        return isinstance(fragment, WholeFragment) and fragment.prepared

    def weight_bytes(self, digest: str) -> int:
        """Of a fragment that is open as a whole; else none."""
        fragment = self._open.get(digest)
        return fragment.weight_bytes if isinstance(fragment, WholeFragment) else 0

    def table_bytes(self, digest: str) -> int:
        """Of a fragment that is open as a whole, weights of which items read rows; else none."""
        fragment = self._open.get(digest)
        return fragment.table_bytes if isinstance(fragment, WholeFragment) else 0

    def drop_weights(self, digest: str) -> None:
        """Let a fragment's mapped weights go: rows of a table have gathered in memory. The next run
        reads again what it needs, mostly from the page cache: 20 MB in under a millisecond."""
        if (fragment := self._open.get(digest)) is not None:
            drop(fragment.weight_pages())

    def shrink(self) -> None:
        """Give back what neither fragments nor activations hold."""
        self._arena.region.empty()
