"""Models of half precision of several families, with activations of some MiB: what ONNX Runtime
makes single precision of them, and what it leaves as it is, differs from one to the other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper, parser

Values = npt.NDArray[Any]
SIDE, CHANNELS, TOKENS, WIDTH, HEADS = 192, 32, 1024, 384, 6
_PICTURE: Final = f"float16[1,{CHANNELS},{SIDE},{SIDE}]"
_ROWS: Final = f"float16[1,{TOKENS},{WIDTH}]"


@dataclass(frozen=True, slots=True)
class Halved:
    """A model, and an item for it."""

    model: onnx.ModelProto
    item: Mapping[str, Values]


@dataclass(slots=True)
class _Writer:
    """Writes a graph node by node. Each method gives the name of what it makes."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Values] = field(default_factory=dict)

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def weight(self, *shape: int, kind: type = np.float16) -> str:
        values = np.random.default_rng(len(self.weights)).standard_normal(shape)
        return self.constant((values / max(1.0, np.sqrt(np.prod(shape[1:])))).astype(kind))

    def constant(self, value: Values) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = value
        return name

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def number(self, value: float, kind: type = np.float16) -> str:
        return self.constant(np.array(value, kind))

    def convolution(self, x: str, before: int, after: int, kernel: int = 3, stride: int = 1) -> str:
        pads = [kernel // 2] * 4
        weights = self.weight(after, before, kernel, kernel), self.weight(after)
        return self.node("Conv", x, *weights, pads=pads, strides=[stride, stride])

    def reshaped(self, x: str, *shape: int) -> str:
        return self.node("Reshape", x, self.integers(*shape))

    def transposed(self, x: str, *axes: int) -> str:
        return self.node("Transpose", x, perm=list(axes))

    def resized(self, x: str, by: float) -> str:
        scales = self.constant(np.array([1, 1, by, by], np.float32))
        return self.node("Resize", x, "", scales, mode="nearest")

    def group_norm(self, x: str, channels: int, side: int, groups: int = 8) -> str:
        """As exporters write it."""
        rows = self.reshaped(x, 1, groups, -1)
        ones = self.constant(np.ones(groups, np.float16))
        zeros = self.constant(np.zeros(groups, np.float16))
        normal = self.node("InstanceNormalization", rows, ones, zeros)
        back = self.reshaped(normal, 1, channels, side, side)
        scaled = self.node("Mul", back, self.weight(channels, 1, 1))
        return self.node("Add", scaled, self.weight(channels, 1, 1))

    def dense(self, x: str, before: int, after: int) -> str:
        product = self.node("MatMul", x, self.weight(before, after))
        return self.node("Add", product, self.weight(after))

    def layer_norm(self, x: str, width: int) -> str:
        return self.node("LayerNormalization", x, self.weight(width), self.weight(width))

    def gelu(self, x: str) -> str:
        inner = self.node("Erf", self.node("Div", x, self.number(1.414)))
        outer = self.node("Mul", x, self.node("Add", inner, self.number(1)))
        return self.node("Mul", outer, self.number(0.5))

    def heads(self, x: str, *axes: int, tokens: int) -> str:
        apart = self.reshaped(x, 1, tokens, HEADS, WIDTH // HEADS)
        return self.transposed(apart, *axes)

    def block(self, x: str, tokens: int) -> str:
        """A layer of an encoder."""
        normal = self.layer_norm(x, WIDTH)
        query = self.heads(self.dense(normal, WIDTH, WIDTH), 0, 2, 1, 3, tokens=tokens)
        key = self.heads(self.dense(normal, WIDTH, WIDTH), 0, 2, 3, 1, tokens=tokens)
        value = self.heads(self.dense(normal, WIDTH, WIDTH), 0, 2, 1, 3, tokens=tokens)
        scores = self.node("MatMul", query, key)
        scaled = self.node("Mul", scores, self.number(0.125))
        mixed = self.node("MatMul", self.node("Softmax", scaled, axis=-1), value)
        joined = self.reshaped(self.transposed(mixed, 0, 2, 1, 3), 1, tokens, WIDTH)
        first = self.node("Add", x, self.dense(joined, WIDTH, WIDTH))
        inner = self.gelu(self.dense(self.layer_norm(first, WIDTH), WIDTH, 4 * WIDTH))
        return self.node("Add", first, self.dense(inner, 4 * WIDTH, WIDTH))

    def model(self, taken: str, given: str, last: str, opset: int = 17) -> onnx.ModelProto:
        """With inputs as ONNX's text has them, and one output."""
        made = parser.parse_model(
            f'<ir_version: 9, opset_import: ["": {opset}]> g ({taken}) => ({given} {last}) {{}}'
        )
        made.graph.node.extend(self.nodes)
        weights = (numpy_helper.from_array(value, name) for name, value in self.weights.items())
        made.graph.initializer.extend(weights)
        return made


def _picture(*shape: int) -> dict[str, Values]:
    return {"x": np.random.default_rng(3).uniform(-1, 1, shape).astype(np.float16)}


def normalised() -> Halved:
    """Convolutions with InstanceNormalization, groups that are normalised, and Resize."""
    w = _Writer()
    x = w.convolution("x", 3, CHANNELS)
    for _ in range(2):
        ones, zeros = w.weight(CHANNELS), w.weight(CHANNELS)
        inner = w.node("InstanceNormalization", w.convolution(x, CHANNELS, CHANNELS), ones, zeros)
        x = w.node("Add", x, w.node("Relu", inner))
    x = w.group_norm(w.convolution(x, CHANNELS, CHANNELS), CHANNELS, SIDE)
    x = w.node("Mul", x, w.node("Sigmoid", x))
    x = w.resized(w.convolution(x, CHANNELS, CHANNELS, stride=2), 2)
    last = w.convolution(w.group_norm(x, CHANNELS, SIDE), CHANNELS, 8)
    model = w.model(f"float16[1,3,{SIDE},{SIDE}] x", f"float16[1,8,{SIDE},{SIDE}]", last)
    return Halved(model, _picture(1, 3, SIDE, SIDE))


def encoder() -> Halved:
    """Token numbers to rows of a table, and layers of a transformer."""
    w = _Writer()
    rows = w.node("Gather", w.weight(2000, WIDTH), "x")
    last = w.layer_norm(w.block(w.node("Add", rows, w.weight(TOKENS, WIDTH)), TOKENS), WIDTH)
    tokens = np.random.default_rng(0).integers(0, 2000, (1, TOKENS))
    return Halved(w.model(f"int64[1,{TOKENS}] x", _ROWS, last), {"x": tokens})


def vision() -> Halved:
    """Patches of a picture, a token for its class before them, and a layer."""
    w, count = _Writer(), 24 * 24
    patches = w.node("Conv", "x", w.weight(WIDTH, 3, 16, 16), strides=[16, 16])
    rows = w.transposed(w.reshaped(patches, 1, WIDTH, count), 0, 2, 1)
    token = w.node("Expand", w.weight(1, 1, WIDTH), w.integers(1, 1, WIDTH))
    joined = w.node("Concat", token, rows, axis=1)
    x = w.block(w.node("Add", joined, w.weight(1, count + 1, WIDTH)), count + 1)
    first = w.node("Gather", w.layer_norm(x, WIDTH), w.constant(np.array(0)), axis=1)
    last = w.node("Gemm", first, w.weight(WIDTH, 1000), w.weight(1000))
    return Halved(
        w.model("float16[1,3,384,384] x", "float16[1,1000]", last), _picture(1, 3, 384, 384)
    )


def u_net() -> Halved:
    """What goes down is joined with what comes up."""
    w, skips, x, channels = _Writer(), list[tuple[str, int]](), "x", 3
    for after in (16, 32):
        x = w.node(
            "Relu", w.convolution(w.node("Relu", w.convolution(x, channels, after)), after, after)
        )
        skips.append((x, after))
        x, channels = w.node("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), after
    x = w.node("Relu", w.convolution(x, channels, channels))
    for skip, after in reversed(skips):
        up = w.node("ConvTranspose", x, w.weight(channels, after, 2, 2), strides=[2, 2])
        joined = w.node("Concat", skip, up, axis=1)
        x, channels = w.node("Relu", w.convolution(joined, 2 * after, after)), after
    last = w.convolution(x, channels, 4, kernel=1)
    return Halved(
        w.model("float16[1,3,256,256] x", "float16[1,4,256,256]", last), _picture(1, 3, 256, 256)
    )


def detector() -> Halved:
    """Heads at three sizes, whose boxes are put in rows, joined, and taken apart."""
    w, rows, x, channels = _Writer(), [], "x", 3
    for index, after in enumerate((24, 32, 64)):
        x = w.node("Relu", w.convolution(x, channels, after, stride=2))
        channels, side = after, 160 >> index
        boxes = w.convolution(x, after, 3 * 85, kernel=1)
        apart = w.transposed(w.reshaped(boxes, 1, 3, 85, side, side), 0, 1, 3, 4, 2)
        rows.append(w.reshaped(apart, 1, 3 * side * side, 85))
    joined = w.node("Concat", *rows, axis=1)
    places = w.node("Slice", joined, w.integers(0), w.integers(4), w.integers(2))
    scores = w.node("Slice", joined, w.integers(4), w.integers(85), w.integers(2))
    scaled = w.node("Mul", places, w.number(2))
    last = w.node("Concat", scaled, w.node("Sigmoid", scores), axis=2)
    count = 3 * (160 * 160 + 80 * 80 + 40 * 40)
    return Halved(
        w.model("float16[1,3,320,320] x", f"float16[1,{count},85]", last), _picture(1, 3, 320, 320)
    )


def recurrent() -> Halved:
    """Both directions, which are put together between two layers."""
    w, x, width, hidden, steps = _Writer(), "x", 128, 128, 1024
    for _ in range(2):
        weights = w.weight(2, 4 * hidden, width), w.weight(2, 4 * hidden, hidden)
        both = w.node("LSTM", x, *weights, hidden_size=hidden, direction="bidirectional")
        x, width = w.reshaped(w.transposed(both, 0, 2, 1, 3), steps, 4, 2 * hidden), 2 * hidden
    last = w.dense(x, width, 96)
    return Halved(
        w.model(f"float16[{steps},4,128] x", f"float16[{steps},4,96]", last),
        _picture(steps, 4, 128),
    )


def moved() -> Halved:
    """Values that are moved before anything computes, and after."""
    w = _Writer()
    half = CHANNELS // 2
    lower = w.node("Slice", "x", w.integers(0), w.integers(half), w.integers(1))
    upper = w.node("Slice", "x", w.integers(half), w.integers(CHANNELS), w.integers(1))
    turned = w.node("Concat", w.transposed(upper, 0, 1, 3, 2), lower, axis=1)
    apart = w.transposed(
        w.reshaped(turned, 1, CHANNELS, SIDE // 2, 2, SIDE // 2, 2), 0, 1, 3, 5, 2, 4
    )
    x = w.node("Exp", w.reshaped(apart, 1, 4 * CHANNELS, SIDE // 2, SIDE // 2))
    x = w.transposed(w.reshaped(x, 1, 4 * CHANNELS, SIDE * SIDE // 4), 0, 2, 1)
    last = w.node("Concat", x, x, axis=0)
    given = f"float16[2,{SIDE * SIDE // 4},{4 * CHANNELS}]"
    return Halved(w.model(f"{_PICTURE} x", given, last), _picture(1, CHANNELS, SIDE, SIDE))


def mixed() -> Halved:
    """Weights of half precision made single, and islands of single precision among halves."""
    w = _Writer()
    x = w.node("Relu", w.convolution("x", 3, CHANNELS))
    wide = w.resized(w.node("Cast", x, to=1), 2)
    x = w.convolution(w.node("Cast", wide, to=10), CHANNELS, CHANNELS, stride=2)
    x = w.transposed(w.node("Cast", x, to=1), 0, 2, 3, 1)
    product = w.node("MatMul", x, w.node("Cast", w.weight(CHANNELS, 64), to=1))
    chosen = w.node("Softmax", product, axis=-1)
    halves = w.node("Cast", chosen, to=10)
    last = w.node("Concat", halves, w.node("Neg", halves), axis=3)
    model = w.model(f"float16[1,3,{SIDE},{SIDE}] x", f"float16[1,{SIDE},{SIDE},128]", last)
    return Halved(model, _picture(1, 3, SIDE, SIDE))


def large_weights() -> Halved:
    """Dense layers whose weights are made single precision by a node each."""
    w, x = _Writer(), "x"
    for _ in range(3):
        x = w.node("MatMul", x, w.node("Cast", w.weight(1536, 1536), to=1))
    model = w.model("float[8,1536] x", "float[8,1536]", x)
    return Halved(model, {"x": np.ones((8, 1536), np.float32)})


def placed_table() -> Halved:
    """A table of which rows are asked for that a node has worked out."""
    w = _Writer()
    numbers = w.node("Cast", "x", to=7)
    rows = w.node("Gather", w.weight(20_000, WIDTH), numbers)
    last = w.node("Add", rows, w.weight(1, WIDTH))
    return Halved(
        w.model("int32[1,512] x", f"float16[1,512,{WIDTH}]", last),
        {"x": np.ones((1, 512), np.int32)},
    )


FAMILIES: Final[Mapping[str, Callable[[], Halved]]] = {
    "convolutions that are normalised": normalised,
    "an encoder": encoder,
    "a vision transformer": vision,
    "a U-Net": u_net,
    "a detector": detector,
    "recurrent layers": recurrent,
    "values that are moved": moved,
    "islands of single precision": mixed,
    "weights that are made single": large_weights,
    "a table": placed_table,
}
