"""Fetching fragments into the cache: from the nearest peer that has one, else the coordinator.

Each file is requested from where the one on disk ends, so that any source resumes a transfer that
broke, also with the process. A source that gives wrong bytes, or gives them too slowly, is left for
the next one; wrong bytes are thrown away. Two requests for one fragment share one fetch, which ends
when nobody waits any more: what comes takes memory that those who wait were granted. A file that
another fragment has on this device is not fetched: the two share it, and where both are fetched at
once, one waits for the other.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import grpc

from shoal_agent.cache.disk import CacheFull, FragmentCache
from shoal_agent.cache.folders import drop_cached_pages
from shoal_protocol.bulk.link import Undelivered
from shoal_protocol.digests import Digest
from shoal_protocol.durable_files import is_disk_full, is_transient, replace_file
from shoal_protocol.files import FileReceiver
from shoal_protocol.fragment_store import FragmentMissing, read_manifest
from shoal_protocol.frames import MalformedFrame
from shoal_protocol.limits import Stalled
from shoal_protocol.manifest import (
    MANIFEST,
    MAXIMUM_MANIFEST_BYTES,
    FileEntry,
    FragmentDamaged,
    Manifest,
    is_shared,
    parse_manifest,
)
from shoal_protocol.services import FileStream
from shoal_protocol.threads import in_thread
from shoal_protocol.transfers import PartialFile, WrongBytes, receive, watched
from shoal_protocol.units import format_bytes
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

Given = ParamSpec("Given")
Written = TypeVar("Written")

_FILE_SECONDS: Final = 600.0
_PART_BYTES: Final = 1 << 20
"""gRPC receives ahead whatever was asked for, up to several times that, so a file is asked for in
parts."""


@dataclass(frozen=True, slots=True)
class Source:
    """A peer or the coordinator: a name for messages, and how to ask it."""

    name: str
    fetch: Callable[[FetchFragmentRequest, float], FileStream]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What it took: bytes over the network (0: it was cached)."""

    fetched_bytes: int
    seconds: float


class FragmentUnavailable(Exception):
    """No source could give the fragment; says what each one answered."""


class FragmentCorrupt(FragmentUnavailable):
    """The sources that answered gave bytes that do not match."""


class SourceLost(Exception):
    """Nothing more comes from a source."""


