"""Arrays of an item that the disk did not take, beside others of the same item that it took."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shoal_coordinator.storage import parts
from shoal_coordinator.storage.catalogues import FixedFiles
from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.item_list import FailedItem
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.results import ResultStore

ROOM_BYTES = 64 << 10
LARGE = np.zeros((1, ROOM_BYTES), np.float32)
SMALL = np.zeros(1, np.float32)


@pytest.fixture(params=[1, 3], ids=["a file each", "stacked"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ResultStore]:
    file = ResultFile("a.npz", 0, request.param, stacked=True)
    catalogue = FixedFiles([file])
    names = ("early", "late")
    with closing(
        ResultStore(tmp_path / "out", job="job", identity="", catalogue=catalogue, names=names)
    ) as opened:
        yield opened


def no_room(size: int = ROOM_BYTES) -> None:
    if size >= ROOM_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_small_array_that_finds_room_does_not_hide_that_a_large_one_found_none(
    store: ResultStore,
) -> None:
    store.take_room = no_room
    store.add(0, {"early": LARGE})
    store.add(0, {"late": SMALL})
    assert "No space left on device; make room there" in store.finish([0])[0]
    assert store.unwritable, "the item is sound: its job stops, and resumes when there is room"


def test_nor_where_it_was_written_before_the_disk_was_full(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(0, {"early": LARGE})
    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_at", lambda *_: no_room())
        store.add(0, {"early": LARGE + 1})
    store.add(0, {"late": SMALL})
    assert "No space left on device; make room there" in store.finish([0])[0]


def test_an_array_that_comes_again_when_there_is_room_is_stored(store: ResultStore) -> None:
    before, store.take_room = store.take_room, no_room
    store.add(0, {"early": LARGE})
    store.take_room = before
    store.add(0, {"late": SMALL})
    store.add(0, {"early": LARGE})
    assert store.finish([0]) == {}
    assert 0 in store.completed()


@pytest.mark.parametrize("store", [3], indirect=True)
def test_no_item_counts_as_stored_whose_results_were_lost_with_those_of_another(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for item in range(3):
        store.add(item, {"early": SMALL, "late": SMALL})
    # What is tried again comes first, and the next try finds no room.
    errors = iter([errno.EMFILE, errno.ENOSPC])

    def write(*_: object) -> None:
        raise OSError(next(errors, errno.ENOSPC), "not now")

    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_at", write)
        failures = store.finish(range(3))
    assert failures.keys() == {0, 1, 2}
    assert not store.completed()


@pytest.mark.parametrize("store", [3], indirect=True)
def test_items_can_fail_where_what_came_of_them_cannot_be_removed_any_more(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(0, {"early": LARGE})

    def refuse(_folder: Folder, name: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "remove", refuse)
        store.fail(FailedItem(item, "a.npz", "of another shape") for item in range(3))
    assert store.failed().keys() == {0, 1, 2}
    assert store.complete() is None
