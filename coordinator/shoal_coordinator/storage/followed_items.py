"""The items of a followed folder, listed from its table of files a page at a time: there may be
millions, and a listing does not hold them."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.followed import LISTED_FAILURES, NAME, check_logs, translated
from shoal_coordinator.storage.item_list import FailedItem, Items, ListedItem, place_of

_CHUNK: Final = 1000
_FILES: Final = (
    "SELECT number, name, first, items, contents, ended, failed FROM taken "
    "WHERE number > ? AND NOT superseded ORDER BY number LIMIT ?"
)
_FAILURES: Final = (
    "SELECT item, input, reason, tries, device FROM failures WHERE item > ? AND item < ? "
    "ORDER BY item LIMIT ?"
)
_COUNTS: Final = (
    "SELECT COALESCE(SUM(items), 0), COALESCE(SUM(failed), 0) FROM taken WHERE NOT superseded"
)
_UNLISTED: Final = f"the reason is not stored: that of the first {LISTED_FAILURES:,} failures is"

Query = Callable[[str, Sequence[object]], list[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class FollowedItems(Items):
    """The items of all files that were taken. Of files that have not ended, `stored` items have a
    result. Iterating reads the disk and may raise `OSError`."""

    query: Query
    stored: Set[int] = frozenset()

    def __iter__(self) -> Iterator[ListedItem]:
        number = 0
        while files := self.query(_FILES, [number, _CHUNK]):
            first, end = files[0][2], files[-1][2] + files[-1][3]
            # Read after the files: what failed in one that has ended by then is among them.
            failures = _Ahead(self._failures(first, end))
            for number, *file in files:  # noqa: B007 - the next page begins after the last one
                yield from self._of_file(file, failures)

    def _failures(self, first: int, end: int) -> Iterator[FailedItem]:
        """Of these items, which have numbers as their files do: they grow."""
        last = first - 1
        while rows := self.query(_FAILURES, [last, end, _CHUNK]):
            yield from (FailedItem(*row) for row in rows)
            last = rows[-1][0]

    def counts(self) -> tuple[int, int]:
        ((items, failed),) = self.query(_COUNTS, [])
        return items, failed

    def not_failed(self, items: Collection[int]) -> Collection[int]:
        return [
            item
            for item in sorted(items)
            if not self.query("SELECT item FROM failures WHERE item = ?", [item])
        ]

    def _of_file(self, file: Sequence[Any], failures: "_Ahead") -> Iterator[ListedItem]:
        raw, first, items, contents, ended, failed = file
        name, stacked = os.fsdecode(raw), json.loads(contents)["stacked"] is not None
        for item in range(first, first + items):
            place = place_of(name, item - first if stacked else None)
            failure = failures.of(item)
            if failure is None and ended and failed == items:
                failure = FailedItem(item, place, _UNLISTED)
            if failure is not None and not failure.reason:
                failure = replace(failure, input=place, reason=_UNLISTED)
            stored = failure is None and (bool(ended) or item in self.stored)
            yield ListedItem(item, place, stored=stored, failure=failure)


class _Ahead:
    """Failures in the order of their items, asked for in that order."""

    def __init__(self, failures: Iterator[FailedItem]) -> None:
        self._failures = failures
        self._next = next(failures, None)

    def of(self, item: int) -> FailedItem | None:
        while self._next is not None and self._next.item < item:
            self._next = next(self._failures, None)
        return self._next if self._next is not None and self._next.item == item else None


def stored_followed_items(outputs: Path, job: str) -> FollowedItems | None:
    """The items of a job that does not run; None where no run of it is known. Raises `OSError`."""
    path = outputs / ".shoal" / job / NAME
    if not path.exists():
        return None
    with contextlib.closing(Folder(path.parent)) as folder:
        os.close(folder.open(NAME, os.O_RDONLY))  # refuses a link
        check_logs(folder)
    log = path.with_name(f"{NAME}-wal")

    def query(statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        # Nobody writes. What a run that was killed, or whose disk is full, has left in its log
        # counts as well; without one there is no need of locks.
        way = "mode=rw" if log.exists() else "immutable=1"
        address = f"file:{quote(str(path.absolute()))}?{way}"
        with (
            translated(path),
            contextlib.closing(sqlite3.connect(address, uri=True)) as database,
        ):
            database.execute("PRAGMA locking_mode = EXCLUSIVE")  # needs no file for its index
            return database.execute(statement, values).fetchall()

    return FollowedItems(query)
