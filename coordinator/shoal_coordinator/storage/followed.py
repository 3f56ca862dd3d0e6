"""The files of a followed folder: which wait, which were taken, which have ended. In SQLite, in the
job's folder of the outputs, so that what is in memory does not grow with the life of the job.

    waiting    listed, and perhaps still being written
    taken      has a number, its items too; ended once its result is made, or its items have failed
    failures   the items that failed; the first with place and reason, the others without text
    last       the number of the last retry that was carried out

A name is taken once, whatever becomes of its file later; a retry takes files again of which items
failed. Two files of one stem would give one result: the second fails. Numbers of files and items
grow over all runs of the job, so what a log or a part says of a number stays true. A file that is
taken again has a new number. The row of the old one is superseded and has no name: it says that
these numbers were given.
"""

import contextlib
import errno
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any, Final

from shoal_coordinator.dispatch.item_sets import ItemSet
from shoal_coordinator.storage.catalogues import Catalogue, CatalogueFailed
from shoal_coordinator.storage.contents import FileContents
from shoal_coordinator.storage.file_names import encodable, result_name
from shoal_coordinator.storage.file_tables import FileTable
from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.inputs import InputFile
from shoal_coordinator.storage.item_list import FailedItem
from shoal_coordinator.storage.job_files import result_file

