"""A language model's decoder as most are now: normalised by mean squares, rotary positions, gated
layers three times as wide; without a cache, so that it reads a whole text."""

from pathlib import Path
from typing import Final

import numpy as np
from onnx import TensorProto

from suite.made import Net

WORDS: Final = 4000
_WIDTH: Final = 512
_HEADS: Final = 8
_INNER: Final = 1408
_LONGEST: Final = 128
_LAYERS: Final = 6


class Decoder(Net):
    """A decoder in the making."""

    def __init__(self) -> None:
        super().__init__()
        self.split = self.numbers(0, 0, _HEADS, _WIDTH // _HEADS)
        self.flat = self.numbers(0, 0, _WIDTH)
        self.zero, self.one, self.three = self.numbers(0), self.numbers(1), self.numbers(3)
        self.half, self.end = self.numbers(_WIDTH // _HEADS // 2), self.numbers(1 << 30)
        sizes = self.node("Shape", "tokens")
        self.length = self.node("Slice", sizes, self.one, self.numbers(2))
        angles = np.arange(_LONGEST)[:, None] / 1e4 ** (np.arange(0, 64, 2) / 64)[None]
        self.cosines = self.first(np.concatenate([np.cos(angles)] * 2, 1))
        self.sines = self.first(np.concatenate([np.sin(angles)] * 2, 1))
        later = self.first(np.triu(np.full((_LONGEST, _LONGEST), -1e4), 1))
        self.later = self.node("Slice", later, self.zero, self.length, self.one)

    def numbers(self, *values: int) -> str:
        return self.value(np.array(values, np.int64))

    def number(self, value: float) -> str:
        return self.value(np.array(value, np.float32))

    def first(self, table: np.ndarray) -> str:
        """As many rows as the text has tokens."""
        rows = self.value(table.astype(np.float32))
        return self.node("Slice", rows, self.zero, self.length, self.zero)

    def normal(self, x: str) -> str:
        squares = self.node("ReduceMean", self.node("Pow", x, self.number(2)), axes=[-1])
        root = self.node("Sqrt", self.node("Add", squares, self.number(1e-5)))
        return self.node("Mul", self.node("Div", x, root), self.value(np.ones(_WIDTH, np.float32)))

    def heads(self, x: str) -> str:
        made = self.node("Reshape", self.node("MatMul", x, self.weight(_WIDTH, _WIDTH)), self.split)
        return self.node("Transpose", made, perm=[0, 2, 1, 3])

    def turned(self, x: str) -> str:
        """By the angle of its position."""
        first = self.node("Slice", x, self.zero, self.half, self.three)
        second = self.node("Slice", x, self.half, self.end, self.three)
        across = self.node("Concat", self.node("Neg", second), first, axis=3)
        along = self.node("Mul", x, self.cosines)
        return self.node("Add", along, self.node("Mul", across, self.sines))

    def attended(self, x: str) -> str:
        asked, keys, values = self.turned(self.heads(x)), self.turned(self.heads(x)), self.heads(x)
        keys = self.node("Transpose", keys, perm=[0, 1, 3, 2])
        scores = self.node("Mul", self.node("MatMul", asked, keys), self.number(0.125))
        shares = self.node("Softmax", self.node("Add", scores, self.later), axis=-1)
        mixed = self.node("Transpose", self.node("MatMul", shares, values), perm=[0, 2, 1, 3])
        joined = self.node("Reshape", mixed, self.flat)
        return self.node("MatMul", joined, self.weight(_WIDTH, _WIDTH))

    def gated(self, x: str) -> str:
        gate = self.node("MatMul", x, self.weight(_WIDTH, _INNER))
        gate = self.node("Mul", gate, self.node("Sigmoid", gate))
        inner = self.node("Mul", gate, self.node("MatMul", x, self.weight(_WIDTH, _INNER)))
        return self.node("MatMul", inner, self.weight(_INNER, _WIDTH))


def decoder(folder: Path) -> Path:
    net = Decoder()
    x = net.node("Gather", net.weight(WORDS, _WIDTH, fan=1), "tokens")
    for _ in range(_LAYERS):
        x = net.node("Add", x, net.attended(net.normal(x)))
        x = net.node("Add", x, net.gated(net.normal(x)))
    y = net.node("MatMul", net.normal(x), net.weight(_WIDTH, WORDS))
    return net.save(
        folder, [("tokens", TensorProto.INT64, [1, "length"])], [(y, TensorProto.FLOAT)]
    )


def texts(*lengths: int) -> list[dict[str, np.ndarray]]:
    chance = np.random.default_rng(0)
    return [{"tokens": chance.integers(0, WORDS, (1, length))} for length in lengths]
