"""Small models of every shape that cutting has to cope with, in ONNX's text form.

Weights are random with a fixed seed and 1 KiB or more where they are called W, so that they go to
weights.bin; those called b stay in the model.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper, parser

Values = npt.NDArray[np.generic]
Tensors = dict[str, Values]


def weight(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Values of order 1 / sqrt(rows), so that products stay of order one."""
    random = np.random.default_rng(seed)
    scale = 1 / np.sqrt(shape[0]) if shape else 1
    return (random.standard_normal(shape) * scale).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A model as text, its weights, and the shapes of its float inputs (others in `feeds`)."""

    text: str
    weights: Mapping[str, Values] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    feeds: Mapping[str, Values] = field(default_factory=dict)
    opset: int = 17
    ir_version: int = 9
    functions: str = ""
    tolerance: float = 0.0

    def proto(self) -> onnx.ModelProto:
        header = f'<ir_version: {self.ir_version}, opset_import: ["": {self.opset}'
        header += ', "local": 1]>' if self.functions else "]>"
        model = parser.parse_model(f"{header}\n{self.text}\n{self.functions}")
        for name, value in self.weights.items():
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return model

    def save(self, folder: Path, *, external: bool = False) -> Path:
        path = folder / "model.onnx"
        model = self.proto()
        onnx.save_model(
            model, path, save_as_external_data=external, location="data.bin", size_threshold=0
        )
        return path

    def inputs(self, seed: int = 0) -> Tensors:
        random = np.random.default_rng(seed)
        made: Tensors = {
            name: random.uniform(-1, 1, shape).astype(np.float32)
            for name, shape in self.shapes.items()
        }
        return made | dict(self.feeds)


W: Final = weight(16, 16)
W2: Final = weight(16, 16, seed=2)
W3: Final = weight(16, 16, seed=3)
X: Final = {"x": (2, 16)}

TOPOLOGIES: Final[dict[str, Made]] = {
    "a chain": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) b = Relu(a) c = MatMul(b, W2) d = Tanh(c) y = MatMul(d, W3) }""",
        weights={"W": W, "W2": W2, "W3": W3},
        shapes=X,
    ),
    "a residual network": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) b = Relu(a) c = MatMul(b, W2) d = Add(c, x) e = Relu(d)
            f = MatMul(e, W3) h = Add(f, e) y = Add(h, b) }""",
        weights={"W": W, "W2": W2, "W3": W3},
        shapes=X,
    ),
    "branches that join": Made(
        text="""g (float[N,16] x) => (float[N,48] y) {
            s = Relu(x) a1 = MatMul(s, W) b1 = MatMul(s, W2) c1 = MatMul(s, W3)
            a2 = Tanh(a1) b2 = Sigmoid(b1) c2 = Relu(c1) y = Concat<axis=1>(a2, b2, c2) }""",
        weights={"W": W, "W2": W2, "W3": W3},
        shapes=X,
    ),
    "independent branches with an output each": Made(
        text="""g (float[N,16] x, float[N,16] z) => (float[N,16] y, float[N,16] v) {
            a = MatMul(x, W) b = MatMul(z, W2) y = Relu(a) v = Tanh(b) }""",
        weights={"W": W, "W2": W2},
        shapes={"x": (2, 16), "z": (3, 16)},
    ),
    "a shared weight": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) b = Relu(a) c = MatMul(b, W) d = Tanh(c) y = MatMul(d, W) }""",
        weights={"W": W},
        shapes=X,
    ),
    "an input used late": Made(
        text="""g (float[N,16] x, float[N,16] late) => (float[N,16] y) {
            a = MatMul(x, W) b = Relu(a) c = MatMul(b, W2) y = Add(c, late) }""",
        weights={"W": W, "W2": W2},
        shapes={"x": (2, 16), "late": (2, 16)},
    ),
    "an output that is used on": Made(
        text="""g (float[N,16] x) => (float[N,16] mid, float[N,16] y) {
            a = MatMul(x, W) mid = Relu(a) c = MatMul(mid, W2) y = Tanh(c) }""",
        weights={"W": W, "W2": W2},
        shapes=X,
    ),
    "an input that is an output": Made(
        text="""g (float[N,16] x, float[N,3] through) => (float[N,16] y, float[N,3] through) {
            a = MatMul(x, W) b = Relu(a) y = MatMul(b, W2) }""",
        weights={"W": W, "W2": W2},
        shapes={"x": (2, 16), "through": (2, 3)},
    ),
    "an initializer that is an output": Made(
        text="""g (float[N,16] x) => (float[N,16] y, float[16,16] W) {
            a = MatMul(x, W) b = Relu(a) y = MatMul(b, W2) }""",
        weights={"W": W, "W2": W2},
        shapes=X,
    ),
    "initializers listed as inputs": Made(
        text="""g (float[N,16] x, float[16,16] W, float[16] b) => (float[N,16] y) {
            a = MatMul(x, W) c = Add(a, b) d = Relu(c) y = MatMul(d, W) }""",
        weights={"W": W, "b": weight(16)},
        shapes=X,
        ir_version=3,
        opset=11,
    ),
    "operators that had attributes once where they take tensors now": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) b = Slice<axes = [1], starts = [4], ends = [12]>(a)
            c = Clip<min = -1.0, max = 1.0>(b) d = Pad<pads = [0, 4, 0, 4]>(c)
            e = Unsqueeze<axes = [1]>(d) f = Squeeze<axes = [1]>(e) y = MatMul(f, W2) }""",
        weights={"W": W, "W2": W2},
        shapes=X,
        ir_version=4,
        opset=9,
    ),
    "initializers that a caller could override": Made(
        text="""g (float[N,16] x, float[16] b) => (float[N,16] y) {
            a = MatMul(x, W) c = Add(a, b) d = Relu(c) y = MatMul(d, W) }""",
        weights={"W": W, "b": weight(16)},
        shapes=X,
    ),
    "shapes computed and used far away": Made(
        text="""g (float[N,4,4] x) => (float[N,4,4] y) {
            s = Shape(x) zero = Constant<value = int64[1] {0}>() n = Gather<axis=0>(s, zero)
            rest = Constant<value = int64[1] {16}>() flat = Concat<axis=0>(n, rest)
            f = Reshape(x, flat) a = MatMul(f, W) b = Relu(a) c = MatMul(b, W2)
            four = Constant<value = int64[2] {4, 4}>() full = Concat<axis=0>(n, four)
            y = Reshape(c, full) }""",
        weights={"W": W, "W2": W2},
        shapes={"x": (3, 4, 4)},
    ),
    "a mask made from shapes": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) s = Shape(a) m = ConstantOfShape<value = float[1] {0.5}>(s)
            b = Relu(a) c = MatMul(b, W2) y = Mul(c, m) }""",
        weights={"W": W, "W2": W2},
        shapes=X,
    ),
    "constants computed from constants": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            k = Constant<value_float = 2.0>() t = Transpose<perm = [1, 0]>(W) u = Mul(t, k)
            a = MatMul(x, u) b = Relu(a) y = MatMul(b, u) }""",
        weights={"W": W},
        shapes=X,
    ),
    "an output that is constant": Made(
        text="""g (float[N,16] x) => (float[N,16] y, float[16,16] u) {
            u = Transpose<perm = [1, 0]>(W) a = MatMul(x, W2) b = Relu(a) y = MatMul(b, W2) }""",
        weights={"W": W, "W2": W2},
        shapes=X,
    ),
    "a branch that captures": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) total = ReduceSum<keepdims = 0>(a) zero = Constant<value_float = 0.0>()
            positive = Greater(total, zero) b = Relu(a)
            c = If (positive) <
                then_branch = one () => (float[N,16] p) { p = MatMul(b, W2) },
                else_branch = two () => (float[N,16] q) {
                    k = Constant<value_float = 3.0>() r = Mul(a, k) q = Add(r, b) } >
            d = Tanh(c) y = MatMul(d, W3) }""",
        weights={"W": W, "W2": W2, "W3": W3},
        shapes=X,
    ),
    "a loop that captures": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) n = Constant<value_int = 3>() go = Constant<value = bool {1}>()
            r = Loop (n, go, a) < body = step (int64 i, bool c, float[N,16] v)
                => (bool c2, float[N,16] v2) { c2 = Identity(c) m = MatMul(v, W2) v2 = Add(m, x) } >
            b = Tanh(r) y = MatMul(b, W3) }""",
        weights={"W": W, "W2": W2, "W3": W3},
        shapes=X,
    ),
    "a scan": Made(
        text="""g (float[T,16] x, float[16] state) => (float[16] last, float[T,16] y) {
            a = MatMul(x, W)
            last, s = Scan (state, a) < num_scan_inputs = 1, body = step (float[16] h, float[16] v)
                => (float[16] h2, float[16] o) { k = Add(h, v) h2 = Tanh(k) o = Identity(h2) } >
            b = Relu(s) y = MatMul(b, W2) }""",
        weights={"W": W, "W2": W2},
        shapes={"x": (5, 16), "state": (16,)},
    ),
    "functions in functions": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = local.twice(x, W) b = Relu(a) y = local.twice(b, W2) }""",
        functions="""
            <domain: "local", opset_import: ["": 17, "local": 1]>
            twice (v, w) => (r) { p = local.step(v, w) r = local.step(p, w) }
            <domain: "local", opset_import: ["": 17]>
            step (v, w) => (r) { m = MatMul(v, w) r = Tanh(m) }""",
        weights={"W": W, "W2": W2},
        shapes=X,
    ),
    "a sequence inside": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) b = Relu(a) s = SequenceConstruct(a, b)
            one = Constant<value_int = 1>() c = SequenceAt(s, one) d = Tanh(c)
            y = MatMul(d, W2) }""",
        weights={"W": W, "W2": W2},
        shapes=X,
    ),
    "optional inputs left out": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) most = Constant<value_float = 0.5>() b = Clip(a, , most)
            y = MatMul(b, W2) }""",
        weights={"W": W, "W2": W2},
        shapes=X,
    ),
    "outputs left out": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) two = Constant<value_int = 2>() h, _unused = TopK<axis = 1>(a, k2)
            d = Relu(a) y = MatMul(d, W2) z = Identity(h) }""",
        weights={"W": W, "W2": W2, "k2": np.array([2], np.int64)},
        shapes=X,
    ),
    "quantised weights": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            w = DequantizeLinear(Q, scale, zero) a = MatMul(x, w)
            q = QuantizeLinear(a, scale, zero) d = DequantizeLinear(q, scale, zero) b = Relu(d)
            w2 = DequantizeLinear(Q, scale, zero) y = MatMul(b, w2) }""",
        weights={
            "Q": (W * 100).astype(np.int8),
            "scale": np.array(0.01, np.float32),
            "zero": np.array(0, np.int8),
        },
        shapes=X,
    ),
    "strings": Made(
        text="""g (string[N] words, float[N,16] x) => (string[N] same, float[N,16] y) {
            s = Identity(words) a = MatMul(x, W) b = Relu(a) same = Identity(s)
            y = MatMul(b, W2) }""",
        weights={"W": W, "W2": W2},
        shapes={"x": (2, 16)},
        feeds={"words": np.array(["fish", "shoal"], object)},
    ),
    "bfloat16 inside": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = MatMul(x, W) h = Cast<to = 16>(a) b = Cast<to = 1>(h) y = MatMul(b, W2) }""",
        weights={"W": W, "W2": W2},
        shapes=X,
    ),
    "half precision": Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            h = Cast<to = 10>(x) a = MatMul(h, W) b = Relu(a) c = MatMul(b, W)
            y = Cast<to = 1>(c) }""",
        weights={"W": W.astype(np.float16)},
        shapes=X,
        # The runtime's processor kernels have no half floats: it computes neighbours in one go in
        # single precision, and rounds where fragments end.
        tolerance=2e-3,
    ),
    "an axis without a name": Made(
        text="""g (float[?,16] x) => (float[?,16] y) {
            a = MatMul(x, W) b = Relu(a) c = MatMul(b, W2) y = Tanh(c) }""",
        weights={"W": W, "W2": W2},
        shapes=X,
    ),
    "nothing but constants": Made(
        text="""g () => (float[16,16] y) { t = Transpose<perm = [1, 0]>(W) y = Relu(t) }""",
        weights={"W": W},
    ),
    "chance": Made(
        text="""g (float[N,16] x) => (float[N,16] y, float[N,16] z) {
            r = RandomUniform<shape = [1, 16], low = 0.25, high = 0.25>() a = Add(x, r)
            b = MatMul(a, W) y = Relu(b) z = Mul(y, r) }""",
        weights={"W": W},
        shapes=X,
    ),
}


