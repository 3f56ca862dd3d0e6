"""Files that come while the copy goes on. A name that the target has is not copied again, unless
files that have changed are wanted too; a file is copied when two looks have found it the same, so
that one that is being written waits. One whose name the target cannot have is left, and named once.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Final

from shoal_cli.transfer.copying import FILES_AT_ONCE, Copied, Copy, Progress
from shoal_cli.transfer.places import (
    PAUSE_SECONDS,
    Entry,
    Source,
    Target,
    TransferBroken,
    TransferRefused,
    is_name,
    no_name,
    with_tries,
)

LOOK_SECONDS: Final = 2.0
_SHARE: Final = 20
"""A listing that takes long is followed by a pause of so many times that."""
_LONGEST_SECONDS: Final = 60.0
_LOOKS: Final = 10
"""Without `follow`: files that still change are waited for during so many looks."""


async def copy_new(
    source: Source,
    target: Target,
    note: Callable[[str], None] = lambda text: None,
    *,
    follow: bool,
    changed: bool = False,
    look_seconds: float = LOOK_SECONDS,
) -> Copied:
    """Copy the files whose names the target lacks; `changed`: those of another size there as well.
    `follow`: those that come later too, for ever, also when the network breaks; otherwise raises
    `TransferBroken` after some tries. Raises `TransferRefused`."""
    existing = await with_tries(PAUSE_SECONDS, target.existing)
    work = _New(source, target, existing, note, look_seconds, changed=changed)
    wanted: set[str] | None = None
    idle = 0
    while follow or idle <= _LOOKS:
        began, before = monotonic(), work.files
        try:
            left = await work.look(wanted)
        except TransferBroken as error:
            if not follow and idle == _LOOKS:
                raise
            note(f"{error}; it is tried again")
        else:
            if not (left or follow):
                break
            wanted = None if follow else wanted or left
        idle = idle + 1 if work.files == before else 0
        pause = max(look_seconds, _SHARE * (monotonic() - began))
        await asyncio.sleep(min(pause, _LONGEST_SECONDS))
    return Copied(files=work.files, bytes=work.bytes, skipped=work.skipped)


class _New:
    """What is known from look to look."""

    def __init__(
        self,
        source: Source,
        target: Target,
        existing: Mapping[str, int],
        note: Callable[[str], None],
        pause_seconds: float,
        *,
        changed: bool,
    ) -> None:
        self._note = note
        self._pause_seconds = pause_seconds
        self._changed = changed
        self._source, self._target = source, target
        self._done = dict(existing)
        self._seen: dict[str, Entry] = {}
        self._failed: set[str] = set()
        """Those that could not be copied: others go first."""
        self._unusable: set[str] = set()
        """Names that no file of the target can have."""
        self.skipped = len(self._done)
        self.files = self.bytes = 0

    async def look(self, wanted: set[str] | None) -> set[str]:
        """Copy what is as it was at the last look, of the names in `wanted`; those that are
        left."""
        new = [
            entry
            for entry in await self._source.entries()
            if self._is_new(entry)
            and (wanted is None or entry.name in wanted)
            and self._is_usable(entry)
        ]
        ready = [entry for entry in new if entry.size_bytes and self._seen.get(entry.name) == entry]
        self._seen = {entry.name: entry for entry in new}
        self._failed &= self._seen.keys()
        await self._copy(sorted(ready, key=lambda entry: entry.name in self._failed))
        return {entry.name for entry in new if self._is_new(entry)}

    def _is_new(self, entry: Entry) -> bool:
        known = self._done.get(entry.name)
        return known is None or (self._changed and known != entry.size_bytes)

    def _is_usable(self, entry: Entry) -> bool:
        if not (usable := is_name(entry.name)) and entry.name not in self._unusable:
            self._unusable.add(entry.name)
            self._note(f"{self._source.address}: {no_name(entry.name)}; it is left there")
        return usable

    async def _copy(self, entries: Sequence[Entry]) -> None:
        """Copy these, some at once. One that fails keeps no other from being copied; where several
        do, the rest waits for the next look."""
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
            self._failed |= problems.keys()
            there = {entry.name for entry in await self._source.entries()}
            for error in (problems[name] for name in problems if name in there):
                raise error  # the others are gone, and not missed

    async def _copy_one(self, entry: Entry) -> None:
        progress = Progress(entry.size_bytes)
        work = Copy(self._source, self._target, {}, progress, lambda _: None, self._pause_seconds)
        await work.copy([entry])
        self._done[entry.name] = entry.size_bytes
        self.files += 1
        self.bytes += entry.size_bytes
