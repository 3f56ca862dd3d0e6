"""Folders of .npz and .npy files as numbered items."""

import io
import os
import struct
import tempfile
import tracemalloc
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal_coordinator.storage import inputs as module
from shoal_coordinator.storage import transposing
from shoal_coordinator.storage.array_limits import Limits
from shoal_coordinator.storage.inputs import FolderLimits, InputSet, InputsRefused, InputUnsuitable
from shoal_coordinator.storage.locations import LocationRefused, local_folder
from shoal_coordinator.storage.transposing import copy_in_c_order
from shoal_protocol.partition import TensorSpec
from small_disk import small_disk

IMAGE = (TensorSpec(name="x", dtype="float", shape=(1, 3, "height", "width")),)
SENTENCE = (
    TensorSpec(name="ids", dtype="int64", shape=("batch", "length")),
    TensorSpec(name="mask", dtype="int64", shape=("batch", "length")),
)

_opened: list[InputSet] = []


@pytest.fixture(autouse=True)
def close_what_was_opened() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def scan_inputs(
    folder: Path, specs: tuple[TensorSpec, ...], limits: FolderLimits | None = None
) -> InputSet:
    _opened.append(module.scan_inputs(folder, specs, limits))
    return _opened[-1]


def test_files_are_numbered_in_name_order_with_their_rows(tmp_path: Path) -> None:
    images = np.arange(4 * 3 * 2 * 2, dtype=np.float32).reshape(4, 3, 2, 2)
    np.savez(tmp_path / "b.npz", x=images[:3])
    np.save(tmp_path / "a.npy", images[3:])
    np.savez(tmp_path / "c.npz", x=images[:2, None])
    (tmp_path / "notes.txt").write_text("passed over")
    (tmp_path / ".hidden.npz").write_text("passed over")
    inputs = scan_inputs(tmp_path, IMAGE)
    assert len(inputs) == 6
    assert [inputs.place(item) for item in range(6)] == [
        "a.npy",
        *("b.npz[0]", "b.npz[1]", "b.npz[2]"),
        *("c.npz[0]", "c.npz[1]"),
    ]
    for item, row in enumerate((3, 0, 1, 2, 0, 1)):
        np.testing.assert_array_equal(inputs.read(item)["x"], images[row : row + 1])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_are_read_in_any_order_from_any_kind_of_archive(tmp_path, save, order) -> None:  # type: ignore[no-untyped-def]
    rows = np.random.default_rng(1).normal(size=(7, 3, 5, 2)).astype(np.float32)
    save(tmp_path / "rows.npz", x=np.asarray(rows, order=order))
    inputs = scan_inputs(tmp_path, IMAGE)
    for item in (6, 0, 3, 3, 1):
        read = inputs.read(item)["x"]
        assert read.flags.c_contiguous
        np.testing.assert_array_equal(read, rows[item : item + 1])
    inputs.close()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_rows_in_fortran_order_are_read_in_bounded_memory(tmp_path, save, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(transposing, "TILE_BYTES", 1 << 16)
    rows = np.random.default_rng(1).normal(size=(400, 3, 64, 64)).astype(np.float32)
    save(tmp_path / "rows.npz", x=np.asfortranarray(rows))
    inputs = scan_inputs(tmp_path, IMAGE)
    tracemalloc.start()
    try:
        for item in (399, 0, 30):
            np.testing.assert_array_equal(inputs.read(item)["x"], rows[item : item + 1])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < rows.nbytes // 2, f"{most} of {rows.nbytes} bytes"


def test_damage_of_rows_in_fortran_order_is_seen(tmp_path: Path) -> None:
    rows = np.zeros((4, 3, 200, 200), np.float32, order="F")
    np.savez(tmp_path / "a.npz", x=rows)
    damage(tmp_path / "a.npz", 400_000)
    assert "a.npz[2]: is damaged" in problem(scan_inputs(tmp_path, IMAGE), 2)


@given(
    st.integers(0, 40),
    st.integers(1, 40),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([8, 64, 999]),
)
def test_a_matrix_is_copied_in_c_order_whatever_its_shape(
    rows: int, columns: int, element_bytes: int, tile_bytes: int
) -> None:
    matrix = np.random.default_rng(rows).integers(0, 256, (rows, columns, element_bytes), np.uint8)
    with (
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as target,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(transposing, "TILE_BYTES", tile_bytes)
        source.write(b"head" + matrix.transpose(1, 0, 2).tobytes())
        source.flush()
        copy_in_c_order(source, 4, target, rows=rows, columns=columns, element_bytes=element_bytes)
        target.seek(0)
        assert target.read() == matrix.tobytes()


@pytest.mark.parametrize(
    ("save", "need"),
    [
        (lambda path, rows: np.savez_compressed(path, x=rows), "5.5 MiB"),
        (lambda path, rows: np.savez(path, x=np.asfortranarray(rows)), "11 MiB"),
    ],
    ids=["compressed", "Fortran order"],
)
def test_rows_that_find_no_room_to_be_laid_out_fill_no_disk(tmp_path, save, need) -> None:  # type: ignore[no-untyped-def]
    folder, disk = tmp_path / "in", tmp_path / "disk"
    folder.mkdir()
    save(folder / "a.npz", np.zeros((10, 3, 219, 219), np.float32))
    inputs = scan_inputs(folder, IMAGE)
    with small_disk(disk, "1m"):
        inputs.inflate_into(disk)
        assert f"needs {need} of temporary disk in {disk}, have 1 MiB; save" in problem(inputs)


def test_an_array_without_rows_is_shared_by_the_rows_of_the_others(tmp_path: Path) -> None:
    specs = (*IMAGE, TensorSpec(name="scale", dtype="double", shape=(2,)))
    np.savez(tmp_path / "a.npz", x=np.zeros((5, 3, 1, 1), np.float32), scale=np.array([1.0, 2.0]))
    inputs = scan_inputs(tmp_path, specs)
    assert len(inputs) == 5
    np.testing.assert_array_equal(inputs.read(4)["scale"], [1.0, 2.0])
    assert list(inputs.read(4, ["scale"])) == ["scale"]


def test_big_endian_arrays_are_turned_around(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((1, 3, 2, 2), ">f4"))
    read = scan_inputs(tmp_path, IMAGE).read(0)["x"]
    assert read.dtype == np.dtype("<f4")
    assert read.sum() == 12


def problem(inputs: InputSet, item: int = 0) -> str:
    with pytest.raises(InputUnsuitable) as caught:
        inputs.read(item)
    assert str(caught.value).startswith(f"{inputs.place(item)}: ")
    return str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"y": np.zeros((1, 3, 2, 2), np.float32)}, "a.npz: lacks x; it holds y"),
        (
            {"x": np.zeros((1, 3, 2, 2))},
            "a.npz: has x of type float64, the model takes float32; convert it with "
            ".astype('float32')",
        ),
        (
            {"x": np.zeros((1, 4, 2, 2), np.float32)},
            "a.npz: has 4 where axis 1 is 3 in x: the array is [1, 4, 2, 2], "
            "the model takes [1, 3, height, width]",
        ),
        (
            {"x": np.zeros((2, 2), np.float32)},
            "a.npz: has rank 2 in x: the array is [2, 2], the model takes [1, 3, height, width]",
        ),
        ({"x": np.array(["a", "word"])}, "a.npz: has x of type text, the model takes float32"),
        ({"x": np.array([b"word"])}, "a.npz: has x of type bytes, the model takes float32"),
    ],
)
def test_what_does_not_suit_the_model_fails_with_a_reason(
    tmp_path: Path, arrays: dict[str, np.ndarray], text: str
) -> None:
    np.savez(tmp_path / "a.npz", allow_pickle=True, **arrays)
    np.savez(tmp_path / "b.npz", x=np.zeros((1, 3, 2, 2), np.float32))
    inputs = scan_inputs(tmp_path, IMAGE)
    assert problem(inputs) == text
    assert inputs.read(1)["x"].shape == (1, 3, 2, 2)


