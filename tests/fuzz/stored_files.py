"""Files on the coordinator's disk: inputs that users put there, parts and journals that a crash,
a disk or a stranger has damaged.

The first byte of an input says what the others are. So mutations get behind a checksum, which no
fuzzer would guess: it is made right for whatever is there.
"""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from fuzz.scratch import empty_folder
from shoal_coordinator.storage.array_limits import Limits
from shoal_coordinator.storage.catalogues import FixedFiles
from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.inputs import (
    FolderLimits,
    InputsRefused,
    InputUnsuitable,
    scan_inputs,
)
from shoal_coordinator.storage.item_list import FailedItem
from shoal_coordinator.storage.made_files import make_file
from shoal_coordinator.storage.parts import Part, ResultFile
from shoal_coordinator.storage.results import OutputsRefused, ResultStore
from shoal_protocol.partition import TensorSpec

LIMITS: Final = FolderLimits(
    items=10_000, arrays=Limits(members=32, array_bytes=32 << 20, item_bytes=4 << 20)
)
MODELS: Final = (
    (TensorSpec(name="x", dtype="float", shape=(1, "n")),),
    (TensorSpec(name="x", dtype="string", shape=None),),
    (
        TensorSpec(name="x", dtype="float", shape=(1, "n", 2)),
        TensorSpec(name="mask", dtype="int64", shape=("n",)),
    ),
    (TensorSpec(name="x", dtype="bool", shape=()),),
)
FILE: Final = ResultFile("b.npz", 0, 4, stacked=True)
NAMES: Final = ("y", "label")
LARGEST: Final = 1 << 20
_LENGTHS: Final = struct.Struct("<IQ")


# ---- inputs ------------------------------------------------------------------------------------


def read_inputs(data: bytes) -> None:
    """A folder with one strange file is refused, or each of its items is read or refused."""
    kind, content = data[:1] or b"\0", data[1:]
    model = MODELS[kind[0] & 3]
    folder = empty_folder("in")
    if kind[0] & 4:
        (folder / "a.npy").write_bytes(content)
    elif kind[0] & 8:
        method = zipfile.ZIP_DEFLATED if kind[0] & 16 else zipfile.ZIP_STORED
        with zipfile.ZipFile(folder / "a.npz", "w", method) as archive:
            archive.writestr("x.npy", content)
            archive.writestr("mask.npy", _saved(np.zeros(3, np.int64)))
    else:
        (folder / "a.npz").write_bytes(content)
    try:
        inputs = scan_inputs(folder, model, LIMITS)
    except InputsRefused:
        return
    inputs.inflate_into(folder)
    for item in {*range(min(len(inputs), 3)), len(inputs) - 1}:
        try:
            arrays = inputs.read(item)
        except InputUnsuitable:
            continue
        assert arrays.keys() == {spec.name for spec in model}
        assert sum(array.nbytes for array in arrays.values()) == inputs.item_bytes(item)
    inputs.close()


def input_seeds() -> Iterable[bytes]:
    rows = np.arange(12, dtype=np.float32).reshape(3, 1, 4)
    arrays = (
        (0, rows),
        (0, rows[:, 0]),
        (0, np.asfortranarray(rows[:, 0])),
        (0, rows.astype(">f4")),
        (0, np.empty((0, 1, 4), np.float32)),
        (1, np.array([["text", "ß"]])),
        (2, np.asfortranarray(np.ones((3, 1, 2, 2), np.float32))),
        (3, np.array(True)),
        (3, np.array([1, 2], "m8[s]")),
    )
    for model, array in arrays:
        for kind in (4, 8, 8 | 16):
            yield bytes([model | kind]) + _saved(array)
    for save in (np.savez, np.savez_compressed):
        archive = io.BytesIO()
        save(archive, x=np.ones((3, 1, 5, 2), np.float32), mask=np.zeros((3, 5), np.int64))
        yield b"\2" + archive.getvalue()


def _saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# ---- parts -------------------------------------------------------------------------------------


