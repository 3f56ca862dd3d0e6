"""Convolutions and products, of numbers and quantised."""

from collections.abc import Mapping
from math import prod
from typing import Final

from onnx import TensorProto

from shoal_compiler.shaped import Dims, Shaped
from shoal_compiler.tensor_types import bits_of
from shoal_compiler.workspaces.workspace import FLOAT_BYTES, Rule, Workspace, floats

STRIP_BYTES: Final = 1 << 18
"""A strip of a convolution's input, spread out, for two threads; it is small, whatever they are."""
DEQUANTISES: Final = "DequantizeLinear"
_ADDRESS_BYTES: Final = 8
_INTEGERS: Final = (TensorProto.INT32, TensorProto.INT64, TensorProto.UINT32, TensorProto.UINT64)
_DEEP: Final = 512


def _convolution(shaped: Shaped) -> Workspace:
    """A kernel of more than one element is made a matrix product. With more filters than output
    positions, the input is spread out whole; else in strips of a fixed size per thread."""
    output, kernel = shaped.output(0), shaped.input(1)
    if shaped.follows(0, DEQUANTISES) and shaped.follows(1, DEQUANTISES):
        return _between_quantised(shaped)
    if prod(kernel[2:]) == 1 and set(shaped.integers("strides") or [1]) == {1}:
        return Workspace()
    filters, places = kernel[0] // shaped.integer("group", 1), prod(output[2:])
    return floats(places * prod(kernel[1:])) if filters > places else Workspace((STRIP_BYTES,))


def _transposed_convolution(shaped: Shaped) -> Workspace:
    """The product is made first, whole, and gathered from."""
    return floats(prod(shaped.input(0)[2:]) * prod(shaped.input(1)[1:]))


def _spread_out(shaped: Shaped, kernel: Dims) -> int:
    """Numbers of one item's input as a matrix, whole; none where it is one. With two axes or fewer,
    one group is spread out after the other."""
    moved = [*shaped.integers("strides"), *(1 + at for at in shaped.integers("pads"))]
    if prod(kernel[2:]) == 1 and set(moved) <= {1}:
        return 0
    groups = shaped.integer("group", 1) if len(kernel) > 4 else 1
    return groups * prod(kernel[1:]) * prod(shaped.output(0)[2:])


def _convolution_of_integers(shaped: Shaped) -> Workspace:
    return Workspace((_spread_out(shaped, shaped.input(1)),))


def _quantised_convolution(shaped: Shaped) -> Workspace:
    return Workspace(_quantised(shaped, shaped.input(3)))


def _quantised(shaped: Shaped, kernel: Dims) -> tuple[int, ...]:
    """The weights in another order, and of one item its products, what goes in and what comes out
    with channels last, and what is spread out: addresses, where each channel is by itself."""
    taken, given = shaped.input(0)[1:], shaped.output(0)[1:]
    spread = _spread_out(shaped, kernel)
    if kernel[1] == 1 and kernel[0] == shaped.integer("group", 1):
        spread = _ADDRESS_BYTES * prod(kernel[2:]) * prod(given[1:])
    return prod(kernel), FLOAT_BYTES * prod(given), prod(taken), prod(given), spread


def _between_quantised(shaped: Shaped) -> Workspace:
    """The runtime makes a quantised one of it. That has neither its input nor its output as
    numbers, which are counted, but works in more."""
    numbers = prod(shaped.input(0)) + prod(shaped.output(0))
    more = sum(_quantised(shaped, shaped.input(1))) - (FLOAT_BYTES - 1) * numbers
    return Workspace((max(STRIP_BYTES, more),))


def _products_of_integers(shaped: Shaped) -> Workspace:
    """They are rounded when all are there."""
    return floats(prod(shaped.output(0)))


def _quantised_layer(shaped: Shaped) -> Workspace:
    """Rounded, too, unless numbers are asked for."""
    return _products_of_integers(shaped) if shaped.has(7) else Workspace()


def _quantising_product(shaped: Shaped) -> Workspace:
    return Workspace((prod(shaped.input(0)),))


def _product(shaped: Shaped) -> Workspace:
    """Of integers, the rows and columns that are multiplied are copied, so many numbers of each at
    a time."""
    if shaped.type(0) not in _INTEGERS:
        return Workspace()
    rows, depth, columns = shaped.output(0)[-2:-1], shaped.input(0)[-1], shaped.input(1)[1:][-1:]
    number = sum(rows) + sum(columns)
    return Workspace(beside_bytes=(bits_of(shaped.type(0)) or 64) // 8 * number * min(depth, _DEEP))


def _deformed(shaped: Shaped) -> Workspace:
    """One item's input is spread out, whole; its products are gathered twice."""
    given = prod(shaped.output(0)[1:])
    spread = prod(shaped.input(1)[1:]) * prod(shaped.output(0)[2:])
    return floats(spread * shaped.integer("group", 1), given, given)


RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("Conv", "FusedConv"), _convolution),
    "ConvTranspose": _transposed_convolution,
    "ConvInteger": _convolution_of_integers,
    "QLinearConv": _quantised_convolution,
    "QLinearMatMul": _products_of_integers,
    "QGemm": _quantised_layer,
    "DynamicQuantizeMatMul": _quantising_product,
    "MatMul": _product,
    "DeformConv": _deformed,
}
