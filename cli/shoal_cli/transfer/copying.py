"""Files from a source to a target: what is there already is skipped, what breaks is resumed."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from shoal_cli.transfer.places import (
    Entry,
    OnBytes,
    Source,
    Target,
    TransferBroken,
    TransferRefused,
    check_name,
    digest_of_stream,
    reader,
    with_tries,
)

FILES_AT_ONCE: Final = 4


@dataclass(slots=True)
class Progress:
    """How far a copy is; `bytes` counts what was there already."""

    bytes: int
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
) -> Copied:
    """Copy every file. Raises `TransferRefused`, also for an empty source and, before anything is
    copied, for a name that not every place can have; or `TransferBroken` after `TRIES` tries of one
    file."""
    entries = await source.entries()
    if not entries:
        raise TransferRefused(f"{source.address}: there are no files")
    for entry in entries:
        check_name(entry.name, source.address)
    progress = Progress(sum(entry.size_bytes for entry in entries))
    existing = await target.existing()
    work = Copy(source, target, existing, progress, on_progress)
    await work.copy(entries)
    return Copied(files=len(entries), bytes=progress.bytes, skipped=work.skipped)


@dataclass(slots=True)
class Copy:
    """A copy under way; `existing` are the sizes of what the target has already."""

    source: Source
    target: Target
    existing: Mapping[str, int]
    progress: Progress
    on_progress: Callable[[Progress], None]
    skipped: int = 0

    async def copy(self, entries: Sequence[Entry]) -> None:
        """Copy these, some at once."""
        remaining = iter(entries)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(FILES_AT_ONCE, len(entries))):
                    group.create_task(self._run(remaining))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled for it

    async def _run(self, entries: Iterable[Entry]) -> None:
        """Take one entry after the other, beside others that do the same."""
        for entry in entries:
            await with_tries(partial(self._try, entry))

    async def _try(self, entry: Entry) -> None:
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            counted += size
            self.progress.done_bytes += size
            self.on_progress(self.progress)

        try:
            await self._put(entry, count)
        except TransferBroken:
            self.progress.done_bytes -= counted
            raise

    async def _put(self, entry: Entry, count: OnBytes) -> None:
        known = entry.digest or await self.source.digest(entry)
        read = reader(self.source, entry)
        if self.existing.get(entry.name) == entry.size_bytes:
            known = known or await digest_of_stream(read(0))
            if await self.target.existing_digest(entry.name) == known:
                self.skipped += 1
                count(entry.size_bytes)
                return
        await self.target.put(replace(entry, digest=known), read, count)
