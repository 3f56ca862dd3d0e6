"""Makes what the job reads: a ResNet-50 with random weights, and generated pictures.

The network has the structure, size and cost of ResNet-50 but was never trained: it classifies
nothing. It shows throughput, memory and that the cut network computes what the whole one does.
image: float32 [1, 3, 224, 224].
"""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
ZOO = HERE.parent.parent / "bench" / "zoo"
INPUTS, OUTPUTS = HERE / "pictures" / "in", HERE / "pictures" / "out"

PICTURES = 24
SIDE_PIXELS = 224


def main() -> None:
    make_model = [sys.executable, str(ZOO / "materialise.py"), "resnet50", str(HERE / "models")]
    subprocess.run(make_model, check=True, stdout=subprocess.DEVNULL)
    for folder in (INPUTS, OUTPUTS):  # a job continues where results exist: begin with none
        shutil.rmtree(folder, ignore_errors=True)
    INPUTS.mkdir(parents=True)
    for index in range(PICTURES):
        np.savez(INPUTS / f"{index:02}.npz", image=waves(np.random.default_rng(index))[None])
    print(f"prepared {PICTURES} pictures in {INPUTS.relative_to(HERE.parents[1])}")


def waves(chance: np.random.Generator) -> npt.NDArray[np.float32]:
    """A picture of interfering waves: [3, 224, 224], within about -2 to 2."""
    across, down = np.meshgrid(*[np.linspace(0, 1, SIDE_PIXELS)] * 2)
    picture = np.zeros((3, SIDE_PIXELS, SIDE_PIXELS))
    for _ in range(6):
        along, away, phase = chance.uniform(-40, 40), chance.uniform(-40, 40), chance.uniform(0, 6)
        colour = chance.uniform(-0.6, 0.6, (3, 1, 1))
        picture += colour * np.sin(along * across + away * down + phase)
    return picture.astype(np.float32)


if __name__ == "__main__":
    main()
