"""One run of a submitted job: its inputs are files, and so are its results."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from typing import Final, ParamSpec, TypeVar

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch.item_sets import ItemSet
from shoal_coordinator.server import wire
from shoal_coordinator.server.task_results import Feed, Result, Run
from shoal_coordinator.storage.catalogues import CatalogueFailed
from shoal_coordinator.storage.inputs import InputSet, InputUnsuitable, scan_inputs
from shoal_coordinator.storage.item_list import (
    FailedItem,
    ItemList,
    Items,
    ListedFile,
    read_items,
    write_items,
)
from shoal_coordinator.storage.job_files import open_results
from shoal_coordinator.storage.job_records import CrashCount
from shoal_coordinator.storage.locations import local_folder
from shoal_coordinator.storage.prefetch import InputPrefetch
from shoal_coordinator.storage.results import OutputsRefused, ResultStore
from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.durable_files import is_transient
from shoal_protocol.frame_sizes import INLINE_BYTES
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.tensors import Array, memory_bytes
from shoal_protocol.threads import in_executor
from shoal_protocol.units import Nanoseconds
from shoal_protocol.v1.coordinator_pb2 import SubmitJobRequest

logger = logging.getLogger(__name__)

BATCH: Final = 256
"""Items whose results become durable together."""
PUBLISH_SECONDS: Final = 1.0
"""How long a small result file waits for others, so that they are made together."""
SMALL_BYTES: Final = 64 << 10
RETRY_SECONDS: Final = 0.5
"""After which disk work is tried again that found no free descriptor, or no memory."""
HELD_BYTES: Final = 16 << 20
"""Small results wait in memory until their item ends, up to this in all."""

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
Held = list[Result]
"""Results in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What runs before have done of a job: the items that ended, and the first that failed.

    Where failed files are taken again, their items have new numbers. The old ones count no more:
    `superseded` of all runs, `retaken` of this one, which are taken off `succeeded` and `failed`.
    """

    succeeded: int = 0
    failed: int = 0
    failures: tuple[FailedItem, ...] = ()
    superseded: int = 0
    retaken: ItemSet = field(default_factory=ItemSet)


class OutputsUnwritable(Exception):
    """A job's outputs take no more results of any item; the text says why and what to do."""


