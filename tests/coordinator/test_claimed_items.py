"""A file of some hundred bytes is not millions of items, whatever its headers claim."""

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from shoal_coordinator.storage.inputs import InputSet, InputUnsuitable, scan_inputs
from shoal_protocol.partition import TensorSpec

SENTENCES = (TensorSpec(name="x", dtype="float", shape=("batch", "length")),)


def problem(inputs: InputSet) -> str:
    with pytest.raises(InputUnsuitable) as caught:
        inputs.read(0)
    return str(caught.value)


def test_rows_without_an_element_are_not_millions_of_items(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((9_990_000, 1, 0), np.float32))
    inputs = scan_inputs(tmp_path, SENTENCES)
    assert len(inputs) == 1
    assert problem(inputs) == "a.npz: stacks 9990000 rows, none of which holds an element"


def test_a_small_archive_does_not_claim_millions_of_items(tmp_path: Path) -> None:
    header = io.BytesIO()
    rows = {"descr": "<f4", "fortran_order": False, "shape": (9_990_000, 1, 1)}
    np.lib.format.write_array_header_1_0(header, rows)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(70_000))
    content = (tmp_path / "a.npz").read_bytes()
    held, claimed = (len(header.getvalue()) + size for size in (70_000, 9_990_000 * 4))
    (tmp_path / "a.npz").write_bytes(
        content.replace(struct.pack("<I", held), struct.pack("<I", claimed))
    )
    inputs = scan_inputs(tmp_path, SENTENCES)
    assert (tmp_path / "a.npz").stat().st_size < 400
    assert len(inputs) == 1
    assert "a.npz: is damaged at 'x': it claims 39960128 bytes" in problem(inputs)
