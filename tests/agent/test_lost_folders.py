"""Disks that have lost something when power failed: an agent has what is left."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.fragment_making import MadeFragment, dense_model, write_fragment
from shoal_agent.cache.disk import FragmentCache


@pytest.fixture
def made(tmp_path: Path) -> tuple[MadeFragment, MadeFragment]:
    one, other = (write_fragment(tmp_path, dense_model([64, 64], seed)) for seed in range(2))
    return one, other


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Path]]:
    """Folders that are named where they were, and of which the disk has nothing."""
    lost, state, listing = set[Path](), Path.stat, os.scandir

    def check(path: Any) -> None:
        if isinstance(path, str | Path) and not lost.isdisjoint((Path(path), *Path(path).parents)):
            raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN), str(path))

    def checked_state(path: Path, **options: Any) -> os.stat_result:
        check(path)
        return state(path, **options)

    def checked_listing(path: Any = ".") -> Any:
        check(path)
        return listing(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", checked_state)
        patch.setattr(os, "scandir", checked_listing)
        yield lost


def test_a_fragment_whose_folder_is_lost_is_not_cached_and_others_are(
    tmp_path: Path, made: tuple[MadeFragment, MadeFragment], lost: set[Path]
) -> None:
    one, other = made
    lost.add(one.folder)
    cache = FragmentCache(tmp_path, 1 << 30)
    assert set(cache.cached()) == {other.digest}
    assert cache.dropped_at_start == [one.folder.name]


def test_a_fragment_whose_prepared_form_is_lost_is_cached(
    tmp_path: Path, made: tuple[MadeFragment, MadeFragment], lost: set[Path]
) -> None:
    prepared = made[0].folder / "prepared"
    prepared.mkdir()
    lost.add(prepared)
    cache = FragmentCache(tmp_path, 1 << 30)
    assert set(cache.cached()) == {each.digest for each in made}
