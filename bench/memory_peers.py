"""ncnn and OpenVINO, which `memory.py` compares with: they come as requirements/bench.txt.

ncnn reads models of its own kind, which pnnx makes from ONNX, in single precision as all the others
compute. What it makes is believed only if it computes what ONNX Runtime does.
"""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from memory_items import Tensors

_DTYPES = {np.dtype(np.float32): "f32", np.dtype(np.int64): "i64"}
_CONVERSION_SECONDS = 600.0
NEEDS = {"ncnn": ("ncnn", "pnnx"), "openvino": ("openvino",)}
"""The packages of each."""


class PeerUnable(Exception):
    """A peer is not installed, or does not run the model."""


def check_installed(peer: str) -> None:
    """Raises `PeerUnable`."""
    missing = [name for name in NEEDS[peer] if importlib.util.find_spec(name) is None]
    if missing:
        what = f"{' and '.join(missing)} not installed"
        raise PeerUnable(f"{what}: pip install --no-deps -r requirements/bench.txt")


def convert_for_ncnn(model: Path, feeds: Tensors, folder: Path) -> Path:
    """The folder with the model as ncnn reads it. Raises `PeerUnable`."""
    check_installed("ncnn")
    spec = importlib.util.find_spec("pnnx")
    assert spec is not None
    assert spec.origin is not None
    folder.mkdir()  # pnnx writes beside the model, and misreads weights in a file of their own
    onnx.save(onnx.load(model), folder / "model.onnx")
    shapes = ",".join(
        f"[{','.join(map(str, array.shape))}]{_DTYPES[array.dtype]}" for array in feeds.values()
    )
    program = Path(spec.origin).with_name("pnnx")
    command = [str(program), "model.onnx", "fp16=0", f"inputshape={shapes}"]
    try:
        made = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=_CONVERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnable(f"pnnx cannot convert it: {error}") from error
    if made.returncode or not (folder / "model.ncnn.param").exists():
        raise PeerUnable(f"pnnx cannot convert it: status {made.returncode}")
    for path in folder.glob("*"):  # hundreds of MiB, of which ncnn reads two files
        if not path.name.startswith("model.ncnn."):
            path.unlink()
    return folder


def ncnn_run(folder: Path, feeds: Tensors, threads: int) -> Callable[[], list[Any]]:
    """A run of a model that was converted."""
    import ncnn  # noqa: PLC0415 - only where it is measured

    net = ncnn.Net()
    net.opt.num_threads = threads
    for half in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, half, False)
    if net.load_param(str(folder / "model.ncnn.param")) or net.load_model(
        str(folder / "model.ncnn.bin")
    ):
        raise PeerUnable("ncnn does not load it: it lacks a kind of layer")
    arrays = [
        np.ascontiguousarray(each.astype(np.int32) if each.dtype == np.int64 else each)
        for each in feeds.values()
    ]

    def run() -> list[Any]:
        with net.create_extractor() as extractor:
            for number, array in enumerate(arrays):
                extractor.input(f"in{number}", ncnn.Mat(array, batch_index=0).clone())
            status, out = extractor.extract("out0")
            if status:
                raise PeerUnable(f"ncnn does not run it: status {status}")
            return [np.array(out)]

    return run


def openvino_run(model: Path, feeds: Tensors, threads: int) -> Callable[[], list[Any]]:
    """A run of the model as it is, in single precision."""
    import openvino  # noqa: PLC0415 - only where it is measured

    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = core.compile_model(
        core.read_model(str(model)), "CPU", {**settings, "INFERENCE_PRECISION_HINT": "f32"}
    )
    return lambda: list(compiled(feeds).values())


def check_same(ours: list[Any], theirs: list[Any]) -> None:
    """Raises `PeerUnable` where the first outputs differ by more than rounding does."""
    one, two = np.asarray(ours[0], np.float64), np.asarray(theirs[0], np.float64)
    if one.size != two.size:
        raise PeerUnable(f"it gives {one.shape} in place of {two.shape}")
    difference = float(np.abs(one.ravel() - two.ravel()).max() / (1 + np.abs(two).max()))
    if not difference < 1e-2:
        raise PeerUnable(f"its results differ: {difference:.2g} relative")
