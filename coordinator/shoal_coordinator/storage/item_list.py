"""How each item of a job ended, stored beside its results, so that it can be listed and retried.

`OUTPUTS/.shoal/JOB/items.json` is written when a run ends. A run of selected items reads from it
which others stay failed.
"""

import contextlib
import json
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
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
        file = self.files[bisect_right(self.files, item, key=attrgetter("first")) - 1]
        return place_of(file.name, item - file.first if file.stacked else None)


def write_items(folder: Folder, items: ItemList) -> None:
    """Raises `OSError`."""
    document = {
        "version": _VERSION,
        "total": items.total,
        "files": [[each.name, each.first, each.stacked] for each in items.files],
        "stored": _pairs(items.stored),
        "failed": [
            [each.item, each.input, each.reason, each.tries, each.device]
            for _, each in sorted(items.failed.items())
        ],
        "tries": sorted(items.tries.items()),
        "earlier": _pairs(items.earlier),
    }
    folder.replace(_NAME, json.dumps(document, separators=(",", ":")).encode())


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
            match rest:
                case {"earlier": list(ranges)}:
                    earlier = _within(ranges, total)
                case _:  # of a version that counted the tries of all
                    earlier = ItemSet.of(found - counted.keys())
            return ItemList(
                total=total,
                files=listed,
                stored=found,
                failed={
                    int(item): FailedItem(int(item), str(place), str(why), int(tried), str(device))
                    for item, place, why, tried, device in failed
                    if 0 <= int(item) < total
                },
                tries=counted,
                earlier=earlier,
            )
        case _:
            return None


def _within(pairs: Iterable[tuple[int, int]], total: int) -> ItemSet:
    return ItemSet(runs=(range(first, end) for first, end in pairs)).within(range(total))


def _pairs(items: Set[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, as first and end."""
    return [(run.start, run.stop) for run in ItemSet.of(items).runs()]
