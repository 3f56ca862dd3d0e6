"""A job's results on disk: written once, whole, and safe at any moment from `kill -9`.

```
OUTPUTS/lines.npz                one file per input file, of the same stem
        failures.json            what failed and why, while there is any
        .shoal/JOB/job.json      whose results these are
                   journal.jsonl {"item": 17, "at": 4096, "end": 8192} is stored, {"file": 3, ...}
                   is made 3.part        results of the items of file 3, until the file is made
                   lock          held by the process that writes here
```

An item's results are appended to its file's part as they come, and counted when its line is in the
journal; both are synced in batches. Once all items of a file have ended, the file is made from the
part: written beside, synced, renamed, journalled; then the part goes. A file of a single item is
made at once, without a line for the item. After a crash: what the journal knows stands, anything
else is done anew, and gives the same bytes.

Rows are stacked as the input was: along a new first axis, or joined along the first where the
inputs were and the rows have length 1. Rows of different shapes cannot be stacked: they become
arrays of their own, `NAME.0`, `NAME.1`, by row. Where rows failed, the file holds those that
succeeded, and `__rows__` (int64) says which these are; its part is kept, so that running again
tries the failed ones again. bfloat16 is written as uint16 (its bits), text as fixed-width unicode.

When all items have succeeded, the journal shrinks to one line per file: running again finds nothing
to do.
"""

import contextlib
import fcntl
import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_coordinator.storage.arrays import Array
from shoal_coordinator.storage.journal import Journal, Line
from shoal_coordinator.storage.parts import Part, ResultFile, make_file
from shoal_protocol.durable_files import replace_file, sync_folder

_VERSION: Final = 1
_LISTED_FAILURES: Final = 100_000
_MAKERS: Final = 4
"""Files that are made at once."""
_UNWRITTEN_BYTES: Final = 16 * 1024 * 1024
"""What the tails of all parts together may hold in memory, at most."""


class OutputsRefused(Exception):
    """The folder cannot take a job's results. `folder` is where, the text says what and what to
    do."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"outputs {folder}: {reason}")
        self.folder = folder
        self.reason = reason


def check_outputs(outputs: Path, job: str) -> None:
    """Whether results of a job could be written now, found by trying; nothing is left behind.

    Raises `OutputsRefused`.
    """
    try:
        for folder in (outputs, outputs / ".shoal" / job):
            nearest = next(path for path in (folder, *folder.parents) if path.exists())
            with tempfile.TemporaryFile(dir=nearest):
                pass
    except OSError as e:
        raise OutputsRefused(outputs, f"cannot be written: {e.strerror or e}") from e


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item without a result: where its input is, and why it failed."""

    item: int
    input: str
    reason: str


