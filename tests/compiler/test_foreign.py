"""A file that is no ONNX model is called what it is."""

import gzip
import io
import pickle
from pathlib import Path

import numpy as np
import pytest

from shoal_compiler.errors import ModelRefused
from shoal_compiler.profile import profile_model


def _zip() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, x=np.zeros(3))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (_zip(), "a zip archive, as PyTorch writes models: export it to ONNX first"),
        (pickle.dumps({"w": [1.0]}, protocol=2), "a pickle, as PyTorch writes models"),
        (b"\x89HDF\r\n\x1a\n" + bytes(64), "an HDF5 file, as Keras writes models"),
        (b"\x1c\x00\x00\x00TFL3" + bytes(64), "a TensorFlow Lite model"),
        (b"GGUF\x03\x00\x00\x00" + bytes(64), "a GGUF file"),
        (b'\x40\x00\x00\x00\x00\x00\x00\x00{"w": {}}', "a safetensors file"),
        (gzip.compress(b"model", mtime=0), "compressed by gzip: unpack it first"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (b"<!doctype html><html>", "a web page"),
    ],
    ids=("zip", "pickle", "hdf5", "tflite", "gguf", "safetensors", "gzip", "lfs", "html"),
)
def test_another_format_is_named_with_what_to_do(
    tmp_path: Path, contents: bytes, said: str
) -> None:
    (tmp_path / "m.onnx").write_bytes(contents)
    with pytest.raises(ModelRefused) as refused:
        profile_model(tmp_path / "m.onnx", None)
    assert f"m.onnx: is not an ONNX model but {said}" in str(refused.value)
