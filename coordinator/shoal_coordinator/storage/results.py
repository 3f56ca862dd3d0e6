"""A job's results on disk: written once, whole, and safe at any moment from `kill -9`.

```
OUTPUTS/lines.npz                one file per input file, of the same stem
        failures.json            what failed and why, while there is any
        .shoal/JOB/job.json      whose results these are, and of which inputs (`identity`)
                   journal.jsonl {"file": 3, "bytes": 8192, ...} is made
                   3.part        results of the items of file 3, until the file is made
                   7.log         small files of one item each, until they are made
                   lock          held by the process that writes here
```

An item's results are appended to its file's part as they come, and count once the part is synced,
which happens in batches. Once all items of a file have ended, the file is made from the part:
written beside, synced, renamed, journalled; then the part is removed. A small file of a single item
counts once a log holds it. It is made with others, when `publish` is called or the log is full
(`result_log`). After a crash or damage: files of which the journal knows and rows whose checksums
are right are complete, files in a log are made, anything else is computed again, and gives the same
bytes.

Rows are stacked as the input was: along a new first axis, or joined along the first where the
inputs were and the rows have length 1. Rows of different shapes cannot be stacked: they become
arrays of their own, `NAME.0`, `NAME.1`, by row. Where rows failed, the file holds those that
succeeded, and `__rows__` (int64) says which these are; its part is kept, so that running again
tries the failed ones again. bfloat16 is written as uint16 (its bits), text as fixed-width unicode.

Others may write to the folder too: nothing in it is reached through a link (`folders`).
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Final

from shoal_coordinator.dispatch.item_sets import ItemSet
from shoal_coordinator.storage.catalogues import Catalogue
from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.identity import Conflict, claim
from shoal_coordinator.storage.item_list import FailedItem
from shoal_coordinator.storage.made_files import content_of, make_file
from shoal_coordinator.storage.parts import Part, ResultFile
from shoal_coordinator.storage.result_log import LARGEST_BYTES, ResultLog
from shoal_protocol.durable_files import is_transient, is_unwritable, remedy
from shoal_protocol.elements import Array

_LISTED_FAILURES: Final = 100_000
_MAKERS: Final = 4
"""Files that are made at once."""
_PAGE_BYTES: Final = 4096
"""A file takes at least so much on most disks."""
_UNWRITTEN_BYTES: Final = 16 * 1024 * 1024
"""What the tails of all parts together may hold in memory, at most."""


class OutputsRefused(Exception):
    """The folder cannot take a job's results; the text says where, what and what to do."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"outputs {folder}: {reason}")


