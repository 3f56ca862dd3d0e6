"""A job's inputs: a folder of `.npz` and `.npy` files, seen as one numbered list of items.

Files are taken in name order; names that start with a dot and files of other kinds are passed over.
A file holds one item, or several stacked along the first axis. Per array that the model takes, with
the model's rank M:

- rank M + 1: stacked, item i is `array[i]`;
- rank M, where the model's first axis is fixed to 1 and the array's is not 1: stacked as well, item
i is
  `array[i : i + 1]`;
- rank M otherwise: not stacked; beside stacked arrays it is shared by every item of the file.

Stacked arrays of one file must agree in length. Arrays of other names are passed over, but for
those of inputs that the model has a value for: that value is used, so another one is a mistake. All
rows of a file share one dtype and shape, so everything about an item but damage to its bytes is
known from the headers; what does not suit the model makes that file's items fail with a reason, and
no others.
"""

import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final

from shoal_coordinator.storage.array_limits import Limits, UnreadableArrays
from shoal_coordinator.storage.arrays import SOLE, ArrayFile
from shoal_coordinator.storage.contents import FileContents, classifier, contents_by_kinds, kinds_of
from shoal_coordinator.storage.file_names import encodable, is_file
from shoal_coordinator.storage.file_tables import FileTable
from shoal_protocol.durable_files import is_transient
from shoal_protocol.elements import Array
from shoal_protocol.partition import TensorSpec
from shoal_protocol.units import counted

SUFFIXES: Final = (".npy", ".npz")
_OPEN_FILES: Final = 4
"""More than one, because a model's input that is used late is read again when the item gets
there."""
_WHOLE_DIGEST_BYTES: Final = 1024 * 1024
_FINGERPRINT_BYTES: Final = 16
"""Of a digest: there may be 200,000 of them in memory."""

Shapes = Mapping[str, tuple[int, ...]]
"""By the names of the model's inputs."""


