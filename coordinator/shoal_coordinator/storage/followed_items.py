"""The items of a followed folder, listed from its table of files a page at a time: there may be
millions, and a listing does not hold them."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.followed import LISTED_FAILURES, NAME, translated
from shoal_coordinator.storage.item_list import FailedItem, Items, ListedItem, place_of

_CHUNK: Final = 1000
_FILES: Final = (
    "SELECT number, name, first, items, contents, ended, failed FROM taken "
    "WHERE number > ? AND NOT superseded ORDER BY number LIMIT ?"
)
_FAILURES: Final = (
    "SELECT item, input, reason, tries, device FROM failures WHERE number BETWEEN ? AND ?"
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
            failures = self.query(_FAILURES, [files[0][0], files[-1][0]])
            failed = {row[0]: FailedItem(*row) for row in failures}
            for number, *file in files:  # noqa: B007 - the next page begins after the last one
                yield from self._of_file(file, failed)

    def counts(self) -> tuple[int, int]:
        ((items, failed),) = self.query(_COUNTS, [])
        return items, failed

    def not_failed(self, items: Collection[int]) -> Collection[int]:
        return [
            item
            for item in sorted(items)
            if not self.query("SELECT item FROM failures WHERE item = ?", [item])
        ]

    def _of_file(
        self, file: Sequence[Any], failures: Mapping[int, FailedItem]
    ) -> Iterator[ListedItem]:
        raw, first, items, contents, ended, failed = file
        name, stacked = os.fsdecode(raw), json.loads(contents)["stacked"] is not None
        for item in range(first, first + items):
            place = place_of(name, item - first if stacked else None)
            failure = failures.get(item)
            if failure is None and ended and failed == items:
                failure = FailedItem(item, place, _UNLISTED)
            stored = failure is None and (bool(ended) or item in self.stored)
            yield ListedItem(item, place, stored=stored, failure=failure)


def stored_followed_items(outputs: Path, job: str) -> FollowedItems | None:
    """The items of a job that does not run; None where no run of it is known. Raises `OSError`."""
    path = outputs / ".shoal" / job / NAME
    if not path.exists():
        return None
    with contextlib.closing(Folder(path.parent)) as folder:
        os.close(folder.open(NAME, os.O_RDONLY))  # refuses a link

    def query(statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        # Nobody writes: without locks, and without a journal beside it.
        address = f"file:{quote(str(path.absolute()))}?immutable=1"
        with (
            translated(path),
            contextlib.closing(sqlite3.connect(address, uri=True)) as database,
        ):
            return database.execute(statement, values).fetchall()

    return FollowedItems(query)
