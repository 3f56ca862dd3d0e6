"""The thread that ONNX Runtime has: what waits for it, and how a run goes there."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple, TypeVar

from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.in_passing import FEW_BYTES
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.results import Passed, RunResult
from shoal_agent.telemetry.handling import HandlingMeter
from shoal_agent.telemetry.task_times import TaskTimes
from shoal_protocol.tensors import Array
from shoal_protocol.threads import in_executor

_LIGHT_SECONDS: Final = 0.0005
"""A run that takes less is not worth the way to the processor's thread and back."""
_SHORT_SECONDS: Final = 0.01
"""Nor is one that takes less where the device has rested for as long: messages wait for its end,
but they are few then, and the way would be a tenth of it."""

Result = TypeVar("Result")


class _Short(NamedTuple):
    """The largest item on which a fragment's run takes next to no time, or little, and what the
    last one took."""

    size_bytes: int
    seconds: float

    @property
    def is_light(self) -> bool:
        return self.seconds <= _LIGHT_SECONDS


class _Largest(NamedTuple):
    """The largest item of a fragment so far, and what a run on it took."""

    size_bytes: int = -1
    peak_bytes: int = 0


_NONE: Final = _Largest()


class Processor:
    """Everything that touches ONNX Runtime runs here, one after the other."""

    def __init__(
        self,
        runtime: Runtime,
        executor: ThreadPoolExecutor,
        handling: HandlingMeter | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`handling` is fed with the runs of tasks; `clock` counts seconds."""
        self._runtime = runtime
        self._executor = executor
        self.times = TaskTimes(runtime.threads)
        self._handling = handling or HandlingMeter()
        self._clock = clock
        self._stopper = Stopper()
        self._waiting = 0
        self._short: dict[tuple[str, int], _Short] = {}
        self._rests_since = clock()
        self._largest: dict[tuple[str, int], _Largest] = {}
        self._last: object = None
        self._ways: dict[str, object] = {}

    async def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Run in the thread that ONNX Runtime has.

        What was asked for is done, also when whoever waits for it is cancelled: they see that when
        it has been done, so that they can say what is so now.
        """
        try:
            return await self._in_thread(function, *arguments)
        finally:
            self._handling.begin()

    async def _in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        self._waiting += 1

        def work() -> Result:
            return function(*arguments)

        try:
            return await in_executor(self._executor, work)
        finally:
            self._waiting -= 1

    async def run(  # noqa: PLR0913 - what is known of a run
        self,
        digest: str,
        tensors: Mapping[str, Array],
        limit_bytes: int,
        *,
        measured: bool,
        is_known: bool,
        is_tried: bool,
        is_larger: bool,
        planned_bytes: int = 0,
        items: int = 1,
    ) -> RunResult:
        """In the thread; or here, where that costs too much beside the run itself.

        An item that is larger than those before it is kept within the limit, or stopped, and so is
        the first one: what was made up for its trial may have computed less; so is every item,
        unless it `is_known` that what a run takes follows from the sizes of its inputs. One that
        `is_larger` than in its trial always is: less may have been beside it when it ran before.
        One of other shapes than the last is, where both may not have room in the arena.
        `measured`: what the fragment takes is known, so that it may run here the next time;
        `is_tried`: it was tried, `is_larger`: with smaller inputs. `planned_bytes` are reckoned
        with for all that this process has. `items`: so many at once, of which the first ones are
        guarded as well.
        """
        key = (digest, items)
        size = sum(tensor.nbytes for tensor in tensors.values())
        may_be_safe = is_known and not is_larger
        if may_be_safe and self.runs_here(digest, size, items):
            passed = self.run_in_passing(digest, (tensors,))
            if passed is not None:
                return self._result(digest, passed, limit_bytes, items)
        self._stopper = Stopper()
        largest, way = self._largest.get(key, _NONE), self.way(digest)
        has_room = self._has_room(key, tensors, limit_bytes)
        guarded = None if may_be_safe and size <= largest.size_bytes and has_room else limit_bytes
        run = partial(self._runtime.run, digest, tensors, self._stopper, guarded)
        known = partial(run, is_known=is_known, is_tried=is_tried, is_larger=is_larger)
        result = await self._in_thread(partial(known, planned_bytes=planned_bytes))
        self._handling.ran(items, result.compute_seconds, result.processor_seconds)
        shows_others = self.way(digest) is way and not is_larger
        if guarded is not None and shows_others and not result.squeezed:
            self._largest[key] = max(_Largest(size, result.peak_bytes), largest)
        self._rests_since = self._clock()
        short, seconds = self._short.get(key, _Short(0, 0.0)), result.compute_seconds
        # What is streamed may come from a disk, which takes its time.
        may_wait = seconds <= _LIGHT_SECONDS or not result.streamed_bytes
        if seconds > _SHORT_SECONDS or not may_wait or result.peak_bytes > limit_bytes:
            self._short.pop(key, None)
        elif measured and shows_others:
            self._short[key] = _Short(max(size, short.size_bytes), seconds)
        if items == 1 and not self._waiting and not self._runtime.opens_beside:
            self.times.note(
                digest,
                result.compute_seconds,
                result.processor_seconds,
                result.streamed_bytes,
                result.granted_bytes,
            )
        return result

    def _has_room(
        self, key: tuple[str, int], tensors: Mapping[str, Array], limit_bytes: int
    ) -> bool:
        """Whether an item has room, if no larger than others were, beside what is in the arena."""
        last, self._last = self._last, (key, [tensor.shape for tensor in tensors.values()])
        peak_bytes = self._largest.get(key, _NONE).peak_bytes
        return last == self._last or self._runtime.has_room_for(peak_bytes, limit_bytes)

    def runs_here(self, digest: str, size: int, items: int = 1) -> bool:
        """Whether a run on items of so many bytes together is to be made in passing now."""
        if (short := self._short.get((digest, items))) is None or size > short.size_bytes:
            return False
        return short.is_light or self._clock() - self._rests_since >= short.seconds

    def gathers(self, digest: str) -> bool:
        """Whether more weights may come into memory run by run than do no harm."""
        return self._runtime.weight_bytes(digest) > FEW_BYTES

    def light_bytes(self, digest: str) -> int:
        """The largest item on which a fragment's runs may be made in passing, several in a row;
        -1: they may not."""
        short = self._short.get((digest, 1))
        if short is None or not short.is_light or self.gathers(digest):
            return -1
        return short.size_bytes

    def run_in_passing(self, digest: str, runs: Sequence[Mapping[str, Array]]) -> Passed | None:
        """Run a fragment here, once for each of these; `note_passed` is to follow. None: something
        waits for the thread, or it took long; `run` is for each of them then."""
        if self._waiting:
            return None
        passed = self._runtime.run_in_passing(digest, runs)
        self._rests_since = self._clock()
        return passed

    def note_passed(self, digest: str, passed: Passed, limit_bytes: int, items: int = 1) -> int:
        """Count runs that were made in passing, of `items` at once as in `run`; the peak."""
        seconds, processor_seconds = passed.seconds, passed.processor_seconds
        peak_bytes, count = self._runtime.peak_in_passing(digest), len(passed.outputs)
        self._handling.ran(count * items, count * seconds, count * processor_seconds)
        key = (digest, items)
        if (short := self._short.get(key)) is not None:
            if seconds > _SHORT_SECONDS or peak_bytes > limit_bytes:
                del self._short[key]
            elif not short.is_light or seconds > _LIGHT_SECONDS:
                self._short[key] = short._replace(seconds=seconds)
        if items == 1:
            self.times.note(
                digest, seconds, processor_seconds, passed.streamed_bytes, passed.granted_bytes
            )
        return peak_bytes

    def _result(self, digest: str, passed: Passed, limit_bytes: int, items: int) -> RunResult:
        """Of one run that was made in passing."""
        (outputs,) = passed.outputs
        return RunResult(
            outputs=outputs,
            compute_seconds=passed.seconds,
            processor_seconds=passed.processor_seconds,
            peak_bytes=self.note_passed(digest, passed, limit_bytes, items),
            streamed_bytes=passed.streamed_bytes,
            granted_bytes=passed.granted_bytes,
        )

    def stop(self) -> None:
        """Ask the present run to end early, also when it still waits for the thread."""
        self._stopper.stop()

    def way(self, digest: str) -> object:
        """How a fragment runs: another one after each change. What a run has shown that began
        before one says nothing of those after it."""
        return self._ways.setdefault(digest, object())

    def note_change(self, digest: str) -> None:
        """The fragment is to run in other terms from now on, or no more."""
        self.note_gathered(digest)
        self._ways.pop(digest, None)
        self._largest = {key: size for key, size in self._largest.items() if key[0] != digest}

    def note_budget(self) -> None:
        """What has run within the old budget may exceed the new one."""
        self._short.clear()
        self._largest.clear()
        self._ways.clear()

    def note_gathered(self, digest: str) -> None:
        """The peak of the fragment's next run is to be its own."""
        self._short = {key: short for key, short in self._short.items() if key[0] != digest}
