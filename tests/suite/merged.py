"""A decoder as exporters for browsers write it: twice, in the branches of one If, with the keys and
values of the words before and without them, and with the same weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from real_models import Tensors
from suite.made import Net

_LAYERS: Final = 4
_WIDTH: Final = 512
_HEADS: Final = 8
_HEAD: Final = _WIDTH // _HEADS
_WORDS: Final = 8000
_FLOAT: Final = TensorProto.FLOAT
_PASTS: Final = [f"past_{layer}_{part}" for layer in range(_LAYERS) for part in ("k", "v")]


class _Weights:
    """What both branches read, made once."""

    def __init__(self, net: Net) -> None:
        self.words = net.weight(_WORDS, _WIDTH, fan=_WIDTH)
        self.ones, self.zeros = (net.value(np.full(_WIDTH, n, np.float32)) for n in (1, 0))
        self.parted = net.value(np.array([0, 0, _HEADS, _HEAD], np.int64))
        self.joined = net.value(np.array([0, 0, _WIDTH], np.int64))
        self.layers = [
            {
                **{part: net.weight(_WIDTH, _WIDTH) for part in "qkvo"},
                "up": net.weight(_WIDTH, 4 * _WIDTH),
                "down": net.weight(4 * _WIDTH, _WIDTH),
            }
            for _ in range(_LAYERS)
        ]
        self.last = net.weight(_WIDTH, _WORDS)


def _branch(prefix: str, known: _Weights, *, with_past: bool) -> onnx.GraphProto:
    net, given = Net(prefix), list[tuple[str, int]]()
    x = net.node("Gather", known.words, "words")
    for number, layer in enumerate(known.layers):
        normal = net.node("LayerNormalization", x, known.ones, known.zeros)
        parts = {}
        for part in "qkv":
            made = net.node("Reshape", net.node("MatMul", normal, layer[part]), known.parted)
            parts[part] = net.node("Transpose", made, perm=[0, 2, 1, 3])
        for part in "kv":
            before = [f"past_{number}_{part}"] if with_past else []
            parts[part] = net.node("Concat", *before, parts[part], axis=2)
            given.append((parts[part], _FLOAT))
        keys = net.node("Transpose", parts["k"], perm=[0, 1, 3, 2])
        shares = net.node("Softmax", net.node("MatMul", parts["q"], keys), axis=-1)
        mixed = net.node("Transpose", net.node("MatMul", shares, parts["v"]), perm=[0, 2, 1, 3])
        mixed = net.node("Reshape", mixed, known.joined)
        x = net.node("Add", x, net.node("MatMul", mixed, layer["o"]))
        normal = net.node("LayerNormalization", x, known.ones, known.zeros)
        wide = net.node("Relu", net.node("MatMul", normal, layer["up"]))
        x = net.node("Add", x, net.node("MatMul", wide, layer["down"]))
    return net.graph(prefix, [], [(net.node("MatMul", x, known.last), _FLOAT), *given])


def decoder(folder: Path) -> Path:
    net = Net()
    known = _Weights(net)
    outputs = ["logits", *(f"new_{name}" for name in _PASTS)]
    net.choose(
        "use_cache_branch",
        outputs,
        _branch("with.", known, with_past=True),
        _branch("without.", known, with_past=False),
    )
    inputs: list[tuple[str, int, Sequence[int | str]]] = [("words", TensorProto.INT64, [1, "new"])]
    for name in _PASTS:
        inputs.append((name, _FLOAT, [1, _HEADS, "past", _HEAD]))
    inputs.append(("use_cache_branch", TensorProto.BOOL, [1]))
    return net.save(folder, inputs, [(name, _FLOAT) for name in outputs])


def step(past: int, new: int) -> Tensors:
    """The first words of a text, or one more; the first time there is a key that does not count."""
    chance = np.random.default_rng(past + new)
    made: Tensors = {
        "words": chance.integers(0, _WORDS, (1, new)),
        "use_cache_branch": np.array([past > 0]),
    }
    shape = (1, _HEADS, max(past, 1), _HEAD)
    return made | {name: chance.standard_normal(shape, np.float32) for name in _PASTS}
