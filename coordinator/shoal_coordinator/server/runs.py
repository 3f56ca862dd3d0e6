"""One run of a job: its open inputs and results, and which task waits for which results.

A device's reply that a task has finished, and the results of the task, come on two streams. The
dispatcher receives the reply when both are here.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic_ns
from typing import Final, TypeVar

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.server import claims, wire
from shoal_coordinator.storage.inputs import FolderLimits, InputSet, InputUnsuitable, scan_inputs
from shoal_coordinator.storage.locations import local_folder
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.prefetch import InputPrefetch
from shoal_coordinator.storage.results import FailedItem, OutputsRefused, ResultStore
from shoal_protocol.assembly import ActivationAssembler, Limits, ReceivedActivation
from shoal_protocol.frames import MalformedFrame, TransferError
from shoal_protocol.partition import MODEL, PartitionDocument
from shoal_protocol.tensors import Array, memory_bytes
from shoal_protocol.units import Nanoseconds, nanoseconds
from shoal_protocol.v1.coordinator_pb2 import SubmitJobRequest
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, Activation

logger = logging.getLogger(__name__)

RESULT_PATIENCE: Final = nanoseconds(60)
"""How long a reply waits for its results."""
BATCH: Final = 256
"""Items whose results become durable together."""
SMALL_BYTES: Final = 64 << 10
HELD_BYTES: Final = 16 << 20
"""Small results wait in memory until their item ends, up to this in all."""

_INLINE_LIMITS: Final = Limits(decoded_bytes=1 << 20)

Feed = Callable[[ev.Event], None]
Value = TypeVar("Value")
Result = tuple[int, int]
"""Item and stage."""


class JobRun:
    """One run of a job, from `open_run` to `close`."""

    def __init__(
        self,
        request: SubmitJobRequest,
        document: PartitionDocument,
        epoch: int,
        inputs: InputSet,
        results: ResultStore,
    ) -> None:
        self.name = request.name
        self.epoch = epoch
        self.lossy = request.lossy
        self.wires = wire.stage_wires(document)
        self.inputs = inputs
        self.bfloat16 = frozenset(s.name for s in document.inputs if s.dtype == "bfloat16")
        self.completed = results.completed()
        """The items whose results existed when the run began."""
        self._results = results
        self._untouched = tuple(
            name for edge in document.into(MODEL) if edge.producer == MODEL for name in edge.tensors
        )
        self._writer = ThreadPoolExecutor(1, f"results of {self.name}")
        self._reader = ThreadPoolExecutor(2, f"inputs of {self.name}")
        self._prefetch = InputPrefetch(inputs, self._reader, wire.INLINE_BYTES)
        self._given: set[Result] = set()
        self._arrived: set[Result] = set()
        self._held: list[tuple[int, Mapping[str, Array]]] = []
        self._held_bytes = 0
        self._waiting: dict[Result, tuple[Nanoseconds, ev.TaskFinished]] = {}
        self._finishing: list[int] = []
        self._failing: list[FailedItem] = []
        self._work = asyncio.Event()
        self._closing = False
        self._writing: asyncio.Task[None] | None = None

    def start(self, feed: Feed, on_error: Callable[[BaseException], None]) -> None:
        """Write results as items end, until `close`. `on_error` gets what ends that too early."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                on_error(error)

        self._writing = asyncio.create_task(self._write_results(feed))
        self._writing.add_done_callback(ended)

    async def close(self, *, complete: bool) -> str | None:
        """Store what is pending, complete the results if `complete`, and release the folders; why
        the results could not be completed."""
        try:
            if self._writing is not None:
                self._closing = True
                self._work.set()
                await asyncio.wait([self._writing])
            return await self._in_writer(self._results.complete) if complete else None
        finally:
            await asyncio.shield(self._release_folders())

    def begin_epoch(self, epoch: int) -> None:
        """A newer plan: results of tasks of the older one are refused from now on."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._given.clear()
            self._arrived.clear()
            self._waiting.clear()

    # ---- inputs ----------------------------------------------------------------------------------

    async def read(self, item: int, names: Iterable[str]) -> dict[str, Array]:
        """Some of an item's inputs. Raises `InputUnsuitable`, whatever is wrong with them."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, self._read, item, names)

    def _read(self, item: int, names: Iterable[str]) -> dict[str, Array]:
        try:
            return self.inputs.read(item, names)
        except InputUnsuitable:
            raise
        except Exception as error:  # files come from strangers: one item fails, nothing else
            place, reason = self.inputs.place(item), f"cannot be read: {error!r}"
            raise InputUnsuitable(item, place, reason) from error

    def prefetched(self, item: int, names: Iterable[str]) -> dict[str, Array] | None:
        """Some of an item's inputs, if the prefetch has read them already."""
        return self._prefetch.cached(item, names)

    # ---- results ---------------------------------------------------------------------------------

    def expect(self, order: ins.Execute) -> None:
        """A task was assigned; its results are accepted from now on."""
        if self.wires[order.stage].results:
            self._given.add((order.item, order.stage))

    def admit(self, activation: Activation) -> None:
        """Raise `TransferError` for a result that nobody waits for."""
        key = activation.key
        if key.epoch != self.epoch or (key.item, key.producer) not in self._given:
            raise TransferError(
                f"nobody waits for item {key.item} of {self.name} in epoch {key.epoch}",
                outcome=Acknowledgement.STALE,
            )
        wires = self.wires[key.producer]
        claims.check_tensors(activation, wires.results, wires.specs)

    async def take(self, received: ReceivedActivation, feed: Feed) -> None:
        """Buffer a result, and pass on the reply that waited for it."""
        result = (received.key.item, received.key.producer)
        if result not in self._given:
            return
        self._hold(received)
        if received.decoded_bytes > SMALL_BYTES or self._held_bytes > HELD_BYTES:
            await self._in_writer(self._add, self._take_held())
        if result not in self._given:
            return
        self._arrived.add(result)
        if (waiting := self._waiting.pop(result, None)) is not None:
            feed(waiting[1])

    def take_inline(self, order: ins.Execute, frame: bytes) -> None:
        """Buffer a task's results that came with its reply. Raises `TransferError`."""
        assembler = ActivationAssembler(
            _INLINE_LIMITS, lambda activation, _: self.admit(activation)
        )
        received = assembler.feed(frame)
        if received is None or (received.key.item, received.key.producer) != (
            order.item,
            order.stage,
        ):
            raise MalformedFrame("the frame in the reply does not hold the task's results")
        self._hold(received)
        if self._held_bytes > HELD_BYTES:
            self._writer.submit(self._add, self._take_held())
        self._arrived.add((received.key.item, received.key.producer))

    def join(self, order: ins.Execute, reply: ev.TaskFinished, feed: Feed) -> None:
        """Report a finished task to the dispatcher, once its results are here."""
        result = (order.item, order.stage)
        if not self.wires[order.stage].results or result in self._arrived:
            feed(reply)
        else:
            self._waiting[result] = (Nanoseconds(reply.at + RESULT_PATIENCE), reply)

    def expire(self, now: Nanoseconds, feed: Feed) -> None:
        """Give up waiting for results that are long overdue."""
        for result, (until, reply) in list(self._waiting.items()):
            if now >= until:
                del self._waiting[result]
                failure = ev.Failure(
                    kind=ev.FailureKind.MISSING_ACTIVATION, message="the result did not arrive"
                )
                feed(ev.InstructionFailed(at=now, instruction=reply.instruction, failure=failure))

    def _hold(self, received: ReceivedActivation) -> None:
        self._held.append((received.key.item, received.tensors))
        self._held_bytes += sum(map(memory_bytes, received.tensors.values()))

    def _take_held(self) -> list[tuple[int, Mapping[str, Array]]]:
        held, self._held, self._held_bytes = self._held, [], 0
        return held

    # ---- in the writer's thread ------------------------------------------------------------------

    async def _in_writer(self, function: Callable[..., Value], *arguments: object) -> Value:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, function, *arguments)

    def _add(self, held: Iterable[tuple[int, Mapping[str, Array]]]) -> None:
        for item, arrays in held:
            self._results.add(item, arrays)

    def _write(
        self,
        held: Iterable[tuple[int, Mapping[str, Array]]],
        failing: list[FailedItem],
        items: list[int],
    ) -> dict[int, str]:
        """Make the results of items durable; of those that cannot be stored: why."""
        self._add(held)
        if failing:
            self._results.fail(failing)
        return self._results.finish(items)

    # ---- the end of items ------------------------------------------------------------------------

    def finish(self, item: int) -> None:
        """All results of an item are here: make them durable."""
        self._finishing.append(item)
        self._work.set()

    def fail(self, item: int, failure: ev.Failure) -> None:
        """An item has failed for good."""
        reason = wire.failure_text(failure)
        self._failing.append(FailedItem(item, self.inputs.place(item), reason))
        self._forget(item)
        self._work.set()

    async def _write_results(self, feed: Feed) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._finishing or self._failing:
                await self._write_batch(feed)
            if self._closing:
                return

    async def _write_batch(self, feed: Feed) -> None:
        items, self._finishing = self._finishing[:BATCH], self._finishing[BATCH:]
        failing, self._failing = self._failing, []
        unreadable = await self._add_untouched(items)
        problems = await self._in_writer(self._write, self._take_held(), failing, items)
        problems |= unreadable
        at = Nanoseconds(monotonic_ns())
        for item in items:
            self._forget(item)
        for item in items:
            failure = None
            if item in problems:
                failure = ev.Failure(kind=ev.FailureKind.OUTPUT, message=problems[item])
            feed(ev.ItemStored(at=at, job=self.name, item=item, failure=failure))

    async def _add_untouched(self, items: list[int]) -> dict[int, str]:
        """An output of the model may be one of its inputs; no device sends those."""
        problems: dict[int, str] = {}
        for item in items if self._untouched else ():
            try:
                arrays = await self.read(item, self._untouched)
            except InputUnsuitable as error:
                problems[item] = str(error)
            else:
                await self._in_writer(self._add, [(item, arrays)])
        return problems

    def _forget(self, item: int) -> None:
        self._prefetch.forget(item)
        for stage in range(len(self.wires)):
            self._given.discard((item, stage))
            self._arrived.discard((item, stage))
            self._waiting.pop((item, stage), None)

    async def _release_folders(self) -> None:
        loop = asyncio.get_running_loop()
        await self._in_writer(self._results.close)
        await loop.run_in_executor(self._reader, self.inputs.close)
        self._writer.shutdown(wait=False)
        self._reader.shutdown(wait=False)