NAME: Final = "followed.sqlite"
LISTED_FAILURES: Final = 100_000
"""Also as many files are taken again by one retry, at most."""
LATEST: Final = 2**63 - 1
"""The last time of a change that can be stored, in nanoseconds: of the year 2262."""
_CHUNK: Final = 5000
_REASON: Final = 2000
"""Characters of a reason that is stored."""
_SCHEMA: Final = """
CREATE TABLE waiting (
    name BLOB PRIMARY KEY, size INTEGER NOT NULL, changed INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX turn ON waiting (size = 0, changed, name);
CREATE TABLE taken (
    number INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, result BLOB UNIQUE,
    first INTEGER NOT NULL, items INTEGER NOT NULL, contents TEXT NOT NULL,
    ended INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    superseded INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX live ON taken (number) WHERE ended = 0;
CREATE INDEX unsuccessful ON taken (number) WHERE failed AND NOT superseded;
CREATE TABLE failures (
    item INTEGER PRIMARY KEY, number INTEGER NOT NULL, input TEXT NOT NULL, reason TEXT NOT NULL,
    tries INTEGER NOT NULL, device TEXT NOT NULL
);
CREATE INDEX failed_of ON failures (number);
CREATE TABLE last (retry INTEGER NOT NULL);
INSERT INTO last VALUES (0);
PRAGMA user_version = 1;
"""
_SETTINGS: Final = (
    "locking_mode = EXCLUSIVE",
    "journal_mode = WAL",
    "synchronous = FULL",
    "cache_size = -2048",
)
_ERRNO: Final = {
    sqlite3.SQLITE_BUSY: errno.EAGAIN,
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_CANTOPEN: errno.EMFILE,
    sqlite3.SQLITE_IOERR: errno.EIO,
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """A file as it was listed last: its size, and the time of its last change in nanoseconds."""

    name: str
    size: int
    changed: int


@dataclass(frozen=True, slots=True)
class Retaken:
    """What a retry takes again: items by their old numbers, and how these had ended."""

    items: ItemSet = field(default_factory=ItemSet)
    failed: int = 0


class FollowedFiles(Catalogue):
    """The catalogue of a followed folder. For several threads."""

    def __init__(self) -> None:
        self.files = FileTable()
        self.live: tuple[tuple[int, InputFile], ...] = ()
        """The files that had been taken and had not ended, when this was opened."""
        self.items = 0
        """Of all files that were taken."""
        self.succeeded = 0
        """Items of files that have ended."""
        self.superseded = 0
        """Items of files that were taken again."""
        self._closed = False
        self._failed = 0
        self._explained = 0
        """Failed items with place and reason."""
        self._failed_items: dict[int, set[int]] = {}
        """Of files that have not ended."""
        self._lock = RLock()

    # ---- a catalogue -----------------------------------------------------------------------------

    def open(self, folder: Folder) -> Mapping[int, int]:
        self._path = folder.path / NAME
        os.close(folder.open(NAME, os.O_RDWR | os.O_CREAT))  # refuses a link
        check_logs(folder)
        with translated(self._path):
            self._db = sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False, cached_statements=32
            )
        try:
            with translated(self._path):
                for setting in _SETTINGS:
                    self._db.execute(f"PRAGMA {setting}")
            with self._changing() as db:
                self._begin(db)
        except BaseException:
            self._db.close()
            raise
        return {}

    def _begin(self, db: sqlite3.Connection) -> None:
        if not db.execute("PRAGMA user_version").fetchone()[0]:
            for statement in _SCHEMA.strip().split(";\n"):
                db.execute(statement)
        # What failed in a file that has not ended is tried again.
        db.execute(
            "DELETE FROM failures WHERE number IN (SELECT number FROM taken WHERE ended = 0)"
        )
        self._explained = _count_explained(db)
        (self.items,) = db.execute("SELECT COALESCE(MAX(first + items), 0) FROM taken").fetchone()
        self.succeeded, self._failed = db.execute(
            "SELECT COALESCE(SUM(items - failed), 0), COALESCE(SUM(failed), 0) "
            "FROM taken WHERE ended AND NOT superseded"
        ).fetchone()
        (self.superseded,) = db.execute(
            "SELECT COALESCE(SUM(items), 0) FROM taken WHERE superseded"
        ).fetchone()
        self.live = tuple(
            (number, InputFile(os.fsdecode(name), first, _contents(contents)))
            for number, name, first, contents in db.execute(
                "SELECT number, name, first, contents FROM taken WHERE ended = 0 ORDER BY number"
            )
        )
        self.files.add((number, result_file(file)) for number, file in self.live)

    def note(self, sizes: Mapping[int, int]) -> None:
        self._end(sizes.keys())

    def note_failed(self, numbers: Collection[int]) -> bool:
        self._end(numbers)
        return True

    def _end(self, numbers: Collection[int]) -> None:
        ended = [number for number in numbers if number in self.files]
        failed = {number: len(self._failed_items.get(number, ())) for number in ended}
        with self._changing() as db:
            db.executemany(
                "UPDATE taken SET ended = 1, failed = ? WHERE number = ?",
                [(failed[number], number) for number in ended],
            )
        with self._lock:
            for number in ended:
                self._failed_items.pop(number, None)
                self._failed += failed[number]
                self.succeeded += self.files[number].items - failed[number]
            self.files.remove(frozenset(ended))

    def correct(self, made: Mapping[int, int]) -> None:
        self._end(made.keys())
        self.live = tuple((number, file) for number, file in self.live if number in self.files)

    def fail(self, failures: Iterable[FailedItem]) -> None:
        rows = [(self.files.number_of(each.item), each) for each in failures]
        with self._changing() as db:
            room = max(0, LISTED_FAILURES - self._explained)
            for chunk, explained in ((rows[:room], True), (rows[room:], False)):
                added = db.executemany(
                    "INSERT OR IGNORE INTO failures VALUES (?, ?, ?, ?, ?, ?)",
                    [_failure_row(number, each, explained) for number, each in chunk],
                )
                self._explained += added.rowcount if chunk and explained else 0
            for number, each in rows:
                self._failed_items.setdefault(number, set()).add(each.item)

    @property
    def failed(self) -> int:
        with self._lock:
            return self._failed + sum(map(len, self._failed_items.values()))

    def failures(self, most: int) -> Sequence[FailedItem]:
        with self._changing() as db:
            found = db.execute(
                "SELECT item, input, reason, tries, device FROM failures WHERE reason <> '' "
                "ORDER BY item LIMIT ?",
                [most],
            )
            return [FailedItem(*row) for row in found]

    def query(self, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """What a statement finds that changes nothing."""
        with self._changing() as db:
            return db.execute(statement, values).fetchall()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._db.close()

    # ---- the folder ------------------------------------------------------------------------------

    def unknown(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Those of the names that were never listed, in chunks."""
        chunk: list[str] = []
        for name in names:
            chunk.append(name)
            if len(chunk) == _CHUNK:
                yield self._unknown(chunk)
                chunk = []
        if chunk:
            yield self._unknown(chunk)

    def _unknown(self, names: Sequence[str]) -> list[str]:
        encoded = [os.fsencode(name) for name in names]
        marks = ", ".join("?" * len(names))
        with self._changing() as db:
            known = {
                row[0]
                for table in ("waiting", "taken")
                for row in db.execute(
                    f"SELECT name FROM {table} WHERE name IN ({marks})",  # noqa: S608 - marks
                    encoded,
                )
            }
        return [name for name, raw in zip(names, encoded, strict=True) if raw not in known]

    def wait(self, files: Iterable[Waiting]) -> None:
        """These files are there, as they are now; they may be still being written."""
        with self._changing() as db:
            _wait(db, files)

    def waiting(self, most: int) -> list[Waiting]:
        """The files that wait, those that were changed longest ago first, empty ones last."""
        with self._changing() as db:
            found = db.execute(
                "SELECT name, size, changed FROM waiting ORDER BY size = 0, changed, name LIMIT ?",
                [most],
            )
            return [Waiting(os.fsdecode(name), size, changed) for name, size, changed in found]

    def count_waiting(self) -> int:
        with self._changing() as db:
            count: int = db.execute("SELECT COUNT(*) FROM waiting").fetchone()[0]
        return count

    def drop(self, names: Iterable[str]) -> None:
        """These files wait no more: they are gone."""
        with self._changing() as db:
            _drop(db, names)

    def take(self, files: Sequence[tuple[str, FileContents]]) -> list[tuple[int, InputFile]]:
        """Number files and their items, durably. One without an item has ended at once."""
        taken: list[tuple[int, InputFile]] = []
        with self._changing() as db:
            first = self.items
            for name, contents in files:
                number, file = _take(db, InputFile(name, first, contents))
                first += file.items
                if file.items:
                    taken.append((number, file))
            _drop(db, (name for name, _ in files))
        self.items = first
        return taken

    def retry(
        self, number: int, items: Collection[int], stat: Callable[[str], Waiting | None]
    ) -> Retaken:
        """Let those files wait again of which items failed, or of which these items did. A file
        that is gone stays failed. The retry of a number is carried out once."""
        with self._changing() as db:
            (last,) = db.execute("SELECT retry FROM last").fetchone()
            found = _failed_files(db, items) if number > last else []
        back = [(*row, there) for row in found if (there := stat(os.fsdecode(row[1]))) is not None]
        with self._changing() as db:
            db.execute("UPDATE last SET retry = ?", [number])
            for again, *_ in back:
                db.execute(
                    "UPDATE taken SET superseded = 1, name = ?, result = NULL WHERE number = ?",
                    [f"/{again}".encode(), again],  # no file has such a name
                )
                db.execute("DELETE FROM failures WHERE number = ?", [again])
            _wait(db, (there for *_, there in back))
            self._explained = _count_explained(db)
        failed = sum(row[4] for row in back)
        with self._lock:
            retaken = ItemSet(runs=(range(row[2], row[2] + row[3]) for row in back))
            self._failed -= failed
            self.succeeded -= len(retaken) - failed
            self.superseded += len(retaken)
        return Retaken(retaken, failed)

    def ended_items(self) -> ItemSet:
        """The items of files that had ended, after the first that had not."""
        if not self.live:
            return ItemSet()
        with self._changing() as db:
            found = db.execute(
                "SELECT first, items FROM taken WHERE ended AND number > ?", [self.live[0][0]]
            ).fetchall()
        return ItemSet(runs=(range(first, first + items) for first, items in found))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction; it is durable at the end of the context. Raises `CatalogueFailed`."""
        with self._lock:
            if self._closed:
                raise CatalogueFailed(errno.EBADF, "the job's run has just ended", str(self._path))
            with translated(self._path), self._db:
                self._db.execute("BEGIN")
                yield self._db


def check_logs(folder: Folder) -> None:
    """Of what SQLite keeps beside the list, a link or what cannot be written says so itself: SQLite
    would call it too many open files, or damage. Raises `OSError`."""
    for suffix in ("-wal", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.close(folder.open(f"{NAME}{suffix}", os.O_RDWR))


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        number = _ERRNO.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
        text = f"{path} is damaged; delete it" if number is None else os.strerror(number)
        raise CatalogueFailed(number or errno.EUCLEAN, text, str(path)) from error


def _take(db: sqlite3.Connection, file: InputFile) -> tuple[int, InputFile]:
    result = os.fsencode(result_name(file.name))
    rival = db.execute("SELECT name FROM taken WHERE result = ?", [result]).fetchone()
    kept: bytes | None = result
    if rival is not None:
        other = os.fsdecode(rival[0])
        problem = encodable(f"would give {result_name(file.name)}, as {other} did; rename it")
        file, kept = replace(file, contents=FileContents(1, problem=problem)), None
    contents = json.dumps(asdict(file.contents))
    row = (os.fsencode(file.name), kept, file.first, file.items, contents, not file.items)
    added = db.execute(
        "INSERT INTO taken (name, result, first, items, contents, ended) VALUES (?, ?, ?, ?, ?, ?)",
        row,
    )
    assert added.lastrowid is not None, "a row was added"
    return added.lastrowid, file


def _failed_files(
    db: sqlite3.Connection, items: Collection[int]
) -> list[tuple[int, bytes, int, int, int]]:
    """Number, name, first item, items and failed items of ended files with failures."""
    return db.execute(
        "SELECT number, name, first, items, failed FROM taken "
        "WHERE ended AND failed AND NOT superseded AND (:all OR number IN ("
        "SELECT number FROM failures WHERE item IN (SELECT value FROM json_each(:items))"
        ")) ORDER BY number LIMIT :most",
        {"all": not items, "items": json.dumps(list(items)), "most": LISTED_FAILURES},
    ).fetchall()


def _failure_row(
    number: int, failed: FailedItem, explained: bool
) -> tuple[int, int, str, str, int, str]:
    if not explained:
        return failed.item, number, "", "", failed.tries, failed.device
    where, why = encodable(failed.input), encodable(failed.reason)[:_REASON]
    return failed.item, number, where, why or "unknown", failed.tries, failed.device


def _count_explained(db: sqlite3.Connection) -> int:
    count: int = db.execute("SELECT COUNT(*) FROM failures WHERE reason <> ''").fetchone()[0]
    return count


def _wait(db: sqlite3.Connection, files: Iterable[Waiting]) -> None:
    db.executemany(
        "INSERT OR REPLACE INTO waiting VALUES (?, ?, ?)",
        [(os.fsencode(each.name), each.size, each.changed) for each in files],
    )


def _drop(db: sqlite3.Connection, names: Iterable[str]) -> None:
    db.executemany("DELETE FROM waiting WHERE name = ?", [(os.fsencode(name),) for name in names])


def _contents(text: str) -> FileContents:
    values = json.loads(text)
    stacked = values.pop("stacked")
    shapes = tuple(map(tuple, values.pop("shapes")))
    return FileContents(
        **values, stacked=None if stacked is None else tuple(stacked), shapes=shapes
    )
