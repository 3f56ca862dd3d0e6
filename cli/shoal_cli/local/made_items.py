"""An item for a model of which there is none: made from the types and shapes of its inputs.

Numbers with a fraction are drawn evenly from -1 to 1, by a fixed seed; whole numbers and truth
values are 1, which most models take for an index, a length and a mask alike. An axis of any size is
given one by `shapes`; a first axis of its own accord: one item is a batch of one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from shoal_cli.local.device_figures import NoItem
from shoal_cli.local.sizes import shown_shape
from shoal_protocol.partition import TensorSpec

Array = npt.NDArray[Any]

_MOST_ELEMENTS: Final = 1 << 31


def make_item(
    specs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """One item; the `shapes` are such as the inputs take. Raises `NoItem`."""
    chance = np.random.default_rng(0)
    return {spec.name: _made(spec, shapes.get(spec.name), chance) for spec in specs}


def _made(spec: TensorSpec, given: tuple[int, ...] | None, chance: np.random.Generator) -> Array:
    shape = given or _shape(spec)
    dtype = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(spec.dtype.upper()))
    if dtype.kind not in "fciub":
        raise NoItem(f"input {spec.name} is {spec.dtype}: no item is made; give --inputs FOLDER")
    if np.prod(shape, dtype=float) > _MOST_ELEMENTS:
        raise NoItem(f"--shape {spec.name}: {'x'.join(map(str, shape))} is too large for one item")
    if dtype.kind in "fc":
        return chance.uniform(-1, 1, shape).astype(dtype)
    return np.ones(shape, dtype)


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    sizes = (None,) if spec.shape is None else spec.shape
    shape = tuple(
        1 if place == 0 and spec.shape and not isinstance(axis, int) else axis
        for place, axis in enumerate(sizes)
    )
    fixed = tuple(axis for axis in shape if isinstance(axis, int))
    if len(fixed) == len(shape):
        return fixed
    raise NoItem(
        f"input {spec.name} has the shape {shown_shape(spec)}: say which with "
        f"--shape {spec.name}=..., or give items with --inputs FOLDER"
    )
