"""What a fragment takes, and whether tensors suit it."""

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnxruntime

from shoal_agent.runtime.failures import RuntimeFailed
from shoal_agent.runtime.mapped_pages import PageRange, pages_around
from shoal_protocol.tensors import DTYPES, Array
from shoal_protocol.v1.tensors_pb2 import BFLOAT16, COMPLEX64, COMPLEX128, DataType

_DTYPES: Final = {
    f"tensor({DataType.Name(each).lower()})": dtype.newbyteorder("=")
    for each, dtype in DTYPES.items()
    if each not in (BFLOAT16, COMPLEX64, COMPLEX128)
}
"""What numpy calls the types of inputs."""


class InputMismatch(ValueError):
    """An input's name, type or shape does not suit the fragment: trying again does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """What a fragment takes under one name; in `shape` None means any size."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


def dtype_of(value: onnxruntime.NodeArg) -> np.dtype[Any] | None:
    """Of an input or output of a session; None: nobody could send it."""
    return _DTYPES.get(value.type)


def input_spec(value: onnxruntime.NodeArg) -> InputSpec:
    """Of an input of a session. Raises `RuntimeFailed` for a type that nobody could send."""
    if (dtype := dtype_of(value)) is None:
        raise RuntimeFailed(f"input {value.name} of type {value.type} is not supported")
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return InputSpec(name=value.name, dtype=dtype, shape=shape)


def check_inputs(specs: Iterable[InputSpec], tensors: Mapping[str, Array]) -> None:
    """Whether tensors suit a fragment; `InputMismatch` says what does not.

    A symbolic size is any size here: exporters give one symbol to axes that differ.
    """
    for spec in specs:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise InputMismatch(f"input {spec.name} is missing")
        if tensor.dtype != spec.dtype:
            raise InputMismatch(f"input {spec.name}: type {tensor.dtype} is not {spec.dtype}")
        if not _fits(tensor.shape, spec.shape):
            raise InputMismatch(
                f"input {spec.name}: shape {_shape(tensor.shape)} does not fit {_shape(spec.shape)}"
            )


def feed_of(specs: Sequence[InputSpec], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """What a fragment takes of these tensors. Raises `InputMismatch`."""
    check_inputs(specs, tensors)
    return {spec.name: tensors[spec.name] for spec in specs}


def pages_on_disk(feed: Mapping[str, Array]) -> list[PageRange]:
    """Where tensors lie that are views of mapped files: reading them takes memory."""
    return [
        pages_around(array.ctypes.data, array.nbytes)
        for array in feed.values()
        if isinstance(_owner(array), mmap.mmap)
    ]


def _owner(array: Array) -> object:
    """What has the memory that an array is a view of."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        behind = owner.base if isinstance(owner, np.ndarray) else owner.obj
        if behind is None:
            break
        owner = behind
    return owner


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    # The runtime shows a shape of unknown rank like a number's: as ().
    if not wanted or shape == wanted:
        return True
    return len(shape) == len(wanted) and all(
        [expected is None or size == expected for size, expected in zip(shape, wanted, strict=True)]
    )


def _shape(sizes: tuple[int | None, ...]) -> str:
    return "[" + ",".join("?" if size is None else str(size) for size in sizes) + "]"
