"""Made models of kinds that the published ones leave out, with weights from a fixed seed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from real_models import Tensors

Array = npt.NDArray[Any]
_FLOAT: Final = TensorProto.FLOAT
_OPSETS: Final = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]


class Net:
    """A model in the making: each call adds a node and gives the name of its output, which begins
    with `prefix`: a sub-graph's names are none of the graph's around it."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._chance = np.random.default_rng(7)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{self._prefix}{kind.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def weight(self, *shape: int, fan: int | None = None) -> str:
        """Values that keep the size of what they are multiplied with; `fan` is the inner size."""
        values = self._chance.standard_normal(shape, np.float32)
        values *= np.float32((fan or shape[0]) ** -0.5)
        return self.value(values)

    def value(self, values: Array) -> str:
        name = f"{self._prefix}w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def conv(self, x: str, taken: int, given: int, kernel: int = 3, **attributes: Any) -> str:
        axes = attributes.pop("axes", 2)
        weight = self.weight(
            given,
            taken // attributes.get("group", 1),
            *[kernel] * axes,
            fan=taken // attributes.get("group", 1) * kernel**axes,
        )
        pads = [kernel // 2] * (2 * axes)
        return self.node("Conv", x, weight, pads=pads, **attributes)

    def choose(
        self, condition: str, outputs: list[str], then: onnx.GraphProto, other: onnx.GraphProto
    ) -> None:
        """An If with these outputs."""
        branches = {"then_branch": then, "else_branch": other}
        node = helper.make_node("If", [condition], outputs, name=outputs[0])
        node.attribute.extend(helper.make_attribute(*each) for each in branches.items())
        self._nodes.append(node)

    def graph(
        self,
        name: str,
        inputs: Sequence[tuple[str, int, Sequence[int | str]]],
        outputs: Sequence[tuple[str, int]],
    ) -> onnx.GraphProto:
        return helper.make_graph(
            self._nodes,
            name,
            [helper.make_tensor_value_info(each, kind, shape) for each, kind, shape in inputs],
            [helper.make_tensor_value_info(each, kind, None) for each, kind in outputs],
            self._weights,
        )

    def save(
        self,
        folder: Path,
        inputs: Sequence[tuple[str, int, Sequence[int | str]]],
        outputs: Sequence[tuple[str, int]],
        *,
        external: bool = False,
    ) -> Path:
        model = helper.make_model(
            self.graph("made", inputs, outputs), opset_imports=_OPSETS, ir_version=9
        )
        path = folder / "model.onnx"
        onnx.save_model(model, path, save_as_external_data=external, location="data.bin")
        return path


def noise(name: str, *shape: int, seed: int = 0) -> Tensors:
    return {name: np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)}


