"""Runs of several items at once: which of those that wait may join, and the memory for them.

A fragment runs several items where its manifest allows that (`execution.joining`). What runs with
others must be like an item that has run alone: a first item is guarded and measured, and shows how
outputs are to look. The first batch of each number of items is guarded too: it is the trial of its
size. One that takes more than there is is stopped; its items run alone, and batches of the fragment
are half as large from then on.

Memory: each item more takes at most what a run takes beside weights, and joined inputs and outputs
lie beside those of the items. That is granted by the ledger as moving bytes before a batch begins;
where it grants less, fewer items join. What was granted stays so while the runtime's arena keeps
what the batch left there. It is given back when somebody else needs it (`take_back`), when the
agent rests, and before a run that is measured. Until then items run one by one: where there is
always work the next batch begins before the last one is settled, and the memory would never be
unused.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from shoal_agent.execution.joining import Counted, NotSplit, join, likeness, split
from shoal_agent.memory.residency import Ledger, short
from shoal_agent.runtime.failures import Exceeded, OutOfBudget, RuntimeFailed, Terminated
from shoal_agent.runtime.inputs import InputMismatch
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.processor import Processor
from shoal_agent.runtime.results import RunResult
from shoal_agent.telemetry.logs import log
from shoal_protocol.tensors import Array

_KNOWN: Final = 512
"""Likenesses of items that have run alone, of one fragment."""
_MOST: Final = 1 << 16
_FAILURES: Final = 3
"""A fragment that failed with so many batches, and succeeded with none, runs items one by one."""


@dataclass(frozen=True, slots=True)
class _Alone:
    """What an item took in and gave that ran alone."""

    shapes: Mapping[str, tuple[int, ...]]
    bytes: int


@dataclass(slots=True)
class _Fragment:
    """A fragment that may run several items at once, `most` as far as is known; each more takes
    `run_bytes` beside its inputs and outputs."""

    counted: Counted
    run_bytes: int
    most: int = _MOST
    has_run: bool = False
    failures: int = 0
    alone: dict[Hashable, _Alone] = field(default_factory=dict)

    def extra_bytes(self, items: int, alone: _Alone) -> int:
        return (items - 1) * self.run_bytes + items * alone.bytes

    def items_within(self, size: int, alone: _Alone) -> int:
        return (size + self.run_bytes) // max(1, self.run_bytes + alone.bytes)


class Batches:
    """Batches of one agent's fragments. All methods belong to the event loop's thread."""

    def __init__(
        self,
        ledger: Ledger,
        processor: Processor,
        runtime: Runtime,
        make_room: Callable[[int], int],
        end_move: Callable[[int], None],
    ) -> None:
        """`make_room` frees what waits for activations, if less than so much is free; `end_move`
        returns moving bytes to the ledger."""
        self._ledger = ledger
        self._processor = processor
        self._runtime = runtime
        self._make_room = make_room
        self._end_move = end_move
        self._fragments: dict[str, _Fragment | None] = {}
        self._granted = 0
        self._in_use = 0
        self._unused = asyncio.Event()
        self._giving_back = asyncio.Lock()
        self._returning: asyncio.Task[None] | None = None

    def opened(self, digest: str, manifest: Mapping[str, object]) -> None:
        """The fragment can run, until it is forgotten; this is its manifest."""
        self._fragments[digest] = _described(manifest)

    def note(self, digest: str, tensors: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """An item has run alone: others like it may run together."""
        fragment = self._fragments.get(digest)
        if fragment is None:
            return
        like = likeness(tensors, fragment.counted)
        if like is None or like in fragment.alone:
            return
        if len(fragment.alone) >= _KNOWN:
            del fragment.alone[next(iter(fragment.alone))]
        if all(array.ndim or name in fragment.counted for name, array in outputs.items()):
            size = sum(array.nbytes for array in (*tensors.values(), *outputs.values()))
            shapes = {name: array.shape for name, array in outputs.items()}
            fragment.alone[like] = _Alone(shapes, size)

    def choose(self, digest: str, items: Sequence[Mapping[str, Array] | None]) -> list[int]:
        """Which of these items are to run at once: the first, and those like it, as many as there
        is memory for, unless somebody wants that back. Where that are several, each must be
        `settled`; None is an item that is gone.
        """
        fragment, first = self._fragments.get(digest), items[0]
        if fragment is None or first is None or self._giving_back.locked():
            return [0]
        like = likeness(first, fragment.counted)
        if (alone := fragment.alone.get(like)) is None:
            return [0]
        chosen = [
            number
            for number, item in enumerate(items)
            if item is not None and likeness(item, fragment.counted) == like
        ][: fragment.most]
        wanted = fragment.extra_bytes(len(chosen), alone) - self._granted
        self._make_room(self._ledger.withheld + wanted)
        room = self._granted + self._ledger.spare
        chosen = chosen[: max(1, fragment.items_within(room, alone))]
        if len(chosen) < 2:
            return [0]
        missing = fragment.extra_bytes(len(chosen), alone) - self._granted
        if missing > 0:
            granted = self._ledger.request_move(missing)
            assert granted, "it is spare"
            self._granted += missing
        self._in_use += len(chosen)
        self._unused.clear()
        return chosen

    async def run(self, digest: str, items: Sequence[Mapping[str, Array]]) -> list[RunResult]:
        """What each gives, and its part of the time. Raises as a run of one item does; then none of
        them has run."""
        fragment = self._fragments.get(digest)
        assert fragment is not None, "these were chosen"
        alone = fragment.alone[likeness(items[0], fragment.counted)]
        try:
            result = await self._processor.run(
                digest,
                join(items, fragment.counted),
                limit_bytes=self._ledger.budget,
                measured=True,
                is_known=True,
                is_tried=False,  # the first of each number is the trial of its size
                is_larger=False,
                items=len(items),
            )
            outputs = split(result.outputs, len(items), alone.shapes, fragment.counted)
        except (Exceeded, OutOfBudget):
            fragment.most = max(1, len(items) // 2)
            raise
        except NotSplit as error:
            fragment.most = 1
            log.warning("%s runs items one by one from now on: %s", short(digest), error)
            raise RuntimeFailed(str(error)) from error
        except (RuntimeFailed, InputMismatch) as error:
            if not fragment.has_run and not isinstance(error, Terminated):
                self._note_failure(digest, fragment)
            raise
        fragment.has_run = True
        if result.peak_bytes > self._ledger.budget:
            fragment.most = max(1, len(items) // 2)
        result = replace(
            result,
            compute_seconds=result.compute_seconds / len(items),
            processor_seconds=result.processor_seconds / len(items),
            batch=len(items),
        )
        return [replace(result, outputs=each) for each in outputs]

    def settled(self, items: int = 1) -> None:
        """So many of the chosen items are delivered, or have not run."""
        self._in_use -= items
        if not self._in_use:
            self._unused.set()

    def forget(self, digest: str) -> None:
        """The fragment is not open any more."""
        self._fragments.pop(digest, None)

    def take_back(self) -> None:
        """Somebody needs memory: have it given back as soon as may be."""
        if self._granted and self._returning is None:
            self._returning = asyncio.create_task(self.give_back())
            self._returning.add_done_callback(self._returned)

    async def give_back(self) -> None:
        """Return the memory of batches to the ledger, when nothing of one lies in it."""
        async with self._giving_back:
            while self._in_use:
                await self._unused.wait()
            granted, self._granted = self._granted, 0
            if granted:
                try:
                    await self._processor.call(self._runtime.shrink)
                finally:  # it is done also where whoever waits for it was cancelled meanwhile
                    self._end_move(granted)

    # ---- inside ------------------------------------------------------------------------------

    def _note_failure(self, digest: str, fragment: _Fragment) -> None:
        """An item may be to blame; where that happens again and again, it is the fragment."""
        fragment.failures += 1
        if fragment.failures >= _FAILURES:
            fragment.most = 1
            log.warning("%s runs items one by one from now on", short(digest))

    def _returned(self, _: asyncio.Task[None]) -> None:
        self._returning = None


def _described(manifest: Mapping[str, object]) -> _Fragment | None:
    """What a manifest says of batches; None: it allows none."""
    match manifest:
        case {
            "batched": dict(counted),
            "resident_bytes": int(resident_bytes),
            "weight_bytes": int(weight_bytes),
        } if all(_are_positions(each) for each in counted.values()):
            return _Fragment(counted, max(0, resident_bytes - weight_bytes))
    return None


def _are_positions(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and each >= 0 for each in value)
