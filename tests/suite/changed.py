"""A model in less precision, as ONNX Runtime's own tools make it, or in four bits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.transformers.float16 import convert_float_to_float16

from real_models import Tensors

Change = Callable[[Path, Path, Tensors], Path]
_BLOCK: Final = 32


def half(path: Path, folder: Path, _item: Tensors) -> Path:
    """Weights and activations of 16 bits; inputs and outputs stay."""
    made = folder / "half.onnx"
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), made)
    return made


def dynamic(path: Path, folder: Path, _item: Tensors) -> Path:
    """Products of eight bits, whose other operand is quantised as it comes."""
    made = folder / "dynamic.onnx"
    quantization.quantize_dynamic(path, made)
    return made


class _Items(quantization.CalibrationDataReader):  # type: ignore[misc] # it ships no types
    def __init__(self, item: Tensors) -> None:
        self._items: Iterator[Tensors] = iter([item])

    def get_next(self) -> Tensors | None:
        return next(self._items, None)


def static(path: Path, folder: Path, item: Tensors) -> Path:
    """QuantizeLinear and DequantizeLinear around each operator."""
    made = folder / "static.onnx"
    quantization.quantize_static(path, made, _Items(item), per_channel=True)
    return made


def weights_alone(path: Path, folder: Path, _item: Tensors) -> Path:
    """The weights of products in eight bits, each dequantised by a node of its own."""
    model = onnx.load(path)
    weights = {each.name: each for each in model.graph.initializer}
    for node in list(model.graph.node):
        if node.op_type != "MatMul" or node.input[1] not in weights:
            continue
        name = node.input[1]
        values = numpy_helper.to_array(weights[name])
        scales = (np.abs(values).max(axis=0) / 127).astype(np.float32)
        parts = {"scales": scales, "zeros": np.zeros(scales.shape, np.int8)}
        for part, value in parts.items():
            model.graph.initializer.append(numpy_helper.from_array(value, f"{name}.{part}"))
        whole = numpy_helper.from_array(np.rint(values / scales).astype(np.int8), name)
        weights[name].CopyFrom(whole)
        node.input[1] = f"{name}.floats"
        inputs = [name, f"{name}.scales", f"{name}.zeros"]
        made = helper.make_node("DequantizeLinear", inputs, [node.input[1]], axis=1)
        model.graph.node.insert(0, made)
    place = folder / "weights-alone.onnx"
    onnx.save(model, place)
    return place


def four_bits(path: Path, folder: Path, _item: Tensors) -> Path:
    """Each product with a large constant as MatMulNBits, in blocks of 32."""
    model = onnx.load(path)
    weights = {each.name: each for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights:
            continue
        values = numpy_helper.to_array(weights[node.input[1]])
        if values.ndim != 2 or values.shape[0] % _BLOCK or values.size < 1 << 14:
            continue
        rows, columns = values.shape
        packed, scales = _packed(values)
        names = [f"{node.output[0]}.{part}" for part in ("packed", "scales")]
        model.graph.initializer.append(numpy_helper.from_array(packed, names[0]))
        model.graph.initializer.append(numpy_helper.from_array(scales, names[1]))
        sizes = {"K": rows, "N": columns, "bits": 4, "block_size": _BLOCK}
        made = helper.make_node(
            "MatMulNBits",
            [node.input[0], *names],
            list(node.output),
            domain="com.microsoft",
            **sizes,
        )
        node.CopyFrom(made)
    used = {name for node in model.graph.node for name in node.input}
    kept = [each for each in model.graph.initializer if each.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    place = folder / "four-bits.onnx"
    onnx.save(model, place)
    return place


def _packed(
    values: npt.NDArray[Any],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Blocks of a column's values, two to a byte, around 8; a scale for each block."""
    rows, columns = values.shape
    blocks = values.T.reshape(columns, rows // _BLOCK, _BLOCK).astype(np.float32)
    scales = np.abs(blocks).max(axis=2, keepdims=True) / 7
    scales[scales == 0] = 1
    whole = (np.rint(blocks / scales) + 8).astype(np.uint8)
    return whole[..., ::2] | (whole[..., 1::2] << 4), scales.reshape(-1).astype(np.float32)
