"""Bringing a fragment into the cache: from the nearest peer that has it, else from the coordinator.

Each file is asked for from where the one on disk ends, so that a transfer that breaks, also with
the process, is continued, by any source. A source that gives wrong bytes is left for the next
one, and what it gave is thrown away. A fragment that is asked for twice at a time is fetched
once.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import Final

import grpc

from shoal_agent.cache.disk import CacheFull, FragmentCache, file_sha256, is_disk_full
from shoal_agent.cache.manifest import MANIFEST, Manifest, ManifestError, parse_manifest
from shoal_protocol.files import MAXIMUM_MANIFEST_BYTES, FileReceiver
from shoal_protocol.frames import MalformedFrame
from shoal_protocol.services import FileStream
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

_FILE_SECONDS: Final = 600.0
_FRAME_SECONDS: Final = 30.0
"""How long a source may give nothing: it may be frozen, and the next one need not be."""


@dataclass(frozen=True, slots=True)
class Source:
    """Somebody who may have the fragment: a name for messages, and how to ask."""

    name: str
    fetch: Callable[[FetchFragmentRequest, float], FileStream]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What it took: bytes over the network (0: it was cached), and what was dropped for it."""

    fetched_bytes: int
    seconds: float
    dropped: tuple[str, ...] = ()


class FragmentUnavailable(Exception):
    """No source could give the fragment; says what each one answered."""


class FragmentCorrupt(FragmentUnavailable):
    """The sources that answered gave bytes that do not match."""


class Fetcher:
    """Fetches into one cache."""

    def __init__(
        self,
        cache: FragmentCache,
        on_bytes: Callable[[str, int], None],
        pace: Callable[[int], Awaitable[None]],
    ) -> None:
        """`on_bytes` is told a source's name and a number of bytes as they come; `pace` returns
        when the link has carried so many bytes."""
        self._cache = cache
        self._on_bytes = on_bytes
        self._pace = pace
        self._running: dict[str, asyncio.Task[Fetched]] = {}

    async def ensure(self, digest: str, sources: Sequence[Source]) -> Fetched:
        """Have a fragment cached. Raises `FragmentUnavailable`, `CacheFull`, `OSError`."""
        if digest in self._cache:
            return Fetched(0, 0.0)
        task = self._running.get(digest)
        if task is None:
            task = asyncio.create_task(self._fetch(digest, sources), name=f"fetch {digest}")
            self._running[digest] = task
            task.add_done_callback(lambda _: self._running.pop(digest, None))
        # One of several that wait may be cancelled; the fetch goes on, what comes is of use.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, digest: str, sources: Sequence[Source]) -> Fetched:
        started = perf_counter()
        answers: list[str] = []
        corrupt = False
        dropped: list[str] = []
        counted = 0

        def count(source: Source, size: int) -> None:
            nonlocal counted
            counted += size
            self._on_bytes(source.name, size)

        for source in sources:
            transfer = _Transfer(self._cache, digest, source, dropped, count, self._pace)
            try:
                await transfer.run()
                return Fetched(counted, perf_counter() - started, tuple(dropped))
            except grpc.aio.AioRpcError as error:
                answers.append(f"{source.name}: {error.code().name} {error.details()}")
            except TimeoutError:
                answers.append(f"{source.name}: gave nothing for {_FRAME_SECONDS:.0f} s")
            except (MalformedFrame, ManifestError, _WrongBytes) as error:
                corrupt = True
                answers.append(f"{source.name}: {error}")
                await asyncio.to_thread(self._cache.discard_part, digest)
            except OSError as error:
                await asyncio.to_thread(self._cache.discard_part, digest)
                if is_disk_full(error):
                    raise CacheFull(transfer.need_bytes, 0, f"{digest}: {error}") from error
                raise
            except CacheFull:
                await asyncio.to_thread(self._cache.discard_part, digest)
                raise
        kind = FragmentCorrupt if corrupt else FragmentUnavailable
        raise kind(f"{digest} cannot be fetched: " + ("; ".join(answers) or "no source is known"))


class _WrongBytes(Exception):
    """A file whose digest is not what the manifest says."""


@dataclass(slots=True)
class _Transfer:
    """One fragment from one source."""

    cache: FragmentCache
    digest: str
    source: Source
    dropped: list[str]
    count: Callable[[Source, int], None]
    pace: Callable[[int], Awaitable[None]]
    need_bytes: int = 0

    async def run(self) -> None:
        part = await asyncio.to_thread(self.cache.part, self.digest)
        manifest = await self._manifest(part)
        self.need_bytes = manifest.total_bytes
        self.dropped += await asyncio.to_thread(
            self.cache.make_room, self.digest, manifest.total_bytes
        )
        for name, entry in manifest.files.items():
            path = part / name
            await self._file(path, entry.bytes)
            if await asyncio.to_thread(file_sha256, path) != entry.sha256:
                raise _WrongBytes(f"{name} does not match its digest")
        await asyncio.to_thread(self.cache.admit, manifest)

    async def _manifest(self, part: Path) -> Manifest:
        path = part / MANIFEST
        if path.exists():
            try:
                return parse_manifest(self.digest, path.read_bytes())
            except ManifestError:
                path.unlink()
        await self._file(path, MAXIMUM_MANIFEST_BYTES, whole=True)
        return parse_manifest(self.digest, path.read_bytes())

    async def _file(self, path: Path, limit_bytes: int, *, whole: bool = False) -> None:
        """Have a file of at most `limit_bytes` (exactly that, unless `whole`) on disk."""
        have = path.stat().st_size if path.exists() else 0
        if whole or have > limit_bytes:
            path.unlink(missing_ok=True)
            have = 0
        if have == limit_bytes and have > 0:
            return
        request = FetchFragmentRequest(digest=self.digest, file=path.name, offset=have)
        receiver = FileReceiver(request, limit_bytes)
        call = self.source.fetch(request, _FILE_SECONDS)
        try:
            with path.open("ab", buffering=0) as file:
                async for message in _promptly(call):
                    payload = receiver.feed(message)
                    self.count(self.source, len(payload))
                    await self.pace(len(payload))
                    await self._append(file, payload)
        finally:
            call.cancel()
        if not receiver.complete:
            raise MalformedFrame(f"{path.name} ends at {receiver.position} bytes")
        if not whole and receiver.position != limit_bytes:
            raise MalformedFrame(f"{path.name} has {receiver.position} bytes, not {limit_bytes}")

    async def _append(self, file: FileIO, payload: memoryview) -> None:
        """Write; while the disk is full, drop what was used longest ago, if there is anything."""
        start = file.tell()
        while True:
            try:
                await asyncio.to_thread(_write_all, file, payload)
                return
            except OSError as error:
                if not is_disk_full(error):
                    raise
                gone = await asyncio.to_thread(self.cache.drop_oldest)
                if gone is None:
                    raise
                self.dropped.append(gone)
                file.truncate(start)


async def _promptly(call: FileStream) -> AsyncIterator[bytes]:
    """The messages; raises `TimeoutError` where none comes for a while."""
    messages = aiter(call)
    while True:
        async with asyncio.timeout(_FRAME_SECONDS):
            message = await anext(messages, None)
        if message is None:
            return
        yield message


def _write_all(file: FileIO, payload: memoryview) -> None:
    while payload:
        payload = payload[file.write(payload) :]
