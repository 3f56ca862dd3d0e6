"""How each item of a job ended, stored beside its results, so that it can be listed and retried.

`OUTPUTS/.shoal/JOB/items.json` is written when a run ends. A run of selected items reads from it
which others stay failed. Of a million failed items the first have a reason there, as many as fit
into what is read again; of the others the numbers are stored.
"""

import contextlib
import json
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from shoal_coordinator.dispatch.item_sets import ItemSet
from shoal_coordinator.storage.file_names import encodable
from shoal_coordinator.storage.folders import Folder

_NAME: Final = "items.json"
_VERSION: Final = 1
_MOST_BYTES: Final = 256 << 20
_MOST_ITEMS: Final = 1 << 24
_FAILURE_BYTES: Final = 128 << 20
"""What failed items with places and reasons take, at most."""
_REASON: Final = 1000
"""Characters of a reason that is stored: a listing shows no more."""
_UNEXPLAINED: Final = "the reason is not stored: those of the first failures are"


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item without a result: where its input is, why it failed, after how many tries, and on
    which device the last one was, if on any."""

    item: int
    input: str
    reason: str
    tries: int = 0
    device: str = ""


class ListedItem(NamedTuple):
    """An item: where its input is, whether it has a result, after how many tries, and why it
    failed, if it did. One of neither is still to do."""

    item: int
    input: str
    stored: bool
    tries: int = 0
    failure: FailedItem | None = None


class Items(ABC):
    """The items of a job, in their order. Any method may raise `OSError`."""

    @abstractmethod
    def __iter__(self) -> Iterator[ListedItem]: ...

    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """How many items there are, and how many of them have failed."""

    @abstractmethod
    def not_failed(self, items: Collection[int]) -> Collection[int]:
        """Those of these items that have not failed, in their order."""


def place_of(name: str, row: int | None) -> str:
    """Where an item comes from: `lines.npz`, or `lines.npz[3]`. The name may be no text."""
    shown = encodable(name)
    return shown if row is None else f"{shown}[{row}]"


@dataclass(frozen=True, slots=True)
class ListedFile:
    """An input file: the number of its first item, and whether it holds several items."""

    name: str
    first: int
    stacked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemList(Items):
    """The items of a job whose files are all known. `stored` have a result, those of `earlier` from
    before the last run; `tries` counts those of the others where one was not enough: there may be
    millions of items."""

    total: int
    files: tuple[ListedFile, ...]
    stored: Set[int]
    failed: Mapping[int, FailedItem]
    tries: Mapping[int, int] = field(default_factory=dict)
    earlier: Set[int] = frozenset()

    def __iter__(self) -> Iterator[ListedItem]:
        for item in range(self.total):
            if (failure := self.failed.get(item)) is not None:
                yield ListedItem(item, failure.input, stored=False, failure=failure)
            else:
                stored = item in self.stored
                tried = stored and item not in self.earlier
                tries = self.tries.get(item, 1) if tried else 0
                yield ListedItem(item, self.place(item), stored, tries)

    def counts(self) -> tuple[int, int]:
        return self.total, len(self.failed)

    def not_failed(self, items: Collection[int]) -> Collection[int]:
        return sorted(frozenset(items) - self.failed.keys())

    def place(self, item: int) -> str:
        return _place(self.files, item)


def _place(files: Sequence[ListedFile], item: int) -> str:
    file = files[bisect_right(files, item, key=attrgetter("first")) - 1]
    return place_of(file.name, item - file.first if file.stacked else None)


@dataclass(frozen=True, slots=True)
class _Failures(Mapping[int, FailedItem]):
    """Failed items, of which only the `explained` ones have a reason, and the others a number."""

    files: Sequence[ListedFile]
    explained: Mapping[int, FailedItem]
    others: ItemSet

    def __getitem__(self, item: int) -> FailedItem:
        if item in self.others:
            return FailedItem(item, _place(self.files, item), _UNEXPLAINED)
        return self.explained[item]

    def __iter__(self) -> Iterator[int]:
        return chain(self.explained.keys() - self.others, self.others)

    def __len__(self) -> int:
        return len(self.explained.keys() - self.others) + len(self.others)


def write_items(folder: Folder, items: ItemList) -> None:
    """Raises `OSError`."""
    explained, others = _failure_rows(items.failed)
    document = {
        "version": _VERSION,
        "total": items.total,
        "files": [[each.name, each.first, each.stacked] for each in items.files],
        "stored": _pairs(items.stored),
        "failed": explained,
        "unexplained": _pairs(others),
        "tries": sorted(items.tries.items()),
        "earlier": _pairs(items.earlier),
    }
    folder.replace(_NAME, json.dumps(document, separators=(",", ":")).encode())


def _failure_rows(failed: Mapping[int, FailedItem]) -> tuple[list[tuple[object, ...]], ItemSet]:
    """The failed items with places and reasons, as far as these have room; and the others."""
    rows: list[tuple[object, ...]] = []
    numbers, room = sorted(failed), _FAILURE_BYTES
    for at, number in enumerate(numbers):
        each = failed[number]
        row = (each.item, each.input, each.reason[:_REASON], each.tries, each.device)
        room -= len(json.dumps(row))
        if room < 0:
            return rows, ItemSet(numbers[at:])
        rows.append(row)
    return rows, ItemSet()


def read_items(folder: Folder) -> ItemList | None:
    """The items as the last run left them in the job's folder; None where no run has. Raises
    `OSError`."""
    if folder.size(_NAME) is None:
        return None
    with open(folder.open(_NAME, os.O_RDONLY), "rb") as file:
        content = file.read(_MOST_BYTES)
    try:
        return _parsed(json.loads(content))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None  # damaged: as if no run had left it


def stored_items(outputs: Path, job: str) -> ItemList | None:
    """The items of a job that does not run; None where no run of it is known. Raises `OSError`."""
    if not (outputs / ".shoal" / job).is_dir():
        return None
    with (
        contextlib.closing(Folder(outputs)) as folder,
        contextlib.closing(folder.enter(".shoal")) as state,
        contextlib.closing(state.enter(job)) as own,
    ):
        return read_items(own)


def _parsed(document: object) -> ItemList | None:
    match document:
        case {
            "version": 1,
            "total": int(total),
            "files": list(files),
            "stored": list(stored),
            "failed": list(failed),
            "tries": list(tries),
            **rest,
        } if 0 <= total <= _MOST_ITEMS:
            listed = tuple(
                ListedFile(str(name), int(first), bool(stacked)) for name, first, stacked in files
            )
            firsts = [file.first for file in listed]
            if total and (firsts[:1] != [0] or firsts != sorted(firsts)):
                return None
            found, counted = _within(stored, total), {int(item): int(n) for item, n in tries}
            others = _ranges(rest, "unexplained", total) or ItemSet()
            earlier = _ranges(rest, "earlier", total)
            if earlier is None:  # of a version that counted the tries of all
                earlier = ItemSet.of(found - counted.keys())
            explained = {
                int(item): FailedItem(int(item), str(place), str(why), int(tried), str(device))
                for item, place, why, tried, device in failed
                if 0 <= int(item) < total
            }
            return ItemList(
                total=total,
                files=listed,
                stored=found,
                failed=_Failures(listed, explained, others) if others else explained,
                tries=counted,
                earlier=earlier,
            )
        case _:
            return None


def _ranges(document: Mapping[object, object], key: str, total: int) -> ItemSet | None:
    match document.get(key):
        case list(pairs):
            return _within(pairs, total)
        case _:
            return None


def _within(pairs: Iterable[tuple[int, int]], total: int) -> ItemSet:
    return ItemSet(runs=(range(first, end) for first, end in pairs)).within(range(total))


def _pairs(items: Set[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, as first and end."""
    return [(run.start, run.stop) for run in ItemSet.of(items).runs()]