def test_rows_of_an_unsuitable_stack_fail_one_by_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3, 2, 2)))
    inputs = scan_inputs(tmp_path, IMAGE)
    assert len(inputs) == 4
    assert problem(inputs, 2).startswith("a.npz[2]: has x of type float64")


def test_stacks_of_different_lengths_are_one_failed_item(tmp_path: Path) -> None:
    ids = np.zeros((3, 1, 4), np.int64)
    np.savez(tmp_path / "a.npz", ids=ids, mask=ids[:2])
    inputs = scan_inputs(tmp_path, SENTENCE)
    assert len(inputs) == 1
    assert problem(inputs) == "a.npz: stacks arrays of different lengths: ids has 3, mask has 2"


def test_a_symbol_may_stand_for_several_sizes_as_the_runtime_has_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", ids=np.zeros((1, 4), np.int64), mask=np.zeros((1, 5), np.int64))
    assert scan_inputs(tmp_path, SENTENCE).read(0)["mask"].shape == (1, 5)


def test_a_single_array_does_not_serve_a_model_of_two_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1, 4), np.int64))
    assert "takes ids, mask; use an .npz of these" in problem(scan_inputs(tmp_path, SENTENCE))


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def test_damaged_bytes_fail_their_item_only(tmp_path: Path) -> None:
    for name, save in (("a", np.savez), ("b", np.savez_compressed), ("c", np.savez)):
        save(
            tmp_path / f"{name}.npz", x=np.arange(120_000, dtype=np.float32).reshape(1, 3, 200, 200)
        )
    damage(tmp_path / "a.npz", 400_000)
    damage(tmp_path / "b.npz", 100_000)
    inputs = scan_inputs(tmp_path, IMAGE)
    assert "a.npz: is damaged" in problem(inputs, 0)
    assert "b.npz: " in problem(inputs, 1)
    assert inputs.read(2)["x"].size == 120_000


