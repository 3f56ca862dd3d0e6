"""What the inspect worker found out, read into a Model's status. Pure.

The worker's answer is JSON: `{"digest", "size_bytes", "opset", "parameters", "inputs": [{"name",
"dtype", "shape"}], "outputs": [...]}`, tensors as in `partition.json`.
"""

import json
from collections.abc import Mapping
from typing import Final

from shoal_api.fields import DIGEST
from shoal_api.kinds.model import ModelStatus, TensorStatus
from shoal_api.shapes import Errors, Invalid
from shoal_operator.reconcile.condition_updates import shortened

_TENSORS: Final = 256
_AXES: Final = 16
_OPSETS: Final = 1000


def read_inspection(output: bytes) -> ModelStatus | str:
    """What was found out, without conditions; or what is wrong with the answer."""
    try:
        parsed: object = json.loads(output)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    match parsed:
        case {
            "digest": str(digest),
            "size_bytes": int(size),
            "opset": int(opset),
            "parameters": int(parameters),
            "inputs": list(inputs),
            "outputs": list(outputs),
        }:
            if not _is_digest(digest):
                return f"{digest[:80]!r} is no digest"
            if size < 0 or parameters < 0 or not 1 <= opset <= _OPSETS:
                return f"size {size}, opset {opset}, {parameters} parameters cannot be"
            return ModelStatus(
                digest=digest,
                size_bytes=size,
                opset=opset,
                parameters=parameters,
                inputs=_tensors(inputs),
                outputs=_tensors(outputs),
            )
    return "fields are missing"


def _is_digest(text: str) -> bool:
    errors: Errors = []
    return not isinstance(DIGEST.read(text, (), errors), Invalid)


def _tensors(values: list[object]) -> tuple[TensorStatus, ...]:
    """As many as a status holds, with names cut to what it holds."""
    return tuple(_tensor(value) for value in values[:_TENSORS] if isinstance(value, Mapping))


def _tensor(value: Mapping[str, object]) -> TensorStatus:
    shape = value.get("shape")
    axes = shape if isinstance(shape, list) else ["..."]
    return TensorStatus(
        name=shortened(str(value.get("name") or "?"), 512),
        dtype=shortened(str(value.get("dtype") or "?"), 32),
        shape=tuple("?" if axis is None else shortened(str(axis), 64) or "?" for axis in axes)[
            :_AXES
        ],
    )