class InputsRefused(Exception):
    """The folder cannot serve as a job's inputs; the text says where, what and what to do."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"inputs {folder}: {reason}")


class InputUnsuitable(Exception):
    """One item cannot be read, or does not suit the model; the text says where it is, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLimits:
    files: int = 200_000
    items: int = 10_000_000
    arrays: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a job; its items are numbered from `first`. `version` is the one that was scanned
    (`ArrayFile.version`), if that is known. `fingerprint` changes when it holds something else."""

    name: str
    first: int
    contents: FileContents
    version: int | tuple[int, int] | None = None
    fingerprint: bytes = b""

    @property
    def items(self) -> int:
        return self.contents.items


class InputSet:
    """The items of a folder. Reading is safe from several threads."""

    def __init__(
        self,
        folder: Path,
        files: tuple[InputFile, ...],
        model_inputs: tuple[TensorSpec, ...],
        digest: str,
        limits: FolderLimits,
        fixed: Collection[str] = (),
    ) -> None:
        self.folder = folder
        self.digest = digest
        """Changes when a file comes, goes, or holds something else."""
        self._table = FileTable(files)
        self._prefix = os.path.join(folder, "")
        self._classify = classifier(model_inputs, limits.arrays, fixed)
        self._model_inputs = model_inputs
        self._limits = limits
        self._spool: Path | None = None
        self._lock = Lock()
        self._open: OrderedDict[int, ArrayFile] = OrderedDict()

    def __len__(self) -> int:
        return self.files[-1].first + self.files[-1].items if self.files else 0

    @property
    def files(self) -> tuple[InputFile, ...]:
        """In the order of their names, which is that of their items."""
        return self._table.files

    def inflate_into(self, folder: Path) -> None:
        """Where compressed files are inflated (unnamed, so nothing stays behind); default: /tmp."""
        self._spool = folder

    def locate(self, item: int) -> tuple[int, int]:
        """Number of the item's file, and its row there."""
        number = self._table.number_of(item)
        return number, item - self._table[number].first

    def place(self, item: int) -> str:
        """Where an item comes from: `lines.npz`, or `lines.npz[3]`."""
        number, row = self.locate(item)
        file = self._table[number]
        name = encodable(file.name)
        return name if file.contents.stacked is None else f"{name}[{row}]"

    def item_bytes(self, item: int) -> int:
        """Bytes that reading an item takes, by its file's headers. Raises `KeyError` where there is
        no such item."""
        return self._table[self.locate(item)[0]].contents.item_bytes

    def envelopes(self) -> tuple[Shapes, ...]:
        """Shapes for the inputs of the model that cover ever more of the items that can run: the
        smallest kind of item, the two smallest, and so on up to all; () if no item can run. What is
        planned for an envelope suits every item that it covers."""
        kinds = {file.contents.shapes for file in self.files if file.contents.problem is None}
        grown: list[Shapes] = []
        for kind in sorted(kinds, key=lambda shapes: (sum(map(math.prod, shapes)), shapes)):
            own = dict(zip((spec.name for spec in self._model_inputs), kind, strict=True))
            last = grown[-1] if grown else own
            grown.append({name: _envelope((last[name], shape)) for name, shape in own.items()})
        return tuple(grown)

    def beyond(self, envelope: Shapes) -> tuple[str, ...]:
        """The files whose items can run, and are larger than an envelope."""
        covered = tuple(envelope[spec.name] for spec in self._model_inputs)
        return tuple(
            file.name
            for file in self.files
            if file.contents.problem is None
            and any(
                _envelope(pair) != pair[0]
                for pair in zip(covered, file.contents.shapes, strict=True)
            )
        )

    def read(self, item: int, names: Iterable[str] | None = None) -> dict[str, Array]:
        """The item's arrays by the model's input names (or those of `names`), in the model's
        shapes.

        Raises `InputUnsuitable`, or `OSError` that says nothing of the item (`is_transient`).
        """
        number, row = self.locate(item)
        file = self._table[number]
        if file.contents.problem is not None:
            raise InputUnsuitable(f"{self.place(item)}: {file.contents.problem}")
        wanted = None if names is None else frozenset(names)
        try:
            with self._lock:
                return self._read_current(number, row, wanted)
        except Exception as e:  # files come from strangers: one item fails, nothing else
            if isinstance(e, OSError) and is_transient(e):
                raise
            reason = str(e) if isinstance(e, UnreadableArrays) else f"cannot be read: {e!r}"
            raise InputUnsuitable(f"{self.place(item)}: {reason}") from e

    def close(self) -> None:
        """Close the files that are open; `read` opens them again."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _read_current(
        self, number: int, row: int, wanted: Collection[str] | None
    ) -> dict[str, Array]:
        """A row of a file that nobody writes to meanwhile. Once more if somebody did: that may have
        changed its time alone."""
        file = self._table[number]
        for _ in range(2):
            arrays = self._opened(number)
            found = {
                spec.name: self._read_array(arrays, file, spec, row)
                for spec in self._model_inputs
                if wanted is None or spec.name in wanted
            }
            if arrays.is_current:
                return found
        raise UnreadableArrays("is being changed")

    def _opened(self, number: int) -> ArrayFile:
        file = self._table[number]
        known = file.version
        if (before := self._open.get(number)) is not None:
            if before.is_current:
                self._open.move_to_end(number)
                return before
            self._open.pop(number).close()
            known = before.version
        path = self._prefix + file.name
        arrays = ArrayFile(path, limits=self._limits.arrays, spool=self._spool)
        same = self._classify(kinds_of(arrays.headers)) == file.contents
        if not same or known not in (None, arrays.version):
            arrays.close()
            raise UnreadableArrays("was changed after the job had begun")
        self._open[number] = arrays
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return arrays

    @staticmethod
    def _read_array(arrays: ArrayFile, file: InputFile, spec: TensorSpec, row: int) -> Array:
        name = SOLE if SOLE in arrays.headers else spec.name
        if spec.name not in (file.contents.stacked or ()):
            return arrays.read(name)
        rows = arrays.read(name, slice(row, row + 1))
        return rows if spec.shape is None or rows.ndim == len(spec.shape) else rows[0, ...]


def scan_inputs(
    folder: Path,
    model_inputs: tuple[TensorSpec, ...],
    limits: FolderLimits | None = None,
    *,
    fixed: Collection[str] = (),
) -> InputSet:
    """Number the items of a folder by reading headers only. `fixed` are inputs that the model has
    a value for. Raises `InputsRefused`, or
    `OSError` that says nothing of the folder (`is_transient`)."""
    limits = limits or FolderLimits()
    digest = hashlib.sha256()
    files: list[InputFile] = []
    first = 0
    prefix = os.path.join(folder, "")
    classify = classifier(model_inputs, limits.arrays, fixed)
    for name in _names(folder, limits):
        version = None
        try:
            with ArrayFile(prefix + name, limits=limits.arrays) as arrays:
                content = _content(name, arrays)
                contents, version = classify(kinds_of(arrays.headers)), arrays.version
        except UnreadableArrays as e:
            contents = FileContents(1, problem=str(e))
            content = os.fsencode(f"{name}\0unreadable\0")
        digest.update(content)
        fingerprint = hashlib.sha256(content).digest()[:_FINGERPRINT_BYTES]
        files.append(InputFile(name, first, contents, version, fingerprint))
        first += contents.items
        if first > limits.items:
            raise InputsRefused(
                folder, f"has more than {limits.items} items; split the job into several"
            )
    if not first:
        raise InputsRefused(folder, "its files hold no item: every stacked array has length 0")
    return InputSet(folder, tuple(files), model_inputs, digest.hexdigest(), limits, fixed)


def _names(folder: Path, limits: FolderLimits) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in entries if entry.name[0] != "." and is_file(entry)]
    except FileNotFoundError as e:
        raise InputsRefused(folder, "does not exist") from e
    except NotADirectoryError as e:
        raise InputsRefused(folder, "is a file; give the folder that holds it") from e
    except OSError as e:
        if is_transient(e):
            raise
        raise InputsRefused(folder, f"cannot be listed: {e.strerror}") from e
    names = sorted(name for name in found if name.endswith(SUFFIXES))
    if not names:
        what = f"holds {counted(len(found), 'file')} and" if found else "is empty: it has"
        raise InputsRefused(folder, f"{what} no .npz or .npy")
    if len(names) > limits.files:
        raise InputsRefused(
            folder,
            f"has {len(names)} files, the limit is {limits.files}; stack items in larger files",
        )
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.rpartition(".")[0], name)
        if other != name:
            raise InputsRefused(
                folder, f"{other} and {name} would both give one result; rename one of them"
            )
    return names


def passed_over(folder: Path) -> list[str]:
    """What looks like inputs and is not taken: files of these kinds in capital letters, and what
    has the name of one and is or leads to no file. Raises `OSError`."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name[0] != "."
            and entry.name.lower().endswith(SUFFIXES)
            and not (entry.name.endswith(SUFFIXES) and is_file(entry))
        )


