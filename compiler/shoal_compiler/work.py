"""How much work a node is for a CPU, counted in what a device's calibration measures.

A device is measured by three rates: FLOPs per second in convolutions and in matrix products, and
bytes per second in operators that only read and write (`shoal_protocol.partition.Work`). A node's
nominal time is the sum of what it computes and what it moves, each by its rate: a roofline without
overlap, which needs no device to be added up over a fragment.

No roofline knows that a depthwise convolution reaches a tenth of the rate of a dense one, or that
the runtime joins an activation with what is before it. So the amounts are corrected: an estimator
of boosted regression trees gives the ratio of a node's true time to its nominal one (FlexPie,
section 4.1, predicts the time itself by such an estimator, one per device; the ratio is nearly the
same on all devices of a kind, and the rates carry the rest). `bench/costmodel.py` trains it on
measured models and says how far it errs on models that it has not seen; `work.json` is what it
wrote.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log2, prod
from typing import Final

import numpy as np
import numpy.typing as npt

from shoal_compiler.costs import flops, moves
from shoal_compiler.nodes import integer_of
from shoal_compiler.shaped import Dims, Shaped
from shoal_protocol.partition import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A node among its neighbours: what the estimator sees of it.

    `element_bytes` is the size of its first output's elements; `weight_bytes` is what it reads of
    initializers. `after` is the operator that makes its first input, "" for an input of the model;
    `readers` is how many nodes read its first output.
    """

    shaped: Shaped
    element_bytes: float
    weight_bytes: int
    after: str
    readers: int


_KINDS: Final[Mapping[str, int]] = {
    operator: number
    for number, names in enumerate(
        (
            "Conv FusedConv ConvTranspose",
            "ConvInteger QLinearConv",
            "MatMul FusedMatMul Gemm FusedGemm Einsum",
            "MatMulInteger QLinearMatMul QGemm DynamicQuantizeMatMul MatMulNBits",
            "LSTM GRU RNN",
            "Relu Clip LeakyRelu PRelu HardSwish HardSigmoid",
            "Sigmoid Tanh Erf Gelu FastGelu Exp Softplus Elu Swish Mish Log Pow",
            "Add Sub Mul Div Sqrt Neg Abs Min Max Where Equal Greater Less And Or Not Sum",
            "Softmax LogSoftmax",
            "LayerNormalization InstanceNormalization GroupNormalization BatchNormalization",
            "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL2 ArgMax ArgMin TopK",
            "MaxPool AveragePool GlobalAveragePool GlobalMaxPool Resize Upsample",
            "Transpose DepthToSpace SpaceToDepth",
            "Concat Split Slice Pad Expand Tile Gather GatherND ScatterND GatherElements",
            "QuantizeLinear DequantizeLinear DynamicQuantizeLinear Cast",
            "Reshape Flatten Squeeze Unsqueeze Identity Dropout Shape Size Constant Range",
        )
    )
    for operator in names.split()
}
_OTHER: Final = len(set(_KINDS.values()))
_CONVOLUTIONS: Final = frozenset((0, 1))
_PRODUCTS: Final = frozenset((2, 3, 4))

FEATURES: Final = (
    "kind",
    "after",
    "readers",
    "element bytes",
    "log2 arithmetic",
    "log2 bytes read",
    "log2 bytes of weights",
    "log2 bytes written",
    "log2 intensity",
    "log2 rows",
    "log2 columns",
    "log2 depth",
    "kernel",
    "stride",
    "log2 groups",
)


def nominal(setting: Setting) -> Work | None:
    """What a node computes and moves; None: a size is unknown."""
    arithmetic, traffic = flops(setting.shaped), _traffic(setting)
    if arithmetic is None or traffic is None:
        return None
    kind = _kind(setting.shaped.node.op_type)
    return Work(
        convolution=arithmetic if kind in _CONVOLUTIONS else 0,
        matrix=arithmetic if kind in _PRODUCTS else 0,
        memory=sum(traffic),
    )


def works(settings: Sequence[Setting]) -> list[Work | None]:
    """The same as estimated: divided by a device's rates and added up, it is a node's time there.
    None: a size is unknown."""
    amounts = [nominal(each) for each in settings]
    rows = [features(each) for each in settings]
    factors = _estimator().estimate(np.array(rows, np.float64).reshape(len(rows), len(FEATURES)))
    return [
        None if amount is None else amount.times(float(factor))
        for amount, factor in zip(amounts, factors, strict=True)
    ]


