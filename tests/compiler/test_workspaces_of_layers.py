"""What layers work in is reckoned with: recurrent and quantised ones, normalisation, and what else
the runtime has a copy for. No fragment of one node takes more than its estimate, nor much less."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper, numpy_helper

from compiler.test_resident_estimate import MIB
from compiler.test_workspaces import OWN, Case, reckoned_and_taken
from made_models import weight

CHANNELS, SIDE = 64, 128
PICTURE: Final = weight(1, CHANNELS, SIDE, SIDE)
MATRIX: Final = weight(1024, 1024)
DOUBLES: Final = MATRIX.astype(np.float64)
INTEGERS: Final = np.ones((1024, 1024), np.int64)
BYTES: Final = np.ones((1, CHANNELS, SIDE, SIDE), np.uint8)
AROUND: Final[dict[str, Any]] = {"pads": [1, 1, 1, 1]}


def standard(
    operator: str, inputs: Mapping[str, Any], *outputs: str, sure: bool = True, **attributes: Any
) -> Case:
    return Case(operator, inputs, attributes, "", outputs or ("y",), sure)


def recurrent(operator: str, *outputs: str, directions: int = 1, **attributes: Any) -> Case:
    gates, hidden, width = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator], 256, 64
    inputs = {
        "x": weight(1024, 8, width),
        "w": weight(directions, gates * hidden, width),
        "wr": weight(directions, gates * hidden, hidden),
    }
    return standard(operator, inputs, *outputs, hidden_size=hidden, **attributes)


def quantised(*kernel: int, **attributes: Any) -> Case:
    inputs = {
        "x": BYTES,
        "wxs": np.float32(0.1),
        "wxz": np.uint8(1),
        "w": np.ones(kernel, np.int8),
        "ws": np.ones(kernel[0], np.float32),
        "wz": np.zeros(kernel[0], np.int8),
        "wys": np.float32(0.1),
        "wyz": np.uint8(1),
    }
    return standard("QLinearConv", inputs, **attributes)


def product(*left: int, right: npt.NDArray[np.uint8]) -> Case:
    one, zero = np.float32(1), np.uint8(0)
    left_side = {"x": np.ones(left, np.uint8), "wxs": one, "wxz": zero}
    scales = {"ws": one, "wz": zero, "wys": one, "wyz": zero}
    return standard("QLinearMatMul", {**left_side, "k": right, **scales})


def einsum(equation: str, *operands: npt.NDArray[Any]) -> Case:
    return standard("Einsum", dict(zip("abc", operands, strict=False)), equation=equation)


def resized(*sizes: float, **attributes: Any) -> Case:
    scales = np.array([1, 1, *sizes], np.float32)
    inputs = {"x": PICTURE, "roi": None, "wscales": scales}
    return standard("Resize", inputs, **attributes)


CASES: Final[Mapping[str, Callable[[], Case]]] = {
    "LSTM": lambda: recurrent("LSTM"),
    "LSTM of both directions": lambda: recurrent("LSTM", directions=2, direction="bidirectional"),
    "LSTM that goes backwards": lambda: recurrent("LSTM", direction="reverse"),
    "LSTM of which the last state is asked for": lambda: recurrent("LSTM", "", "h"),
    "GRU": lambda: recurrent("GRU"),
    "GRU of both directions": lambda: recurrent("GRU", directions=2, direction="bidirectional"),
    "RNN of which the last state is asked for": lambda: recurrent("RNN", "", "h"),
    "a quantised convolution": lambda: quantised(CHANNELS, CHANNELS, 3, 3, **AROUND),
    "of groups": lambda: quantised(CHANNELS, 16, 3, 3, group=4, **AROUND),
    "of each channel by itself": lambda: quantised(CHANNELS, 1, 3, 3, group=CHANNELS, **AROUND),
    "of single points": lambda: quantised(2 * CHANNELS, CHANNELS, 1, 1),
    "of every other point": lambda: quantised(2 * CHANNELS, CHANNELS, 1, 1, strides=[2, 2]),
    "a convolution of integers": lambda: standard(
        "ConvInteger", {"x": BYTES, "w": np.ones((CHANNELS, CHANNELS, 3, 3), np.uint8)}, **AROUND
    ),
    "a quantised product": lambda: product(2048, 512, right=np.ones((512, 2048), np.uint8)),
    "quantised products": lambda: product(4, 1024, 64, right=np.ones((4, 64, 1024), np.uint8)),
    "quantised pooling": lambda: Case(
        "QLinearAveragePool",
        {"x": BYTES, "ws": np.float32(1), "wz": np.uint8(0)}
        | {"wys": np.float32(1), "wyz": np.uint8(0)},
        {"kernel_shape": [3, 3], **AROUND},
    ),
    "Softmax along channels": lambda: standard("Softmax", {"x": PICTURE}, axis=1),
    "Softmax of halves": lambda: standard("Softmax", {"x": PICTURE.astype(np.float16)}, axis=-1),
    "Gelu of halves": lambda: standard("Gelu", {"x": MATRIX.astype(np.float16)}, sure=False),
    "Gelu of a sum": lambda: Case("BiasGelu", {"x": MATRIX, "wb": weight(1024)}),
    "FastGelu of a sum": lambda: Case("FastGelu", {"x": MATRIX, "wb": weight(1024)}),
    "FastGelu": lambda: Case("FastGelu", {"x": MATRIX}),
    "GroupNormalization": lambda: standard(
        "GroupNormalization",
        {"x": PICTURE, "ws": weight(CHANNELS), "wb": weight(CHANNELS)},
        num_groups=8,
    ),
    "MeanVarianceNormalization": lambda: standard("MeanVarianceNormalization", {"x": PICTURE}),
    "LRN": lambda: standard("LRN", {"x": PICTURE}, size=5),
    "bytes that are chosen": lambda: standard(
        "Where",
        {"c": np.ones((2048, 2048), bool)} | dict.fromkeys("ab", np.ones((2048, 2048), "u1")),
    ),
    "numbers of double precision that are chosen": lambda: standard(
        "Where", {"c": np.ones((1024, 1024), bool), "a": DOUBLES, "b": DOUBLES}
    ),
    "the largest of three": lambda: standard("Max", dict.fromkeys("abc", MATRIX)),
    "the sum of five": lambda: standard("Sum", dict.fromkeys("abcde", MATRIX)),
    "Einsum of matrices": lambda: einsum("ij,jk->ik", MATRIX, MATRIX),
    "Einsum of attention": lambda: einsum(
        "bqhd,bkhd->bhqk", weight(4, 256, 8, 128), weight(4, 256, 8, 128)
    ),
    "Einsum of attention to one item": lambda: einsum(
        "bqhd,bkhd->bhqk", weight(1, 512, 8, 64), weight(1, 512, 8, 64)
    ),
    "Einsum that sums up": lambda: einsum(
        "bhqk,bkhd->bqhd", weight(4, 8, 256, 256), weight(4, 256, 8, 64)
    ),
    "Einsum of three": lambda: einsum("ij,jk,kl->il", MATRIX, MATRIX, MATRIX),
    "Einsum of one": lambda: einsum("ij->ji", weight(2048, 1024)),
    "Einsum of matrices, one after the other": lambda: einsum(
        "...ij,...jk->...ik", weight(8, 256, 512), weight(8, 512, 256)
    ),
    "Einsum of matrices that are turned": lambda: einsum(
        "...ij,...kj->...ki", weight(8, 512, 256), weight(8, 512, 256)
    ),
    "Einsum of double precision": lambda: einsum("ij,jk->ik", DOUBLES, DOUBLES),
    "Einsum of integers": lambda: einsum("ij,jk->ik", INTEGERS, INTEGERS),
    "Softmax of double precision": lambda: standard(
        "Softmax", {"x": PICTURE.astype(np.float64)}, axis=1
    ),
    "a product of integers": lambda: standard("MatMul", {"x": INTEGERS, "k": INTEGERS}),
    "a product of integers without signs": lambda: standard(
        "MatMul", {"x": np.ones((512, 2048), np.uint32), "w": np.ones((2048, 2048), np.uint32)}
    ),
    "a quantised product with its scales": lambda: Case(
        "QGemm",
        {"x": np.ones((1024, 1024), np.uint8), "wxs": np.float32(1), "wxz": np.uint8(0)}
        | {"w": np.ones((1024, 4096), np.int8), "ws": np.float32(1), "wz": np.int8(0)}
        | {"wb": None, "wys": np.float32(1), "wyz": np.uint8(0)},
    ),
    "a product that quantises": lambda: Case(
        "DynamicQuantizeMatMul",
        {"x": MATRIX, "w": np.ones((1024, 4096), np.int8), "ws": np.float32(1)},
    ),
    "frames": lambda: standard(
        "STFT", {"x": weight(1, 1 << 20, 1), "wstep": np.array(256), "wwindow": weight(1024)}
    ),
    "long frames": lambda: standard(
        "STFT", {"x": weight(1, 1 << 20, 1), "wstep": np.array(1 << 14), "ww": weight(1 << 17)}
    ),
    "resized by cubes": lambda: resized(2, 2, mode="cubic"),
    "resized against aliases": lambda: resized(0.5, 0.5, mode="linear", antialias=1),
    "sampled": lambda: standard(
        "GridSample", {"x": weight(1, 4, 256, 256), "g": weight(1, 512, 512, 2)}
    ),
    "deformed": lambda: standard(
        "DeformConv",
        {"x": PICTURE, "w": weight(32, CHANNELS, 3, 3), "o": weight(1, 18, SIDE, SIDE)},
        **AROUND,
    ),
    "sorted": lambda: standard(
        "TopK", {"x": weight(1, 1 << 20), "wk": np.array([1 << 20])}, "y", "i"
    ),
    "scattered": lambda: standard(
        "ScatterElements",
        {"x": MATRIX, "i": np.tile(np.arange(1024), (1024, 1)), "u": MATRIX},
        axis=1,
    ),
    "gathered one by one": lambda: standard(
        "GatherND", {"x": MATRIX, "i": np.zeros((1 << 20, 2), np.int64)}
    ),
    "scattered one by one": lambda: standard(
        "ScatterND", {"x": MATRIX, "i": np.zeros((1 << 19, 2), np.int64), "u": weight(1 << 19)}
    ),
    "a sum over the first axis": lambda: standard(
        "Einsum", {"x": weight(8, 1024, 1024)}, equation="hqk->kq"
    ),
    "positions that are not zero": lambda: standard("NonZero", {"x": MATRIX}),
    "what is different": lambda: standard("Unique", {"x": np.arange(1 << 18)}, "y", "i", "v", "c"),
    "rows that are different": lambda: standard(
        "Unique", {"x": np.arange(1 << 20).reshape(-1, 4)}, axis=0
    ),
    "what is kept": lambda: standard("Compress", {"x": MATRIX, "c": np.ones(1024, bool)}, axis=0),
    "a grid": lambda: standard(
        "AffineGrid", {"t": weight(1, 2, 3), "ws": np.array([1, 3, 512, 512])}, sure=False
    ),
}
"""Made when they are run: together they have a hundred megabytes."""
OFTEN: Final = (
    "LSTM of both directions",
    "GRU",
    "a quantised convolution",
    "of each channel by itself",
    "quantised products",
    "Softmax along channels",
    "GroupNormalization",
    "the sum of five",
    "Einsum that sums up",
    "Einsum of attention to one item",
    "Einsum of matrices that are turned",
    "Einsum of double precision",
    "Softmax of double precision",
    "a product of integers without signs",
    "a quantised product with its scales",
    "long frames",
    "scattered",
    "scattered one by one",
    "Gelu of a sum",
    "positions that are not zero",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in OFTEN else pytest.mark.minutes) for each in CASES],
)
def test_what_a_layer_works_in_is_reckoned(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    reckoned, taken = reckoned_and_taken(case.model(), case.item(), tmp_path)
    assert taken <= reckoned
    if case.sure:
        assert reckoned < 1.5 * taken + 4 * MIB


@pytest.mark.parametrize("operator", ["RNN", "LSTM"])
def test_what_a_layer_makes_for_nobody_is_there_until_it_has_run(
    operator: str, tmp_path: Path
) -> None:
    """Exporters name both outputs of a recurrent layer, though the last state alone is read."""
    made = recurrent(operator, "unread", "h")
    layer = made.model()
    last = helper.make_node("Tanh", ["h"], ["y"])
    layer.graph.node.append(last)
    del layer.graph.output[:]
    layer.graph.output.append(helper.make_empty_tensor_value_info("y"))
    reckoned, taken = reckoned_and_taken(layer, made.item(), tmp_path)
    assert taken <= reckoned < 1.5 * taken


def between_quantised(kernel: int, group: int = 1) -> onnx.ModelProto:
    """A convolution as exporters write quantised ones: of numbers, between two roundings."""
    chance = np.random.default_rng(0)
    channels = (CHANNELS, CHANNELS // group, kernel, kernel)
    weights = {
        "s": np.float32(0.05),
        "z": np.uint8(3),
        "w": chance.integers(-100, 100, channels).astype(np.int8),
        "ws": np.full(CHANNELS, 0.01, np.float32),
        "wz": np.zeros(CHANNELS, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        helper.make_node("Conv", ["xd", "wd"], ["c"], pads=[kernel // 2] * 4, group=group),
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["cq"]),
        helper.make_node("DequantizeLinear", ["cq", "s", "z"], ["cd"]),
        helper.make_node("ReduceMax", ["cd"], ["y"], axes=[2, 3]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, PICTURE.shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(OWN, 1), helper.make_opsetid("", 13)],
        ir_version=9,
    )


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        (5, 1),
        pytest.param(3, 1, marks=pytest.mark.minutes),
        pytest.param(1, 1, marks=pytest.mark.minutes),
        pytest.param(3, CHANNELS, marks=pytest.mark.minutes),
    ],
)
def test_a_convolution_between_quantised_values_is_reckoned_as_what_becomes_of_it(
    kernel: int, group: int, tmp_path: Path
) -> None:
    reckoned, taken = reckoned_and_taken(between_quantised(kernel, group), {"x": PICTURE}, tmp_path)
    assert taken <= reckoned < 1.5 * taken + 4 * MIB


def halves(*widths: int) -> onnx.ModelProto:
    """Dense layers of half precision, from each width to the next."""
    pairs = list(pairwise(widths))
    nodes = [
        helper.make_node("MatMul", [f"x{at}", f"w{at}"], [f"x{at + 1}"]) for at in range(len(pairs))
    ]
    weights = [
        numpy_helper.from_array(weight(*pair, seed=at).astype(np.float16), f"w{at}")
        for at, pair in enumerate(pairs)
    ]
    kind = onnx.TensorProto.FLOAT16
    first = helper.make_tensor_value_info("x0", kind, [1, widths[0]])
    last = helper.make_tensor_value_info(f"x{len(pairs)}", kind, [1, widths[-1]])
    graph = helper.make_graph(nodes, "halves", [first], [last], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize(
    "widths",
    [
        pytest.param((1024, 3584, 1072), id="larger ones, which do not fit where the last one was"),
        pytest.param((1024, 3072, 1024, 2048, 1024, 1024) * 2, id="several sizes, by turns"),
    ],
)
def test_weights_are_converted_one_after_the_other_as_reckoned(
    widths: tuple[int, ...], tmp_path: Path
) -> None:
    item = {"x0": np.ones((1, widths[0]), np.float16)}
    reckoned, taken = reckoned_and_taken(halves(*widths), item, tmp_path)
    stored = sum(2 * before * after for before, after in pairwise(widths))
    assert taken <= reckoned < stored + 40 * MIB
    assert taken > stored + 8 * MIB