class ResultStore:
    """The results of one job. Not for several threads at once; any method may wait for the disk."""

    def __init__(
        self,
        outputs: Path,
        *,
        job: str,
        identity: str,
        files: Sequence[ResultFile],
        names: Sequence[str],
    ) -> None:
        """Open or begin. `identity` says what the results depend on, `names` are the model's
        outputs in order. Raises `OutputsRefused`."""
        self._outputs = outputs
        self._folder = outputs / ".shoal" / job
        self._job = job
        self._files = files
        self._firsts = [file.first for file in files]
        self._names = tuple(names)
        self._made: dict[int, int] = {}
        self._made_in_part: set[int] = set()
        self._parts: dict[int, Part] = {}
        self._failed: dict[int, FailedItem] = {}
        self._listed = 0
        self._unwritten = 0
        with contextlib.ExitStack() as undo:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                undo.callback(os.close, lock)
                self._take(lock)
                self._identify(identity)
                self._journal = Journal(self._folder / "journal.jsonl")
                undo.callback(self._journal.close)
                self._recover()
            except OSError as e:
                raise OutputsRefused(outputs, f"cannot be written: {e.strerror or e}") from e
            self._makers = undo.enter_context(ThreadPoolExecutor(_MAKERS, f"files of {job}"))
            self._resources = undo.pop_all()

    def close(self) -> None:
        """Let go of the folder. What is stored stays."""
        self._resources.close()

    def completed(self) -> frozenset[int]:
        """The items whose results are safe."""
        items: set[int] = set()
        for number in self._made:
            file = self._files[number]
            items.update(range(file.first, file.first + file.items))
        for part in self._parts.values():
            items.update(part.file.first + row for row in part.stored_rows())
        return frozenset(items)

    # ---- storing ---------------------------------------------------------------------------------

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        """Put aside some of an item's results; a later array of the same name replaces an earlier.

        What goes wrong here is told by `finish`.
        """
        part = self._part_of(item)
        part.add(item - part.file.first, arrays)
        self._unwritten += sum(array.nbytes for array in arrays.values())
        if self._unwritten > _UNWRITTEN_BYTES:
            self._unwritten = 0
            for part in self._parts.values():
                part.flush()

    def finish(self, items: Iterable[int]) -> dict[int, str]:
        """Make the results of these items last. Of those that cannot be stored: why."""
        failures: dict[int, str] = {}
        touched: dict[int, list[int]] = {}
        for item in items:
            number = self._file_of(item)
            if number in self._made:
                continue
            part = self._part_of(item)
            reason = part.problem(item - part.file.first, self._names)
            if reason is None:
                touched.setdefault(number, []).append(item)
            else:
                failures[item] = self._unwritable(reason)
        several = {n: items for n, items in touched.items() if self._files[n].items > 1}
        try:
            self._journal.append(self._settle(several))
        except OSError as e:
            for number, lost in several.items():
                failures |= dict.fromkeys(lost, self._unwritable(e.strerror or str(e)))
                del touched[number]
        for number, stored in touched.items():
            for item in stored:
                self._parts[number].settle(item - self._files[number].first)
        for number, reason in self._make(touched).items():
            if self._files[number].items == 1:
                failures[self._files[number].first] = reason
                self._drop(number)
        return failures

    def fail(self, failures: Iterable[FailedItem]) -> None:
        """Note items that have failed for good, and drop what had arrived of them."""
        touched: set[int] = set()
        for failure in failures:
            self._failed[failure.item] = failure
            part = self._part_of(failure.item)
            part.fail(failure.item - part.file.first)
            touched.add(self._file_of(failure.item))
        self._make(touched)
        # Written anew each time the list has grown by a quarter, so that many failures stay cheap.
        if len(self._failed) > self._listed * 5 // 4:
            with contextlib.suppress(OSError):
                self._list_failures()

    def complete(self) -> str | None:
        """Bring everything to its end after the job's last item; the reason if that is
        impossible."""
        problems = self._make(list(self._parts))
        try:
            self._list_failures()
            if not self._failed and not problems:
                self._journal.rewrite(self._made_line(number) for number in sorted(self._made))
        except OSError as e:
            return self._unwritable(e.strerror or str(e))
        return next(iter(problems.values()), None)

    def _settle(self, touched: Mapping[int, Sequence[int]]) -> list[Line]:
        """The journal's lines for items whose parts are synced now. Raises `OSError`."""
        lines: list[Line] = []
        for number, items in touched.items():
            part = self._parts[number]
            part.sync()
            for item in items:
                at, end = part.extent(item - part.file.first)
                lines.append({"item": item, "at": at, "end": end})
        return lines

    def _make(self, numbers: Iterable[int]) -> dict[int, str]:
        """Make the files among these whose items have all ended; the reasons where that failed."""
        problems: dict[int, str] = {}
        ready: list[int] = []
        made: list[int] = []
        for number in numbers:
            part = self._parts[number]
            if not part.ended or number in self._made_in_part:
                continue
            if not part.any_stored:
                self._drop(number)
                continue
            ready.append(number)
        for number, size in zip(ready, self._makers.map(self._try_make, ready), strict=True):
            if isinstance(size, OSError):
                problems[number] = self._unwritable(size.strerror or str(size))
            elif self._parts[number].failed_rows:
                self._made_in_part.add(number)
            else:
                self._made[number] = size
                made.append(number)
        return problems | self._note_made(made)

    def _try_make(self, number: int) -> int | OSError:
        """In a thread of its own: what takes the time is to wait for the disk."""
        try:
            return make_file(self._parts[number], self._names, self._outputs)
        except OSError as e:
            return e

    def _note_made(self, numbers: Sequence[int]) -> dict[int, str]:
        """Make the names of made files last, then let their parts go."""
        if not numbers:
            return {}
        try:
            sync_folder(self._outputs)
            self._journal.append([self._made_line(number) for number in numbers])
        except OSError as e:
            for number in numbers:
                del self._made[number]
            return dict.fromkeys(numbers, self._unwritable(e.strerror or str(e)))
        for number in numbers:
            self._drop(number)
        return {}

    def _made_line(self, number: int) -> Line:
        return {"file": number, "bytes": self._made[number]}

    def _drop(self, number: int) -> None:
        self._parts.pop(number).remove()

    def _list_failures(self) -> None:
        path = self._outputs / "failures.json"
        self._listed = len(self._failed)
        if not self._failed:
            path.unlink(missing_ok=True)
            return
        listed = [self._failed[item] for item in sorted(self._failed)[:_LISTED_FAILURES]]
        document = {
            "job": self._job,
            "failed": len(self._failed),
            "failures": [
                {"item": each.item, "input": each.input, "reason": each.reason} for each in listed
            ],
        }
        replace_file(path, json.dumps(document, indent=1).encode() + b"\n")

    def _unwritable(self, reason: str) -> str:
        return f"results cannot be written to {self._outputs}: {reason}"

    # ---- finding ---------------------------------------------------------------------------------

    def _file_of(self, item: int) -> int:
        return bisect_right(self._firsts, item) - 1

    def _part_of(self, item: int) -> Part:
        number = self._file_of(item)
        if number not in self._parts:
            self._parts[number] = Part(self._folder / f"{number}.part", self._files[number])
        return self._parts[number]

    # ---- beginning -------------------------------------------------------------------------------

    def _take(self, lock: int) -> None:
        """Make sure that the folder is ours alone, and can be written."""
        state = self._outputs / ".shoal"
        for other in os.listdir(state):
            if other != self._job:
                raise OutputsRefused(
                    self._outputs,
                    f"hold results of another job, {other!r}; choose another folder, "
                    f"or delete {state}",
                )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            reason = f"are in use by another process that runs {self._job!r}"
            raise OutputsRefused(self._outputs, reason) from e
        # The results' own folder may be another mount than its child, or read-only.
        probe = self._outputs / ".shoal-probe"
        probe.touch()
        probe.unlink()

    def _identify(self, identity: str) -> None:
        """Make sure that what stands here is of this very job."""
        path = self._folder / "job.json"
        mine = {"version": _VERSION, "job": self._job, "identity": identity}
        try:
            known = json.loads(path.read_bytes())
        except FileNotFoundError:
            replace_file(path, json.dumps(mine).encode())
            return
        except ValueError as e:
            raise OutputsRefused(self._outputs, f"hold a damaged {path}; delete it") from e
        if known != mine:
            raise OutputsRefused(
                self._outputs,
                f"hold results of another {self._job!r}, of another model or other inputs; "
                f"choose another folder, or delete {self._outputs / '.shoal'}",
            )

    def _recover(self) -> None:
        """Take over what the journal says, as far as the files still bear it out."""
        for line in self._journal.lines:
            match line:
                case {"file": int(number), "bytes": int(size)} if 0 <= number < len(self._files):
                    self._made[number] = size
                case {"item": int(item), "at": int(at), "end": int(end)} if self._knows(item):
                    part = self._part_of(item)
                    part.restore(item - part.file.first, at, end)
                case _:
                    pass
        for number, size in list(self._made.items()):
            if self._stands(number, size):
                self._parts.pop(number, None)
            else:
                del self._made[number]
        self._sweep()
        for part in self._parts.values():
            part.cut()
        # What does not hold any more must not be believed later, when new parts have grown.
        lines = list(self._valid_lines())
        if len(lines) != len(self._journal.lines):
            self._journal.rewrite(lines)

    def _sweep(self) -> None:
        """Delete what nobody will ask for."""
        for leftover in self._folder.glob("*.tmp"):
            leftover.unlink()
        for path in self._folder.glob("*.part"):
            number = int(path.stem) if path.stem.isdigit() else -1
            if number not in self._parts:
                path.unlink()

    def _valid_lines(self) -> Iterable[Line]:
        for number in sorted(self._made):
            yield self._made_line(number)
        for part in self._parts.values():
            for row in part.stored_rows():
                at, end = part.extent(row)
                yield {"item": part.file.first + row, "at": at, "end": end}

    def _knows(self, item: int) -> bool:
        return 0 <= item < self._files[-1].first + self._files[-1].items

    def _stands(self, number: int, size: int) -> bool:
        try:
            return (self._outputs / self._files[number].name).stat().st_size == size
        except FileNotFoundError:
            return False