def open_run(
    request: SubmitJobRequest,
    document: PartitionDocument,
    epoch: int,
    limits: FolderLimits,
) -> JobRun:
    """Count a job's inputs and take possession of its outputs.

    Blocks on the file system. Raises `LocationRefused`, `InputsRefused`, `OutputsRefused`.
    """
    source = local_folder(request.inputs_uri, what="inputs")
    target = local_folder(request.outputs_uri, what="outputs")
    inputs = scan_inputs(source, document.inputs, limits)
    if target.resolve() == source.resolve():
        raise OutputsRefused(target, "are the inputs as well; choose another folder")
    facts = (document.model_digest, inputs.digest, str(request.lossy))
    results = ResultStore(
        target,
        job=request.name,
        identity=hashlib.sha256("\0".join(facts).encode()).hexdigest(),
        files=_result_files(inputs),
        names=[spec.name for spec in document.outputs],
    )
    inputs.inflate_into(_spool(target, request.name))
    return JobRun(request, document, epoch, inputs, results)


def _spool(outputs: Path, job: str) -> Path:
    return outputs / ".shoal" / job


def _result_files(inputs: InputSet) -> list[ResultFile]:
    return [
        ResultFile(
            name=f"{file.name.rpartition('.')[0]}.npz",
            first=file.first,
            items=file.contents.items,
            stacked=file.contents.stacked is not None,
            joined=file.contents.joined,
        )
        for file in inputs.files
    ]
