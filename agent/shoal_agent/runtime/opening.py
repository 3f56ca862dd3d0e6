"""From a digest to a fragment that can run: fetched, verified, prepared, opened, tried.

The trial comes before any work: what it measures replaces the estimate. It is left out where the
estimate is small beside what is free, where it was made before, and where sizes follow from what
the inputs hold: made-up ones would say nothing, and each run is guarded. A fragment that takes more
than there is is tried again: as it was cut, if it was prepared, then in blocks (`memory.trials`).
One whose trial has ended this agent a moment ago is taken to need more (`trial_marks`).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.cache.fetching import Fetched, Fetcher, Source
from shoal_agent.memory.allocation import Point
from shoal_agent.memory.residency import Ledger, short
from shoal_agent.memory.trials import Trial, is_worth_a_trial, need_of_stopped, next_grant
from shoal_agent.runtime.blocks import GrantTooSmall
from shoal_agent.runtime.described import description
from shoal_agent.runtime.failures import MORE_OR_SMALLER, Exceeded, OverBudget
from shoal_agent.runtime.in_background import begin
from shoal_agent.runtime.largest_inputs import Tried, unplanned_inputs
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.preparation import Preparation
from shoal_agent.runtime.prepared import Prepared
from shoal_agent.runtime.processor import Processor
from shoal_agent.runtime.trial_marks import MarkedTrial, TrialMarks
from shoal_agent.telemetry.logs import log
from shoal_agent.transport.buffers import nothing_arrives
from shoal_protocol.frame_sizes import FETCH_BYTES
from shoal_protocol.manifest import CHOOSES, UNKNOWN_SIZES, FragmentDamaged
from shoal_protocol.seen_sizes import is_within
from shoal_protocol.tensors import Array
from shoal_protocol.units import Bytes, format_apart, format_bytes

_FETCHES_AFTER_DAMAGE: Final = 2
_KNOWN_TRIALS: Final = 1024
_KNOWN_UNPLANNED: Final = 256
"""And those that are here: what an agent knows does not grow with all that it has ever had."""
_MARK: Final = "trial.json"
_RESERVE: Final = 8
"""One part in so many of the budget is not for an item that is larger than planned: a run is
stopped between two nodes, and one node may take as much beyond what it is stopped at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """It can run now, within `granted`. `curve`: what it streams at several grants, from the least
    that its blocks can run in; empty: it has none. `taken` is what it took in its trial; None: it
    was not tried. `manifest` is empty where items are to run one by one."""

    fetched_bytes: int
    granted: Bytes
    curve: tuple[Point, ...]
    taken: Bytes | None
    manifest: Mapping[str, object]

    @property
    def least(self) -> Bytes | None:
        return _least(self.curve)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A fragment became resident: what the ledger reckons, time, that of this process's threads on
    processors meanwhile, and bytes fetched for it."""

    resident_bytes: int
    seconds: float
    processor_seconds: float
    fetched_bytes: int


@dataclass(frozen=True, slots=True)
class UnloadResult:
    """A fragment gave so many bytes back; time, and processor time as of a load."""

    freed_bytes: int
    seconds: float
    processor_seconds: float


class _Key(NamedTuple):
    """How a fragment was tried: within so many bytes, prepared if it could be, or `as_cut`."""

    digest: str
    granted: Bytes
    as_cut: bool


_Trying = tuple[str, Path, int, Prepared, int, int]
"""What `Runtime.open_and_try` is given, but for what it calls."""


class Opening:
    """Opens fragments. `room` says what there is beside what is granted."""

    def __init__(
        self,
        cache: FragmentCache,
        fetcher: Fetcher,
        preparation: Preparation,
        runtime: Runtime,
        processor: Processor,
        ledger: Ledger,
    ) -> None:
        self._cache = cache
        self._fetcher = fetcher
        self._preparation = preparation
        self._runtime = runtime
        self._processor = processor
        self._ledger = ledger
        self._trials: dict[_Key, Trial | None] = {}
        self._ran: dict[str, Trial] = {}
        self._unknown: dict[str, Mapping[str, tuple[int, ...] | None]] = {}
        self._bounded: set[str] = set()
        self._prefetching: set[asyncio.Task[Fetched]] = set()
        self._marks = TrialMarks(cache.folder.with_name(_MARK))

    async def prefetch(
        self,
        digest: str,
        sources: Sequence[Source],
        request_move: Callable[[int], bool],
        end_move: Callable[[int], None],
    ) -> Fetched:
        """Bring a fragment into the cache, where there is room for what gRPC receives ahead
        meanwhile: nothing else is granted for it, and it ends where a load needs that
        (`end_prefetches`). Raises as `open` does."""
        if digest in self._cache:
            return Fetched(0, 0.0)
        if not request_move(FETCH_BYTES):
            need, have = format_apart(FETCH_BYTES, self._ledger.free)
            reason = f"{short(digest)} is not fetched now: needs {need} on its way, have {have}"
            raise OverBudget(FETCH_BYTES, self._ledger.free, reason)
        fetching = begin(self._fetcher.fetch_ahead(digest, sources), self._prefetching)
        fetching.add_done_callback(lambda _: end_move(FETCH_BYTES))
        try:
            await asyncio.wait((fetching,))
        finally:
            fetching.cancel()
        if fetching.cancelled():
            reason = f"{short(digest)} is not fetched now: a load needs the memory"
            raise OverBudget(FETCH_BYTES, self._ledger.free, reason)
        return fetching.result()

    def end_prefetches(self) -> None:
        """A load waits for memory: what is fetched ahead may take minutes, and can come later."""
        for fetching in self._prefetching:
            fetching.cancel()

    async def open(self, digest: str, granted_bytes: int, sources: Sequence[Source]) -> Opened:
        """Raises `OverBudget`, `FragmentUnavailable`, `FragmentDamaged`, `CacheFull`,
        `RuntimeFailed`, `OSError`."""
        fetched_bytes, folder = await self._fetched(digest, sources)
        manifest = await asyncio.to_thread(description, folder)
        if manifest.get(UNKNOWN_SIZES) is True:
            if len(self._unknown) >= _KNOWN_UNPLANNED:
                here = self._ledger.resident.keys() | self._ledger.in_flight.keys()
                self._unknown = {key: self._unknown[key] for key in self._unknown.keys() & here}
            self._unknown[digest] = await asyncio.to_thread(unplanned_inputs, folder)
        self._forget_stopped(digest, granted_bytes + self._ledger.free_for_fragments)
        granted, number, as_cut = Bytes(granted_bytes), 1, False
        while True:
            curve, trial = await self._open(digest, folder, granted, number, as_cut=as_cut)
            room = Bytes(granted_bytes + self._ledger.free_for_fragments)
            if trial is not None and trial.stopped and trial.taken <= room:
                # Something else took memory beside it: how much it takes by itself is not known,
                # but that there is not enough.
                trial = replace(trial, taken=Bytes(room + 1))
                if (key := _Key(digest, granted, as_cut)) in self._trials:
                    self._trials[key] = trial
            if trial is None or trial.taken <= room:
                taken = None if trial is None else trial.taken
                self._note_bounded(digest, trial is not None and trial.bounded)
                if taken is not None and manifest.get(CHOOSES) is True:
                    taken = max(taken, granted)  # of branches that did not run
                return Opened(
                    fetched_bytes=fetched_bytes,
                    granted=granted,
                    curve=curve,
                    taken=taken,
                    manifest={} if digest in self._bounded else manifest,
                )
            if not trial.prepared:
                least = _least(curve)
                less = None if least is None else next_grant(trial, least, room, number)
                if less is None:
                    least = (
                        need_of_stopped(room, self._ledger.budget) if trial.stopped else trial.taken
                    )
                    need = max(trial.taken, least)
                    raise OverBudget(need, room, _too_large(digest, trial, room))
                granted, number = less, number + 1
            as_cut = trial.prepared
            log.warning(
                "%s took %s in a trial within %s, have %s: tried again %s",
                short(digest),
                format_bytes(trial.taken),
                format_bytes(trial.granted),
                format_bytes(room),
                "as it was cut" if as_cut else f"within {format_bytes(granted)}, in blocks",
            )
            await self._processor.call(self._runtime.close, digest)

    def trial_of(self, digest: str) -> Trial | None:
        """Its run with the largest inputs of the plan: larger ones are not planned for. Of several,
        that which took the least."""
        return self._ran.get(digest)

    def is_known(self, digest: str) -> bool:
        """Whether what a run takes follows from the sizes of its inputs: else each is bounded."""
        return digest not in self._unknown and digest not in self._bounded

    def sizes_seen(self, digest: str, tensors: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
        """Of what a run takes, the sizes that no plan knows, and that no item has shown before."""
        unplanned = self._unknown.get(digest, {})
        return {
            name: array.shape
            for name, array in tensors.items()
            if name in unplanned and not is_within(array.shape, unplanned[name])
        }

    async def _fetched(self, digest: str, sources: Sequence[Source]) -> tuple[int, Path]:
        """Bytes that had to be fetched, and the fragment's folder, verified."""
        fetched_bytes = 0
        for attempt in range(_FETCHES_AFTER_DAMAGE):
            fetched = await self._fetcher.ensure(digest, sources)
            fetched_bytes += fetched.fetched_bytes
            try:
                return fetched_bytes, await asyncio.to_thread(self._cache.verify, digest)
            except FragmentDamaged:
                if attempt + 1 == _FETCHES_AFTER_DAMAGE:
                    raise
        raise AssertionError("the loop returns or raises")

    async def _open(
        self, digest: str, folder: Path, granted: Bytes, number: int, *, as_cut: bool
    ) -> tuple[tuple[Point, ...], Trial | None]:
        """What it streams at several grants, and takes within this one, where that is known."""
        prepared = await self._preparation.prepare(digest, folder, granted)
        if as_cut:
            prepared = replace(prepared, whole=None)
        key, ledger = _Key(digest, granted, as_cut), self._ledger
        known = self._trials.get(key)
        arguments = (digest, folder, granted, prepared)
        is_wanted = (
            number > 1 or as_cut or is_worth_a_trial(granted, granted + ledger.free_for_fragments)
        )
        try:
            if key in self._trials or not is_wanted or digest in self._unknown:
                curve = await self._processor.call(self._runtime.open, *arguments)
            elif self._marks.ended_its_process(
                mark := MarkedTrial(digest, as_cut, granted, ledger.budget)
            ):
                log.warning("a trial of %s has ended this agent's last process", short(digest))
                curve = await self._processor.call(self._runtime.open, *arguments)
                whole = await self._processor.call(self._runtime.runs_prepared, digest)
                tried = Tried(taken_bytes=ledger.budget + 1, stopped=True, prepared=whole)
                known = self._note(key, tried, Bytes(0))
            else:
                before, coming = ledger.activations, ledger.moving
                with nothing_arrives(ledger, ledger.free):
                    curve, tried = await self._processor.call(
                        self._try_marked, mark, *arguments, ledger.budget, coming
                    )
                left = Bytes(max(0, before - ledger.activations))
                known = self._note(key, tried, left)
        except GrantTooSmall as error:
            reason = f"{short(digest)} {error}"
            raise OverBudget(error.need_bytes, error.have_bytes, reason) from error
        return curve, known

    def _forget_stopped(self, digest: str, room: int) -> None:
        """Trials that were stopped where there was less than now say nothing of what there is."""
        for key, trial in list(self._trials.items()):
            if key.digest == digest and trial is not None and trial.stopped and trial.taken <= room:
                del self._trials[key]

    def _note_bounded(self, digest: str, is_bounded: bool) -> None:
        self._bounded &= self._ledger.resident.keys() | self._ledger.in_flight.keys()
        self._bounded.discard(digest)
        if is_bounded:
            log.warning("%s runs item by item, with what there is of the arena", short(digest))
            self._bounded.add(digest)

    def _try_marked(
        self, mark: MarkedTrial, *arguments: *_Trying
    ) -> tuple[tuple[Point, ...], Tried]:
        ended = self._marks.ended_its_process(mark._replace(as_work=True))
        with self._marks.running(mark) as goes_on:
            return self._runtime.open_and_try(*arguments, goes_on=None if ended else goes_on)

    def _note(self, key: _Key, tried: Tried, left: Bytes) -> Trial | None:
        """What the trial says. Activations that `left` memory meanwhile made room for the fragment,
        which may have taken so much more; that is not remembered, for it may have taken less."""
        digest, trial = key.digest, None
        if tried.taken_bytes is None:
            log.info("%s was not tried: %s", short(digest), tried.reason)
        else:
            taken = Bytes(max(0, tried.taken_bytes + left))
            trial = Trial(
                granted=key.granted,
                taken=taken,
                fixed=Bytes(tried.fixed_bytes),
                input_bytes=Bytes(tried.input_bytes),
                stopped=tried.stopped,
                prepared=tried.prepared,
                bounded=tried.bounded,
            )
            log.info("%s took %s in a trial", short(digest), format_bytes(taken))
            if not trial.stopped:
                self._ran[digest] = min(trial, self._ran.get(digest, trial), key=_taken)
        if left:
            return trial
        while len(self._trials) >= _KNOWN_TRIALS:
            forgotten = next(iter(self._trials))
            del self._trials[forgotten]
            self._ran.pop(forgotten.digest, None)
        self._trials[key] = trial
        return trial


def _least(curve: tuple[Point, ...]) -> Bytes | None:
    return Bytes(curve[0].granted) if curve else None


def _taken(trial: Trial) -> int:
    return trial.taken


def _too_large(digest: str, trial: Trial, room: Bytes) -> str:
    tried = f"{short(digest)} was tried with the largest inputs of the plan"
    if trial.stopped and trial.taken <= room + 1:
        return f"{tried}: takes more than the {format_bytes(room)} that there are"
    taken, had = format_apart(trial.taken, room)
    return f"{tried}: takes {'more than' if trial.stopped else 'up to'} {taken}, have {had}"


def limit_of_larger(trial: Trial, input_bytes: int, budget: Bytes) -> Bytes:
    """What an item may take that is larger than planned. One that is too large is refused before it
    takes anything: raises `Exceeded`."""
    if (need := trial.need(input_bytes)) > budget:
        needed, had = format_apart(need, budget)
        reason = (
            f"its input of {format_bytes(input_bytes)} makes it need about {needed}, "
            f"have {had}; {MORE_OR_SMALLER}"
        )
        raise Exceeded(reason, need)
    return Bytes(budget - budget // _RESERVE)