class Fetcher:
    """Fetches into one cache."""

    def __init__(
        self,
        cache: FragmentCache,
        on_bytes: Callable[[str, int], None],
        pace: Callable[[int], Awaitable[None]],
    ) -> None:
        """`on_bytes` receives a source's name and a number of bytes as they come; `pace` returns
        when the link has carried so many bytes."""
        self._cache = cache
        self._on_bytes = on_bytes
        self._pace = pace
        self._running: dict[str, asyncio.Task[Fetched]] = {}
        self._ending: dict[str, asyncio.Task[Fetched]] = {}
        self._waiting: Counter[str] = Counter()
        self._shared = WeakValueDictionary[Digest, asyncio.Lock]()

    async def ensure(self, digest: str, sources: Sequence[Source]) -> Fetched:
        """Have a fragment cached. Raises `FragmentUnavailable`, `CacheFull`, `OSError`."""
        while (ending := self._ending.get(digest)) is not None:
            await asyncio.wait((ending,))
        if digest in self._cache:
            return Fetched(0, 0.0)
        task = self._running.get(digest)
        if task is None:
            task = asyncio.create_task(self._fetch(digest, sources), name=f"fetch {digest}")
            self._running[digest] = task
            task.add_done_callback(partial(self._ended, digest))
        self._waiting[digest] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[digest] -= 1
            if not self._waiting[digest]:
                del self._waiting[digest]
                if not task.done():
                    await self._cancel(digest, task)

    async def _cancel(self, digest: str, task: "asyncio.Task[Fetched]") -> None:
        """End a fetch that nobody waits for any more, and has memory for. The next one resumes what
        has come."""
        self._ending[digest] = self._running.pop(digest)
        task.cancel()
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((task,))

    async def fetch_ahead(self, digest: str, sources: Sequence[Source]) -> Fetched:
        """`ensure`, of what is used later: it leaves the page cache."""
        fetched = await self.ensure(digest, sources)
        await in_thread(drop_cached_pages, self._cache.path(digest))
        return fetched

    def _ended(self, digest: str, task: "asyncio.Task[Fetched]") -> None:
        for tasks in (self._running, self._ending):
            if tasks.get(digest) is task:
                del tasks[digest]
        if not task.cancelled():
            task.exception()  # asyncio logs a failure that nobody waits for any more

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, digest: str, sources: Sequence[Source]) -> Fetched:
        try:
            return await self._fetch_from(digest, sources)
        finally:
            self._cache.give_up(digest)

    async def _fetch_from(self, digest: str, sources: Sequence[Source]) -> Fetched:
        started = perf_counter()
        answers: list[str] = []
        corrupt = False
        transfer = _Transfer(
            self._cache, Digest(digest), self._on_bytes, self._pace, self._turn_for
        )
        for source in sources:
            try:
                await transfer.run(source)
            except grpc.aio.AioRpcError as error:
                answers.append(f"{source.name}: {error.code().name} {error.details()}")
            except (Stalled, SourceLost) as error:
                answers.append(f"{source.name}: {error}")
            except (MalformedFrame, FragmentDamaged, WrongBytes) as error:
                corrupt = True
                answers.append(f"{source.name}: {error}")
                await in_thread(self._cache.discard_part, digest)
            except OSError as error:
                if is_transient(error):  # what came is kept for the next try
                    raise FragmentUnavailable(f"{digest} cannot be fetched now: {error}") from error
                await in_thread(self._cache.discard_part, digest)
                if is_disk_full(error):
                    need = transfer.need_bytes
                    full = f"the disk of {self._cache.folder} is full: {digest} does not fit"
                    room = f"room for {format_bytes(need)}" if need else "room"
                    reason = f"{full} ({error.strerror}); make {room} there"
                    raise CacheFull(need, 0, reason) from error
                raise
            except CacheFull:
                await in_thread(self._cache.discard_part, digest)
                raise
            else:
                seconds = perf_counter() - started
                return Fetched(transfer.fetched_bytes, seconds)
        kind = FragmentCorrupt if corrupt else FragmentUnavailable
        raise kind(f"{digest} cannot be fetched: " + ("; ".join(answers) or "no source is known"))

    def _turn_for(self, digest: Digest) -> asyncio.Lock:
        """Held by the one transfer that brings a shared file."""
        return self._shared.setdefault(digest, asyncio.Lock())