def features(setting: Setting) -> tuple[float, ...]:
    """What the estimator knows of a node whose `nominal` is known, as `FEATURES` name it."""
    shaped, traffic = setting.shaped, _traffic(setting) or (0, 0, 0)
    arithmetic = flops(shaped) or 0
    rows, columns, depth, kernel, stride, groups = _geometry(shaped)
    return (
        _kind(shaped.node.op_type),
        _kind(setting.after),
        min(setting.readers, 4),
        setting.element_bytes,
        log2(1 + arithmetic),
        *(log2(1 + size) for size in traffic),
        log2((1 + arithmetic) / (1 + sum(traffic))),
        log2(1 + rows),
        log2(1 + columns),
        log2(1 + depth),
        kernel,
        stride,
        log2(groups),
    )


def _kind(operator: str) -> int:
    return _KINDS.get(operator, _OTHER) if operator else _OTHER + 1


def _traffic(setting: Setting) -> tuple[int, int, int] | None:
    """Bytes read of activations and of weights, and bytes written."""
    shaped = setting.shaped
    if any(size is None for size in shaped.outputs):
        return None
    written = int(sum(prod(size or ()) for size in shaped.outputs) * setting.element_bytes)
    known = [prod(size) for size in shaped.inputs if size is not None]
    if moves(shaped.node):
        return written, 0, written
    elements = max(0, int(sum(known) * setting.element_bytes) - setting.weight_bytes)
    return elements, setting.weight_bytes, written


def _geometry(shaped: Shaped) -> tuple[int, int, int, int, int, int]:
    """Rows, columns and depth of the matrix product that a node is, or its output's last axes;
    its kernel, stride and groups."""
    output = next((size for size in shaped.outputs if size is not None), ())
    kind = _kind(shaped.node.op_type)
    second = _size(shaped, 1)
    if kind in _CONVOLUTIONS and len(second) > 2:
        kernel = shaped.integers("kernel_shape") or list(second[2:])
        stride = (shaped.integers("strides") or [1])[0]
        groups = max(1, integer_of(shaped.node, "group", 1))
        return prod(output[2:]), second[0] // groups, second[1], prod(kernel), stride, groups
    columns = output[-1] if output else 1
    rows = prod(output[:-1])
    depth = (_size(shaped, 0) or (1,))[-1] if kind in _PRODUCTS else 0
    kernel = shaped.integers("kernel_shape") or [1]
    return rows, columns, depth, prod(kernel), (shaped.integers("strides") or [1])[0], 1


def _size(shaped: Shaped, index: int) -> Dims:
    found = shaped.inputs[index] if index < len(shaped.inputs) else None
    return found or ()


# ---- the estimator -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimator:
    """Boosted regression trees. A tree is a list of nodes `[feature, threshold, left, right]`, or
    `[value]` for a leaf; the first is its root."""

    base: float
    trees: Sequence[Sequence[Sequence[float]]]

    def estimate(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of each row of features the sum of one leaf of each tree, at least zero."""
        total = np.full(len(rows), self.base)
        for tree in self.trees:
            self._add(tree, 0, rows, np.arange(len(rows)), total)
        return total.clip(min=0.0)

    def _add(
        self,
        tree: Sequence[Sequence[float]],
        at: int,
        rows: npt.NDArray[np.float64],
        chosen: npt.NDArray[np.intp],
        total: npt.NDArray[np.float64],
    ) -> None:
        """Add the leaves below a node to those rows that come there."""
        if not len(chosen):
            return
        if len(node := tree[at]) == 1:
            total[chosen] += node[0]
            return
        feature, threshold, left, right = node
        low = rows[chosen, int(feature)] <= threshold
        self._add(tree, int(left), rows, chosen[low], total)
        self._add(tree, int(right), rows, chosen[~low], total)


@cache
def _estimator() -> Estimator:
    read = json.loads(files("shoal_compiler").joinpath("work.json").read_text())
    assert tuple(read["features"]) == FEATURES, "work.json was made for other features"
    return Estimator(read["base"], read["trees"])