class JobRun(Run):
    """One run of a job, from `open_run` to `close`."""

    def __init__(
        self,
        request: SubmitJobRequest,
        document: PartitionDocument,
        epoch: int,
        inputs: InputSet,
        results: ResultStore,
        crashes: CrashCount,
    ) -> None:
        super().__init__(request.name, document, epoch, lossy=request.lossy, batch=request.batch)
        self.inputs = inputs
        self.completed = results.completed()
        """The items whose results existed when the run began."""
        self.earlier = Earlier(succeeded=len(self.completed))
        self.stored = 0
        """Items of which this run has made the results durable."""
        self.first = 0
        """Items before this one have ended."""
        self.follows = False
        """More items may arrive."""
        self.amended = asyncio.Event()
        """What `amend` asked for is done."""
        self.amended.set()
        self.failed = {
            each.item: ev.Failure(kind=ev.FailureKind.OUTPUT, message=each.reason)
            for each in results.failed().values()
        }
        """The items that failed in an earlier run and are not tried again."""
        self._tries: dict[int, int] = {}
        self._results = results
        self._writer = ThreadPoolExecutor(1, f"results of {self.name}")
        self._reader = ThreadPoolExecutor(2, f"inputs of {self.name}")
        self.prefetch = InputPrefetch(inputs, self._reader, INLINE_BYTES, crashes)
        self._crashes = crashes
        self._held: Held = []
        self._held_bytes = 0
        self._finishing: list[int] = []
        self._failing: list[FailedItem] = []
        self._published_at = monotonic()
        self._work = asyncio.Event()
        self._closing = self._stopping = False
        self._writing: asyncio.Task[None] | None = None

    def start(self, feed: Feed, on_error: Callable[[BaseException], None]) -> None:
        """Write results as items end, until `close`. `on_error` gets what ends that too early, an
        `OutputsUnwritable` among it."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                on_error(error)

        self._writing = asyncio.create_task(self._write_results(feed))
        self._writing.add_done_callback(ended)

    def ask_for_room(self, of: Callable[[Path], Callable[[int], None] | None]) -> None:
        """Have results ask for room before they are written, where `of` their folder gives what is
        to be asked."""
        if (take := of(self._results.folder.path)) is not None:
            self._results.take_room = take

    def amend(self, request: SubmitJobRequest) -> None:
        """What a client changed: of use where items arrive while the job runs."""

    async def close(self, *, complete: bool) -> str | None:
        """Store what is pending, complete the results if `complete`, and release the folders; why
        the results could not be completed."""
        self._stopping = not complete
        try:
            if self._writing is not None:
                self._closing = True
                self._work.set()
                await asyncio.wait([self._writing])
            return await self._in_writer(self._complete) if complete else None
        finally:
            await asyncio.shield(self._release_folders())

    # ---- inputs ----------------------------------------------------------------------------------

    def place(self, item: int) -> str:
        return self.inputs.place(item)

    def item_bytes(self, item: int) -> int:
        return self.inputs.item_bytes(item)

    def look_ahead(self) -> None:
        if not self.completed:  # else the first item to do is not known here
            self.prefetch.look_ahead(self.first)

    def cached(self, item: int, names: Iterable[str]) -> dict[str, Array] | None:
        return self.prefetch.cached(item, names)

    async def read(self, item: int, names: Iterable[str]) -> dict[str, Array]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, self._read, item, names)

    def _read(self, item: int, names: Iterable[str]) -> dict[str, Array]:
        with self._crashes.processing():
            return self._persistently(self.inputs.read, item, names)

    # ---- results ---------------------------------------------------------------------------------

    async def _take_in(self, received: ReceivedActivation) -> None:
        self._hold(((received.key.item, received.tensors),))
        if received.decoded_bytes > SMALL_BYTES or self._held_bytes > HELD_BYTES:
            # Not `_in_writer`, which ends with the work: a link that ends waits for no disk.
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._writer, self._add, self._take_held())

    def take_small(self, results: Sequence[Result]) -> None:
        self._hold(results)
        if self._held_bytes > HELD_BYTES:
            self._writer.submit(self._add, self._take_held())

    def _hold(self, results: Sequence[Result]) -> None:
        self._held += results
        for _, arrays in results:
            self._held_bytes += sum(map(memory_bytes, arrays.values()))

    def _take_held(self) -> Held:
        held, self._held, self._held_bytes = self._held, [], 0
        return held

    # ---- in the threads of the reader and the writer ---------------------------------------------

    def _persistently(
        self, act: Callable[Arguments, Value], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Value:
        """Do disk work; again after a while, where it finds no free descriptor or no memory."""
        while True:
            try:
                return act(*args, **kwargs)
            except OSError as error:
                if self._stopping or not is_transient(error):
                    raise
                logger.warning("job %s waits: %s", self.name, error)
                sleep(RETRY_SECONDS)

    async def _in_writer(self, function: Callable[..., Value], *arguments: object) -> Value:
        return await in_executor(self._writer, partial(function, *arguments))

    def _add(self, held: Held) -> None:
        with self._crashes.processing():
            for item, arrays in held:
                self._persistently(self._results.add, item, arrays)

    def _write(self, held: Held, failing: list[FailedItem], items: list[int]) -> dict[int, str]:
        """Make the results of items durable; of those that cannot be stored: why."""
        with self._crashes.processing():
            self._add(held)
            if failing:
                self._persistently(self._results.fail, failing)
            problems = self._persistently(self._results.finish, items)
            if monotonic() >= self._published_at + PUBLISH_SECONDS:
                self._publish()
        if len(problems) < len(items):
            self._crashes.progress()
        return problems

    def _publish(self) -> None:
        self._published_at = monotonic()
        self._persistently(self._results.publish)

    def _complete(self) -> str | None:
        with self._crashes.processing():
            return self._persistently(self._results.complete)

    # ---- the end of items ------------------------------------------------------------------------

    def finish(self, item: int, attempts: int) -> None:
        """Make the results of an item durable."""
        if attempts > 1:  # of millions of items, few
            self._tries[item] = attempts
        self._finishing.append(item)
        self._work.set()

    def fail(self, item: int, failure: ev.Failure, attempts: int) -> None:
        reason, place = wire.failure_text(failure), self.inputs.place(item)
        self._failing.append(FailedItem(item, place, reason, attempts, failure.device))
        self._forget(item)
        self._work.set()

    async def _write_results(self, feed: Feed) -> None:
        try:
            while not self._closing or self._finishing or self._failing:
                await self._wait_for_work()
                self._work.clear()
                while self._finishing or self._failing:
                    await self._write_batch(feed)
        except CatalogueFailed as error:
            raise OutputsUnwritable(self._results.reason(error)) from error
        except OSError as error:
            if not self._stopping or not is_transient(error):
                raise  # otherwise the items run again with the next run

    async def _wait_for_work(self) -> None:
        try:
            async with asyncio.timeout(PUBLISH_SECONDS if self._results.unpublished else None):
                await self._work.wait()
        except TimeoutError:
            await self._in_writer(self._publish)
            self._require_writable()

    def _require_writable(self) -> None:
        if self._results.unwritable:
            raise OutputsUnwritable(self._results.unwritable)

    async def _write_batch(self, feed: Feed) -> None:
        items, self._finishing = self._finishing[:BATCH], self._finishing[BATCH:]
        failing, self._failing = self._failing, []
        unreadable = await self._add_untouched(items)
        problems = await self._in_writer(self._write, self._take_held(), failing, items)
        problems |= unreadable
        at = Nanoseconds(monotonic_ns())
        for item in items:
            self._forget(item)
        stored = tuple([item for item in items if item not in problems])
        if stored:
            self.stored += len(stored)
            feed(ev.ItemsStored(at=at, job=self.name, items=stored))
        # Otherwise the items are sound: they run again with the next run.
        for item, problem in {} if self._results.unwritable else problems.items():
            failure = ev.Failure(kind=ev.FailureKind.OUTPUT, message=problem)
            feed(ev.ItemsStored(at=at, job=self.name, items=(item,), failure=failure))
        self._require_writable()

    async def _add_untouched(self, items: list[int]) -> dict[int, str]:
        """Add the results that are inputs; why not, of the items whose inputs are unsuitable."""
        problems: dict[int, str] = {}
        for item in items if self.untouched else ():
            try:
                arrays = await self.read(item, self.untouched)
            except InputUnsuitable as error:
                problems[item] = str(error)
            else:
                await self._in_writer(self._add, [(item, arrays)])
        return problems

    def _forget(self, item: int) -> None:
        self.prefetch.forget(item)
        super()._forget(item)

    # ---- its items -------------------------------------------------------------------------------

    async def items(self) -> Items:
        """The items as they are now, but for which of them are active."""
        return await self._in_writer(self._items)

    def _items(self) -> Items:
        return self._item_list()

    def _item_list(self) -> ItemList:
        stored = self._results.completed()
        return ItemList(
            total=len(self.inputs),
            files=_listed_files(self.inputs),
            stored=stored,
            failed=self._results.failed(),
            tries={item: tries for item, tries in self._tries.copy().items() if item in stored},
            earlier=self.completed,
        )

    def _close_results(self) -> None:
        with suppress(OSError):  # then its items cannot be listed
            write_items(self._results.folder, self._item_list())
        self._results.close()

    async def _release_folders(self) -> None:
        loop = asyncio.get_running_loop()
        await self._in_writer(self._close_results)
        await loop.run_in_executor(self._reader, self.inputs.close)
        self._writer.shutdown(wait=False)
        self._reader.shutdown(wait=False)


def _listed_files(inputs: InputSet) -> tuple[ListedFile, ...]:
    return tuple(
        ListedFile(file.name, file.first, file.contents.stacked is not None)
        for file in inputs.files
    )


def open_run(
    request: SubmitJobRequest, document: PartitionDocument, epoch: int, crashes: CrashCount
) -> JobRun:
    """Count a job's inputs and take possession of its outputs. Where only some of the failed items
    are to be tried again, the others have failed from the beginning.

    Blocks on the file system. Raises `LocationRefused`, `InputsRefused`, `OutputsRefused`, or
    `OSError` that says nothing of the folders (`is_transient`).
    """
    source = local_folder(request.inputs_uri, what="inputs")
    target = local_folder(request.outputs_uri, what="outputs")
    with crashes.processing():
        inputs = scan_inputs(source, document.inputs, fixed=document.fixed)
        if target.resolve() == source.resolve():
            raise OutputsRefused(target, "are the inputs as well; choose another folder")
        results = open_results(target, inputs, document, job=request.name, lossy=request.lossy)
        with ExitStack() as undo:
            undo.callback(results.close)
            _give_up_others(results, inputs, frozenset(request.retry.items))
            undo.pop_all()
    inputs.inflate_into(target / ".shoal" / request.name)
    return JobRun(request, document, epoch, inputs, results, crashes)


def _give_up_others(results: ResultStore, inputs: InputSet, retried: Set[int]) -> None:
    """Of the items that failed before, those that are not tried again stay failed. Where files came
    or went since, the numbers are those of other items, and all are tried again. Raises `OSError`.
    """
    before = read_items(results.folder) if retried else None
    if before is not None and before.files == _listed_files(inputs):
        left = before.failed.keys() - retried - results.completed()
        results.fail(before.failed[item] for item in sorted(left))