class ResultStore:
    """The results of one job. Not for several threads at once; any method may wait for the disk.

    Any method may raise an `OSError` that says nothing of the results (`is_transient`): call it
    again, nothing is lost.
    """

    def __init__(
        self,
        outputs: Path,
        *,
        job: str,
        identity: str,
        catalogue: Catalogue,
        names: Sequence[str],
    ) -> None:
        """Open or begin. `identity` says what the results depend on, for catalogues without
        `origins`; `names` are the model's outputs in order. Raises `OutputsRefused`."""
        self._path = outputs
        self._job = job
        self._catalogue = catalogue
        self._names = tuple(names)
        self._made: dict[int, int] = {}
        self._made_in_part: set[int] = set()
        self._unmade: set[int] = set()
        """Files of several items that have ended: their making was interrupted, or failed."""
        self._parts: dict[int, Part] = {}
        self._small: dict[int, str] = {}
        """The names of the files of one item."""
        self._listed = 0
        self._unwritten = 0
        self.folder: Folder
        """The job's own folder in the outputs."""
        self.take_room: Callable[[int], None] = lambda _: None
        """Is asked for room for so many bytes more; raises `OSError` where there is none. Below 0:
        so many are gone. Called by several threads."""
        self.unwritable = ""
        """Why the folder takes no more results of any item, and what to do; empty if it does."""
        with contextlib.ExitStack() as undo:
            try:
                outputs.mkdir(parents=True, exist_ok=True)
                self._outputs = Folder(outputs)
                undo.callback(self._outputs.close)
                self.folder = self._own_folder(undo)
                self._claim(identity)
                noted = catalogue.open(self.folder)
                undo.callback(catalogue.close)
                self._log = ResultLog(self.folder, self._outputs, self._small, self._note_made)
                undo.callback(self._log.close)
                self._expect((number, self._files[number]) for number in self._files)
                self._recover(noted)
            except OSError as e:
                if is_transient(e):
                    raise
                raise OutputsRefused(outputs, f"cannot be written: {e.strerror or e}") from e
            self._makers = undo.enter_context(ThreadPoolExecutor(_MAKERS, f"files of {job}"))
            self._resources = undo.pop_all()

    def close(self) -> None:
        self._resources.close()

    def extend(self, files: Sequence[tuple[int, ResultFile]]) -> None:
        """There are more files to make."""
        self._files.add(files)
        self._expect(files)

    def _expect(self, files: Iterable[tuple[int, ResultFile]]) -> None:
        self._small |= {number: file.name for number, file in files if file.items == 1}

    def completed(self) -> ItemSet:
        whole = (self._files[number] for number in self._made.keys() | self._log.numbers)
        runs = (range(file.first, file.first + file.items) for file in whole)
        parts = (part.stored_items() for part in self._parts.values())
        return ItemSet(runs=chain(runs, chain.from_iterable(parts)))

    def failed(self) -> dict[int, FailedItem]:
        return {each.item: each for each in self._catalogue.failures(self._catalogue.failed)}

    def is_complete(self) -> bool:
        """Whether every file is made, and nothing in it failed."""
        return all(number in self._made for number in self._files if self._files[number].items)

    # ---- storing ---------------------------------------------------------------------------------

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        """Store some of an item's results; a later array of the same name replaces an earlier.

        `finish` reports what goes wrong here.
        """
        part, size = self._part_of(item), sum(array.nbytes for array in arrays.values())
        try:
            self.take_room(max(size, _PAGE_BYTES) if part.file.items == 1 else size)
        except OSError as e:
            part.refuse(item - part.file.first, arrays, e)
            return
        part.add(item - part.file.first, arrays)
        self._unwritten += size
        if self._unwritten > _UNWRITTEN_BYTES:
            self._unwritten = 0
            for part in self._parts.values():
                part.flush()

    def finish(self, items: Iterable[int]) -> dict[int, str]:
        """Make the results of these items durable. Of those that cannot be stored: why."""
        failures: dict[int, str] = {}
        touched: dict[int, list[int]] = {}
        made, logged = self._made, self._log.numbers
        numbered = ((self._files.number_of(item), item) for item in items)
        new = [each for each in numbered if each[0] not in made and each[0] not in logged]
        self._flush(new)
        for number, item in new:
            part = self._part_of(item)
            if (reason := part.problem(item - part.file.first)) is None:
                touched.setdefault(number, []).append(item)
            else:
                failures[item] = self.reason(reason)
        for number in [number for number in touched if self._files[number].items > 1]:
            try:
                self._parts[number].sync()
            except OSError as e:
                failures |= dict.fromkeys(touched.pop(number), self.reason(e))
        for number, stored in touched.items():
            for item in stored:
                self._parts[number].commit(item - self._files[number].first)
        for number, reason in self._make(touched).items():
            if self._files[number].items == 1:
                failures[self._files[number].first] = reason
                self._drop(number)
        return failures

    def _flush(self, items: Iterable[tuple[int, int]]) -> None:
        """Write what waits of these: once for all rows, since it may be lost for all of them."""
        for part in dict.fromkeys(self._part_of(item) for _, item in items):
            if part.file.items > 1:
                part.flush()

    def publish(self) -> None:
        """Begin to make the small files that are stored; without this call, only a full log and
        `complete` do. Files of several items that could not be made, are. `unwritable` reports what
        goes wrong with these, and what went wrong with small ones before."""
        problems = self._make(tuple(self._unmade))
        self.unwritable = self.unwritable or next(iter(problems.values()), "")
        self._log.publish()
        self._log_problem()

    @property
    def unpublished(self) -> bool:
        """Whether files are stored that are not made yet."""
        return bool(self._log.numbers or self._unmade)

    def fail(self, failures: Iterable[FailedItem]) -> None:
        """Note items that have failed for good, and drop what had arrived of them."""
        failed = tuple(failures)
        self._catalogue.fail(failed)
        for failure in failed:
            part = self._part_of(failure.item)
            part.fail(failure.item - part.file.first)
        self._make({self._files.number_of(each.item) for each in failed})
        # Written again each time the list has grown by a quarter, so that many failures stay cheap.
        if self._catalogue.failed > self._listed * 5 // 4:
            self.list_failures()

    def list_failures(self) -> None:
        """Write anew which items failed, where that is possible."""
        with contextlib.suppress(OSError):
            self._list_failures()

    def complete(self) -> str | None:
        """Make all files after the job's last item; the reason if that is impossible."""
        problems = self._make(list(self._parts))
        self._log.publish_all()
        try:
            self._list_failures()
        except OSError as e:
            return self.reason(e)
        return next(iter(problems.values()), None) or self._log_problem()

    def _make(self, numbers: Iterable[int]) -> dict[int, str]:
        """Make the files among these whose items have all ended; the reasons where that failed."""
        failed, made = dict[int, OSError](), dict[int, int]()
        ready: list[int] = []
        for number in numbers:
            part = self._parts[number]
            if not part.ended or number in self._made_in_part:
                continue
            if not part.any_stored:
                self._note_failed([number])
                self._drop(number)
                continue
            ready.append(number)
        problems = self._store_small(ready)
        large = [number for number in ready if number in self._parts and number not in problems]
        self._unmade |= {number for number in large if self._parts[number].file.items > 1}
        for number, size in zip(large, self._makers.map(self._try_make, large), strict=True):
            if isinstance(size, OSError):
                failed[number] = size
            elif self._parts[number].failed_rows:
                self._made_in_part.add(number)
            else:
                made[number] = size
        problems |= self._note_large(made)
        self._unmade -= (made.keys() - problems.keys()) | self._made_in_part
        self._end_made_in_part()
        return problems | {number: self.reason(error) for number, error in failed.items()}

    def _end_made_in_part(self) -> None:
        """Drop the parts that no later run goes on with."""
        if self._made_in_part and self._note_failed(self._made_in_part):
            for number in self._made_in_part:
                self._drop(number)
            self._made_in_part.clear()

    def _store_small(self, numbers: Iterable[int]) -> dict[int, str]:
        """Store the small files among these in the log, and drop their parts; the reasons where
        that failed."""
        small: dict[int, bytes] = {}
        for number in numbers:
            part = self._parts[number]
            if part.file.items == 1 and part.in_memory:
                content = content_of(part)
                if len(content) <= LARGEST_BYTES:
                    small[number] = content
        if not small:
            return {}
        try:
            failed = self._log.store(small)
        except OSError as e:
            return dict.fromkeys(small, self.reason(e))
        for number in small.keys() - failed.keys():
            self._drop(number)
        return {number: self.reason(error) for number, error in failed.items()}

    def _try_make(self, number: int) -> int | OSError:
        """In a thread of its own: what takes the time is to wait for the disk. For a moment there
        are the part and the file."""
        part = self._parts[number]
        try:
            self.take_room(part.written)
            return make_file(part, self._outputs)
        except OSError as e:
            return e

    def _note_large(self, sizes: Mapping[int, int]) -> dict[int, str]:
        """Make the names of made files durable, then remove their parts; the reasons where that
        failed."""
        if not sizes:
            return {}
        try:
            self._outputs.sync()
            self._note_made(sizes)
        except OSError as e:
            return dict.fromkeys(sizes, self.reason(e))
        for number in sizes:
            self._drop(number)
        return {}

    def _note_made(self, sizes: Mapping[int, int]) -> None:
        self._catalogue.note(sizes)
        self._made |= sizes
        self._forget_removed(sizes)

    def _note_failed(self, numbers: Collection[int]) -> bool:
        done = self._catalogue.note_failed(numbers)
        self._forget_removed(numbers)
        return done

    def _forget_removed(self, numbers: Iterable[int]) -> None:
        """Hold nothing of files that have left the catalogue."""
        for number in numbers:
            if number not in self._files:
                self._made.pop(number, None)
                self._small.pop(number, None)

    def _drop(self, number: int) -> None:
        part = self._parts.pop(number)
        with contextlib.suppress(OSError):  # of no use to anybody: the next run removes it
            part.remove()
        self.take_room(-part.written)

    def _list_failures(self) -> None:
        self._listed = self._catalogue.failed
        if not self._listed:
            self._outputs.remove("failures.json")
            return
        failures = self._catalogue.failures(_LISTED_FAILURES)
        shown = [{"item": e.item, "input": e.input, "reason": e.reason} for e in failures]
        document = {"job": self._job, "failed": self._listed, "failures": shown}
        content = json.dumps(document, indent=1).encode() + b"\n"
        self._outputs.replace("failures.json", content)

    def reason(self, error: OSError | str) -> str:
        """What is wrong with the results; an error that says nothing of them is raised again."""
        if isinstance(error, str):
            return f"results cannot be written to {self._path}: {error}"
        if is_transient(error):
            raise error
        reason = self.reason(error.strerror or str(error))
        if not is_unwritable(error):
            return reason
        self.unwritable = f"{reason}; {remedy(error)}, then run the job again: it resumes"
        return self.unwritable

    def _log_problem(self) -> str | None:
        """Why files in a log cannot be made."""
        return None if self._log.problem is None else self.reason(self._log.problem)

    # ---- finding ---------------------------------------------------------------------------------

    def _part_of(self, item: int) -> Part:
        number = self._files.number_of(item)
        if number not in self._parts:
            file = self._files[number]
            self._parts[number] = Part(self.folder, number, file, self._names)
        return self._parts[number]

    # ---- beginning -------------------------------------------------------------------------------

    def _own_folder(self, undo: contextlib.ExitStack) -> Folder:
        """The job's folder in the outputs: ours alone from now on, and writable."""
        state = self._outputs.enter(".shoal")
        undo.callback(state.close)
        self._refuse_others(state)
        folder = state.enter(self._job)
        undo.callback(folder.close)
        try:
            self._refuse_others(state)  # who began at the same time
        except OutputsRefused:
            state.remove_empty(self._job)
            raise
        lock = folder.open("lock", os.O_RDWR | os.O_CREAT)
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            reason = f"are in use by another process that runs {self._job!r}"
            raise OutputsRefused(self._path, reason) from e
        # The results' own folder may be another mount than its child, or read-only.
        os.close(self._outputs.create(".shoal-probe"))
        self._outputs.remove(".shoal-probe")
        return folder

    def _refuse_others(self, state: Folder) -> None:
        for other in state.names():
            if other != self._job:
                raise OutputsRefused(
                    self._path,
                    f"hold results of another job, {other!r}; choose another folder, "
                    f"or delete {state.path}",
                )

    def _claim(self, identity: str) -> None:
        """Have the files get the numbers that they have on the disk."""
        origins = self._catalogue.origins
        try:
            numbers = claim(self.folder, self._outputs, self._job, identity, origins)
        except Conflict as e:
            raise OutputsRefused(self._path, str(e)) from e
        if numbers is not None:
            self._catalogue.number(numbers)
        self._files = self._catalogue.files

    def _recover(self, noted: Mapping[int, int]) -> None:
        """Take over what is noted and what the parts say, as far as the files confirm it."""
        for number, size in noted.items():
            if self._outputs.size(self._files[number].name) == size:
                self._made[number] = size
        self._made |= self._log.recover(self._made.keys())
        for name in self.folder.names():
            stem, _, kind = name.partition(".")
            if kind not in ("part", "part.tmp"):
                continue
            number = int(stem) if stem.isdecimal() and stem.isascii() else -1
            known = number in self._files and self._files[number].items > 0
            if kind == "part" and known and number not in self._made:
                part = self._part_of(self._files[number].first)
                part.recover()
                if part.ended:
                    self._unmade.add(number)
            else:
                self.folder.remove(name)
        # What does not hold any more must not be believed later.
        self._catalogue.correct(self._made)
        self._forget_removed(tuple(self._made))
        self._log.forget_recovered()
