"""Input files that change, or go, while a job is about to read them."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO, Final, Literal

import numpy as np
import numpy.typing as npt
import pytest

from shoal_coordinator.storage.inputs import InputSet, InputUnsuitable, scan_inputs
from shoal_protocol.partition import TensorSpec

IMAGE: Final = (TensorSpec(name="x", dtype="float", shape=(1, 3, "height", "width")),)
SMALL: Final = (3, 3, 8, 8)
LARGE: Final = (3, 3, 100, 100)


def save(path: Path, array: npt.NDArray[np.float32]) -> None:
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        np.savez(path, x=array)


def problem(inputs: InputSet, item: int) -> str:
    with pytest.raises(InputUnsuitable) as caught:
        inputs.read(item)
    return str(caught.value)


_listening: list[list[str]] = []


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        for each in _listening:
            each.append(str(arguments[0]))


sys.addaudithook(_hook)  # it cannot be removed


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """The paths of files that are opened."""
    opened: list[str] = []
    _listening.append(opened)
    try:
        yield opened
    finally:
        _listening.remove(opened)


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_a_scan_opens_each_file_once(tmp_path: Path, name: str) -> None:
    # So no file can vanish, or become a pipe, between two looks at it.
    save(tmp_path / name, np.zeros((2, 3, 2, 2), np.float32))
    with opened_files() as opened:
        scan_inputs(tmp_path, IMAGE)
    assert opened.count(str(tmp_path / name)) == 1


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_a_file_that_has_got_other_numbers_of_the_same_kind_is_not_mistaken(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    save(tmp_path / name, np.zeros(shape, np.float32))
    with closing(scan_inputs(tmp_path, IMAGE)) as inputs:
        save(tmp_path / name, np.ones(shape, np.float32))
        assert "was changed" in problem(inputs, item=0)


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_rows_are_not_read_from_a_file_that_was_written_to_since_it_was_opened(
    tmp_path: Path, name: str
) -> None:
    save(tmp_path / name, np.zeros(LARGE, np.float32))
    with closing(scan_inputs(tmp_path, IMAGE)) as inputs:
        assert not inputs.read(0)["x"].any()
        # In its place, as `cp` does it: the file that is open is the one that changes.
        save(tmp_path / name, np.ones(LARGE, np.float32))
        assert "was changed" in problem(inputs, item=1)


@pytest.mark.parametrize(("name", "shape"), [("a.npy", SMALL), ("a.npz", SMALL), ("a.npz", LARGE)])
def test_a_file_that_has_another_time_and_the_same_content_is_read(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    save(tmp_path / name, np.ones(shape, np.float32))
    with closing(scan_inputs(tmp_path, IMAGE)) as inputs:
        for item in range(3):
            assert inputs.read(item)["x"].all()
            os.utime(tmp_path / name, (item, item))


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_damaged_array_is_not_inflated_again_for_each_of_its_items(
    tmp_path: Path, order: Literal["C", "F"], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).standard_normal((100, 3, 30, 30)).astype(np.float32)
    np.savez_compressed(tmp_path / "a.npz", x=np.asarray(noise, order=order))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    copied: list[object] = []

    def copy(source: BinaryIO, target: BinaryIO, length: int) -> None:
        copied.append(source)
        copyfileobj(source, target, length)

    monkeypatch.setattr("shutil.copyfileobj", copy)
    with closing(scan_inputs(tmp_path, IMAGE)) as inputs:
        reasons = {problem(inputs, item).partition("]: ")[2] for item in range(100)}
    assert len(reasons) == len(copied) == 1