def _content(name: str, arrays: ArrayFile) -> bytes:
    """What distinguishes a file from another of the same name: an archive has checksums of its
    members; a small `.npy` is read; of a large one, the time of its last change must do. Raises
    `UnreadableArrays`."""
    parts = [name]
    for header in arrays.headers.values():
        parts.append(f"{header.name}:{header.dtype.str}:{header.shape}:{header.checksum}")
    if SOLE in arrays.headers:
        parts.append(arrays.digest(_WHOLE_DIGEST_BYTES))
    return os.fsencode("\0".join([*parts, "\0"]))


def contents_of(
    path: Path,
    model_inputs: tuple[TensorSpec, ...],
    limits: FolderLimits,
    fixed: Collection[str] = (),
) -> FileContents:
    """What a file holds, by its headers. Raises `OSError` that says nothing of it."""
    try:
        with ArrayFile(path, limits=limits.arrays) as arrays:
            kinds = kinds_of(arrays.headers)
        contents = contents_by_kinds(kinds, model_inputs, limits.arrays, fixed)
    except UnreadableArrays as problem:
        return FileContents(1, problem=str(problem))
    if contents.items > limits.items:
        return FileContents(1, problem=f"has more than {limits.items} items; split it")
    return contents


def _envelope(shapes: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """The largest size of each axis; of shapes that differ in rank, those of the highest."""
    rank = max(map(len, shapes))
    return tuple(map(max, zip(*(each for each in shapes if len(each) == rank), strict=True)))
