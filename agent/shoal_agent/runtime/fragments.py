"""Fragments on this device: fetched, loaded, measured, given up. The ledger decides, this does.

Changes of residency happen in the order in which they were asked for: a load is admitted when every
unload before it has returned its memory. What is admitted then fetches and opens beside the others.
Everything that touches ONNX Runtime runs in one thread, the processor.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter, process_time

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.cache.fetching import Fetched, Fetcher, Source
from shoal_agent.memory.allocation import Share, urgency_of
from shoal_agent.memory.demands import Demand, Evict, Grant, Load, MakeRoom, Reclaim, Refusal, Spill
from shoal_agent.memory.residency import Ledger, short
from shoal_agent.memory.trials import need_of_stopped
from shoal_agent.runtime.batches import Batches
from shoal_agent.runtime.enlarging import Enlarging
from shoal_agent.runtime.failures import Exceeded, NotResident, OverBudget
from shoal_agent.runtime.gathered_rows import GatheredRows
from shoal_agent.runtime.granting import Granting, finish
from shoal_agent.runtime.in_background import begin
from shoal_agent.runtime.light_runs import LightRuns
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.opening import LoadResult, Opening, UnloadResult, limit_of_larger
from shoal_agent.runtime.preparation import Preparation
from shoal_agent.runtime.process_memory import MAPPED_FROM_BYTES, trim, tune_allocator
from shoal_agent.runtime.processor import Processor
from shoal_agent.runtime.results import RunResult
from shoal_agent.runtime.spilling import Spilling
from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.logs import log
from shoal_agent.transport.buffers import Buffers, nothing_arrives
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.tensors import Array
from shoal_protocol.units import Bytes, format_apart, format_bytes


class Fragments:
    """The fragments of one agent process; they outlive its sessions."""

    def __init__(  # noqa: PLR0913 - the parts that it joins
        self,
        *,
        ledger: Ledger,
        cache: FragmentCache,
        fetcher: Fetcher,
        runtime: Runtime,
        processor: Processor,
        counters: Counters,
        on_evicted: Callable[[str, str], None],
    ) -> None:
        """`on_evicted` receives each fragment that was evicted unasked, and why."""
        self.ledger = ledger
        self.cache = cache
        self._fetcher = fetcher
        self._runtime = runtime
        self.processor = processor
        self._counters = counters
        self._on_evicted = on_evicted
        preparation = Preparation(cache, self.request_move, self.end_move)
        self.opening = Opening(cache, fetcher, preparation, runtime, processor, ledger)
        self.buffers = Buffers(ledger, MAPPED_FROM_BYTES, trim)
        make_room = self.buffers.make_room
        self.batches = Batches(ledger, processor, runtime, make_room, self.end_move)
        self._turn = asyncio.Lock()
        self._loading: dict[str, asyncio.Event] = {}
        self._enlarging = Enlarging(
            ledger, runtime, processor, self._turn, self._loading, self._close
        )
        self._evicting: set[asyncio.Task[None]] = set()
        self._measured: set[str] = set()
        self._gathered = GatheredRows(ledger, processor, runtime, self.buffers)
        self.light = LightRuns(ledger, processor, self.opening, self._measured, self._gathered)
        self._held: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self.spilling = Spilling(ledger, self.buffers, self._carry_out)
        call = processor.call
        widen, pack = partial(call, runtime.widen), partial(call, runtime.pack)
        later = partial(finish, widen, pack, self._note_change)
        self._granting = Granting(
            ledger, partial(call, runtime.grant), later, counters, self._cannot_run
        )

    # ---- what sessions ask for ---------------------------------------------------------------

    async def load(
        self, digest: str, need_bytes: int, sources: Sequence[Source], priority: int = 0
    ) -> LoadResult:
        """Make a fragment resident, to run within `need_bytes`: as a whole if that is enough for
        it, else in blocks. `priority` weighs where memory is divided. Raises `OverBudget`,
        `SpillFull`, `FragmentUnavailable`, `FragmentDamaged`, `CacheFull`, `RuntimeFailed`,
        `OSError`.
        """
        started, used = perf_counter(), process_time()
        while True:
            async with self._turn:
                with self.buffers.yielding():
                    admitted = digest not in self._loading and await self._admit(digest, need_bytes)
            if admitted:
                break
            if digest in self.ledger.resident:
                return LoadResult(self.ledger.resident[digest], perf_counter() - started, 0.0, 0)
            # Somebody else loads it, or did and lost its place. Then this load is one of its own.
            await self._loading[digest].wait()
        self._loading[digest] = asyncio.Event()
        self.cache.pin(digest)
        try:
            await self._granting.wait()  # others may run within less for it
            opened = await self.opening.open(digest, need_bytes, sources)
            self.ledger.finish_load(
                digest, opened.least, opened.curve, opened.granted, urgency_of(priority)
            )
            if opened.taken is not None:
                self._counters.memory_ratio.observe(opened.taken / max(1, need_bytes))
                self._carry_out(self.ledger.measure(digest, opened.taken))
        finally:
            await self._end_load(digest)
        if digest not in self.ledger.resident:
            have = self.ledger.free_for_fragments
            raise OverBudget(need_bytes, have, f"{short(digest)} was given up while it was loaded")
        self.batches.opened(digest, opened.manifest)
        seconds, spent = perf_counter() - started, process_time() - used
        self._counters.load.observe(seconds)
        result = LoadResult(self.ledger.resident[digest], seconds, spent, opened.fetched_bytes)
        self._carry_out(self.ledger.lend())
        return result

    async def _end_load(self, digest: str) -> None:
        """Whichever way a load has ended, nothing is left of one that failed, nor of its moves."""
        self.buffers.give_back()
        try:
            if digest not in self.ledger.resident:
                await self.processor.call(self._runtime.close, digest)
        finally:
            if digest not in self.ledger.resident:
                self.cache.unpin(digest)
                self.ledger.fail_load(digest)
            self._loading.pop(digest).set()
            self._changed.set()  # what its trial held is free

    async def unload(self, digest: str) -> UnloadResult:
        """Give a fragment up: its memory is back on return. Raises `NotResident`."""
        async with self._turn:
            if (loading := self._loading.get(digest)) is not None:
                await loading.wait()
            if digest not in self.ledger.resident:
                raise NotResident(f"{short(digest)} is not resident")
            started, used = perf_counter(), process_time()
            freed = await self._close(digest)
            return UnloadResult(freed, perf_counter() - started, process_time() - used)

    async def prefetch(self, digest: str, sources: Sequence[Source]) -> Fetched:
        """Bring a fragment into the cache, where there is room for that. Raises as `load` does."""
        return await self.opening.prefetch(digest, sources, self.request_move, self.end_move)

    async def run(self, digest: str, tensors: Mapping[str, Array]) -> RunResult:
        """Run a resident fragment on one item's tensors, and measure it. Raises `NotResident`,
        `OverBudget` (it is not resident any more then), `InputMismatch`, `RuntimeFailed`."""
        if digest not in self.ledger.resident:
            raise NotResident(f"{short(digest)} is not resident")
        known = digest in self._measured
        if not known:
            await self.batches.give_back()
        terms = self._terms(digest)
        result, before = await self._run(digest, tensors)
        self.ledger.note_run(digest, result.compute_seconds)
        if self._terms(digest) != terms:
            return result  # what it took was right when it began, and says nothing of the next run
        beside = max(before, self.ledger.activations)
        over = result.peak_bytes > self.ledger.budget
        if known and over:
            self._counters.over_budget += 1
            await self.processor.call(self._runtime.shrink)
        if result.squeezed:  # what it would have taken is not known
            share = self.ledger.shares.get(digest)
            if self.opening.trial_of(digest) is None and share is not None and share.slack:
                await self._measure(digest, self.ledger.budget + 1 - beside)
            return result
        if not known or result.unkept_bytes or (over and digest in self.ledger.shares):
            await self._measure(digest, result.peak_bytes + result.unkept_bytes - beside)
        await self._gathered.check(digest, result.peak_bytes - beside)
        return result

    async def run_together(
        self, digest: str, items: Sequence[Mapping[str, Array]]
    ) -> list[RunResult]:
        """`run` for items that `batches` has chosen; where it raises, none of them has run."""
        if digest not in self.ledger.resident:
            raise NotResident(f"{short(digest)} is not resident")
        results = await self.batches.run(digest, items)
        await self._gathered.check(digest, results[0].peak_bytes - self.ledger.activations)
        return results

    async def _run(self, digest: str, tensors: Mapping[str, Array]) -> tuple[RunResult, int]:
        """The result, and the activations beside it. Where a run is stopped, activations make room,
        then the fragment runs in blocks, within less, if it has some; else it is to be loaded with
        more. An item that is larger than the plan covers fails instead."""
        trial, size = self.opening.trial_of(digest), sum(each.nbytes for each in tensors.values())
        is_larger = trial is not None and size > trial.input_bytes
        is_known = self.opening.is_known(digest)
        known = partial(self.processor.run, digest, tensors, is_known=is_known)
        run = partial(known, is_tried=is_known and trial is not None, is_larger=is_larger)
        while True:
            await self.buffers.let_loads_first()
            limit, free, measured = self.ledger.budget, self.ledger.free, digest in self._measured
            if trial is not None and is_larger:
                limit = limit_of_larger(trial, size, limit)
            # What such a run may take, nothing that comes meanwhile may have.
            held = 0 if is_known and not is_larger else self.buffers.make_room(self.ledger.budget)
            beside = self.ledger.activations
            try:
                with nothing_arrives(self.ledger, held):
                    return await run(limit, planned_bytes=limit - free, measured=measured), beside
            except Exceeded as error:
                text, peak_bytes = str(error), error.peak_bytes
            finally:
                self._changed.set()
            # The exception is gone, and what it referred to: the fragment can be closed.
            if is_larger:
                again = await self.spilling.spill_all()
            else:
                again = await self._outgrow(digest, peak_bytes, beside, text)
            if not again:
                raise Exceeded(text, peak_bytes)

    async def _outgrow(self, digest: str, peak_bytes: int, beside: int, text: str) -> bool:
        """A run was stopped: the fragment takes more than it had, nobody knows how much. Whether it
        may run again in other terms. Raises `OverBudget`; one that has run other items stays
        resident then, if it had all that there is."""
        if await self.spilling.spill_all():
            return True
        if self.ledger.moving and self.ledger.occupied + beside > self.ledger.budget:
            await self._change()  # what moves exceeds a budget that became smaller, and ends soon
            return True
        others, budget, terms = self._others(digest), self.ledger.budget, self._terms(digest)
        share, had = self.ledger.shares.get(digest), budget - others - beside
        if digest in self._measured and had >= budget and (share is None or not share.slack):
            raise OverBudget(budget + 1, budget, text)
        need = max(peak_bytes - others - beside, need_of_stopped(had, budget))
        await self._measure(digest, others + need, stopped=text)
        return self._terms(digest) != terms

    def _others(self, digest: str) -> int:
        """What is reckoned for the other fragments, and for the agent itself."""
        others = sum(n for key, n in self.ledger.resident.items() if key != digest)
        return others + self.ledger.grown

    def _terms(self, digest: str) -> tuple[Bytes, Share | None, object]:
        share, way = self.ledger.shares.get(digest), self.processor.way(digest)
        return self.ledger.budget, share, way

    async def _measure(self, digest: str, peak_bytes: int, *, stopped: str = "") -> None:
        """Put to a fragment what the process took beyond what is reckoned for all else; raises
        `OverBudget` when it is evicted for that. `stopped`: why the run was, so that nobody knows
        how much more it takes."""
        measured = max(0, peak_bytes - self._others(digest))
        if digest not in self._measured and self.opening.trial_of(digest) is None:
            reckoned = self.ledger.resident.get(digest, 0)
            self._counters.memory_ratio.observe(measured / max(1, reckoned))
        self._carry_out(self.ledger.measure(digest, Bytes(measured), stopped=bool(stopped)))
        while changing := self.spilling.tasks | self._granting.tasks:
            await asyncio.gather(*map(asyncio.shield, changing))
        if self.ledger.resident.get(digest, 0) >= measured:
            self._measured.add(digest)
        if digest not in self.ledger.resident:
            await asyncio.gather(*map(asyncio.shield, self._evicting), return_exceptions=True)
            have = self.ledger.free_for_fragments
            needed, had = format_apart(measured, have)
            reason = f"{short(digest)} was measured: would need {needed}, have {had}"
            raise OverBudget(measured, have, stopped or reason)

    def planned_bytes(self, digest: str) -> int:
        """What a fragment was loaded for, without what has gathered or was lent since."""
        planned = self._gathered.planned_bytes(digest)
        share = self.ledger.shares.get(digest)
        return planned if share is None else planned - share.lent

    def stop_run(self) -> None:
        """Ask the present run to end early, also when it still waits for the processor."""
        self.processor.stop()

    # ---- the budget --------------------------------------------------------------------------

    async def change_budget(self, budget_bytes: int) -> None:
        """There is more or less memory from now on. On return, what had to leave memory has left
        it, but for what moves; and fragments have what that has left to them. For more than ever
        before, all are given up, to be loaded with it."""
        await self._gathered.drop_all()
        budget, gone = await self._enlarging.make_room(budget_bytes)
        if budget is not None:
            log.warning("the budget is %s now", format_bytes(budget))
            self.processor.note_budget()
            self.batches.take_back()
            self.buffers.give_back()
            tune_allocator(budget)
            self._carry_out(self.ledger.change_budget(Bytes(budget)))
        for digest in gone:
            self._on_evicted(digest, "there is more memory than ever before to load it with")
        while changing := self.spilling.tasks | self._granting.tasks | self._evicting:
            await asyncio.gather(*map(asyncio.shield, changing), return_exceptions=True)
        self._carry_out(self.ledger.lend())
        self._changed.set()

    async def withhold(self, size_bytes: int) -> None:
        """Memory is short elsewhere, or not any more: fragments do without so much, if they can."""
        log.info("memory is short: %s are withheld", format_bytes(size_bytes))
        self.batches.take_back()
        self.buffers.give_back()
        self._carry_out(self.ledger.withhold(Bytes(size_bytes)))
        await self._granting.wait()

    # ---- the activations' share --------------------------------------------------------------

    def request_space(self, size: int, *, text: bool = False) -> bool:
        return self.buffers.request_space(size, text=text) or self._take_back()

    def return_space(self, size: int) -> None:
        self.ledger.return_space(size)

    def request_move(self, size: int, *, text: bool = False) -> bool:
        return self.buffers.request_move(size, text=text) or self._take_back()

    def _take_back(self) -> bool:
        """Something finds no room: what was lent is free again, soon."""
        self._granting.take_back()
        self.batches.take_back()
        return False

    def end_move(self, size: int) -> None:
        self.buffers.end_move(size)
        self._changed.set()

    def begin_move(self, size: int) -> None:
        self.ledger.begin_move(size)

    def arrive(self, size: int) -> None:
        self._carry_out(self.ledger.arrive(size))
        self._changed.set()

    def hold(self, digest: str) -> None:
        """Outputs of a fragment lie in its own share: it is not closed before `release`."""
        self._held[digest] += 1

    async def make_way(self, outputs: Mapping[str, Array]) -> None:
        """Outputs that lie in their fragment's own share are about to be sent. Frames of large ones
        take the place of what the run has left in the arena."""
        if sum(array.nbytes for array in outputs.values()) > MAXIMUM_PAYLOAD_BYTES:
            await self.processor.call(self._runtime.shrink)

    def release(self, digest: str) -> None:
        """They have left memory."""
        self._held[digest] -= 1
        self._changed.set()

    # ---- inside ------------------------------------------------------------------------------

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def close(self) -> None:
        """Wait for what is being given up."""
        await asyncio.gather(*self._evicting, *self.spilling.tasks, return_exceptions=True)
        await self._granting.close()
        await self._fetcher.close()

    async def _admit(self, digest: str, need_bytes: int) -> bool:
        """Whether there is something to load. Raises `OverBudget`, `SpillFull`."""
        while True:
            self.buffers.give_back()  # also, what is loaded into holes cannot be measured
            if need_bytes > self.ledger.free:
                await self._gathered.drop_all()
                await self.batches.give_back()
            match self.ledger.request_load(digest, Bytes(need_bytes)):
                case Load.ADMITTED:
                    return True
                case Load.ALREADY_THERE:
                    return False
                case Load.POSTPONED:
                    self.opening.end_prefetches()
                    await self._change()
                case MakeRoom(size=size):
                    await self.spilling.make_room(size)
                case Reclaim(grants=grants):
                    self._carry_out(grants)
                    return True
                case Refusal(need=need, have=have, reason=reason):
                    if not await self._shrunk():
                        raise OverBudget(need, have, reason)

    async def _shrunk(self) -> bool:
        """Whether the agent itself takes less than it did; untold where a fragment is resident."""
        before = self.ledger.grown
        if not before or self.ledger.resident:
            return False
        await self.processor.call(self._runtime.note_growth)
        self._carry_out(self.ledger.grow_itself(Bytes(self._runtime.grown_bytes)))
        return self.ledger.grown < before

    async def _close(self, digest: str) -> int:
        """Let a fragment go, once nothing of it is in use; the bytes that came back."""
        while self._held[digest] > 0:
            await self._change()
        del self._held[digest]
        try:
            return await self.processor.call(self._runtime.close, digest)
        finally:
            self.cache.unpin(digest)
            self._measured.discard(digest)
            self._gathered.forget(digest)
            self.batches.forget(digest)
            self.batches.take_back()
            self.processor.note_change(digest)
            self.ledger.unload(digest)
            self._carry_out(self.ledger.grow_itself(Bytes(self._runtime.grown_bytes)))
            self._carry_out(self.ledger.lend())

    def _carry_out(self, demands: Sequence[Demand]) -> None:
        for demand in demands:
            match demand:
                case Spill(digest=needs):
                    self.spilling.begin(needs)
                case Evict(digest=digest, reason=reason):
                    # A load under way sees that it lost its place, and closes what it opened.
                    if digest not in self._loading:
                        begin(self._evict(digest, reason), self._evicting)
                case Grant(digest=digest) as grant:
                    self._note_change(digest)
                    self._granting.begin(grant)

    def _note_change(self, digest: str) -> None:
        """What a fragment takes from its next run on is not known."""
        self.processor.note_change(digest)
        self._measured.discard(digest)

    def _cannot_run(self, digest: str, reason: str) -> None:
        begin(self._evict(digest, reason), self._evicting)

    async def _evict(self, digest: str, reason: str) -> None:
        # Loads that come after this wait until the memory is back.
        async with self._turn:
            await self._close(digest)
        self._on_evicted(digest, reason)
