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
from shoal_protocol.blocks import Join
from shoal_protocol.tensors import Array

Placed: TypeAlias = Mapping[str, Array]
"""By the names of outputs, what these are written into."""
_Source = tuple[str, int, int]
"""An axis that has a symbol: the input, the axis, and how many there are."""
_Described: TypeAlias = tuple[str, np.dtype[Any] | None, Sequence[int | str]]
"""An output: its name, its type where arrays have that, and its axes."""


class Destinations:
    """Of a session, or of several in a row. What its outputs need is worked out once, since light
    items run in a few microseconds."""

    def __init__(
        self,
        sessions: Sequence[onnxruntime.InferenceSession],
        outputs: Container[str],
        joins: Iterable[Join] = (),
    ) -> None:
        """`outputs` are those that others are given; sessions make parts of those of `joins`, and
        the first part says what the whole is."""
        self._sources: dict[str, list[_Source]] = {}
        for value in (value for each in sessions for value in each.get_inputs()):
            for axis, size in enumerate(value.shape):
                if isinstance(size, str):
                    source = value.name, axis, len(value.shape)
                    self._sources.setdefault(size, []).append(source)
        whole = {join.parts[0]: join for join in joins}
        made = (value for each in sessions for value in each.get_outputs())
        described = (
            _whole_of(value, whole[value.name]) if value.name in whole else _described(value)
            for value in made
            if value.name in outputs or value.name in whole
        )
        self._outputs = tuple(self._may_be_large(described))

    def of(self, feed: Mapping[str, Array]) -> Placed:
        """An array for each large output whose shape is known, by name."""
        found = {}
        for name, dtype, axes in self._outputs:
            shape = self._shape(axes, feed)
            if shape is not None and prod(shape) * dtype.itemsize >= OUTSIDE_BYTES:
                found[name] = np.empty(shape, dtype)
        return found

    def _may_be_large(
        self, described: Iterable[_Described]
    ) -> Iterator[tuple[str, np.dtype[Any], Sequence[int | str]]]:
        for name, dtype, axes in described:
            if dtype is None or dtype.hasobject or not axes:
                continue
            if any(axis not in self._sources for axis in axes if not isinstance(axis, int)):
                continue
            sizes = [axis for axis in axes if isinstance(axis, int)]
            if len(sizes) < len(axes) or prod(sizes) * dtype.itemsize >= OUTSIDE_BYTES:
                yield name, dtype, axes

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


def _described(value: onnxruntime.NodeArg) -> _Described:
    return value.name, dtype_of(value), value.shape


def _whole_of(part: onnxruntime.NodeArg, join: Join) -> _Described:
    axes = list(part.shape or ())
    axes[join.axis : join.axis + 1] = [sum(join.sizes)]
    return join.output, dtype_of(part), axes