def recover_part(data: bytes) -> None:
    """What is recovered from a part is what was put there, or, where the checksums of its heads
    are made right, something that can be read at least."""
    sealed, content = bool(data[:1] != b"\0"), data[1:]
    folder = Folder(empty_folder("part"))
    outputs = Folder(empty_folder("out"))
    try:
        (folder.path / "0.part").write_bytes(_with_checksums(content) if sealed else content)
        part = Part(folder, 0, FILE, NAMES)
        part.recover()
        rows = list(part.stored_rows())
        for row in {*range(FILE.items)} - set(rows):
            part.fail(row)
        assert part.ended
        if not rows:
            return
        try:
            size = make_file(part, outputs)
        except OSError:
            assert sealed, "a part that was recovered cannot be read"
            return
        assert size <= LARGEST + 100 * len(content)
        if not sealed:
            _check(outputs.path / FILE.name, rows)
    finally:
        folder.close()
        outputs.close()


def _check(made: Path, rows: list[int]) -> None:
    with np.load(made) as file:
        for place, row in enumerate(rows):
            for name, expected in _result(row).items():
                np.testing.assert_array_equal(file[name][place], expected)


def _result(row: int) -> dict[str, np.ndarray]:
    return {
        "y": np.full((1, 2), row, np.float32),
        "label": np.array([f"item {row}" * row], dtype=object),
    }


def _with_checksums(content: bytes) -> bytes:
    """A part whose heads have their checksums, as far as its lengths lead to heads at all."""
    made, at = bytearray(content), 0
    while at + 16 <= len(made):
        lengths = bytes(made[at : at + 12])
        head_bytes, data_bytes = _LENGTHS.unpack(lengths)
        head = bytes(made[at + 16 : at + 16 + head_bytes])
        made[at + 12 : at + 16] = struct.pack("<I", zlib.crc32(head, zlib.crc32(lengths)))
        at += 16 + head_bytes + data_bytes
    return bytes(made)


def part_seeds() -> Iterable[bytes]:
    folder = Folder(empty_folder("part"))
    part = Part(folder, 0, FILE, NAMES)
    for row in (2, 0):
        part.add(row, _result(row))
    part.add(1, {"y": _result(1)["y"] + 1})
    part.add(1, {"y": _result(1)["y"]})
    part.add(3, {"label": _result(3)["label"]})
    part.add(1, {"label": _result(1)["label"]})
    part.sync()
    content = (folder.path / part.name).read_bytes()
    folder.close()
    yield b"\0" + content
    yield b"\1" + content


# ---- journal -----------------------------------------------------------------------------------


def open_results(data: bytes) -> None:
    """Results with a strange journal open or are refused; what is complete exists."""
    sealed, content = bool(data[:1] != b"\0"), data[1:]
    outputs = empty_folder("out")
    _written(outputs).close()
    journal = outputs / ".shoal" / "job" / "journal.jsonl"
    journal.write_bytes(b"\n".join(map(_sealed, content.split(b"\n"))) if sealed else content)
    try:
        store = _opened(outputs)
    except OutputsRefused:
        return
    completed = store.completed()
    assert completed <= {0, 1, 2}
    assert sealed or 1 in completed, "the part is sound, whatever the journal says"
    for item in {0, 1, 2} - completed:
        store.add(item, _result(item))
    assert not store.finish(range(3))
    store.fail([FailedItem(3, "b.npz[2]", "refused")])
    assert store.complete() is None
    store.close()
    again = _opened(outputs)
    assert again.completed() == {0, 1, 2}
    again.close()


def _opened(outputs: Path) -> ResultStore:
    files = (ResultFile("a.npz", 0, 1), ResultFile("b.npz", 1, 3, stacked=True))
    return ResultStore(outputs, job="job", identity="i", catalogue=FixedFiles(files), names=NAMES)


def _written(outputs: Path) -> ResultStore:
    store = _opened(outputs)
    for item in (0, 1):
        store.add(item, _result(item))
    store.finish([0, 1])
    return store


def _sealed(line: bytes) -> bytes:
    """The line with the checksum of what it says, if it says anything."""
    try:
        value = json.loads(line)
        del value["crc"]
        text = json.dumps(value, separators=(",", ":")).encode()
        return json.dumps({**value, "crc": zlib.crc32(text)}, separators=(",", ":")).encode()
    except Exception:
        return line


def journal_seeds() -> Iterable[bytes]:
    outputs = empty_folder("out")
    _written(outputs).close()
    line = (outputs / ".shoal" / "job" / "journal.jsonl").read_bytes()
    for content in (line, line + line.replace(b"0", b"1"), b"", line[:-1]):
        yield b"\0" + content
        yield b"\1" + content
