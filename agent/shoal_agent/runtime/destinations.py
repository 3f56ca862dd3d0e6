"""Arrays that a session writes its large outputs into, so that nobody copies them afterwards.

What a session allocates for an output lies in its arena, and is copied, because it would hold the
arena back: of 128 tokens, GPT-2 gives 25 MB. Where the shape of an output follows from those of the
inputs, the array exists before the run.

A model may say what is not true of its shapes: then the run fails, and is to be repeated without.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Final

import numpy as np
import onnxruntime

from shoal_agent.runtime.inputs import dtype_of
from shoal_protocol.tensors import Array

LARGE_BYTES: Final = 1 << 20
"""Less is copied in no time."""


def destinations(
    inputs: Iterable[onnxruntime.NodeArg],
    outputs: Iterable[onnxruntime.NodeArg],
    feed: Mapping[str, Array],
) -> dict[str, Array]:
    """An array for each large output whose shape is known, by name."""
    sizes: dict[str, set[int]] = {}
    for value in inputs:
        if value.name in feed and len(value.shape) == feed[value.name].ndim:
            for axis, size in zip(value.shape, feed[value.name].shape, strict=True):
                if isinstance(axis, str):
                    sizes.setdefault(axis, set()).add(size)
    found = {}
    for value in outputs:
        shape = [axis if isinstance(axis, int) else _only(sizes.get(axis)) for axis in value.shape]
        known = [size for size in shape if size is not None]
        dtype = dtype_of(value)
        if dtype is None or dtype.hasobject or len(known) < len(shape) or not shape:
            continue
        if prod(known) * dtype.itemsize >= LARGE_BYTES:
            found[value.name] = np.empty(known, dtype)
    return found


def _only(sizes: set[int] | None) -> int | None:
    """Exporters give one symbol to axes that differ: of such, no size is known."""
    return next(iter(sizes)) if sizes is not None and len(sizes) == 1 else None
