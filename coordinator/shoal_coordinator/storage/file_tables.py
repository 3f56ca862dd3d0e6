"""The files of a job by number, and by the items that they hold."""

from array import array as packed
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count, pairwise
from threading import Lock
from typing import Generic, NamedTuple, Protocol, TypeVar


class ItemFile(Protocol):
    """A file whose items are numbered from `first`."""

    @property
    def first(self) -> int: ...
    @property
    def items(self) -> int: ...


File = TypeVar("File", bound=ItemFile)


class _Index(NamedTuple, Generic[File]):
    """The files in their order, with their numbers and first items. `ordered` are the numbers from
    the smallest on, and `places` where the file of each stands."""

    numbers: tuple[int, ...]
    firsts: tuple[int, ...]
    files: tuple[File, ...]
    ordered: Sequence[int]
    places: Sequence[int]


class FileTable(Generic[File]):
    """Files in the order of their items. One thread may change the table while others read it:
    each change puts another index in the place of the last one."""

    def __init__(self, files: Iterable[File] = (), numbers: Iterable[int] | None = None) -> None:
        """Without `numbers` the files are counted from 0."""
        self._lock = Lock()
        self._index = _index(zip(count() if numbers is None else numbers, files, strict=False))

    def __len__(self) -> int:
        return len(self._index.numbers)

    def __contains__(self, number: int) -> bool:
        return self._find(self._index, number) is not None

    def __getitem__(self, number: int) -> File:
        index = self._index
        if (at := self._find(index, number)) is None:
            raise KeyError(number)
        return index.files[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self._index.numbers)

    @property
    def files(self) -> tuple[File, ...]:
        return self._index.files

    def number_of(self, item: int) -> int:
        """The number of the file that holds an item. Raises `KeyError`."""
        index = self._index
        at = bisect_right(index.firsts, item) - 1
        if at < 0 or item >= index.firsts[at] + index.files[at].items:
            raise KeyError(item)
        return index.numbers[at]

    def add(self, files: Iterable[tuple[int, File]]) -> None:
        """Add files, whose numbers and items are above all that are there."""
        with self._lock:
            known = zip(self._index.numbers, self._index.files, strict=True)
            self._index = _index((*known, *files))

    def remove(self, numbers: Collection[int]) -> None:
        with self._lock:
            known = zip(self._index.numbers, self._index.files, strict=True)
            self._index = _index(each for each in known if each[0] not in numbers)

    @staticmethod
    def _find(index: _Index[File], number: int) -> int | None:
        at = bisect_left(index.ordered, number)
        found = at < len(index.ordered) and index.ordered[at] == number
        return index.places[at] if found else None


def _index(files: Iterable[tuple[int, File]]) -> _Index[File]:
    listed = tuple(files)
    numbers = tuple(number for number, _ in listed)
    places: Sequence[int] = range(len(numbers))
    ordered: Sequence[int] = numbers
    if any(first > second for first, second in pairwise(numbers)):
        places = packed("q", sorted(places, key=numbers.__getitem__))
        ordered = packed("q", map(numbers.__getitem__, places))
    return _Index(
        numbers,
        tuple(file.first for _, file in listed),
        tuple(file for _, file in listed),
        ordered,
        places,
    )
