"""Files that come while the copy is active. A name that the target has is not copied again, unless
files that have changed are wanted too; a file is copied when two scans have found it the same, so
that one that is being written waits. One whose name the target cannot have is left, and named once.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from shoal_cli.transfer.copying import FILES_AT_ONCE, Copied, Copy, Progress
from shoal_cli.transfer.places import (
    Entry,
    Source,
    Target,
    TransferBroken,
    TransferRefused,
    is_name,
    no_name,
    with_tries,
)

SCAN_SECONDS: Final = 2.0
_SHARE: Final = 20
"""A listing that takes long is followed by a pause of so many times that."""
_LONGEST_SECONDS: Final = 60.0
_SCANS: Final = 10
"""Without `follow`: files that still change are waited for during so many scans."""


async def copy_new(
    source: Source,
    target: Target,
    note: Callable[[str], None] = lambda text: None,
    *,
    follow: bool,
    changed: bool = False,
) -> Copied:
    """Copy the files whose names the target lacks; `changed`: those of another size there as well.
    `follow`: those that come later too, for ever, also when the network breaks; otherwise raises
    `TransferBroken` after some tries. Raises `TransferRefused`."""
    existing = await with_tries(target.existing)
    work = _New(source, target, note, dict(existing), changed=changed)
    wanted: set[str] | None = None
    idle = 0
    while follow or idle <= _SCANS:
        began, before = monotonic(), work.files
        try:
            left = await work.scan(wanted)
        except TransferBroken as error:
            if not follow and idle == _SCANS:
                raise
            note(f"{error}; it is tried again")
        else:
            if not (left or follow):
                break
            wanted = None if follow else wanted or left
        idle = idle + 1 if work.files == before else 0
        pause = max(SCAN_SECONDS, _SHARE * (monotonic() - began))
        await asyncio.sleep(min(pause, _LONGEST_SECONDS))
    return Copied(files=work.files, bytes=work.bytes, skipped=work.skipped)


@dataclass(slots=True)
class _New:
    """What is known from scan to scan: of `done` files the sizes. `failed` could not be copied:
    others go first. `unusable` are names that no file of the target can have."""

    source: Source
    target: Target
    note: Callable[[str], None]
    done: dict[str, int]
    changed: bool = field(kw_only=True)
    seen: dict[str, Entry] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    unusable: set[str] = field(default_factory=set)
    skipped: int = 0
    files: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        self.skipped = len(self.done)

    async def scan(self, wanted: set[str] | None) -> set[str]:
        """Copy what is as it was at the last scan, of the names in `wanted`; those that are
        left."""
        new = [
            entry
            for entry in await self.source.entries()
            if self._is_new(entry)
            and (wanted is None or entry.name in wanted)
            and self._is_usable(entry)
        ]
        ready = [entry for entry in new if entry.size_bytes and self.seen.get(entry.name) == entry]
        self.seen = {entry.name: entry for entry in new}
        self.failed &= self.seen.keys()
        await self._copy(sorted(ready, key=lambda entry: entry.name in self.failed))
        return {entry.name for entry in new if self._is_new(entry)}

    def _is_new(self, entry: Entry) -> bool:
        known = self.done.get(entry.name)
        return known is None or (self.changed and known != entry.size_bytes)

    def _is_usable(self, entry: Entry) -> bool:
        if not (usable := is_name(entry.name)) and entry.name not in self.unusable:
            self.unusable.add(entry.name)
            self.note(f"{self.source.address}: {no_name(entry.name)}; it is left there")
        return usable

    async def _copy(self, entries: Sequence[Entry]) -> None:
        """Copy these, some at once. One that fails keeps no other from being copied; where several
        do, the rest waits for the next scan."""
        remaining = iter(entries)
        problems: dict[str, TransferBroken | TransferRefused] = {}

        async def run() -> None:
            for entry in remaining:
                try:
                    await self._copy_one(entry)
                except (TransferBroken, TransferRefused) as error:
                    problems[entry.name] = error
                if len(problems) > FILES_AT_ONCE:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(min(FILES_AT_ONCE, len(entries))):
                group.create_task(run())
        if problems:
            self.failed |= problems.keys()
            there = {entry.name for entry in await self.source.entries()}
            for error in (problems[name] for name in problems if name in there):
                raise error  # the others are gone, and not missed

    async def _copy_one(self, entry: Entry) -> None:
        progress = Progress(entry.size_bytes)
        work = Copy(self.source, self.target, {}, progress, lambda _: None)
        await work.copy([entry])
        self.done[entry.name] = entry.size_bytes
        self.files += 1
        self.bytes += entry.size_bytes
