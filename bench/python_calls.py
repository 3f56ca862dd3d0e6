"""What a call from Python costs: on a warm pool, beside ONNX Runtime in the same process.

A pool is for models that fit no single device; here the model fits, so that there is something to
compare with. The difference is what the way through the coordinator and its devices costs. As in
a notebook, the pool starts once and 100 calls follow one another; a line for each model says what
a call takes. Then the same items go through a map.

    .venv/bin/python bench/python_calls.py [--quick] [--json FILE]
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import onnxruntime
from layered_model import LAYERS, save_layers
from measurement import Arguments, Report, alternate, compared, parse_arguments, timed

import shoal

CALLS: Final = 100
MAPPED: Final = 32
"""Items of one map."""
MAPS: Final = {True: 10, False: 50}
"""How many maps are measured, in the quick form and in the long one."""
WIDTHS: Final = (256, 1024)
"""Of layers with 3 MiB, and with 48 MiB of weights together."""
DEVICES: Final = 3

Subjects = Mapping[str, Callable[[], float]]


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
        in_process = timed(lambda: whole.run(None, {"x": x}))
        calls: Subjects = {"shoal": timed(lambda: model.run({"x": x})), "whole": in_process}
        called = alternate(calls, turns=CALLS)
        maps: Subjects = {"shoal": partial(_seconds_per_item, model, x), "whole": in_process}
        mapped = alternate(maps, turns=MAPS[arguments.quick])
    weights = LAYERS * width * width * 4 >> 20
    for kind, samples in (("run", called), ("map", mapped)):
        name = f"{kind}, {weights} MiB in {DEVICES} fragments"
        report.add(compared(name, samples["shoal"], samples["whole"], unit="s"))
    print(_in_words(f"{weights} MiB", first, called))


def _in_words(model: str, first_seconds: float, called: Mapping[str, Sequence[float]]) -> str:
    """`48 MiB: loaded ... in 2.10 s; then 100 calls of 5.10 ms each (median), ...`"""
    call, whole = (1000 * median(called[name]) for name in ("shoal", "whole"))
    return (
        f"{model}: loaded, and its first call answered, in {first_seconds:.2f} s; then "
        f"{len(called['shoal'])} calls of {call:.2f} ms each (median), ONNX Runtime in process "
        f"{whole:.2f} ms: {call - whole:.2f} ms more a call"
    )


def _seconds_per_item(model: shoal.Model, x: np.ndarray) -> float:
    started = time.perf_counter()
    for _ in model.map(itertools.repeat({"x": x}, MAPPED)):
        pass
    return (time.perf_counter() - started) / MAPPED


if __name__ == "__main__":
    main()
