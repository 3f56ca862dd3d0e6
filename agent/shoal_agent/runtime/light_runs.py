"""Runs of light fragments on several items, one after the other in one turn of the event loop, and
runs that take little on one that is alone.

A light fragment takes next to no time, so that what is done around a run costs more than the run
itself. Here it is done once for all of them: clocks, meters and the ledger. What the runs have
shown is noted when what they made is on its way.
"""

from collections.abc import Mapping, Sequence, Set

from shoal_agent.memory.residency import Ledger, short
from shoal_agent.runtime.failures import NotResident
from shoal_agent.runtime.gathered_rows import GatheredRows
from shoal_agent.runtime.opening import Opening
from shoal_agent.runtime.processor import Processor
from shoal_agent.runtime.results import Passed
from shoal_protocol.tensors import Array


class LightRuns:
    """Those of one agent's fragments; for the event loop's thread."""

    def __init__(
        self,
        ledger: Ledger,
        processor: Processor,
        opening: Opening,
        measured: Set[str],
        gathered: GatheredRows,
    ) -> None:
        """`measured` are the fragments of which it is known what they take."""
        self._ledger = ledger
        self._processor = processor
        self._opening = opening
        self._measured = measured
        self._gathered = gathered

    def is_light(self, digest: str) -> bool:
        """Whether a fragment takes next to no time, and memory that is known and does not grow with
        the items: rows of a table gather from one to the next."""
        return self._is_known(digest) and self._processor.light_bytes(digest) >= 0

    def run(self, digest: str, items: Sequence[Mapping[str, Array]]) -> Passed | None:
        """What a fragment gives for each of the items, where it is light or one is alone; `note` is
        to follow. None: `Fragments.run` is for them. Raises as that does, and then that may be due
        to any of them."""
        if digest not in self._ledger.resident:
            raise NotResident(f"{short(digest)} is not resident")
        if not self._is_known(digest):
            return None
        size = max([sum([each.nbytes for each in tensors.values()]) for tensors in items])
        if len(items) == 1:
            runs_here = self._processor.runs_here(digest, size)
        else:
            runs_here = size <= self._processor.light_bytes(digest)
        trial = self._opening.trial_of(digest)
        if not runs_here or (trial is not None and size > trial.input_bytes):
            return None
        return self._processor.run_in_passing(digest, items)

    async def note(self, digest: str, passed: Passed) -> None:
        """Take what runs have shown, when what they made has left. Where that was too much, the
        next run goes the other way, and is measured as it is."""
        peak_bytes = self._processor.note_passed(digest, passed, self._ledger.budget)
        for _ in passed.outputs:
            self._ledger.note_run(digest, passed.seconds)
        if self._processor.gathers(digest):
            beside = self._ledger.activations
            await self._gathered.check(digest, peak_bytes - beside)

    def _is_known(self, digest: str) -> bool:
        """Whether it is known what a fragment takes, and that this follows from its inputs."""
        return digest in self._measured and self._opening.is_known(digest)
