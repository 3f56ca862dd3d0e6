"""Archives of a form that is known: read and written without a parser, as with one."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal_coordinator.storage.archive_forms import ArchiveForm
from shoal_coordinator.storage.archives import ArrayStream, archive_of, write_archive
from shoal_coordinator.storage.array_limits import Limits, UnreadableArrays
from shoal_coordinator.storage.arrays import (
    ArrayFile,
    ArrayHeader,
    ArrayKind,
    archive_headers,
    form_of,
)

Arrays = Mapping[str, np.ndarray[Any, Any]]

DTYPES = st.sampled_from(["<f4", "<i8", "|b1", "<f2", "|u1", "<U3"])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
KINDS = st.dictionaries(st.sampled_from(["x", "y/z", "ü"]), st.tuples(DTYPES, SHAPES), max_size=3)


def filled(kinds: Mapping[str, tuple[str, tuple[int, ...]]], seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in kinds.items()
    }


def saved(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **dict[str, Any](arrays))
    return file.getvalue()


def parsed(content: bytes) -> dict[str, ArrayHeader]:
    return archive_headers(io.BytesIO(content), len(content), Limits())


def form(content: bytes) -> ArchiveForm:
    found = form_of(content, parsed(content))
    assert found is not None
    return found


@settings(max_examples=50)
@given(KINDS, st.integers(0, 1 << 30))
def test_archives_of_arrays_of_the_same_kinds_have_one_form(kinds: Any, seed: int) -> None:
    first, second = saved(filled(kinds, seed)), saved(filled(kinds, seed + 1))
    checksums = form(first).checksums(second)
    assert checksums == tuple(header.checksum for header in parsed(second).values())


@settings(max_examples=50)
@given(KINDS, st.integers(0, 1 << 30))
def test_an_archive_that_is_filled_in_is_the_one_that_zipfile_writes(kinds: Any, seed: int) -> None:
    arrays = filled(kinds, seed)
    data = {name: array.tobytes() for name, array in arrays.items()}
    written = io.BytesIO()
    write_archive(
        written,
        (
            ArrayStream(name=name, dtype=array.dtype, shape=array.shape, pieces=[data[name]])
            for name, array in arrays.items()
        ),
    )
    named = tuple(ArrayKind(name, array.dtype, array.shape) for name, array in arrays.items())
    for _ in range(2):
        assert archive_of(named, list(data.values())) == written.getvalue()
    with np.load(io.BytesIO(archive_of(named, list(data.values())))) as loaded:
        assert {name: loaded[name].tolist() for name in loaded} == {
            name: array.tolist() for name, array in arrays.items()
        }


@settings(max_examples=200)
@given(st.data())
def test_a_changed_byte_is_seen_as_a_parser_sees_it(data: st.DataObject) -> None:
    """Whatever changes: where the form still holds, a parser finds the same headers."""
    content = bytearray(saved(filled({"x": ("<f4", (2, 3)), "y": ("<i8", (1,))}, 1)))
    known = form(bytes(content))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    changed = bytes(content)
    checksums = known.checksums(changed)
    if checksums is not None:
        assert checksums == tuple(header.checksum for header in parsed(changed).values())


@pytest.mark.parametrize("at", [10, 13, 14, 17])
def test_local_times_and_checksums_are_of_no_account(at: int) -> None:
    content = bytearray(saved({"x": np.arange(3)}))
    known = form(bytes(content))
    content[at] ^= 255
    assert known.checksums(bytes(content)) is not None
    assert parsed(bytes(content))["x"].shape == (3,)


def test_a_damaged_file_after_a_sound_one_is_refused_in_the_same_words(tmp_path: Path) -> None:
    content = bytearray(saved({"x": np.arange(100)}))
    (tmp_path / "sound.npz").write_bytes(content)
    content[content.index(b"\x63\0\0\0\0\0\0\0")] ^= 1
    (tmp_path / "damaged.npz").write_bytes(content)

    def refusal() -> str:
        with pytest.raises(UnreadableArrays) as refused:
            ArrayFile(tmp_path / "damaged.npz", limits=Limits(members=99))
        return str(refused.value)

    before = refusal()
    for _ in range(3):
        with ArrayFile(tmp_path / "sound.npz", limits=Limits(members=99)) as sound:
            assert sound.read("x").tolist() == list(range(100))
    assert refusal() == before
    assert "Bad CRC-32" in before


def test_a_limit_that_is_lower_refuses_what_was_read_with_a_higher_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(100))
    for _ in range(3):
        with ArrayFile(tmp_path / "a.npz", limits=Limits(array_bytes=800)) as found:
            assert found.headers["x"].shape == (100,)
    with pytest.raises(UnreadableArrays, match="the limit is 799"):
        ArrayFile(tmp_path / "a.npz", limits=Limits(array_bytes=799))


def test_an_archive_whose_members_overlap_has_no_form() -> None:
    """Else bytes that tell where an array lies would pass for data."""
    inner = saved({"y": np.arange(4)})
    data = np.frombuffer(inner, np.uint8)
    outer = bytearray(saved({"x": data, "y": np.arange(4)}))
    with zipfile.ZipFile(io.BytesIO(outer)) as archive:
        second = archive.getinfo("y.npy")
        entry = outer.rindex(b"PK\1\2")
    # The directory says that the second array is the one within the data of the first.
    start = outer.index(b"PK\3\4", 1)
    assert start < second.header_offset
    outer[entry + 42 : entry + 46] = start.to_bytes(4, "little")
    try:
        headers = parsed(bytes(outer))
    except zipfile.BadZipFile:
        return  # newer versions of zipfile refuse it
    assert headers["y"].shape == (4,)
    assert form_of(bytes(outer), headers) is None
