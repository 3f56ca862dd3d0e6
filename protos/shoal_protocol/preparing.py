"""What preparing a fragment for a device takes: agents keep to it, and plans reckon with it."""

from typing import Final

PROCESS_BYTES: Final = 36 << 20
"""Anonymous memory of the process that prepares, besides what grows with the model: with ONNX
Runtime loaded 25 MiB on x86-64, and its stack, which a deep model fills (8 MiB)."""
LEAST_WEIGHT_FACTOR: Final = 1.125
"""What it takes at least to save a model, over its weights."""
WORTH_PREPARING_BYTES: Final = 4 << 20
"""The process takes 0.3 s of a PC's processor, and ten times that of a small board's. A fragment
with fewer bytes of weights gains less than that in thousands of runs."""


def preparing_bytes(weight_bytes: int) -> int:
    """The least memory in which a model with so many weights is prepared; its graph takes more."""
    return PROCESS_BYTES + int(LEAST_WEIGHT_FACTOR * weight_bytes)
