"""The weights of a prepared model, mapped in one piece and given to ONNX Runtime by reference.

ONNX Runtime maps each weight by itself. A mapping below 2 MiB has no huge page, whatever the page
cache holds, so the kernel brings such weights back 64 KiB at a time: those of ResNet-152 in 3,300
faults for each item, which take 14 ms. In one mapping they come back in huge pages.

Packed forms cannot be given: the runtime looks for them beside the weights that it maps itself. So
a weight that has one is left to it.
"""

import mmap
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from shoal_agent.runtime.external_data import is_packed
from shoal_agent.runtime.onnx_subset import tensors
from shoal_protocol.manifest import WEIGHTS
from shoal_protocol.onnx_subset_pb2 import Model

_FLOAT: Final = 1
_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    _FLOAT: np.dtype(np.float32),
    2: np.dtype(np.uint8),
    3: np.dtype(np.int8),
    6: np.dtype(np.int32),
    7: np.dtype(np.int64),
    10: np.dtype(np.float16),
    11: np.dtype(np.float64),
}
"""Types of tensors by their numbers in onnx.proto; weights of others are left to the runtime."""

Weights = dict[str, onnxruntime.OrtValue]
"""By name. They refer to the mapping, which ends with the last of them."""


def packs_floats(model: Path) -> bool:
    """Whether a prepared model has packed forms, and only of floats of 32 bits: products of others
    take many times as long without. Raises `OSError`."""
    found = tensors(Model.FromString(model.read_bytes()).graph)
    types = {tensor.data_type for tensor in found if is_packed(tensor)}
    return types == {_FLOAT}


def map_weights(model: Path) -> Weights:
    """Those of a prepared model that have no packed form. Raises `OSError`, `ValueError`."""
    found = []
    for tensor in Model.FromString(model.read_bytes()).graph.initializer:
        if tensor.external_data and tensor.data_type in _DTYPES and not is_packed(tensor):
            entries = {each.key: each.value for each in tensor.external_data}
            found.append((int(entries["offset"]), int(entries["length"]), tensor))
    if not found:
        return {}
    start = min(offset for offset, *_ in found)
    start -= start % mmap.ALLOCATIONGRANULARITY  # pages may be larger than what tensors begin at
    end = max(offset + length for offset, length, _ in found)
    with model.with_name(WEIGHTS).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), end - start, access=mmap.ACCESS_COPY, offset=start)
    weights = {}
    for offset, _, tensor in found:
        dtype = _DTYPES[tensor.data_type]
        array = np.ndarray(tuple(tensor.dims), dtype, mapped, offset - start)
        weights[tensor.name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return weights