def shuffled(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The same model with its nodes in a random order, nameless or with one name for all."""
    nodes = list(model.graph.node)
    np.random.default_rng(seed).shuffle(nodes)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    for node in made.graph.node:
        node.name = "same" if seed % 2 else ""
    return made


def tiny() -> onnx.ModelProto:
    """The smallest model: one Relu."""
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 4])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 4])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def tied_encoder(layers: int = 4, width: int = 320, tables: int = 0) -> Made:
    """Every layer with the same two weights; of `tables` rows, a table of embeddings that is the
    output layer too."""
    lines = ["h0 = Gather(T, x)"] if tables else ["h0 = Identity(x)"]
    for number in range(layers):
        lines += [
            f"a{number} = MatMul(h{number}, W)",
            f"b{number} = Relu(a{number})",
            f"c{number} = MatMul(b{number}, V)",
            f"d{number} = Add(c{number}, h{number})",
            f"h{number + 1} = Tanh(d{number})",
        ]
    lines.append(f"y = {f'Gemm<transB=1>(h{layers}, T)' if tables else f'Relu(h{layers})'}")
    weights = {"W": weight(width, width), "V": weight(width, width, seed=1)}
    x = "int64[N] x" if tables else f"float[N,{width}] x"
    return Made(
        text=f"g ({x}) => (float[N,{tables or width}] y) {{ {' '.join(lines)} }}",
        weights=weights | ({"T": weight(tables, width, seed=2)} if tables else {}),
        shapes={} if tables else {"x": (2, width)},
        feeds={"x": np.array([3, tables - 1], np.int64)} if tables else {},
    )


def deep(layers: int = 24) -> Made:
    """A chain of layers of 1 MiB each."""
    return Made(
        text="agraph (float[1, 512] x) => (float[1, 512] y) {\n"
        + "\n".join(
            f"{'y' if layer == layers else f't{layer}'} = MatMul ("
            f"{'x' if layer == 1 else f't{layer - 1}'}, W{layer})"
            for layer in range(1, layers + 1)
        )
        + "\n}",
        weights={f"W{layer}": weight(512, 512, seed=layer) for layer in range(1, layers + 1)},
        shapes={"x": (1, 512)},
    )


WORDS: Final = 1 << 16
"""What `vocabulary` gives numbers for."""


def vocabulary(width: int = 256, words: int = WORDS) -> onnx.ModelProto:
    """A last layer that is much larger than what it reads, as language models have: 64 MiB of
    weights, and 256 KiB of output for each row; less with fewer words."""
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, "rows", size])
        for name, size in (("x", width), ("y", words))
    ]
    nodes = [
        helper.make_node("Tanh", ["x"], ["t"]),
        helper.make_node("MatMul", ["t", "W"], ["y"]),
    ]
    weights = [numpy_helper.from_array(weight(width, words), "W")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=9)


DENSE = Made(
    text="agraph (float[1, 1000] x) => (float[1, 3000] y) {\n  t = MatMul (x, W)\n"
    "  y = Relu (t)\n}",
    weights={"W": weight(1000, 3000)},
    shapes={"x": (1, 1000)},
)
"""Almost all of it is one layer of 11.4 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommender:
    """Looks `reads` rows up in each of so many tables, and weighs what it finds. Where the `items`
    are in one input, nodes take the indices of each table from it."""

    tables: int = 4
    rows: int = 32768
    width: int = 64
    reads: int = 512
    dtype: npt.DTypeLike = np.float32
    together: bool = False

    def proto(self) -> onnx.ModelProto:
        random = np.random.default_rng(0)
        ends = [helper.make_tensor_value_info("dense", onnx.TensorProto.FLOAT, [1, 16])]
        int64, int32 = onnx.TensorProto.INT64, onnx.TensorProto.INT32
        if self.together:
            ends.append(helper.make_tensor_value_info("items", int32, [self.tables, self.reads]))
        weights: Tensors = {"flat": np.array([1, -1])}
        nodes: list[tuple[str, list[str], str, dict[str, Any]]] = []
        for table in range(self.tables):
            values = random.standard_normal((self.rows, self.width))
            weights[f"table{table}"] = values.astype(self.dtype)
            if self.together:
                weights[f"which{table}"] = np.array(table)
                nodes.append(("Gather", ["items", f"which{table}"], f"items{table}", {}))
                nodes.append(("Cast", [f"items{table}"], f"ids{table}", {"to": int64}))
            else:
                ends.append(helper.make_tensor_value_info(f"ids{table}", int64, [self.reads]))
            nodes.append(("Gather", [f"table{table}", f"ids{table}"], f"rows{table}", {}))
            to = {"to": onnx.TensorProto.FLOAT}
            nodes.append(("Cast", [f"rows{table}"], f"numbers{table}", to))
            axes = {"axes": [0], "keepdims": 0}
            nodes.append(("ReduceMean", [f"numbers{table}"], f"mean{table}", axes))
            nodes.append(("Reshape", [f"mean{table}", "flat"], f"part{table}", {}))
        parts = ["dense", *(f"part{table}" for table in range(self.tables))]
        nodes.append(("Concat", parts, "h0", {"axis": 1}))
        widths = (16 + self.tables * self.width, 256, 64, 1)
        for layer, (taken, given) in enumerate(itertools.pairwise(widths)):
            weights[f"w{layer}"] = weight(taken, given, seed=layer)
            nodes.append(("MatMul", [f"h{layer}", f"w{layer}"], f"m{layer}", {}))
            nodes.append(("Tanh", [f"m{layer}"], "y" if given == 1 else f"h{layer + 1}", {}))
        graph = helper.make_graph(
            [helper.make_node(kind, taken, [made], **how) for kind, taken, made, how in nodes],
            "recommender",
            ends,
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 1])],
            [numpy_helper.from_array(value, name) for name, value in weights.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)

    def item(self, seed: int = 0) -> Tensors:
        """Rows from all over the tables, counted from their ends, too."""
        random = np.random.default_rng(seed)
        rows = random.integers(-self.rows, self.rows, (self.tables, self.reads))
        dense: Tensors = {"dense": random.standard_normal((1, 16)).astype(np.float32)}
        if self.together:
            return dense | {"items": rows.astype(np.int32)}
        return dense | {f"ids{table}": each for table, each in enumerate(rows)}