def test_files_that_are_no_arrays_are_failed_items(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"no archive")
    (tmp_path / "b.npy").write_bytes(b"")
    (tmp_path / "b_words.npy").write_text("some words, not an array")
    np.save(tmp_path / "c.npy", np.array([{"an": "object"}], dtype=object), allow_pickle=True)
    (tmp_path / "d.npy").write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1))
    np.save(tmp_path / "e.npy", np.zeros((1, 3, 2, 2), np.float32))
    os.truncate(tmp_path / "e.npy", (tmp_path / "e.npy").stat().st_size - 1)
    inputs = scan_inputs(tmp_path, IMAGE)
    assert len(inputs) == 6
    assert "is no readable .npz file" in problem(inputs, 0)
    assert "is no readable .npy file: the array is empty, not as numpy" in problem(inputs, 1)
    assert "begins with b'some words, not ', not as numpy.save" in problem(inputs, 2)
    assert "type object, which is not read; save an array of numbers" in problem(inputs, 3)
    assert "is no readable .npy file" in problem(inputs, 4)
    assert "is cut short: the array needs 48 bytes, 47 are there" in problem(inputs, 5)


def test_a_small_archive_that_claims_to_be_huge_is_refused_before_it_is_inflated(
    tmp_path: Path,
) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": "<f4", "fortran_order": False, "shape": (2**31, 3, 2, 2)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", buffer.getvalue() + bytes(10_000_000))
    assert "the limit is" in problem(
        scan_inputs(tmp_path, IMAGE, FolderLimits(arrays=Limits(array_bytes=1024**3)))
    )
    assert "is cut short" in problem(scan_inputs(tmp_path, IMAGE))


