"""What a call from Python costs: on a warm pool, beside ONNX Runtime in the same process.

A pool is for models that fit no single device; here the model fits, so that there is something to
compare with. The difference is what the way through the coordinator and three devices costs.

    .venv/bin/python bench/python_calls.py [--quick] [--json FILE]
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime
from layered_model import LAYERS, save_layers
from measurement import Arguments, Report, alternate, compared, parse_arguments, timed

import shoal

CALLS: Final = 100
MAPPED: Final = 32
"""Items of one map."""
WIDTHS: Final = (256, 1024)
"""Of layers with 3 MiB, and with 48 MiB of weights together."""
DEVICES: Final = 3


def main() -> None:
    """Measure calls, one after another and in a map."""
    arguments = parse_arguments(__doc__)
    report = Report(arguments)
    with tempfile.TemporaryDirectory(prefix="shoal-calls-") as folder:
        for width in WIDTHS:
            _measure(report, arguments, Path(folder) / f"layers-{width}.onnx", width)
    report.finish()


def _measure(report: Report, arguments: Arguments, path: Path, width: int) -> None:
    save_layers(path, 1, width)
    x = np.random.default_rng(0).standard_normal((1, width)).astype(np.float32)
    whole = onnxruntime.InferenceSession(path)
    with shoal.pool(devices=DEVICES, budget="64Mi", enforce="none") as pool:
        started = time.perf_counter()
        model = pool.load(path, fragments=DEVICES)
        y = model.run({"x": x})["y"]
        first = time.perf_counter() - started
        np.testing.assert_allclose(y, whole.run(None, {"x": x})[0], atol=1e-3)
        subjects: dict[str, Callable[[], float]] = {
            "run": timed(lambda: model.run({"x": x})),
            "map": partial(_seconds_per_item, model, x),
            "whole": timed(lambda: whole.run(None, {"x": x})),
        }
        samples = alternate(subjects, turns=CALLS // 5 if arguments.quick else CALLS)
    weights = LAYERS * width * width * 4 >> 20
    for kind in ("run", "map"):
        name = f"{kind}, {weights} MiB in {DEVICES} fragments"
        report.add(compared(name, samples[kind], samples["whole"], unit="s"))
    print(f"{weights} MiB: loaded, and its first call answered, in {first:.2f} s")


def _seconds_per_item(model: shoal.Model, x: np.ndarray) -> float:
    started = time.perf_counter()
    for _ in model.map(itertools.repeat({"x": x}, MAPPED)):
        pass
    return (time.perf_counter() - started) / MAPPED


if __name__ == "__main__":
    main()
