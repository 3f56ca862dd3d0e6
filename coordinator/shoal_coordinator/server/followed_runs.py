"""One run of a job whose inputs arrive in a folder while it runs."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from time import monotonic, monotonic_ns
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch.jobs import SHOWN_FAILURES
from shoal_coordinator.server.runs import Earlier, JobRun, OutputsUnwritable
from shoal_coordinator.server.task_results import Feed
from shoal_coordinator.storage.catalogues import CatalogueFailed
from shoal_coordinator.storage.followed import FollowedFiles, Retaken
from shoal_coordinator.storage.followed_items import FollowedItems
from shoal_coordinator.storage.following import FollowedFolder, FollowedInputs
from shoal_coordinator.storage.inputs import InputFile
from shoal_coordinator.storage.item_list import Items
from shoal_coordinator.storage.job_files import open_followed_results, result_file
from shoal_coordinator.storage.job_records import CrashCount
from shoal_coordinator.storage.locations import local_folder
from shoal_coordinator.storage.results import ResultStore
from shoal_protocol.durable_files import is_transient
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Nanoseconds
from shoal_protocol.v1.coordinator_pb2 import Retry, SubmitJobRequest

logger = logging.getLogger(__name__)

SCAN_SECONDS: Final = 1.0
"""Between two scans of the folder, at least."""
_SHARE: Final = 20
"""A scan that takes long is followed by a pause of so many times that."""


class FollowedRun(JobRun):
    """A run that takes files until `end`, and completes when these have ended."""

    def __init__(
        self,
        request: SubmitJobRequest,
        document: PartitionDocument,
        epoch: int,
        inputs: FollowedInputs,
        results: ResultStore,
        crashes: CrashCount,
    ) -> None:
        super().__init__(request, document, epoch, inputs, results, crashes)
        files = inputs.catalogue
        self._followed = inputs
        self._folder = FollowedFolder(inputs.folder, files, document.inputs, document.fixed)
        self.follows = True
        self.first = inputs.files[0].first if inputs.files else len(inputs)
        self.earlier = Earlier(
            succeeded=files.succeeded + len(self.completed),
            failed=files.failed,
            failures=tuple(files.failures(SHOWN_FAILURES)),
            superseded=files.superseded,
        )
        self.completed = self.completed.plus(files.ended_items())
        self.failed = {}
        self._failed_places: dict[int, str] = {}
        """Of the first items that failed: their files may have ended since."""
        self._last = False
        self._retry: Retry | None = None
        """What is to be tried again before the next scan."""
        self._woken = asyncio.Event()
        self._halted = False
        self._following: asyncio.Task[None] | None = None

    @property
    def waiting_files(self) -> int:
        return self._folder.waiting

    def start(self, feed: Feed, on_error: Callable[[BaseException], None]) -> None:
        super().start(feed, on_error)
        self._following = asyncio.create_task(self._follow(feed))
        self._following.add_done_callback(
            lambda task: None if (error := task.exception()) is None else on_error(error)
        )

    def amend(self, request: SubmitJobRequest) -> None:
        self._retry = request.retry
        self.amended.clear()
        if request.end and not self._last:
            self._last = True
            self._woken.set()

    async def close(self, *, complete: bool) -> str | None:
        self._halted = True
        self._woken.set()
        self.amended.set()
        if self._following is not None:
            await asyncio.wait([self._following])
        return await super().close(complete=complete)

    def place(self, item: int) -> str:
        if (failed := self._failed_places.get(item)) is not None:
            return failed
        try:
            return super().place(item)
        except KeyError:
            return f"item {item}"

    def finish(self, item: int, attempts: int) -> None:
        super().finish(item, attempts)
        self._tries.pop(item, None)  # nobody lists the items of weeks

    def fail(self, item: int, failure: ev.Failure, attempts: int) -> None:
        if len(self._failed_places) < SHOWN_FAILURES:
            self._failed_places[item] = self.place(item)
        super().fail(item, failure, attempts)

    def _close_results(self) -> None:
        self._results.close()

    async def _follow(self, feed: Feed) -> None:
        while not self._halted:
            began = monotonic()
            try:
                arrived = await self._scan()
            except CatalogueFailed as error:
                if not is_transient(error):
                    raise OutputsUnwritable(self._results.reason(error)) from error
                logger.warning("job %s waits: %s", self.name, error)
            except OSError as error:
                logger.warning("job %s: its inputs cannot be listed now: %s", self.name, error)
            else:
                done = self._folder.settled
                if arrived or done:
                    at, items = Nanoseconds(monotonic_ns()), len(self._followed)
                    self.follows = not done
                    feed(ev.ItemsArrived(at=at, job=self.name, items=items, last=done))
                if self._retry is None:
                    self.amended.set()
                if done:
                    return
            await self._pause(max(SCAN_SECONDS, _SHARE * (monotonic() - began)))

    async def _scan(self) -> bool:
        """Scan once; whether there are more items."""
        loop = asyncio.get_running_loop()
        if (retry := self._retry) is not None:
            self._retake(
                await loop.run_in_executor(
                    self._reader, self._folder.retry, retry.number, retry.items
                )
            )
            await self._in_writer(self._results.list_failures)
            if self._retry is retry:
                self._retry = None
        taken, items = await loop.run_in_executor(self._reader, self._take, self._last)
        self._followed.retain()
        if taken:
            self._followed.extend(taken, items)
            files = [(number, result_file(file)) for number, file in taken]
            await self._in_writer(self._results.extend, files)
        return bool(taken)

    def _retake(self, retaken: Retaken) -> None:
        before, items = self.earlier, retaken.items
        self.earlier = Earlier(
            succeeded=before.succeeded - len(items) + retaken.failed,
            failed=before.failed - retaken.failed,
            failures=tuple(each for each in before.failures if each.item not in items),
            superseded=before.superseded + len(items),
            retaken=before.retaken.plus(items),
        )

    def _take(self, last: bool) -> tuple[list[tuple[int, InputFile]], int]:
        with self._crashes.processing():
            return self._folder.scan(last=last), self._followed.catalogue.items

    def _items(self) -> Items:
        return FollowedItems(self._followed.catalogue.query, self._results.completed())

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()


def open_followed_run(
    request: SubmitJobRequest, document: PartitionDocument, epoch: int, crashes: CrashCount
) -> FollowedRun:
    """Take possession of a job's outputs, and of what earlier runs have taken.

    Blocks on the file system. Raises `LocationRefused`, `InputsRefused`, `OutputsRefused`, or
    `OSError` that says nothing of the folders (`is_transient`).
    """
    source = local_folder(request.inputs_uri, what="inputs")
    target = local_folder(request.outputs_uri, what="outputs")
    files = FollowedFiles()
    with crashes.processing():
        results = open_followed_results(
            source, target, files, document, job=request.name, lossy=request.lossy
        )
    inputs = FollowedInputs(source, files, document.inputs, document.fixed)
    inputs.inflate_into(target / ".shoal" / request.name)
    return FollowedRun(request, document, epoch, inputs, results, crashes)
