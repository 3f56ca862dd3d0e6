"""Files from a source to a target: what is there already is skipped, what breaks is resumed."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal_cli.transfer.places import (
    Entry,
    Source,
    Target,
    TransferBroken,
    TransferRefused,
    digest_of_stream,
    reader,
)

FILES_AT_ONCE: Final = 4
TRIES: Final = 4
PAUSE_SECONDS: Final = 1.0
"""Before the second try of a file; it doubles."""


@dataclass(slots=True)
class Progress:
    """How far a copy is; `bytes` counts what was there already."""

    files: int
    bytes: int
    done_files: int = 0
    done_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a copy came to; `skipped` of the files were there already."""

    files: int
    bytes: int
    skipped: int


async def copy(
    source: Source,
    target: Target,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    *,
    pause_seconds: float = PAUSE_SECONDS,
) -> Copied:
    """Copy every file. Raises `TransferRefused`, also for an empty source, or `TransferBroken`
    after `TRIES` tries of one file."""
    entries = await source.entries()
    if not entries:
        raise TransferRefused(f"{source.address}: there are no files")
    progress = Progress(len(entries), sum(entry.size_bytes for entry in entries))
    existing = await target.existing()
    work = _Copy(source, target, existing, progress, on_progress, pause_seconds)
    remaining = iter(entries)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(FILES_AT_ONCE, len(entries))):
                group.create_task(work.run(remaining))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the others were cancelled for it
    return Copied(files=len(entries), bytes=progress.bytes, skipped=work.skipped)


@dataclass(slots=True)
class _Copy:
    source: Source
    target: Target
    existing: Mapping[str, int]
    progress: Progress
    on_progress: Callable[[Progress], None]
    pause_seconds: float
    skipped: int = 0

    async def run(self, entries: Iterable[Entry]) -> None:
        """Take one entry after the other, beside others that do the same."""
        for entry in entries:
            await self._file(entry)

    async def _file(self, entry: Entry) -> None:
        pause = self.pause_seconds
        for remaining in reversed(range(TRIES)):
            mine = 0

            def count(size: int) -> None:
                nonlocal mine
                mine += size
                self.progress.done_bytes += size
                self.on_progress(self.progress)

            try:
                await self._try(entry, count)
                break
            except TransferBroken:
                self.progress.done_bytes -= mine
                if not remaining:
                    raise
                await asyncio.sleep(pause)
                pause *= 2
        self.progress.done_files += 1
        self.on_progress(self.progress)

    async def _try(self, entry: Entry, count: Callable[[int], None]) -> None:
        known = entry.digest or await self.source.digest(entry)
        read = reader(self.source, entry)
        if self.existing.get(entry.name) == entry.size_bytes:
            mine = known or await digest_of_stream(read(0))
            if await self.target.digest(entry.name) == mine:
                self.skipped += 1
                count(entry.size_bytes)
                return
            known = mine
        await self.target.put(replace(entry, digest=known), read, count)
