"""How long a local run takes to start: until its devices have joined, and until a first result.

The run is a warm one: the model was cut before, the devices have their fragments on disk. Its time
depends on how busy the machine is, so it is measured in turns with a peer that does some of the
same: a Python that imports what an agent needs, of which a run starts three beside a coordinator.

    .venv/bin/python bench/starting.py [--quick] [--json FILE]
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from layered_model import save_layers
from measurement import VALUE, Report, alternate, compared, parse_arguments, timed

TURNS: Final = {True: 4, False: 12}
"""How many starts are measured, in the quick form and in the long one."""
WIDTH: Final = 1024
"""Of layers with 48 MiB of weights together."""
DEVICES: Final = 3
JOINED_SECONDS: Final = 2.0
_JOINED: Final = "running\n"
_PEER: Final = "import onnxruntime, grpc.aio"


def main() -> None:
    """Measure starts."""
    arguments = parse_arguments(__doc__)
    report = Report(arguments)
    with tempfile.TemporaryDirectory(prefix="shoal-starting-") as folder:
        run = _run_of(Path(folder))
        run()  # cuts the model, and has devices fetch and prepare their fragments
        results: list[float] = []

        def joined() -> float:
            seconds, result_seconds = run()
            results.append(result_seconds)
            return seconds

        peer = timed(lambda: subprocess.run([sys.executable, "-c", _PEER], check=True))
        samples = alternate({"joined": joined, "peer": peer}, turns=TURNS[arguments.quick])
    for name, seconds, goal in (
        (f"{DEVICES} devices joined", samples["joined"], VALUE <= JOINED_SECONDS),
        ("first result", results, None),
    ):
        report.add(compared(name, seconds, samples["peer"], unit="s", goal=goal))
    report.finish()


def _run_of(folder: Path) -> Callable[[], tuple[float, float]]:
    """A run of one item: the seconds until its devices have joined, and until its result exists."""
    inputs, outputs, model = folder / "in", folder / "out", folder / "layers.onnx"
    inputs.mkdir()
    save_layers(model, 1, WIDTH)
    np.save(inputs / "0.npy", np.ones((1, WIDTH), np.float32))
    command = [sys.executable, "-m", "shoal_cli", "run", str(model), "--progress", "plain"]
    command += ["--inputs", str(inputs), "--outputs", str(outputs), "--work", str(folder / "work")]
    command += ["--devices", str(DEVICES), "--fragments", str(DEVICES)]
    environment: Mapping[str, str] = {**os.environ, "PYTHONUNBUFFERED": "1"}

    def run() -> tuple[float, float]:
        shutil.rmtree(outputs, ignore_errors=True)
        started, began = time.perf_counter(), time.time()
        joined = 0.0
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if line == _JOINED:
                    joined = time.perf_counter() - started
        assert process.returncode == 0, "the run failed"
        return joined, (outputs / "0.npz").stat().st_mtime - began

    return run


if __name__ == "__main__":
    main()
