"""The results of simulated jobs: the coordinator's real store, on a disk whose power fails.

What the store does in threads of its own is done in the caller's here, at once or when it is waited
for, as chance has it: so a seed gives the same operations in every run.
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lost_power import Disk, PowerLost, all_written
from shoal_coordinator.dispatch.events import JobSpec
from shoal_coordinator.storage import result_log, results
from shoal_coordinator.storage.catalogues import FixedFiles
from shoal_coordinator.storage.item_list import FailedItem
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.results import ResultStore

NEVER = 1 << 62


class _Late(Future[Any]):
    """Work that is done when somebody waits for it."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._work())
        return super().result(timeout)


class _Worker:
    """In the place of a pool of threads."""

    chance = random.Random()  # noqa: S311 (not for secrets)

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., object], *arguments: object) -> _Late:
        late = _Late(lambda: work(*arguments))
        if self.chance.random() < 0.5:
            late.result()
        return late

    map = staticmethod(map)

    def shutdown(self) -> None:
        pass


class Outputs:
    """The folders of all jobs of a world, from one life of the coordinator to the next."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._folder = folder
        self.chance = random.Random(f"{seed} outputs")  # noqa: S311 (not for secrets)
        self._lives = 0
        self._stores: dict[str, ResultStore] = {}
        self._files: dict[str, tuple[ResultFile, ...]] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._present.mkdir()
        worker = type("_WorkerOfASeed", (_Worker,), {"chance": self.chance})
        for module in (results, result_log):
            patch.setattr(module, "ThreadPoolExecutor", worker)
        self.disk = Disk(patch, self._present, NEVER)

    @property
    def _present(self) -> Path:
        return self._folder / str(self._lives)

    def fail_soon(self) -> None:
        """The power fails in one of the next operations."""
        self.disk.fails_at = len(self.disk.operations) + self.chance.randint(1, 12)

    def lose_power(self) -> None:
        """Of what was not synced, chance says what is found again."""
        names_survive = self.chance.random() < 0.7
        tear = self.chance.choice((self._tear, self._tear, all_written))
        before = self.disk
        self._lives += 1
        before.fails_at = NEVER
        before.copy_durable(self._present, names_survive=names_survive, tear=tear)
        before.fails_at = 0  # nothing that still runs of that life does anything
        for store in self._stores.values():
            with contextlib.suppress(PowerLost):
                store.close()
        self._stores.clear()
        before.begin(self._present, NEVER)

    def _tear(self, synced: int, written: int) -> tuple[int, int]:
        kept = self.chance.randint(min(synced, written), written)
        return kept, self.chance.choice((kept, self.chance.randint(kept, max(kept, written))))

    def open(self, spec: JobSpec) -> frozenset[int]:
        """Begin, or go on after a restart; the items that have results."""
        if spec.name not in self._files:
            self._files[spec.name] = tuple(self._some_files(spec.items))
            self._names[spec.name] = self.chance.choice((("y",), ("y", "z")))
        self._stores[spec.name] = ResultStore(
            self._present / spec.name,
            job=spec.name,
            identity="i",
            catalogue=FixedFiles(self._files[spec.name]),
            names=self._names[spec.name],
        )
        return frozenset(self._stores[spec.name].completed())

    def _some_files(self, items: int) -> Iterator[ResultFile]:
        """Files of one item each, and of several."""
        first = number = 0
        several = self.chance.choice((1, 1, 4))
        while first < items:
            count = min(items - first, self.chance.randint(1, several))
            yield ResultFile(f"{number}.npz", first, count, stacked=several > 1)
            first, number = first + count, number + 1

    def store(self, job: str, items: Iterable[int], failed: Iterable[int] = ()) -> dict[int, str]:
        """Make the results of items durable, as a job's run does, and note those that failed."""
        store, items = self._stores[job], list(items)
        for item in items:
            arrays = {name: _result(item) for name in self._names[job]}
            for each in arrays if self.chance.random() < 0.2 else ():  # one stage after the other
                store.add(item, {each: arrays[each]})
            store.add(item, arrays)
        store.fail(FailedItem(item, f"input {item}", "it went wrong") for item in failed)
        problems = store.finish(items)
        if self.chance.random() < 0.3:
            store.publish()
        return problems

    def complete(self, job: str) -> str | None:
        """All items have ended: make what is not made yet, and let go of the folder."""
        store = self._stores[job]
        problem = store.complete()
        del self._stores[job]
        store.close()
        return problem

    def found(self, job: str) -> dict[int, list[int]]:
        """The items of which the made files have rows, and what these hold."""
        held: dict[int, list[int]] = {}
        for file in self._files[job]:
            path = self._present / job / file.name
            if not path.exists():
                continue
            with np.load(path) as content:
                rows = content["__rows__"] if "__rows__" in content else range(file.items)
                for name in self._names[job]:
                    values = content[name] if file.stacked else content[name][None]
                    for row, value in zip(rows, values, strict=True):
                        held.setdefault(file.first + int(row), []).extend(value.tolist())
        return held


def _result(item: int) -> np.ndarray[Any, Any]:
    return np.full(2, item, np.int64)
