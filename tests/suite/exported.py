"""A language model's decoder as the tools of ONNX Runtime export it: four bits a weight, attention
with fewer heads for keys than for questions, keys and values so far as inputs and as outputs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import TensorProto, helper

from real_models import Tensors
from suite.made import Net

_DOMAIN: Final = "com.microsoft"
_BLOCK: Final = 32
_WORDS: Final = 4000
_WIDTH: Final = 512
_HEADS: Final = 8
_KEY_HEADS: Final = 2
_HEAD: Final = _WIDTH // _HEADS
_INNER: Final = 1408
_LONGEST: Final = 256
_LAYERS: Final = 4


class Decoder(Net):
    """A decoder in the making."""

    def own(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """A node of ONNX Runtime's own operators; the names of what it gives."""
        names = [f"{kind.lower()}{len(self._nodes)}_{number}" for number in range(outputs)]
        node = helper.make_node(kind, list(inputs), names, domain=_DOMAIN, **attributes)
        self._nodes.append(node)
        return names

    def linear(self, x: str, taken: int, given: int) -> str:
        blocks = taken // _BLOCK
        digits = self._chance.integers(0, 256, (given, blocks, _BLOCK // 2), np.uint8)
        scales = np.full(given * blocks, 0.2 * taken**-0.5, np.float32)
        weights = self.value(digits), self.value(scales)
        sizes = {"K": taken, "N": given, "bits": 4, "block_size": _BLOCK}
        (y,) = self.own("MatMulNBits", x, *weights, **sizes)
        return y

    def ones(self) -> str:
        return self.value(np.ones(_WIDTH, np.float32))

    def added(self, x: str, y: str) -> tuple[str, str]:
        """The sum, normalised and as it is."""
        kind = "SkipSimplifiedLayerNormalization"
        normal, _, _, total = self.own(kind, x, y, self.ones(), outputs=4, epsilon=1e-5)
        return normal, total


def decoder(folder: Path) -> Path:
    net = Decoder()
    one = net.value(np.array(1, np.int64))
    before = net.node("Sub", net.node("ReduceSum", "mask", net.value(np.array([1]))), one)
    before = net.node("Cast", before, to=TensorProto.INT32)
    total = net.node("Gather", net.node("Shape", "mask"), one)
    total = net.node("Cast", total, to=TensorProto.INT32)
    angles = np.arange(_LONGEST)[:, None] / 1e4 ** (np.arange(0, _HEAD, 2) / _HEAD)[None]
    turns = [net.value(each(angles).astype(np.float32)) for each in (np.cos, np.sin)]
    x = net.node("Gather", net.weight(_WORDS, _WIDTH, fan=1), "tokens")
    normal = net.node("SimplifiedLayerNormalization", x, net.ones(), epsilon=1e-5)
    inputs: list[tuple[str, int, Sequence[int | str]]] = [
        (name, TensorProto.INT64, [1, axis])
        for name, axis in {"tokens": "length", "mask": "total"}.items()
    ]
    outputs = []
    for layer in range(_LAYERS):
        past = [f"{kind}{layer}" for kind in ("keys", "values")]
        keys = _KEY_HEADS * _HEAD
        asked = [net.linear(normal, _WIDTH, given) for given in (_WIDTH, keys, keys)]
        mixed, *now = net.own(
            "GroupQueryAttention",
            *(*asked, *past, before, total, *turns),
            outputs=3,
            num_heads=_HEADS,
            kv_num_heads=_KEY_HEADS,
            do_rotary=1,
        )
        normal, x = net.added(x, net.linear(mixed, _WIDTH, _WIDTH))
        gate = net.linear(normal, _WIDTH, _INNER)
        gate = net.node("Mul", gate, net.node("Sigmoid", gate))
        inner = net.node("Mul", gate, net.linear(normal, _WIDTH, _INNER))
        normal, x = net.added(x, net.linear(inner, _INNER, _WIDTH))
        inputs += [(each, TensorProto.FLOAT, [1, _KEY_HEADS, "past", _HEAD]) for each in past]
        outputs += [(each, TensorProto.FLOAT) for each in now]
    y = net.linear(normal, _WIDTH, _WORDS)
    return net.save(folder, inputs, [(y, TensorProto.FLOAT), *outputs])


def step(past: int, length: int) -> Tensors:
    """So many tokens after others, of which the first step has none."""
    chance = np.random.default_rng(past)
    shape = (1, _KEY_HEADS, past, _HEAD)
    kept = {
        f"{kind}{layer}": chance.standard_normal(shape, np.float32)
        for layer in range(_LAYERS)
        for kind in ("keys", "values")
    }
    tokens = chance.integers(0, _WORDS, (1, length))
    return {"tokens": tokens, "mask": np.ones((1, past + length), np.int64), **kept}
