"""One run of a fragment that is open, and what it took: within whatever there is, or guarded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from shoal_agent.runtime.block_fragment import BlockFragment
from shoal_agent.runtime.destinations import Placed
from shoal_agent.runtime.failures import (
    OutOfBudget,
    RuntimeFailed,
    Stopper,
    Terminated,
    exceeded,
    without_frames,
)
from shoal_agent.runtime.guard import Guard
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.results import Ran, RunResult, kept, result_of
from shoal_agent.runtime.whole_fragment import WholeFragment
from shoal_protocol.tensors import Array

OpenFragment = WholeFragment | BlockFragment


class Runs:
    """Those of one process, one after the other."""

    def __init__(
        self,
        meter: MemoryMeter,
        processor_clock: Callable[[], float],
        note_peak: Callable[[], None],
        shrink: Callable[[], None],
    ) -> None:
        """`note_peak` is told when a run's peak is read, `shrink` gives back what nobody holds."""
        self._meter = meter
        self._processor_clock = processor_clock
        self._note_peak = note_peak
        self._shrink = shrink

    def run(
        self, fragment: OpenFragment, feed: Mapping[str, Array], stopper: Stopper, limit_bytes: int
    ) -> RunResult:
        """Within what the arena has for a limit. Raises `Exceeded`, and what the run raises."""
        self._meter.begin_peak(recount=False)
        try:
            ran = self._ran(fragment, feed, stopper)
        except OutOfBudget:
            # Items of other sizes may have left the arena in pieces: once more, in an empty one.
            self._shrink()
            try:
                ran = self._ran(fragment, feed, stopper)
            except OutOfBudget as error:
                raise exceeded(error, limit_bytes + 1, limit_bytes) from error
        return self._measured(fragment, ran)

    def run_guarded(  # noqa: PLR0913 - what is known of a run
        self,
        fragment: OpenFragment,
        feed: Mapping[str, Array],
        stopper: Stopper,
        limit_bytes: int,
        let_go: Callable[[], None] | None = None,
        placed: Placed | None = None,
        *,
        planned_bytes: int = 0,
        come_slowly: bool = False,
    ) -> RunResult:
        """Stopped where this process takes more than that, and than is planned for all that it has;
        see `Guard`. Raises `Exceeded`, and what the run raises."""
        self._meter.begin_peak()
        guard = Guard(
            self._meter, limit_bytes, stopper, let_go, planned_bytes, come_slowly=come_slowly
        )
        with guard:
            try:
                ran = self._ran(fragment, feed, stopper, placed, guard.make_room)
            except (Terminated, OutOfBudget) as error:
                if guard.late:
                    late = f"not ended after {stopper.seconds:g} s"
                    raise Terminated(f"{late}, and {error}") from error
                if isinstance(error, Terminated) and not guard.tripped:
                    raise
                peak = max(self._meter.peak_since_begin_bytes(), limit_bytes + 1)
                self._shrink()
                raise exceeded(error, peak, limit_bytes) from error
        result = self._measured(fragment, ran)
        return replace(result, squeezed=guard.dropped)

    def _measured(self, fragment: OpenFragment, ran: Ran) -> RunResult:
        self._note_peak()
        return result_of(
            ran,
            fragment.outputs,
            self._meter.peak_since_begin_bytes(),
            streamed_bytes=fragment.streamed_bytes,
            granted_bytes=fragment.granted_bytes,
        )

    def _ran(
        self,
        fragment: OpenFragment,
        feed: Mapping[str, Array],
        stopper: Stopper,
        placed: Placed | None = None,
        make_room: Callable[[int], None] | None = None,
    ) -> Ran:
        """Run it. `make_room` is asked before what lies in the arena is copied; raises what it and
        the run raise, without the frames that hold values of the arena: it can be emptied."""
        if stopper.stopped:
            raise Terminated("stopped before it began")
        processor = self._processor_clock
        started, used = perf_counter(), processor()
        try:
            outputs = _outputs(fragment.run(feed, stopper, placed), make_room)
        except RuntimeFailed as error:
            failure = without_frames(error)
        else:
            return Ran(outputs, perf_counter() - started, processor() - used)
        try:
            raise failure
        finally:
            del failure  # it has this frame, which holds the inputs


def _outputs(made: Sequence[Array], make_room: Callable[[int], None] | None) -> list[Array]:
    if make_room is not None:
        make_room(sum(each.nbytes for each in made if not each.flags.owndata))
    return kept(made)