def tied_encoder(folder: Path) -> Path:
    """A transformer's encoder whose output layer is the embedding, transposed."""
    net, width, words, heads = Net(), 192, 8000, 4
    table = net.weight(words, width, fan=width)
    x = net.node("Gather", table, "tokens")
    for _ in range(4):
        split = net.value(np.array([0, 0, heads, width // heads], np.int64))
        q, k, v = (
            net.node("Reshape", net.node("MatMul", x, net.weight(width, width)), split)
            for _ in range(3)
        )
        q, v = (net.node("Transpose", each, perm=[0, 2, 1, 3]) for each in (q, v))
        k = net.node("Transpose", k, perm=[0, 2, 3, 1])
        scores = net.node("Mul", net.node("MatMul", q, k), net.value(np.array(0.1, np.float32)))
        mixed = net.node("MatMul", net.node("Softmax", scores, axis=-1), v)
        flat = net.value(np.array([0, 0, width], np.int64))
        joined = net.node("Reshape", net.node("Transpose", mixed, perm=[0, 2, 1, 3]), flat)
        x = _normal(net, net.node("Add", x, joined), width)
        wide = net.node("Relu", net.node("MatMul", x, net.weight(width, 4 * width)))
        x = _normal(
            net, net.node("Add", x, net.node("MatMul", wide, net.weight(4 * width, width))), width
        )
    y = net.node("MatMul", x, net.node("Transpose", table, perm=[1, 0]))
    return net.save(folder, [("tokens", TensorProto.INT64, [1, "length"])], [(y, _FLOAT)])


def _normal(net: Net, x: str, width: int) -> str:
    scale, shift = np.ones(width, np.float32), np.zeros(width, np.float32)
    return net.node("LayerNormalization", x, net.value(scale), net.value(shift), axis=-1)


def tokens(*lengths: int) -> list[Tensors]:
    chance = np.random.default_rng(0)
    return [{"tokens": chance.integers(0, 8000, (1, length))} for length in lengths]


def u_net(folder: Path) -> Path:
    """Down and up again, with what was before each step down joined to what is after the step up:
    the largest activations live longest."""
    net, width, depth = Net(), 16, 4
    x, skips = net.conv("x", 3, width), list[str]()
    for level in range(depth):
        wide = width << level
        x = net.node("Relu", net.conv(x, wide, wide))
        skips.append(x)
        x = net.node("Relu", net.conv(x, wide, 2 * wide, strides=[2, 2]))
    for level in reversed(range(depth)):
        wide = width << level
        up = net.weight(2 * wide, wide, 2, 2, fan=2 * wide)
        x = net.node("ConvTranspose", x, up, strides=[2, 2])
        x = net.node("Concat", x, skips[level], axis=1)
        x = net.node("Relu", net.conv(x, 2 * wide, wide))
    y = net.conv(x, width, 2, kernel=1)
    return net.save(folder, [("x", _FLOAT, [1, 3, "height", "width"])], [(y, _FLOAT)])


def residual(width: int, layers: int) -> Callable[[Path], Path]:
    """A residual network of dense layers with external data: width x width x 8 bytes a layer."""

    def make(folder: Path) -> Path:
        net, x = Net(), "x"
        for _ in range(layers):
            wide = net.node("Relu", net.node("MatMul", x, net.weight(width, width)))
            small = net.value(np.array(0.1, np.float32))
            inner = net.node("Mul", net.node("MatMul", wide, net.weight(width, width)), small)
            x = net.node("Add", x, inner)
        return net.save(folder, [("x", _FLOAT, ["rows", width])], [(x, _FLOAT)], external=True)

    return make


def wide(folder: Path) -> Path:
    """Three dense layers without names; that in the middle has 62 of 80 MiB, the last is narrow."""
    net = Net()
    inner = net.node("Relu", net.node("MatMul", "x", net.weight(512, 1024)))
    words = net.node("Relu", net.node("MatMul", inner, net.weight(1024, 16000)))
    y = net.node("MatMul", words, net.weight(16000, 256))
    return net.save(folder, [("x", _FLOAT, ["rows", 512])], [(y, _FLOAT)])


def recurrent(kind: str, gates: int) -> Callable[[Path], Path]:
    """Two layers in both directions, over sequences of any length."""

    def make(folder: Path) -> Path:
        net, hidden, taken = Net(), 192, 64
        x = "x"
        for _ in range(2):
            weights = [net.weight(2, gates * hidden, taken, fan=taken)]
            weights.append(net.weight(2, gates * hidden, hidden, fan=hidden))
            both = net.node(kind, x, *weights, hidden_size=hidden, direction="bidirectional")
            turned = net.node("Transpose", both, perm=[0, 2, 1, 3])
            shape = net.value(np.array([0, 0, 2 * hidden], np.int64))
            x, taken = net.node("Reshape", turned, shape), 2 * hidden
        y = net.node("MatMul", x, net.weight(2 * hidden, 40))
        return net.save(folder, [("x", _FLOAT, ["steps", 1, 64])], [(y, _FLOAT)])

    return make


def volume(folder: Path) -> Path:
    """Convolutions in three dimensions."""
    net, x, wide = Net(), "x", 1
    for given in (16, 32, 64):
        x = net.node("Relu", net.conv(x, wide, given, axes=3))
        x, wide = net.node("MaxPool", x, kernel_shape=[2, 2, 2], strides=[2, 2, 2]), given
    pooled = net.node("Flatten", net.node("GlobalAveragePool", x))
    y = net.node("MatMul", pooled, net.weight(wide, 10))
    return net.save(folder, [("x", _FLOAT, [1, 1, "depth", "height", "width"])], [(y, _FLOAT)])


def depthwise(folder: Path) -> Path:
    """Depthwise and pointwise convolutions in turn, with HardSwish."""
    net, wide = Net(), 24
    x = net.conv("x", 3, wide, strides=[2, 2])
    for layer in range(8):
        x = net.node("HardSwish", net.conv(x, wide, wide, kernel=5, group=wide))
        given = wide + 24
        x, wide = net.node("HardSwish", net.conv(x, wide, given, kernel=1)), given
        if layer % 3 == 2:
            x = net.node("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
    return net.save(folder, [("x", _FLOAT, [1, 3, "height", "width"])], [(x, _FLOAT)])


def super_resolution(folder: Path) -> Path:
    """Few weights, large activations, four times the size in the end."""
    net = Net()
    x = first = net.node("Relu", net.conv("x", 3, 32))
    for _ in range(4):
        inner = net.conv(net.node("Relu", net.conv(x, 32, 32)), 32, 32)
        x = net.node("Add", x, inner)
    x = net.conv(net.node("Add", x, first), 32, 48)
    y = net.node("DepthToSpace", x, blocksize=4)
    return net.save(folder, [("x", _FLOAT, [1, 3, "height", "width"])], [(y, _FLOAT)])


def looping(folder: Path) -> Path:
    """A Loop whose body has 4 MiB of weights, between dense layers."""
    net, inner, width = Net(), Net("body."), 1024
    x = net.node("MatMul", "x", net.weight(width, width))
    go = inner.node("Identity", "go")
    y = inner.node("Tanh", inner.node("MatMul", "v", inner.weight(width, width)))
    state: list[tuple[str, int, Sequence[int | str]]] = [
        ("i", TensorProto.INT64, []),
        ("go", TensorProto.BOOL, []),
    ]
    body = inner.graph(
        "body", [*state, ("v", _FLOAT, ["rows", width])], [(go, TensorProto.BOOL), (y, _FLOAT)]
    )
    count, always = net.value(np.array(4, np.int64)), net.value(np.array(1, np.bool_))
    x = net.node("Loop", count, always, x, body=body)
    y = net.node("MatMul", net.node("Relu", x), net.weight(width, width))
    return net.save(folder, [("x", _FLOAT, ["rows", width])], [(y, _FLOAT)])


def branching(folder: Path) -> Path:
    """An If each of whose branches has weights of 16 MiB, and large activations."""
    net, width, wide = Net(), 512, 4096
    first = net.node("MatMul", "x", net.weight(width, width))

    def branch(kind: str) -> onnx.GraphProto:
        inner = Net(f"{kind}.")
        up = inner.node(kind, inner.node("MatMul", first, inner.weight(width, wide)))
        down = inner.node("MatMul", up, inner.weight(wide, width))
        return inner.graph(kind, [], [(down, _FLOAT)])

    mean = net.node("ReduceMean", first, keepdims=0)
    positive = net.node("Greater", mean, net.value(np.array(0, np.float32)))
    x = net.node("If", positive, then_branch=branch("Relu"), else_branch=branch("Tanh"))
    y = net.node("MatMul", x, net.weight(width, width))
    return net.save(folder, [("x", _FLOAT, ["rows", width])], [(y, _FLOAT)])


def decoder_with_cache(folder: Path) -> Path:
    """One step of a decoder: each layer is given its keys and values so far, and gives them back
    with one more."""
    net, width, heads = Net(), 256, 4
    x = net.node("Gather", net.weight(4000, width, fan=width), "token")
    split = net.value(np.array([0, 0, heads, width // heads], np.int64))
    flat = net.value(np.array([0, 0, width], np.int64))
    inputs: list[tuple[str, int, Sequence[int | str]]] = [("token", TensorProto.INT64, [1, 1])]
    outputs = list[tuple[str, int]]()
    for layer in range(4):
        past: dict[str, str] = {}
        for part in ("k", "v"):
            name = f"past_{part}{layer}"
            inputs.append((name, _FLOAT, [1, heads, "past", width // heads]))
            made = net.node("Reshape", net.node("MatMul", x, net.weight(width, width)), split)
            made = net.node("Transpose", made, perm=[0, 2, 1, 3])
            past[part] = net.node("Concat", name, made, axis=2)
            outputs.append((past[part], _FLOAT))
        asked = net.node("Reshape", net.node("MatMul", x, net.weight(width, width)), split)
        asked = net.node("Transpose", asked, perm=[0, 2, 1, 3])
        keys = net.node("Transpose", past["k"], perm=[0, 1, 3, 2])
        shares = net.node("Softmax", net.node("MatMul", asked, keys), axis=-1)
        mixed = net.node("Transpose", net.node("MatMul", shares, past["v"]), perm=[0, 2, 1, 3])
        x = _normal(net, net.node("Add", x, net.node("Reshape", mixed, flat)), width)
        wide = net.node("Relu", net.node("MatMul", x, net.weight(width, 4 * width)))
        x = net.node("Add", x, net.node("MatMul", wide, net.weight(4 * width, width)))
    outputs.append((net.node("MatMul", x, net.weight(width, 4000)), _FLOAT))
    return net.save(folder, inputs, outputs)


def cached_step(past: int) -> Tensors:
    chance = np.random.default_rng(past)
    made: Tensors = {"token": np.array([[past]], np.int64)}
    for layer in range(4):
        for part in ("k", "v"):
            values = chance.uniform(-1, 1, (1, 4, past, 64)).astype(np.float32)
            made[f"past_{part}{layer}"] = values
    return made


def words(folder: Path) -> Path:
    """Text that is handed through, and integers that are computed with."""
    net = Net()
    same = net.node("Identity", "words")
    doubled = net.node("Add", "counts", "counts")
    x = net.node("Cast", doubled, to=_FLOAT)
    x = net.node("MatMul", x, net.weight(512, 2048))
    y = net.node("ArgMax", net.node("MatMul", x, net.weight(2048, 512)), axis=1)
    inputs: list[tuple[str, int, Sequence[int | str]]] = [
        ("words", TensorProto.STRING, ["n"]),
        ("counts", TensorProto.INT64, ["rows", 512]),
    ]
    kinds = [(same, TensorProto.STRING), (doubled, TensorProto.INT64), (y, TensorProto.INT64)]
    return net.save(folder, inputs, kinds)


def spoken(rows: int) -> Tensors:
    counts = np.random.default_rng(rows).integers(-9, 9, (rows, 512))
    return {"words": np.array(["fish", "shoal"], object), "counts": counts}
