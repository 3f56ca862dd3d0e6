"""Which files of external data a model names, before they are there.

`safety` checks a model and its files together; to fetch them one has to know them. Only names that
lie inside the model's folder are given; whether a model is sound is still for `safety` to say.
"""

from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError, Message

from shoal_compiler.errors import ModelRefused
from shoal_compiler.safety import misplaced
from shoal_compiler.wire import INLINE, read_skeleton

_MOST_FILES: Final = 4096


def external_locations(path: Path) -> tuple[str, ...]:
    """The locations of external data that the tensors of an ONNX file name, sorted. Raises
    `ModelRefused`, also for a location that leads out of the model's folder."""
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(read_skeleton(path))
    except DecodeError as error:
        raise ModelRefused("is no ONNX model", path=path) from error
    found: set[str] = set()
    _collect(proto, found)
    found.discard(INLINE)
    if len(found) > _MOST_FILES:
        raise ModelRefused(f"names {len(found)} files of external data", path=path)
    for location in found:
        if (reason := misplaced(location)) is not None:
            raise ModelRefused(reason, path=path)
    return tuple(sorted(found))


def _collect(message: Message, found: set[str]) -> None:
    """Every location below a message, however deep the graphs nest (the parser bounds that)."""
    if isinstance(message, onnx.TensorProto):
        if message.data_location == onnx.TensorProto.EXTERNAL:
            found.update(each.value for each in message.external_data if each.key == "location")
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        values = [value] if isinstance(value, Message) else value
        for each in values:
            _collect(each, found)
