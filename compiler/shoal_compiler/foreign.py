"""What a file is that is no ONNX model, by its first bytes: so that the user learns what to do."""

from typing import Final

HEAD_BYTES: Final = 32

_EXPORT: Final = "export it to ONNX first"
_SIGNATURES: Final[tuple[tuple[int, bytes, str], ...]] = (
    (0, b"PK\x03\x04", f"a zip archive, as PyTorch writes models: {_EXPORT} (torch.onnx.export)"),
    (0, b"\x80\x02", f"a pickle, as PyTorch writes models: {_EXPORT} (torch.onnx.export)"),
    (0, b"\x89HDF\r\n\x1a\n", f"an HDF5 file, as Keras writes models: {_EXPORT} (tf2onnx)"),
    (4, b"TFL3", f"a TensorFlow Lite model: {_EXPORT} (tf2onnx)"),
    (4, b"ORTM", "a model in ONNX Runtime's own format: give the .onnx file that it was made of"),
    (0, b"GGUF", "a GGUF file: it has weights without a graph; take an ONNX export of the model"),
    (8, b'{"', "a safetensors file: it has weights without a graph; export the model to ONNX"),
    (0, b"\x1f\x8b", "compressed by gzip: unpack it first"),
    (
        0,
        b"version https://git-lfs",
        "a pointer of Git LFS, not the file: `git lfs pull` fetches it",
    ),
    (0, b"<!DOCTYPE", "a web page: the address is not that of the file itself"),
    (0, b"<html", "a web page: the address is not that of the file itself"),
)


def foreign_format(head: bytes) -> str | None:
    """What a file that starts with these bytes is, and what to do; None where nothing is known."""
    for offset, signature, what in _SIGNATURES:
        if head[offset : offset + len(signature)].lower() == signature.lower():
            return what
    return None