def npy(shape: tuple[int, ...], dtype: str = "<f4", *, tail: bytes = b"") -> bytes:
    """An `.npy` file whose header says this."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue() + tail


SENTENCES = (TensorSpec(name="x", dtype="float", shape=("batch", "length")),)
TEXTS = (TensorSpec(name="x", dtype="string", shape=("batch",)),)


@pytest.mark.parametrize(
    ("content", "specs", "text"),
    [
        (npy((0, 2**62)), SENTENCES, "which no array can have"),
        (npy((2**62, 0)), SENTENCES, "which no array can have"),
        (npy((1,) * 40), SENTENCES, "which no array can have"),
        (npy((3,), "<U0"), TEXTS, "which have no size"),
        (npy((3,), "|V0"), TEXTS, "which have no size"),
        (b"\x93NUMPY\1\0\x10\0{'descr': ('<f4',", SENTENCES, "is no readable .npy file"),
        (b"\x93NUMPY\1\0\x10\0" + b"(" * 16, SENTENCES, "is no readable .npy file"),
        (b"\x93NUMPY\1\0\x40\x1f" + b"-" * 8000, SENTENCES, "is no readable .npy file"),
    ],
)
def test_a_header_that_makes_no_sense_is_a_failed_item(
    tmp_path: Path, content: bytes, specs: tuple[TensorSpec, ...], text: str
) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    np.save(tmp_path / "b.npy", np.zeros(3, np.float32))
    inputs = scan_inputs(tmp_path, specs)
    assert text in problem(inputs, 0)
    assert len(inputs) == 2


def test_an_item_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1, 4_000_000), np.float32))
    np.savez_compressed(tmp_path / "b.npz", x=np.zeros((1, 1000), np.float32))
    limits = FolderLimits(arrays=Limits(item_bytes=1_000_000))
    inputs = scan_inputs(tmp_path, SENTENCES, limits)
    assert "a.npz: needs 15.3 MiB for one item, and 976.6 KiB is the most" in problem(inputs)
    assert inputs.item_bytes(1) == 4000
    assert inputs.read(1)["x"].shape == (1, 1000)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".npz of deflated members"])
def test_damaged_files_are_read_or_refused_and_nothing_else(tmp_path: Path, suffix: str) -> None:
    random = np.random.default_rng(7)
    rows = random.normal(size=(3, 1, 5)).astype(np.float32)
    path = tmp_path / f"a{suffix.split(maxsplit=1)[0]}"
    match suffix:
        case ".npy":
            np.save(path, rows)
        case ".npz":
            np.savez(path, x=np.asfortranarray(rows))
        case _:
            np.savez_compressed(path, x=rows)
    sound = path.read_bytes()
    refused = 0
    for _ in range(300):
        content = bytearray(sound)
        for at in random.integers(0, len(sound), random.integers(1, 4)):
            content[at] = random.integers(0, 256)
        cut = random.integers(1, len(sound)) if random.random() < 0.1 else len(sound)
        path.write_bytes(content[:cut])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy on headers of Python 2
            try:
                inputs = scan_inputs(tmp_path, SENTENCES)
            except InputsRefused:
                continue
            for item in range(min(len(inputs), 5)):
                try:
                    inputs.read(item)
                except InputUnsuitable as error:
                    refused += not str(error).endswith(": ")
    assert refused > 50


def test_an_archive_of_very_many_members_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for number in range(300):
            archive.writestr(f"{number}.npy", b"")
    assert "has 300 members; the limit is 256" in problem(scan_inputs(tmp_path, IMAGE))


def test_a_file_that_changed_after_the_scan_is_not_mistaken(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 3, 2, 2), np.float32))
    inputs = scan_inputs(tmp_path, IMAGE)
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 2, 2), np.float32))
    assert "was changed" in problem(inputs)


def test_the_digest_tells_contents_apart_and_not_times(tmp_path: Path) -> None:
    def digest(value: float, *, compressed: bool = False) -> str:
        array = np.full((1, 3, 2, 2), value, np.float32)
        np.savez(tmp_path / "a.npz", x=array)
        np.save(tmp_path / "b.npy", array)
        os.utime(tmp_path / "b.npy", (value, value))
        return scan_inputs(tmp_path, IMAGE).digest

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


def with_an_empty_array(folder: Path) -> None:
    folder.mkdir()
    np.save(folder / "a.npy", np.zeros((0, 3, 2, 2), np.float32))


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda folder: None, "does not exist"),
        (lambda folder: folder.write_text(""), "is a file"),
        (lambda folder: folder.mkdir(), "is empty: it has no .npz or .npy"),
        (
            lambda folder: (folder.mkdir(), (folder / "cat.png").write_text("")),
            "holds 1 file and no .npz or .npy",
        ),
        (
            lambda folder: (folder.mkdir(), (folder / "a.npy").touch(), (folder / "a.npz").touch()),
            "a.npy and a.npz would both give one result",
        ),
        (with_an_empty_array, "its files hold no item"),
    ],
)
def test_a_folder_that_cannot_serve_is_refused_with_its_name(tmp_path, prepare, text) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "inputs"
    prepare(folder)
    with pytest.raises(InputsRefused, match=text) as caught:
        scan_inputs(folder, IMAGE)
    assert str(folder) in str(caught.value)


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any),
    data=st.data(),
)
@settings(deadline=None)
def test_every_item_is_found_where_it_was_put(tmp_path_factory, counts, data) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("inputs")
    stored: list[np.ndarray] = []
    for number, count in enumerate(counts):
        rows = data.draw(hnp.arrays(np.int32, (count, 2)))
        save = data.draw(st.sampled_from([np.savez, np.savez_compressed]))
        save(folder / f"{number}.npz", v=rows)
        stored.extend(rows)
    inputs = scan_inputs(folder, (TensorSpec(name="v", dtype="int32", shape=(2,)),))
    assert len(inputs) == len(stored)
    for item in data.draw(st.permutations(range(len(stored)))):
        np.testing.assert_array_equal(inputs.read(item)["v"], stored[item])
    inputs.close()


def test_a_location_is_an_absolute_path_or_a_file_uri() -> None:
    assert local_folder("/data/in", what="inputs") == Path("/data/in")
    assert local_folder("file:///data/with%20space", what="inputs") == Path("/data/with space")
    for uri, text in (
        ("s3://bucket/in", "is not a local folder"),
        ("data/in", "is not absolute"),
        ("file://host/in", "is not a local folder"),
        ("file:///data/run#1", "write %3F for . and %23 for #"),
        ("/a\0b", "is no path"),
    ):
        with pytest.raises(LocationRefused, match=text):
            local_folder(uri, what="inputs")