class _Transfer:
    """One fragment, from one source after the other until one has given all of it."""

    def __init__(
        self,
        cache: FragmentCache,
        digest: Digest,
        on_bytes: Callable[[str, int], None],
        pace: Callable[[int], Awaitable[None]],
        turn_for: Callable[[Digest], asyncio.Lock],
    ) -> None:
        self._cache = cache
        self._digest = digest
        self._turn_for = turn_for
        self._on_bytes = on_bytes
        self._pace = pace
        self.need_bytes = 0
        self.fetched_bytes = 0
        self._resumed = False

    async def run(self, source: Source) -> None:
        try:
            await self._run(source)
        except (MalformedFrame, FragmentDamaged, WrongBytes):
            if not self._resumed:
                raise
            # What was here before may be what is wrong.
            await in_thread(self._cache.discard_part, self._digest)
            self._resumed = False
            await self._run(source)

    async def _run(self, source: Source) -> None:
        part = await self._write(self._cache.part, self._digest)
        manifest = await self._manifest(part, source)
        self.need_bytes = manifest.total_bytes
        # First what is here: nobody drops it for the rest then.
        linked = await in_thread(self._cache.link_shared, manifest)
        await in_thread(self._cache.make_room, manifest, linked)
        for name, entry in manifest.files.items():
            if name not in linked:
                await self._file(part / name, entry, source)
        await in_thread(self._cache.admit, manifest)

    async def _manifest(self, part: Path, source: Source) -> Manifest:
        """The one that an earlier fetch left, or the source's, in memory until it is verified."""
        try:
            return await in_thread(read_manifest, part, self._digest)
        except (FragmentMissing, FragmentDamaged):
            pass  # fetched below
        request = FetchFragmentRequest(digest=self._digest, file=MANIFEST)
        content = bytearray()
        async for piece in watched(_pieces(request, MAXIMUM_MANIFEST_BYTES, source)):
            content += piece
            await self._arrived(source, len(piece))
        manifest = parse_manifest(bytes(content), self._digest)
        self.need_bytes = manifest.total_bytes
        await self._write(replace_file, part / MANIFEST, bytes(content))
        return manifest

    async def _file(self, path: Path, entry: FileEntry, source: Source) -> None:
        if not is_shared(path.name):
            await self._receive(path, entry, source)
            return
        async with self._turn_for(entry.digest):
            if not await in_thread(self._cache.shared.link, entry, path):
                await self._receive(path, entry, source)
                await in_thread(self._cache.shared.keep, entry.digest, path)

    async def _receive(self, path: Path, entry: FileEntry, source: Source) -> None:
        def read(offset: int) -> AsyncIterator[memoryview]:
            return watched(_parts(self._digest, path.name, offset, entry.size_bytes, source))

        async def arrived(count: int) -> None:
            await self._arrived(source, count)

        part = PartialFile(path, entry.size_bytes, cached=False)
        try:
            await self._write(part.open)
            self._resumed = self._resumed or part.offset > 0
            await receive(part, read, arrived, self._make_room)
            try:
                await in_thread(part.verify, entry.digest)
            except WrongBytes as error:
                raise WrongBytes(f"{path.name} does not match its digest") from error
        finally:
            await in_thread(part.close)

    async def _arrived(self, source: Source, count: int) -> None:
        self.fetched_bytes += count
        self._on_bytes(source.name, count)
        await self._pace(count)

    async def _write(
        self, write: Callable[Given, Written], *given: Given.args, **named: Given.kwargs
    ) -> Written:
        """What a call gives that writes: where the disk is full, it is called again when there is
        room."""
        while True:
            try:
                return await in_thread(write, *given, **named)
            except OSError as error:
                await self._make_room(error)

    async def _make_room(self, error: OSError) -> None:
        """While the disk is full, drop the least recently used; raise where there is none."""
        if not is_disk_full(error) or await in_thread(self._cache.drop_oldest) is None:
            raise error


async def _parts(
    digest: Digest, file: str, offset: int, size_bytes: int, source: Source
) -> AsyncIterator[memoryview]:
    """The bytes of a file from an offset on. Raises as `_pieces`."""
    while offset < size_bytes:
        request = FetchFragmentRequest(digest=digest, file=file, offset=offset, bytes=_PART_BYTES)
        async for piece in _pieces(request, size_bytes, source):
            offset += len(piece)
            yield piece


async def _pieces(
    request: FetchFragmentRequest, limit_bytes: int, source: Source
) -> AsyncIterator[memoryview]:
    """The bytes that a source answers. Raises `MalformedFrame`, `SourceLost`,
    `grpc.aio.AioRpcError`."""
    receiver = FileReceiver(request, limit_bytes)
    try:
        call = source.fetch(request, _FILE_SECONDS)
    except (Undelivered, grpc.aio.UsageError) as error:
        raise SourceLost(str(error)) from error
    try:
        async for message in call:
            yield receiver.feed(message)
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise SourceLost("the coordinator has lost it") from error  # so its call was cancelled
    finally:
        call.cancel()
    if not receiver.complete:
        raise MalformedFrame(f"{request.file} ends at {receiver.position} bytes")
