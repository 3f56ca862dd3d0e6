"""Arrays that a session writes its large outputs into, so that nobody copies them afterwards.

What a session allocates for an output lies in its arena, and is copied, because it would hold the
arena back: of 128 tokens, GPT-2 gives 25 MB. Where the shape of an output follows from those of the
inputs, the array exists before the run. Where an output lies depends on the item's shapes alone:
one that is in the arena for the first item and not for the next moves all that comes after it, and
of the arena two places are in memory for what needs one.

A model may say what is not true of its shapes: then the run fails, and is to be repeated without.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnxruntime

from shoal_agent.runtime.inputs import dtype_of
from shoal_protocol.arena_regions import OUTSIDE_BYTES
from shoal_protocol.tensors import Array

Placed: TypeAlias = Mapping[str, Array]
"""By the names of outputs, what these are written into."""
_Source = tuple[str, int, int]
"""An axis that has a symbol: the input, the axis, and how many there are."""


class Destinations:
    """Of a session, or of several in a row. What its outputs need is worked out once, since light
    items run in a few microseconds."""

    def __init__(
        self, sessions: Sequence[onnxruntime.InferenceSession], outputs: Container[str]
    ) -> None:
        """`outputs` are those that others are given."""
        self._sources: dict[str, list[_Source]] = {}
        for value in (value for each in sessions for value in each.get_inputs()):
            for axis, size in enumerate(value.shape):
                if isinstance(size, str):
                    source = value.name, axis, len(value.shape)
                    self._sources.setdefault(size, []).append(source)
        made = (value for each in sessions for value in each.get_outputs())
        self._outputs = tuple(self._may_be_large(each for each in made if each.name in outputs))

    def of(self, feed: Mapping[str, Array]) -> Placed:
        """An array for each large output whose shape is known, by name."""
        found = {}
        for name, dtype, axes in self._outputs:
            shape = self._shape(axes, feed)
            if shape is not None and prod(shape) * dtype.itemsize >= OUTSIDE_BYTES:
                found[name] = np.empty(shape, dtype)
        return found

    def _may_be_large(
        self, outputs: Iterable[onnxruntime.NodeArg]
    ) -> Iterator[tuple[str, np.dtype[Any], Sequence[int | str]]]:
        for value in outputs:
            dtype, axes = dtype_of(value), value.shape
            if dtype is None or dtype.hasobject or not axes:
                continue
            if any(axis not in self._sources for axis in axes if not isinstance(axis, int)):
                continue
            is_fixed = all(isinstance(axis, int) for axis in axes)
            if not is_fixed or prod(axes) * dtype.itemsize >= OUTSIDE_BYTES:
                yield value.name, dtype, axes

    def _shape(self, axes: Sequence[int | str], feed: Mapping[str, Array]) -> list[int] | None:
        shape = []
        for axis in axes:
            size = axis if isinstance(axis, int) else self._size(axis, feed)
            if size is None:
                return None
            shape.append(size)
        return shape

    def _size(self, symbol: str, feed: Mapping[str, Array]) -> int | None:
        """Exporters give one symbol to axes that differ: of such, no size is known."""
        found = None
        for name, axis, rank in self._sources[symbol]:
            array = feed.get(name)
            if array is None or array.ndim != rank:
                continue
            size = array.shape[axis]
            if found is not None and size != found:
                return None
            found = size
        return found
