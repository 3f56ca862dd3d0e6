"""The models of `memory.py`: an item for each, and what is aimed at."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tensors = dict[str, npt.NDArray[np.generic]]


def image(name: str) -> Tensors:
    pixels = np.random.default_rng(0).uniform(-1, 1, (1, 3, 224, 224))
    return {name: pixels.astype(np.float32)}


def text(*masks: str) -> Tensors:
    tokens: Tensors = {"input_ids": np.random.default_rng(0).integers(1000, 20_000, (1, 128))}
    return tokens | {name: np.ones((1, 128), np.int64) for name in masks}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the zoo, one item, and what is aimed at: shares of the default's peak and time."""

    inputs: Callable[[], Tensors]
    peak: float | None = None
    time: float | None = None


SUBJECTS = {
    "mobilenet_v2": Subject(lambda: image("image"), time=1.05),
    "squeezenet1_1": Subject(lambda: image("image"), time=1.05),
    "resnet152": Subject(lambda: image("image"), peak=0.0619, time=1.036),
    "vgg19": Subject(lambda: image("image"), peak=0.0705, time=1.03),
    "distilbert_sst2": Subject(lambda: text("attention_mask"), peak=0.1, time=1.05),
    "vit_base_16": Subject(lambda: image("image"), peak=0.1, time=1.05),
    "gpt2": Subject(text, peak=0.1, time=1.05),
}
"""FlexNN (table 2) reports 93.81 % less for ResNet-152 at 1.036 times the latency, and 92.95 % at
1.03 for VGG-19: those are the goals."""
