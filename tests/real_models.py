"""The real models that tests run: where each is, and inputs that suit it.

They come out of published packages (installed without what those depend on, and never imported) and
from bench/zoo. A test that needs one calls `find`, which skips, loudly, only where the package is
absent.
"""

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

Tensors = dict[str, npt.NDArray[np.generic]]
ROOT: Final = Path(__file__).resolve().parent.parent
ZOO_FOLDER: Final = Path(
    os.environ.get("SHOAL_ZOO", Path(tempfile.gettempdir()) / f"shoal-zoo-{os.getuid()}")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model by name. `inputs` makes one item from a seed; `finest` fragments are possible."""

    name: str
    package: str
    file: str
    inputs: Callable[[int], Tensors]
    finest: int = 1000

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the inputs, for profiling."""
        return {name: value.shape for name, value in self.inputs(0).items()}


def image(name: str, *shape: int) -> Callable[[int], Tensors]:
    """Noise between -1 and 1."""
    return lambda seed: {name: np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)}


def text(length: int, *others: str) -> Callable[[int], Tensors]:
    """Token numbers, and a mask that hides a few at the end; the length varies with the seed."""

    def make(seed: int) -> Tensors:
        size = length - seed % 7
        tokens = np.random.default_rng(seed).integers(1000, 20_000, (1, size))
        possible: Tensors = {
            "attention_mask": (np.arange(size) < size - 3).astype(np.int64)[None],
            "token_type_ids": (np.arange(size) > size // 2).astype(np.int64)[None],
        }
        return {"input_ids": tokens.astype(np.int64)} | {name: possible[name] for name in others}

    return make


def file_bytes(seed: int) -> Tensors:
    """What magika reads: numbers of bytes, 256 for padding."""
    return {"bytes": np.random.default_rng(seed).integers(0, 257, (1, 2048)).astype(np.int32)}


def sound(samples: int, *, rate: bool) -> Callable[[int], Tensors]:
    """What silero reads: samples, its state, and in some variants the sampling rate."""

    def make(seed: int) -> Tensors:
        random = np.random.default_rng(seed)
        made: Tensors = {
            "input": random.uniform(-1, 1, (1, samples)).astype(np.float32),
            "state": random.uniform(-1, 1, (2, 1, 128)).astype(np.float32),
        }
        if rate:
            made["sr"] = np.array(16_000, np.int64)
        return made

    return make


def sequence(seed: int) -> Tensors:
    """What silero's variant for whole recordings reads."""
    random = np.random.default_rng(seed)
    return {
        "input": random.uniform(-1, 1, (5, 576)).astype(np.float32),
        "h": random.uniform(-1, 1, (1, 1, 128)).astype(np.float32),
        "c": random.uniform(-1, 1, (1, 1, 128)).astype(np.float32),
    }


_OCR, _VAD = "rapidocr_onnxruntime", "silero_vad"
MODELS: Final = {
    each.name: each
    for each in (
        RealModel(
            name="ppocr_rec",
            package=_OCR,
            file="models/ch_PP-OCRv4_rec_infer.onnx",
            inputs=lambda seed: image("x", 1, 3, 48, 320 - 32 * (seed % 3))(seed),
        ),
        RealModel(
            name="ppocr_det",
            package=_OCR,
            file="models/ch_PP-OCRv4_det_infer.onnx",
            inputs=image("x", 1, 3, 160, 224),
        ),
        RealModel(
            name="ppocr_cls",
            package=_OCR,
            file="models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
            inputs=image("x", 1, 3, 48, 192),
        ),
        RealModel(
            name="magika",
            package="magika",
            file="models/standard_v3_3/model.onnx",
            inputs=file_bytes,
        ),
        RealModel(
            name="silero_vad",
            package=_VAD,
            file="data/silero_vad.onnx",
            inputs=sound(512, rate=True),
            finest=4,
        ),
        RealModel(
            name="silero_vad_ifless",
            package=_VAD,
            file="data/silero_vad_op18_ifless.onnx",
            inputs=sound(512, rate=True),
            finest=4,
        ),
        RealModel(
            name="silero_vad_op15",
            package=_VAD,
            file="data/silero_vad_16k_op15.onnx",
            inputs=sound(512, rate=True),
        ),
        RealModel(
            name="silero_vad_openvino",
            package=_VAD,
            file="data/silero_vad_openvino_16k.onnx",
            inputs=sound(576, rate=False),
        ),
        RealModel(
            name="silero_vad_half",
            package=_VAD,
            file="data/silero_vad_half.onnx",
            inputs=sound(576, rate=False),
        ),
        RealModel(
            name="silero_vad_sequence",
            package=_VAD,
            file="data/silero_vad_16k_sequence.onnx",
            inputs=sequence,
        ),
        *(
            RealModel(name=name, package="zoo", file=name, inputs=inputs)
            for name, inputs in (
                ("minilm_l6", text(32, "attention_mask")),
                ("distilbert_sst2", text(32, "attention_mask")),
                ("bert_small", text(32, "attention_mask", "token_type_ids")),
                ("gpt2", text(24)),
                ("resnet18", image("image", 1, 3, 224, 224)),
                ("resnet50", image("image", 1, 3, 224, 224)),
                ("resnet101", image("image", 1, 3, 224, 224)),
                ("resnet152", image("image", 1, 3, 224, 224)),
                ("vgg19", image("image", 1, 3, 224, 224)),
                ("fcn_resnet50", image("image", 1, 3, 224, 224)),
                ("squeezenet1_1", image("image", 1, 3, 224, 224)),
                ("mobilenet_v1", image("image", 1, 3, 224, 224)),
                ("mobilenet_v2", image("image", 1, 3, 224, 224)),
                ("efficientnet_b1", image("image", 1, 3, 240, 240)),
                ("vit_base_16", image("image", 1, 3, 224, 224)),
                ("yolov3", image("image", 1, 3, 416, 416)),
            )
        ),
    )
}
PACKAGED: Final = tuple(name for name, each in MODELS.items() if each.package != "zoo")
ZOO: Final = tuple(name for name, each in MODELS.items() if each.package == "zoo")
HEAVY: Final = frozenset(
    {
        "distilbert_sst2",
        "fcn_resnet50",
        "gpt2",
        "resnet50",
        "resnet101",
        "resnet152",
        "vgg19",
        "vit_base_16",
        "yolov3",
    }
)
"""Models of 100 MB and more; to run all of them in every way takes minutes."""


def find(name: str) -> Path:
    """The path of a model's ONNX file; skips the test if its package is not installed."""
    model = MODELS[name]
    if model.package == "zoo":
        zoo = _materialise()
        try:
            path: Path = zoo.materialise(name, ZOO_FOLDER)
        except zoo.ZooError as error:
            pytest.skip(f"MODEL NOT RUN: {error}")
        return path
    found = importlib.util.find_spec(model.package)
    if found is None or found.submodule_search_locations is None:
        pytest.skip(f"MODEL NOT RUN: the package {model.package} is not installed")
    return Path(found.submodule_search_locations[0]) / model.file


def _materialise() -> ModuleType:
    """bench/zoo/materialise.py, which is a script and in no package."""
    if "zoo_materialise" not in sys.modules:
        place = ROOT / "bench" / "zoo" / "materialise.py"
        spec = importlib.util.spec_from_file_location("zoo_materialise", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["zoo_materialise"] = module
        spec.loader.exec_module(module)
    return sys.modules["zoo_materialise"]
