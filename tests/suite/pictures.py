"""What makes a picture of a latent image: the decoder of an autoencoder, as image generators end
with one. Its activations are forty times as large as its weights."""

from pathlib import Path
from typing import Final

import numpy as np
from onnx import TensorProto

from suite.made import Net

_GROUPS: Final = 32
_WIDTHS: Final = (128, 128, 64, 64)
"""Of the channels at each size, which is twice the one before."""


class Decoder(Net):
    """A decoder in the making."""

    def silu(self, x: str) -> str:
        return self.node("Mul", x, self.node("Sigmoid", x))

    def normal(self, x: str, width: int) -> str:
        """By groups of channels."""
        shape = self.node("Shape", x)
        groups = self.value(np.array([0, _GROUPS, -1], np.int64))
        one, zero = (self.value(each(_GROUPS, np.float32)) for each in (np.ones, np.zeros))
        x = self.node("InstanceNormalization", self.node("Reshape", x, groups), one, zero)
        scale = self.value(np.full((width, 1, 1), 0.5, np.float32))
        return self.node("Mul", self.node("Reshape", x, shape), scale)

    def residual(self, x: str, taken: int, given: int) -> str:
        y = self.conv(self.silu(self.normal(x, taken)), taken, given)
        y = self.conv(self.silu(self.normal(y, given)), given, given)
        return self.node("Add", x if taken == given else self.conv(x, taken, given, 1), y)

    def larger(self, x: str) -> str:
        scales = self.value(np.array([1, 1, 2, 2], np.float32))
        return self.node(
            "Resize",
            *(x, "", scales),
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        )


def decoder(folder: Path) -> Path:
    net, width = Decoder(), _WIDTHS[0]
    x = net.conv("latent", 4, width)
    for given in _WIDTHS:
        x = net.larger(net.residual(x, width, given))
        width = given
    y = net.conv(net.silu(net.normal(x, width)), width, 3)
    return net.save(
        folder,
        [("latent", TensorProto.FLOAT, [1, 4, "height", "width"])],
        [(y, TensorProto.FLOAT)],
    )
